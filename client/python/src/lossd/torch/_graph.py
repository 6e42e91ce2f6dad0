# SPDX-License-Identifier: Apache-2.0
"""The place of a loss in autograd's graph: what backward brings to a Job, and what it takes from there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from lossd.types import RowOutput

if TYPE_CHECKING:
    from lossd.torch._job import Job


class Direct(torch.autograd.Function):
    """Gradients that are known already."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, hidden: torch.Tensor, job: Job, loss: float | None) -> torch.Tensor:
        ctx.job = job
        return job.scalar(math.nan if loss is None else loss)

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: Job | None = ctx.job
        if job is None:
            raise RuntimeError(_SECOND_BACKWARD)
        job.check_backward()
        factor = job.meet(float(grad_loss))
        ctx.job = None
        job.fill_lazy_loss()
        job.had_backward()
        return torch.zeros(()), _once_differentiable(job.gradient(factor)), None, None


class Deferred(torch.autograd.Function):
    """Gradients that the server computes when the upstream gradients of the rows are known."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, hidden: torch.Tensor, job: Job, names: list[RowOutput],
                rows: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ctx.job, ctx.names = job, names
        ctx.set_materialize_grads(False)
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        job: Job | None = ctx.job
        if job is None:
            raise RuntimeError(_SECOND_BACKWARD)
        job.check_backward()
        ctx.job = None
        job.run_backward(dict(zip(ctx.names, upstream)))
        return torch.zeros(()), _once_differentiable(job.gradient()), None, None, None


_SECOND_BACKWARD = (
    "backward ran twice on one loss; the server accumulated its weight gradient once. Compute the loss again, or add "
    "losses up before backward()")


class _NotTwice(torch.autograd.Function):
    """Passes a gradient on and raises if it is differentiated itself."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise RuntimeError("lossd has no second derivatives: the gradient of its loss cannot be differentiated")


def _once_differentiable(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or not torch.is_grad_enabled():  # enabled with create_graph=True only
        return gradient
    marked: torch.Tensor = _NotTwice.apply(torch.zeros((), requires_grad=True), gradient)
    return marked
