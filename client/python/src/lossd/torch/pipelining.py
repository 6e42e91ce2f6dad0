# SPDX-License-Identifier: Apache-2.0
"""PipelineLoss: the loss function of a pipeline's last stage, for the schedules of torch.distributed.pipelining (torch 2.4 or
later)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from lossd.torch._input import known_arguments
from lossd.torch._modes import Asked, asked_by_schedule
from lossd.torch.head import LossHead


class PipelineLoss:
    """The loss_fn of a schedule: computes the loss of one microbatch on a lossd server.

        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=PipelineLoss(head, n_microbatches=8))

    After a step, a schedule divides the gradients of its stages by the number of microbatches (scale_grads=True, its
    default), which is right for losses that are means. The schedule does not divide the head's gradient; HeadOptimizer
    divides it when it applies the step. So give this class the same arguments as the schedule. If several replicas of the
    pipeline train one head, give the LossHead the process group of their last stages.

    By default all microbatches have the same weight, even if they have different numbers of valid targets. For the mean over
    all valid targets of a step, give their number as `normalizer`:

        loss_fn = PipelineLoss(head, n_microbatches=8, normalizer=lambda: (targets != -100).sum())

    Unless the LossHead is deferred, a call returns at once (PendingHeadLoss.lazy). The server computes the microbatch while the schedule lets the stage do
    other work, and the microbatch's backward waits for the server. lossd.torch.schedules has a 1F1B in which the stage does a
    forward in this time.

    schedule.eval() gets losses only, and nothing is accumulated.
    """

    @known_arguments
    def __init__(self, head: LossHead, *, n_microbatches: int, scale_grads: bool = True,
                 normalizer: float | Callable[[], Any] | None = None) -> None:
        """
        Args:
          n_microbatches, scale_grads: the same as the schedule's.
          normalizer: the number of valid targets (with class weights: their weight) of all microbatches of a step, of all
            replicas together; or a function that returns this number and is called for each microbatch. The trunk and the
            head get the gradients of the mean over these targets. The average of the microbatches' losses is this mean
            (with scale_grads=False their sum is). None: each microbatch's loss is divided by its own number of targets.
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
        self._divisor = n_microbatches if scale_grads else 1  # the divisor of the trunk's gradients, after the step
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
        """The divisor of a microbatch's sum of losses; None: the LossHead chooses. Together with the schedule's division by
        the number of microbatches, the sum is divided by `normalizer`."""
        if self.normalizer is None:
            return None
        total = self.normalizer() if callable(self.normalizer) else self.normalizer
        return _number(total) / self._divisor


def _number(value: Any) -> float:
    """The number of targets that `value`, a number or a tensor with one element, has. ValueError or TypeError if there is
    none."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"normalizer is {value!r}; it must be a number, or a function that returns one") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"normalizer is {number:g}; it must be the number of valid targets of the step")
    return number
