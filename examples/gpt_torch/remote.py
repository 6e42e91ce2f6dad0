# SPDX-License-Identifier: Apache-2.0
"""The head of the examples on a lossd server."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import lossd
from lossd.torch import LossHead


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
