# SPDX-License-Identifier: Apache-2.0
"""The loss of a pipeline's last stage, for the schedules of torch.distributed.pipelining (torch 2.4 or later)."""

from __future__ import annotations

import inspect

import torch

from lossd.torch.head import LossHead


class PipelineLoss:
    """What a schedule takes as loss_fn: the loss of one microbatch on a lossd server.

        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=PipelineLoss(head, n_microbatches=8))

    A schedule divides the gradients of its stages by the number of microbatches after a step (scale_grads=True, its
    default), which is right for losses that are means. The head's gradient is not among them; this divides it, when
    HeadOptimizer applies the step. Give the schedule's own arguments. If several replicas of the pipeline train one
    head, give the LossHead the process group of their last stages.

    The server's work on a microbatch goes on behind whatever the schedule lets the stage do before that microbatch's
    backward (PendingHeadLoss.lazy); lossd.torch.schedules has a 1F1B that lets it do a forward.
    """

    def __init__(self, head: LossHead, *, n_microbatches: int, scale_grads: bool = True) -> None:
        if n_microbatches < 1:
            raise ValueError(f"n_microbatches is {n_microbatches}; it must be positive")
        if head.extras or head.reduction == "none":
            raise ValueError("a schedule needs one number: make the LossHead with reduction mean or sum and no extras")
        self.head = head
        head.steps.group = n_microbatches
        head.scale.schedule = 1.0 / n_microbatches if scale_grads else 1.0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if _is_probe():
            return output.float().sum() * 0.0
        pending = self.head.start(output, target)
        if not self.head.deferred:
            return pending.lazy()
        loss = pending.wait()
        assert isinstance(loss, torch.Tensor)
        return loss


def _is_probe() -> bool:
    """Whether a schedule only wants to know shapes.

    Before its first step a schedule whose stages were made without example arguments calls the loss once with memory
    that holds anything, to see the shape of the gradient. Those rows must not reach the server, and only the caller's
    name tells them. Should the name change, the step has one microbatch too many and is refused (StepTracker.group).
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_backward_metadata_inference":
            return True
        frame = frame.f_back
    return False
