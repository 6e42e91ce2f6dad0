# SPDX-License-Identifier: Apache-2.0
"""A small GPT without its head: tokens in, hidden states out; whole, or in stages of a pipeline."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


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
