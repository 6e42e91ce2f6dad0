# SPDX-License-Identifier: Apache-2.0
"""The loss of docs/math.md in torch, double precision, with autograd: what LossHead is compared with."""

from __future__ import annotations

from typing import Any

import torch

import lossd

Tensors = dict[str, torch.Tensor]


def parameters(client: lossd.Client, head: str) -> Tensors:
    """The head's tensors as double-precision leaves."""
    spec = client.describe_head(head).spec
    names = ["weight"] + ["bias"] * spec.bias + ["norm_gain"] * (spec.norm != "none") + \
        ["norm_shift"] * (spec.norm == "layernorm")
    return {name: torch.from_numpy(client.read_tensor(head, name)).double().requires_grad_() for name in names}


def gradients(client: lossd.Client, head: str, names: Any) -> Tensors:
    return {name: torch.from_numpy(client.read_tensor(head, name, "gradient")).double() for name in names}


def row_results(
        hidden: torch.Tensor, targets: torch.Tensor, p: Tensors, *, ignore_index: int = -100,
        label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0, logit_scale: float = 1.0,
        class_weights: torch.Tensor | None = None, epsilon: float = 1e-5) -> Tensors:
    """Per row: loss, lse, entropy, logprob, argmax, z_loss; `hidden` [N, D] double, `targets` [N]."""
    if "norm_shift" in p:
        hidden = torch.nn.functional.layer_norm(hidden, hidden.shape[-1:], p["norm_gain"], p["norm_shift"], epsilon)
    elif "norm_gain" in p:
        hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + epsilon) * p["norm_gain"]
    z = hidden @ p["weight"].T
    if "bias" in p:
        z = z + p["bias"]
    z = z * logit_scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    valid = targets != ignore_index
    lse = torch.logsumexp(z, -1)
    logp = z - lse[:, None]
    loss = torch.nn.functional.cross_entropy(z, targets, weight=class_weights, label_smoothing=label_smoothing,
                                             ignore_index=ignore_index, reduction="none")
    zero = torch.zeros_like(lse)
    extra = torch.where(valid, z_loss * lse.square(), zero)
    picked = logp.gather(1, torch.where(valid, targets, 0)[:, None])[:, 0]
    return {
        "loss": loss + extra, "z_loss": extra, "lse": torch.where(valid, lse, zero),
        "entropy": torch.where(valid, -(logp.exp() * logp).sum(-1), zero), "logprob": torch.where(valid, picked, zero),
        "argmax": torch.where(valid, z.argmax(-1), -1)}
