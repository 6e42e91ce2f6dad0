# SPDX-License-Identifier: Apache-2.0
"""A small GPT, whole or in stages of a pipeline, and its head: a layer of its own, or on a lossd server."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import lossd
from lossd.torch import LossHead


# A small GPT without its head: tokens in, hidden states out; whole, or in stages of a pipeline.


@dataclass(frozen=True)
class Shape:
    vocab_size: int = 16384
    hidden_size: int = 64  # D
    layers: int = 2
    heads: int = 4
    context: int = 64  # tokens

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        defaults = Shape()
        for name in ("vocab_size", "hidden_size", "layers", "heads", "context"):
            parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))

    @staticmethod
    def from_arguments(arguments: argparse.Namespace) -> Shape:
        return Shape(arguments.vocab_size, arguments.hidden_size, arguments.layers, arguments.heads,
                     arguments.context)


class Embedding(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.position = nn.Embedding(shape.context, shape.hidden_size)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.hidden_size
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        future = torch.full((shape.context, shape.context), float("-inf")).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self._attend(self.norm1(x)))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, d = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5 + self.future[:length, :length]
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, d)


def stages(shape: Shape, count: int, seed: int) -> list[nn.Sequential]:
    """The trunk cut into `count` parts with about as many blocks each; the same weights for the same seed."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = [Embedding(shape), *(Block(shape) for _ in range(shape.layers)),
                              nn.LayerNorm(shape.hidden_size)]
    cuts = [0, *(1 + shape.layers * i // count for i in range(1, count)), len(parts)]
    return [nn.Sequential(*parts[begin:end]) for begin, end in zip(cuts, cuts[1:])]


def trunk(shape: Shape, seed: int) -> nn.Sequential:
    return stages(shape, 1, seed)[0]


def head_weight(shape: Shape, seed: int) -> torch.Tensor:
    """[V, D]: the head's first weights, for a local head and for one on a server."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape.vocab_size, shape.hidden_size, generator=generator) * 0.02


class LocalHead(nn.Module):
    """What lossd replaces: logits, their softmax and the weights on the trainer's device."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(hidden, self.weight.to(hidden.dtype)).float()
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


# The head of the examples on a lossd server.


def add_loss_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = lossd.LossOptions()
    parser.add_argument("--gradients", choices=tuple(lossd.types.GRADIENTS), default="exact",
                        help="how lossd computes gradients")
    parser.add_argument("--filter_epsilon", type=float, default=defaults.filter_epsilon,
                        help="filtered: probabilities below it add nothing to gradients")
    parser.add_argument("--sample_threshold", type=float, default=defaults.sample_threshold,
                        help="sampled, auto: probabilities below it add to gradients by chance")
    parser.add_argument("--max_gradient_error", type=float, default=defaults.max_gradient_error,
                        help="auto: the largest predicted relative error of sampled gradients")


def loss_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments above as LossHead takes them."""
    names = ("gradients", "filter_epsilon", "sample_threshold", "max_gradient_error")
    return {name: getattr(arguments, name) for name in names}


def remote_head(client: lossd.Client, name: str, weight: torch.Tensor, compute_dtype: lossd.types.DType,
                **options: Any) -> LossHead:
    """A new head of that name, in place of an older one, with `weight` [V, D]; `options` are LossHead's."""
    if name in [head.spec.name for head in client.list_heads()]:
        client.delete_head(name)
    client.create_head(name, hidden_size=weight.shape[1], vocab_size=weight.shape[0], compute_dtype=compute_dtype,
                       zeros=True)
    client.write_tensor(name, "weight", weight.numpy())
    return LossHead(client, name, **options)
