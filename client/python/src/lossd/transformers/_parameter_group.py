# SPDX-License-Identifier: Apache-2.0
"""The hyper-parameters of a head's steps: those of the group of the trainer's optimizer that the head's weight is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from lossd.torch import HeadOptimizer
from lossd.transformers._head_module import ServedHead

_NAMES = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov")


def algorithm_of(optimizer: Any) -> Literal["adamw", "sgd"]:
    """ValueError if a server does not compute the steps of this optimizer."""
    name = type(optimizer).__name__
    if type(optimizer) is torch.optim.AdamW:
        return "adamw"
    if type(optimizer) is torch.optim.SGD:
        return "sgd"
    if getattr(optimizer, "adam_w_mode", False) and name in ("FusedAdam", "DeepSpeedCPUAdam"):
        return "adamw"
    raise ValueError(f"the trainer's optimizer is {name}; a head on a server steps with torch's AdamW (optim='adamw_torch') "
                     "or SGD (optim='sgd')")


class ParameterGroup:
    """The group that the head's weight is in, by the trainer's own rules."""

    def __init__(self, served: ServedHead, optimizer: Any, parameters: Sequence[Sequence[Any]], head_lr: float | None,
                 head_weight_decay: float | None) -> None:
        """`parameters` are those of each group of the optimizer, which may hold other tensors by now. ValueError if the head
        is in none of them."""
        self._optimizer, self._head_lr, self._head_weight_decay = optimizer, head_lr, head_weight_decay
        found = {name: _index(parameters, served.tensors_of(name)) for name in served.stand_ins}
        index = found["weight"]
        if index is None and head_lr is None:
            raise ValueError(
                f"the trainer's optimizer has no group for the head {served.loss_head.head_name!r}, so it would not be "
                "trained: give the optimizer model.parameters() after patch(), or give attach(head_lr=), or freeze the head "
                "with patch(freeze=True)")
        self._index = index or 0
        self._first_lr = float(self._group["lr"])
        if head_lr is not None and not self._initial_lr:
            raise ValueError("head_lr is scaled as the learning rate of the trainer's optimizer is by its scheduler, and that is 0")
        bias = found.get("bias")
        self.decays_bias = bias is not None and optimizer.param_groups[bias]["weight_decay"] > 0.0
        if bias is not None and index is not None and head_lr is None and (
                optimizer.param_groups[bias]["lr"] != optimizer.param_groups[index]["lr"]):
            raise ValueError("the head's bias and its weight are in groups of different learning rates; a server steps them with "
                             "one: put them into groups of one rate, or give attach(head_lr=)")

    @property
    def _group(self) -> dict[str, Any]:
        groups = self._optimizer.param_groups
        return groups[self._index if self._index < len(groups) else 0]  # some wrappers show one group at a time

    @property
    def _initial_lr(self) -> float:
        return float(self._group.get("initial_lr", self._first_lr))

    def copy_to(self, optimizer: HeadOptimizer) -> None:
        """As they are now, after whatever a scheduler has made of them."""
        group, ours = self._group, optimizer.param_groups[0]
        for name in _NAMES:
            if name in group:
                ours[name] = group[name]
        if self._head_lr is not None:
            ours["lr"] = self._head_lr * float(group["lr"]) / self._initial_lr
        if self._head_weight_decay is not None:
            ours["weight_decay"] = self._head_weight_decay
        optimizer.decay_vectors = self.decays_bias


def _index(parameters: Sequence[Sequence[Any]], wanted: Sequence[Any]) -> int | None:
    for index, group in enumerate(parameters):
        if any(each is one for each in group for one in wanted):
            return index
    return None
