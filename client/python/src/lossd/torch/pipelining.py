# SPDX-License-Identifier: Apache-2.0
"""The loss of a pipeline's last stage, for the schedules of torch.distributed.pipelining (torch 2.4 or later)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from lossd.torch._input import known_arguments
from lossd.torch._modes import Asked, asked_by_schedule
from lossd.torch.head import LossHead


class PipelineLoss:
    """What a schedule takes as loss_fn: the loss of one microbatch on a lossd server.

        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=PipelineLoss(head, n_microbatches=8))

    A schedule divides the gradients of its stages by the number of microbatches after a step (scale_grads=True, its
    default), which is right for losses that are means. The head's gradient is not among them; this divides it, when
    HeadOptimizer applies the step. Give the schedule's own arguments. If several replicas of the pipeline train one
    head, give the LossHead the process group of their last stages.

    Microbatches with different numbers of valid targets count alike then, as with a mean of torch. For the mean over all
    valid targets of a step give `normalizer`, their number:

        loss_fn = PipelineLoss(head, n_microbatches=8, normalizer=lambda: (targets != -100).sum())

    The server's work on a microbatch goes on behind whatever the schedule lets the stage do before that microbatch's
    backward (PendingHeadLoss.lazy); lossd.torch.schedules has a 1F1B that lets it do a forward.

    schedule.eval() gets losses alone, and nothing is accumulated.
    """

    @known_arguments
    def __init__(self, head: LossHead, *, n_microbatches: int, scale_grads: bool = True,
                 normalizer: float | Callable[[], Any] | None = None) -> None:
        """
        Args:
          n_microbatches, scale_grads: the schedule's.
          normalizer: the number of valid targets (with class weights: their weight) of all microbatches of a step, of all
            replicas together; or a function that is called for each microbatch and returns it. The trunk and the head
            get the gradients of the mean over them, and the losses of the microbatches average to it (scale_grads=False:
            add up). None: each microbatch is divided by its own.
        """
        if isinstance(n_microbatches, bool) or not isinstance(n_microbatches, int) or n_microbatches < 1:
            raise ValueError(f"n_microbatches is {n_microbatches!r}; it must be a positive integer")
        if head.extras or head.reduction == "none":
            raise ValueError("a schedule needs one number: make the LossHead with reduction mean or sum and no extras")
        if normalizer is not None and head.reduction != "mean":
            raise ValueError(f"normalizer is for means; the LossHead has reduction {head.reduction!r}")
        if normalizer is not None and not callable(normalizer):
            _number(normalizer)
        self.head = head
        self.normalizer = normalizer
        self._divisor = n_microbatches if scale_grads else 1  # of the trunk's gradients, after the step
        head.steps.group = n_microbatches
        head.scale.schedule = 1.0 / self._divisor

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        asked = asked_by_schedule()
        if asked is Asked.SHAPE:
            return output.float().sum() * 0.0
        if asked is Asked.VALUE:
            with torch.no_grad():
                return self._loss(output, target)
        return self._loss(output, target)

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        pending = self.head.start(output, target, normalizer=self._share())
        if not self.head.deferred:
            return pending.lazy()
        loss = pending.wait()
        assert isinstance(loss, torch.Tensor)
        return loss

    def _share(self) -> float | None:
        """What a microbatch is divided by, so that the schedule's division makes that of the step of it."""
        if self.normalizer is None:
            return None
        total = self.normalizer() if callable(self.normalizer) else self.normalizer
        return _number(total) / self._divisor


def _number(value: Any) -> float:
    """ValueError or TypeError unless it is a number of targets, or a tensor of one."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"normalizer is {value!r}; it must be a number, or a function that returns one") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"normalizer is {number:g}; it must be the number of valid targets of the step")
    return number
