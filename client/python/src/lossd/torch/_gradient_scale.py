# SPDX-License-Identifier: Apache-2.0
"""What the server's gradient of a head is multiplied by when HeadOptimizer applies a step."""

from __future__ import annotations

import math


class GradientScale:
    """The product of factors that are known apart. Not thread-safe."""

    def __init__(self, ranks: int, averaged_over: int) -> None:
        self.replicas = 1.0 / averaged_over  # the ranks' losses are averaged, and the server adds up
        self._copies = ranks  # of a finished gradient: each rank adds its own
        self.schedule = 1.0  # of a pipeline schedule, which divides the trunk's gradients after the step
        self._step = -1  # that _loss belongs to
        self._loss: float | None = None  # what losses of the step were multiplied by after forward, if one had backward

    def meet_loss(self, step: int, factor: float) -> bool:
        """Notes that a loss of `step` was multiplied by `factor` after forward; False if others had another factor."""
        if self._step != step:
            self.forget_losses()
        if self._loss is not None and not math.isclose(self._loss, factor, rel_tol=1e-6):
            return False
        self._step, self._loss = step, factor
        return True

    def forget_losses(self) -> None:
        """The gradients of the step are gone."""
        self._loss = None

    def of_losses(self, step: int) -> float:
        return self._loss if self._loss is not None and self._step == step else 1.0

    def applied(self, step: int) -> float:
        return self.replicas * self.schedule * self.of_losses(step)

    def of_finished_gradient(self, step: int) -> float:
        """What multiplies a gradient that lacks nothing, and that every rank adds, when it is added to the server's."""
        undone = self._copies * self.replicas * self.schedule * self.of_losses(step)
        if undone == 0:
            raise RuntimeError("the losses of this step were multiplied by 0, so no other gradient can be added to theirs")
        return 1.0 / undone
