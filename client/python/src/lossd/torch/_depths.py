# SPDX-License-Identifier: Apache-2.0
"""The arguments and the result of LossHead.depth_losses. A depth is one of several tokens that a model predicts at each
position; it has hidden states, targets, a weight and a loss of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import lossd
from lossd.torch import _input
from lossd.torch._job import Job, LossExtras

_MOST_DEPTHS = 64  # the largest number of depths of a microbatch


@dataclass
class DepthLosses:
    """The result of LossHead.depth_losses: the loss of all depths, which can be differentiated, and its parts for each of the
    K depths, on the CPU."""

    loss: torch.Tensor  # the sum of weights[k] * losses[k]; part of the graph
    losses: torch.Tensor  # (K,) float32: the loss of each depth, before its weight; not part of the graph
    accuracy: torch.Tensor  # (K,) float32: the share of valid rows whose largest logit is the target's; 0 without valid rows
    valid_rows: torch.Tensor  # (K,) int64: the number of this trainer's rows that have a target
    extras: LossExtras | None = None  # what LossHead(extras=) asked for; tensors of rows have the shape (K, ...)


@dataclass(frozen=True)
class DepthRows:
    """The rows of one call of depth_losses, which read() has checked."""

    parts: tuple[torch.Tensor, ...]  # one tensor (K, ..., D), or K tensors (..., D)
    labels: list[NDArray[np.int32]]  # for each depth: [rows of the depth]
    row_weights: NDArray[np.float32] | None  # [rows of all depths]
    weights: list[float]  # for each depth: the factor of its loss

    def depths(self, normalizers: Sequence[float]) -> list[lossd.Depth]:
        return [lossd.Depth(len(labels), weight, normalizer)
                for labels, weight, normalizer in zip(self.labels, self.weights, normalizers)]


def any_part(hidden: Any) -> torch.Tensor:
    """One of the tensors in `hidden`: one that requires a gradient, or the first one if none does. TypeError if `hidden` has
    no tensor."""
    parts = _parts(hidden)
    return next((part for part in parts if part.requires_grad), parts[0])


def shifted(labels: NDArray[np.int32], by: int, ignore_index: int) -> NDArray[np.int32]:
    """Labels in which each position has the label that is `by` positions later in the last dimension. The last `by` positions
    have ignore_index."""
    if by == 0:
        return labels
    found = np.full_like(labels, ignore_index)
    found[..., :-by] = labels[..., by:]
    return found


def read(head: str, hidden_size: int, hidden: Any, targets: Any, row_weights: Any, weights: Any, *, shift: bool,
         vocab_size: int, ignore_index: int) -> DepthRows:
    """Checks the arguments of depth_losses and returns their rows. TypeError, ValueError or lossd.InvalidArgument names the
    argument that is wrong.

    `targets` and `row_weights` have a first dimension for the K depths, or belong to one sequence of rows that all depths share.
    Depth k then has the same row weights, and the targets from k positions later, because it predicts k tokens further ahead.
    `shift`: each position first gets the target of the next position."""
    parts = _parts(hidden)
    views = parts if len(parts) > 1 else parts[0].unbind(0)
    count = len(views)
    if not 1 <= count <= _MOST_DEPTHS:
        raise ValueError(f"hidden has {count} depths; it must have 1 to {_MOST_DEPTHS}")
    _input.check_tensors(views[0], targets, {"row_weights": row_weights})
    factors = _weights(weights, count)
    rows_of_one = targets.dim() == views[0].dim() - 1
    of_depths = [targets] * count if rows_of_one else _of_each("targets", targets, count)
    masks: Sequence[torch.Tensor | None] = [None] * count
    if row_weights is not None:
        shared = row_weights.dim() == views[0].dim() - 1
        masks = [row_weights] * count if shared else _of_each("row_weights", row_weights, count)
    labels: list[NDArray[np.int32]] = []
    for depth, view in enumerate(views):
        _input.check_shapes(head, hidden_size, shift, view, of_depths[depth], {"row_weights": masks[depth]})
        if rows_of_one and targets.dim() == 0 and count > 1:
            raise ValueError("targets of one sequence for several depths need at least one dimension")
        known = _input.labels(of_depths[depth], shift, ignore_index).reshape(view.shape[:-1])
        labels.append(shifted(known, depth if rows_of_one else 0, ignore_index).reshape(-1))
        _input.check_labels(labels[-1], vocab_size, ignore_index)
    arrays = [array for array in map(_input.weights, masks) if array is not None]
    return DepthRows(parts, labels, np.concatenate(arrays) if arrays else None, factors)


def _parts(hidden: Any) -> tuple[torch.Tensor, ...]:
    """The hidden states as one tensor (K, ..., D), or as K > 1 tensors (..., D)."""
    if isinstance(hidden, torch.Tensor):
        if hidden.dim() < 2:
            raise ValueError(f"hidden has shape {tuple(hidden.shape)}; it must be (K, ..., D), or K tensors (..., D)")
        return (hidden,)
    if not isinstance(hidden, (list, tuple)) or not hidden or not all(isinstance(part, torch.Tensor) for part in hidden):
        raise TypeError("hidden must be a tensor (K, ..., D), or a list or tuple of tensors (..., D), one for each depth")
    first = hidden[0]
    for index, part in enumerate(hidden):
        if (part.shape, part.dtype, part.device) != (first.shape, first.dtype, first.device):
            raise ValueError(f"hidden[{index}] has shape {tuple(part.shape)} and is {part.dtype} on {part.device}; hidden[0] has "
                             f"{tuple(first.shape)} and is {first.dtype} on {first.device}")
    return tuple(hidden) if len(hidden) > 1 else (first.unsqueeze(0),)


def _of_each(name: str, tensor: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    if tensor.dim() == 0 or len(tensor) != count:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; {count} depths need ({count}, ...), or (...) for all")
    return tensor.unbind(0)


def _weights(weights: Any, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    values = [_input.number(f"weights[{index}]", value) for index, value in enumerate(weights)]
    if len(values) != count:
        raise ValueError(f"weights has {len(values)} numbers for {count} depths")
    for index, value in enumerate(values):
        if not 0 <= value < float("inf"):
            raise ValueError(f"weights[{index}] is {value}; it must be finite and not negative")
    return values


def losses_of(job: Job) -> DepthLosses:
    """Waits for the job and returns its result as DepthLosses."""
    output = job.output()
    loss, extras = output if isinstance(output, tuple) else (output, None)
    depths = job.result().depths
    return DepthLosses(
        loss, torch.tensor([depth.loss for depth in depths], dtype=torch.float32),
        torch.tensor([depth.correct_rows / depth.valid_rows if depth.valid_rows else 0.0 for depth in depths], dtype=torch.float32),
        torch.tensor([depth.valid_rows for depth in depths], dtype=torch.int64), extras)
