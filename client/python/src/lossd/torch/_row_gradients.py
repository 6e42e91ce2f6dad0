# SPDX-License-Identifier: Apache-2.0
"""Gradients of rows of an embedding on their way to the server."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import lossd
from lossd.torch._step_tracker import StepTracker


class RowGradients:
    """Those of one head, in the order in which they were sent. Thread-safe.

    There are at most as many as the client has computations under way (max_pending).
    """

    def __init__(self, steps: StepTracker, explain: Callable[[lossd.LossdError], None]) -> None:
        """`explain` adds to an error what is behind it."""
        self._steps = steps
        self._explain = explain
        self._lock = threading.Lock()
        self._sent: deque[tuple[lossd.PendingLoss, int, int, Any]] = deque()  # guarded by _lock

    def add(self, pending: lossd.PendingLoss, number: int, step: int, memory: Any) -> None:
        """Microbatch `number` of `step`. `memory`: what it is sent from, which has to stay until then."""
        with self._lock:
            self._sent.append((pending, number, step, memory))

    def settle(self, wait: bool = True) -> None:
        """Waits for all, or with wait=False looks at those that have ended; raises the first error of them."""
        while True:
            with self._lock:
                if not self._sent or not (wait or self._sent[0][0].done()):
                    return
                pending, number, step, _ = self._sent[0]
            try:
                result = pending.wait()
            except lossd.LossdError as error:
                if self._remove(pending) and step == self._steps.step:
                    self._steps.failed_rows(number)
                    if isinstance(error, (lossd.Restarted, lossd.StepDiscarded)):
                        self._steps.lost(str(error))
                self._explain(error)
                raise
            if self._remove(pending) and step == self._steps.step:
                self._steps.arrived(number, result.valid_rows, waits_for_backward=False)

    def drop(self) -> None:
        """Ends those that are on their way, whatever becomes of them: the step is given up."""
        while True:
            with self._lock:
                if not self._sent:
                    return
                pending = self._sent[0][0]
            pending.cancel()
            with contextlib.suppress(lossd.LossdError):
                pending.wait()
            self._remove(pending)

    def _remove(self, pending: lossd.PendingLoss) -> bool:
        """Whether it was still there."""
        with self._lock:
            found = next((each for each in self._sent if each[0] is pending), None)
            if found is not None:
                self._sent.remove(found)
            return found is not None
