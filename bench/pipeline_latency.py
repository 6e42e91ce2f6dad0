# SPDX-License-Identifier: Apache-2.0
"""How long the last stage of a pipeline waits for a microbatch of a head on a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

import lossd
from lossd.torch import LossHead, PendingHeadLoss

_UNDER_WAY = 8  # microbatches that are watched at a time


class TimedClient(lossd.Client):
    """Notes for every loss computation how long it takes from when its rows are there until its result is here."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.seconds: list[float] = []
        self.calls_of_gpu = self.calls_of_host = 0  # computations whose rows the client got in memory of a GPU, of the host
        self.rows_are_there: Callable[[], None] = lambda: None  # of the next computation: blocks until they are
        self._watchers = ThreadPoolExecutor(_UNDER_WAY)
        super().__init__(*arguments, **options)

    def compute_loss_async(self, head: str, hidden: Any, *arguments: Any, **options: Any) -> lossd.PendingLoss:
        on_gpu = hasattr(hidden, "is_cuda") and hidden.is_cuda
        self.calls_of_gpu, self.calls_of_host = self.calls_of_gpu + on_gpu, self.calls_of_host + (not on_gpu)
        rows_are_there, self.rows_are_there = self.rows_are_there, lambda: None
        pending = super().compute_loss_async(head, hidden, *arguments, **options)
        self._watchers.submit(self._watch, rows_are_there, pending)
        return pending

    def _watch(self, rows_are_there: Callable[[], None], pending: lossd.PendingLoss) -> None:
        rows_are_there()
        begin = time.perf_counter()
        pending.wait()
        self.seconds.append(time.perf_counter() - begin)

    def median_seconds(self) -> float | None:
        """Of the computations that have ended; None if none has."""
        return float(np.median(self.seconds)) if self.seconds else None

    def close(self) -> None:
        super().close()
        self._watchers.shutdown()


class TimedHead(LossHead):
    """A head of a TimedClient. On a GPU rows are there when the work has been done that was enqueued before start()."""

    def start(self, hidden: torch.Tensor, *arguments: Any, **options: Any) -> PendingHeadLoss:
        if hidden.is_cuda and isinstance(self.client, TimedClient):
            event = torch.cuda.Event(blocking=True)
            event.record()
            self.client.rows_are_there = event.synchronize
        return super().start(hidden, *arguments, **options)


def transports(client: TimedClient) -> dict[str, Any]:
    """How the rows of a client have travelled, after a run: {"took": {transport: computations}, "host": [transport, why] of
    rows in memory of the host, "gpu": likewise}."""
    host, gpu = client.transport, client.cuda_transport
    took: dict[str, int] = {}
    for transport, calls in ((host[0], client.calls_of_host), (gpu[0], client.calls_of_gpu)):
        if calls:
            took[transport] = took.get(transport, 0) + calls
    return {"took": took, "host": list(host), "gpu": list(gpu)}
