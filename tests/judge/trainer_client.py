# SPDX-License-Identifier: Apache-2.0
"""A trainer as it is in real life: a lossd.Client, which remembers its step and repeats what broke, recorded.

With LOSSD_TRANSPORT=cuda_ipc its rows are on a GPU, which is played on both sides (stage.py), unless it has them in messages.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from encoding import GRID
from fake_cuda import FakeArray
from history import Event, Recorder
from raw_client import Message, state_of, step_result

import lossd


def _connected(target: str, transport: str | None, retry: lossd.RetryOptions) -> lossd.Client:
    """Connections that are cut while they are made are made again."""
    for _ in range(20):
        with contextlib.suppress(lossd.Unavailable):
            return lossd.Client(target, channels=1, transport=transport, retry=retry, call_timeout=10.0, transfer_timeout=10.0,
                                loss_timeout=20.0, wait_for_server=True)
    raise RuntimeError(f"no connection to {target} stands")


class TrainerClient:
    """One lossd.Client of one head, with its own connection; for one thread. Methods are as RawClient's."""

    def __init__(self, name: str, target: str, recorder: Recorder, head: str, hidden_size: int = 4, *,
                 cut_times: Sequence[int] = (), accept_times: Sequence[int] = (), transport: str | None = None,
                 retry: lossd.RetryOptions = lossd.RetryOptions(max_attempts=20, initial_backoff=0.02,
                                                               max_backoff=0.2)) -> None:
        self.name = name
        self._recorder = recorder
        self._head = head
        self._hidden_size = hidden_size
        self._cut_times = cut_times  # of the proxy that it connects through
        self._accept_times = accept_times
        self._on_gpu = transport != "grpc" and os.environ.get("LOSSD_TRANSPORT") == "cuda_ipc"
        self._gpu = int(os.environ.get("LOSSD_TEST_GPU", "0"))
        self._client = _connected(target, transport, retry)

    def close(self) -> None:
        self._client.close()

    @property
    def transport(self) -> tuple[str, str]:
        """How its rows travel, and why."""
        return self._client.cuda_transport if self._on_gpu else self._client.transport

    def compute_loss(self, id: int, rows: int, *, step: int, slice_rows: int = 2) -> Event:
        """Accumulates rows of weight 0 over one stream. Notes when the client had the first answer: from then on it
        knows the generation that its rows are in."""
        args = {"id": id, "rows": (0, rows), "total": rows, "step": step, "accumulate": True}
        hidden = np.zeros((rows, self._hidden_size), np.float32)
        hidden[:, 0] = 1
        gradient = np.full_like(hidden, np.nan)  # the client scatters answers into it as they come
        memory: tuple[Any, Any] = hidden, gradient
        if self._on_gpu:
            memory = FakeArray(hidden, self._gpu), FakeArray(gradient, self._gpu)
            gradient = memory[1].values
        with self._record("ComputeLoss", args) as event:
            pending = self._client.compute_loss_async(
                self._head, memory[0], np.zeros(rows, np.int64), step=step, id=id, accumulate=True, grad_hidden=memory[1],
                row_weights=np.zeros(rows, np.float32), reduction="sum", rows=("lse",), streams=1,
                slice_bytes=slice_rows * hidden.itemsize * self._hidden_size)
            while not pending.done() and np.isnan(gradient).all():
                time.sleep(0.0005)
            if not np.isnan(gradient).all():
                event.result["accepted"] = {"time": self._recorder.now(), "state": None}
            told = pending.wait()
            event.result.update(accumulated=told.accumulated_rows, repeated=told.repeated_rows, repeats=told.repeats)
            self._note_resent(event, told.repeats)
            lses, now = told.rows["lse"].tolist(), self._recorder.now()
            # Rows of several attempts were computed at different moments.
            size = 1 if told.repeats else rows
            event.result["slices"] = [
                {"rows": [begin, begin + size], "sent": event.start, "got": now, "lse": sorted(set(
                    lses[begin:begin + size]))} for begin in range(0, rows, size)]
        return event

    def _note_resent(self, event: Event, repeats: int) -> None:
        """If each cut ended an attempt, the last attempt came on a connection that was made after the last cut."""
        cuts = self._cuts_since(event)
        if not repeats or repeats != len(cuts):
            return
        made = [at for at in map(self._recorder.at, list(self._accept_times)) if at >= max(cuts)]
        if made:  # else the last cut came when the call had its answer
            event.result["resent"] = min(made)

    def add_gradient(self, step: int, id: int, messages: Sequence[Message]) -> Event:
        (begin, end, values), = messages
        array = np.zeros((end - begin, self._hidden_size), np.float32)
        array[:, 0] = np.array(values, np.float64) * GRID
        args = {"id": id, "step": step, "messages": [[begin, end, list(values)]]}
        with self._record("AddGradient", args) as event:
            event.result["sent"] = [event.start]
            told = self._client.add_gradient(self._head, "weight", array, step=step, id=id, rows=(begin, end))
            event.result.update(state=state_of(told.state), added=told.added_rows, repeated=told.repeated_rows)
        return event

    def apply_step(self, step: int, momentum: int = 0, expected: Sequence[int] | None = None) -> Event:
        args = {"step": step, "momentum": momentum, "expected": expected}
        with self._record("ApplyStep", args) as event:
            told = self._client.apply_step(self._head, step, lossd.SGD(lr=1.0, momentum=momentum),
                                           expected_microbatches=expected or ())
            event.result.update(step_result(told), state=state_of(told.state))
        return event

    def zero_gradients(self, step: int) -> Event:
        with self._record("ZeroGradients", {"step": step}) as event:
            event.result["state"] = state_of(self._client.zero_gradients(self._head, step))
        return event

    def acknowledge(self) -> Event:
        """The trainer starts its step again."""
        with self._record("Acknowledge", {}) as event:
            self._client.acknowledge_restart(self._head)
        return event

    @contextlib.contextmanager
    def _record(self, call: str, args: dict[str, Any]) -> Iterator[Event]:
        with self._recorder.call(self.name, call, args, trainer=True) as event:
            try:
                yield event
            finally:
                event.result["broken"] = self._cuts_since(event)

    def _cuts_since(self, event: Event) -> list[int]:
        return sorted(at for at in map(self._recorder.at, list(self._cut_times)) if at >= event.start)
