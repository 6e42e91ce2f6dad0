# SPDX-License-Identifier: Apache-2.0
"""The model of pipeline_bench.py: stages made of the blocks of examples/gpt_torch, local heads, and what is learnt.

Weights and tokens depend on the seed alone, not on how layers are divided, so that all configurations learn alike.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "gpt_torch"))

from model import Block, Embedding, Shape  # noqa: E402

USED_TOKENS, SUCCESSORS = 16384, 8  # tokens of the vocabulary that occur; tokens that may follow one


class FusedBlock(Block):
    """The block of the example, without a matrix of attention scores."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        del self.future  # the mask

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, d = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, length, d)


class Stage(nn.Module):
    """Some of the layers: tokens or hidden states in, hidden states out, bf16 on GPUs, whose parameters are float32."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda" if x.is_cuda else "cpu", torch.bfloat16, enabled=x.is_cuda):
            for part in self.parts:  # a layer gets and gives the same wherever stages begin
                x = part(x).bfloat16() if x.is_cuda else part(x)
        return x


def make_stage(shape: Shape, layers: tuple[int, ...], index: int, seed: int, device: torch.device) -> Stage:
    """Stage `index` of len(layers). Its parts are made on the device, each from a seed of its own."""
    def part(number: int, make: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(seed * 1_000_003 + number)
        with device:
            return make()

    parts = [part(0, lambda: Embedding(shape))] if index == 0 else []
    begin = sum(layers[:index])
    parts += (part(1 + layer, lambda: FusedBlock(shape)) for layer in range(begin, begin + layers[index]))
    if index == len(layers) - 1:
        parts.append(part(1 + shape.layers, lambda: nn.LayerNorm(shape.hidden_size)))
    return Stage(parts)


def make_head_weight(shape: Shape, seed: int, device: torch.device) -> torch.Tensor:
    """[V, D] float32: the head's first weights, for a local head and for one on a server."""
    torch.manual_seed(seed * 1_000_003 + 2 + shape.layers)
    return torch.randn(shape.vocab_size, shape.hidden_size, device=device).mul_(0.02)


class LocalHead:
    """A head beside the last stage: what a schedule takes as loss_fn, and its optimizer.

    Weights and their gradient are float32. The loss works on a copy, in bf16 on a GPU, that is made once a step; the
    gradient of a microbatch is added to the float32 one as soon as it is there. With a process group the gradient is
    averaged over it, from when the last microbatch's is there.
    """

    def __init__(self, function: Callable[..., torch.Tensor], weight: torch.Tensor, microbatches: int, lr: float,
                 group: torch.distributed.ProcessGroup | None = None) -> None:
        self.function, self.microbatches, self.group = function, microbatches, group
        self.ranks = 1 if group is None else torch.distributed.get_world_size(group)
        self.weight = nn.Parameter(weight)
        self.weight.grad = torch.zeros_like(weight)
        self.working = weight.to(torch.bfloat16 if weight.is_cuda else weight.dtype, copy=True).requires_grad_()
        self.working.register_post_accumulate_grad_hook(self._collect)
        self.optimizer = make_optimizer([self.weight], lr)
        self.collected = 0
        self.reduction: torch.distributed.Work | None = None

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.function(output.flatten(0, -2), self.working, targets.flatten())

    def step(self) -> None:
        """RuntimeError if the backward passes were not as many as the microbatches of a step."""
        if self.collected != self.microbatches:
            raise RuntimeError(f"{self.collected} gradients of the head in a step of {self.microbatches} microbatches")
        self.collected = 0
        self._wait()
        self.optimizer.step()
        with torch.no_grad():
            self.working.copy_(self.weight)
            self.weight.grad.zero_()

    def gradient_norm(self) -> float:
        """Of the step's gradient, before step()."""
        self._wait()
        return float(self.weight.grad.norm())

    def _wait(self) -> None:
        if self.reduction is not None:
            self.reduction.wait()
            self.reduction = None

    def _collect(self, working: torch.Tensor) -> None:
        self.weight.grad.add_(working.grad, alpha=1.0 / (self.microbatches * self.ranks))
        working.grad = None
        self.collected += 1
        if self.group is not None and self.collected == self.microbatches:
            self.reduction = torch.distributed.all_reduce(self.weight.grad, group=self.group, async_op=True)


def make_optimizer(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01, fused=parameters[0].is_cuda)


def make_tokens(shape: Shape, sequences: int, seed: int, step: int) -> NDArray[np.int64]:
    """[sequences, context + 1]: walks in which one of a few tokens follows each, the first of them most often."""
    used = min(USED_TOKENS, shape.vocab_size)
    successors = np.random.default_rng(seed).integers(0, used, (used, SUCCESSORS))
    chances = 1.0 / np.arange(1, SUCCESSORS + 1)**2
    rng = np.random.default_rng([seed, step])
    choices = rng.choice(SUCCESSORS, (sequences, shape.context + 1), p=chances / chances.sum())
    tokens = np.empty((sequences, shape.context + 1), np.int64)
    tokens[:, 0] = rng.integers(0, used, sequences)
    for place in range(shape.context):
        tokens[:, place + 1] = successors[tokens[:, place], choices[:, place]]
    return tokens
