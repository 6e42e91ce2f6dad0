# SPDX-License-Identifier: Apache-2.0
"""RowGradients: the gradients of embedding rows that are being sent to the server."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import lossd
from lossd.torch._step_tracker import StepTracker


class RowGradients:
    """The gradients of embedding rows of one head that are being sent, the oldest first. Thread-safe.

    There are at most max_pending gradients, the client's limit for computations in flight.
    """

    def __init__(self, steps: StepTracker, explain: Callable[[lossd.LossdError], None]) -> None:
        """`explain` adds the cause of an error to it (Continuation.explain)."""
        self._steps = steps
        self._explain = explain
        self._lock = threading.Lock()
        # For each gradient: its call, the number of its microbatch, its step, its memory. Guarded by _lock.
        self._sent: deque[tuple[lossd.PendingLoss, int, int, Any]] = deque()

    def add(self, pending: lossd.PendingLoss, number: int, step: int, memory: Any) -> None:
        """Adds the gradient that is sent as microbatch `number` of `step`. `memory`: the objects whose memory it is sent from.
        They are kept alive until it is sent."""
        with self._lock:
            self._sent.append((pending, number, step, memory))

    def settle(self, wait: bool = True) -> None:
        """Waits until all gradients are sent. With wait=False, only removes those whose calls have ended. Raises the first
        error. The StepTracker is told of each result."""
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
        """Cancels all gradients and ignores their results. Called when the step is given up."""
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
        """Removes a gradient. False if another thread has already removed it."""
        with self._lock:
            found = next((each for each in self._sent if each[0] is pending), None)
            if found is not None:
                self._sent.remove(found)
            return found is not None
