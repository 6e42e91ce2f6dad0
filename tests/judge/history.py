# SPDX-License-Identifier: Apache-2.0
"""What clients did to one head and what they were told: the events of a run, with times, as JSON lines.

How an answer tells which weights computed it, too: the numbers that all weights of a judged head have.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

import lossd


# What clients did to one head, and what they were told: the events of a run, with times, as JSON lines.
#
# A history concerns one head. Its first line is a header (the head's name, V, the incarnation of the server at the
# beginning); every other line is one event: a call by one client. Times are nanoseconds since the recorder was made.

# How a call ends without saying whether it took effect.
UNANSWERED = frozenset({"CANCELLED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "PENDING"})
# How it ends when the device fails under it.
DEVICE_FAILED = frozenset({"INTERNAL", "DATA_LOSS"})


@dataclass
class Event:
    """One call. `end` and `outcome` are those the client saw; a call that has not ended is PENDING.

    Calls that stream have parts in `args` and `result`, each with its own times:
      ComputeLoss, Backward: result["accepted"] = {"time", "state"}, result["slices"] = [{"rows", "sent", "got", ...}]
      WriteTensor, AddGradient: args["messages"] = [[begin, end, values]], result["sent"] = [time]
      ReadTensor: result["slices"] = [{"rows", "values", "state", "got"}]
      a trainer's ComputeLoss: result["resent"], a time before the attempt that succeeded, if that was not the first
      any call of a trainer: result["broken"] = [time], when its connection was cut during the call
      any call: result["device_lost"], see History.mark_lost_devices
    `trainer` is true for calls of a lossd.Client, which remembers and repeats; others are single gRPC calls.
    """

    number: int
    client: str
    call: str
    args: dict[str, Any]
    start: float
    end: float | None = None
    outcome: str = "PENDING"
    result: dict[str, Any] = field(default_factory=dict)
    trainer: bool = False

    @property
    def ok(self) -> bool:
        return self.outcome == "OK"

    @property
    def unanswered(self) -> bool:
        return self.outcome in UNANSWERED or bool(self.result.get("device_lost"))

    @property
    def lingers(self) -> bool:
        """The server may go on with it, or with an earlier attempt of it, after the client has had its answer."""
        return not self.ok or bool(self.result.get("broken"))

    @property
    def last(self) -> float:
        """When the client had its answer; infinity if it had none."""
        return float("inf") if self.end is None else self.end

    def overlaps(self, other: Event) -> bool:
        return self.start <= other.last and other.start <= self.last


@dataclass
class History:
    head: str
    vocab: int
    incarnation: int
    events: list[Event]

    def of(self, events: list[Event]) -> History:
        return replace(self, events=events)

    def mark_lost_devices(self) -> None:
        """For a server that may lose its device: a call that failed by that says no more than one that had no answer.
        What fails so while there is no restart stays without a reason."""
        restarts = [event for event in self.events if event.call == "Restart"]
        for event in self.events:
            if event.outcome in DEVICE_FAILED and any(event.overlaps(restart) for restart in restarts):
                event.result["device_lost"] = True

    def save(self, path: Path) -> None:
        header = {"head": self.head, "vocab": self.vocab, "incarnation": self.incarnation}
        lines = [json.dumps(header), *(json.dumps(asdict(event)) for event in self.events)]
        path.write_text("\n".join(lines) + "\n")

    @classmethod
    def load(cls, path: Path) -> History:
        header, *lines = path.read_text().splitlines()
        return cls(**json.loads(header), events=[Event(**json.loads(line)) for line in lines])


def code_of(error: Exception) -> str | None:
    """The status code that an error of gRPC or of the client stands for; None if it is neither's."""
    if isinstance(error, grpc.RpcError):
        return str(error.code().name)
    kinds = {
        lossd.InvalidArgument: "INVALID_ARGUMENT", lossd.NonFinite: "OUT_OF_RANGE", lossd.NotFound: "NOT_FOUND",
        lossd.AlreadyExists: "ALREADY_EXISTS", lossd.FailedPrecondition: "FAILED_PRECONDITION",
        lossd.ResourceExhausted: "RESOURCE_EXHAUSTED", lossd.Unavailable: "UNAVAILABLE",
        lossd.DeadlineExceeded: "DEADLINE_EXCEEDED", lossd.Cancelled: "CANCELLED", lossd.Aborted: "ABORTED",
        lossd.DataLoss: "DATA_LOSS", lossd.Internal: "INTERNAL"}
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), None)


def _message(error: Exception) -> str:
    return str((error.details() or "") if isinstance(error, grpc.RpcError) else error)


class Recorder:
    """Collects the events of one history. Thread-safe; an event belongs to the thread that made it until it ends."""

    def __init__(self, head: str, vocab: int, incarnation: int) -> None:
        self._zero = time.monotonic_ns()
        self._lock = threading.Lock()
        self._history = History(head, vocab, incarnation, [])

    def now(self) -> int:
        return self.at(time.monotonic_ns())

    def at(self, monotonic_ns: int) -> int:
        """A time of time.monotonic_ns() as one of the history."""
        return monotonic_ns - self._zero

    @contextmanager
    def call(self, client: str, call: str, args: dict[str, Any], trainer: bool = False) -> Iterator[Event]:
        """Records one call; errors of gRPC and of the client become its outcome and end here."""
        with self._lock:
            event = Event(len(self._history.events), client, call, args, self.now(), trainer=trainer)
            self._history.events.append(event)
        try:
            yield event
        except Exception as error:
            code = code_of(error)
            if code is None:
                raise
            event.result["message"] = _message(error)
            event.outcome, event.end = code, self.now()
        else:
            event.outcome, event.end = "OK", self.now()

    def history(self) -> History:
        """All events so far; call it when every client has ended."""
        with self._lock:
            return self._history.of(list(self._history.events))


# Weights whose version can be read off every answer.
#
# All weights, gradients and moments of a judged head are zero but for column 0, and there row v holds a whole multiple
# of GRID: the judge knows a tensor as the tuple of these V whole numbers. The clients write c * v into row v (and add
# a * v to its gradient), so that one whole number c names a version; a tensor that mixes versions has other rows.
#
# With hidden state x = (1, 0, 0, ...), the logits of a row are logit_scale * GRID * values, so
#   lse = log sum_v exp(logit_scale * GRID * values[v])
# says which weights computed the row, and the gradient of lse with respect to x,
#   dx[0] = logit_scale * GRID * sum_v p_v values[v],
# says which weights and which logit_scale a backward used. Neighbouring c differ by 0.01 or more in both for the c that
# the workload draws; fp32 is off by about 1e-6. SGD with learning rate 1 keeps the family, with momentum 0 or 1.

GRID = 2.0**-8
TOLERANCE = 2e-4
EMBEDDED = 3  # the row of the weight that calls of an embedding ask for: its column 0 tells the version

Values = tuple[int, ...]


def family(c: int, vocab: int) -> Values:
    return tuple(c * v for v in range(vocab))


def _exponentials(values: Values, scale: float) -> tuple[float, list[float]]:
    logits = [scale * GRID * value for value in values]
    top = max(logits)
    return top, [math.exp(logit - top) for logit in logits]


def lse(values: Values, scale: float) -> float:
    top, exponentials = _exponentials(values, scale)
    return top + math.log(sum(exponentials))


def lse_gradient(values: Values, scale: float) -> float:
    """d lse / d x[0]."""
    _, exponentials = _exponentials(values, scale)
    weighted = sum(e * value for e, value in zip(exponentials, values))
    return scale * GRID * weighted / sum(exponentials)


def norm(values: Values) -> float:
    return GRID * math.sqrt(sum(value * value for value in values))


def near(seen: float, expected: float) -> bool:
    return abs(seen - expected) <= TOLERANCE * max(1.0, abs(expected))


def describe(values: Values, first_row: int = 0) -> str:
    """c=13, or, of rows of several versions, the c of each run of rows."""
    runs: list[tuple[int, int, str]] = []
    for row, value in enumerate(values, first_row):
        if row == 0:  # is 0 in all versions
            continue
        c = str(value // row) if value % row == 0 else f"{value}/{row}"
        begin = row
        if runs and runs[-1][2] == c:
            begin = runs.pop()[0]
        runs.append((begin, row + 1, c))
    if len(runs) == 1:
        return f"c={runs[0][2]}"
    return ", ".join(f"rows [{begin}, {end}) c={c}" for begin, end, c in runs)


def decode_lse(seen: float, vocab: int, scale: float = 1.0, limit: int = 4096) -> str:
    """The c whose lse was seen, as text; of weights outside the family, the number itself."""
    low, high = -limit, limit
    while low < high:
        middle = (low + high) // 2
        if lse(family(middle, vocab), scale) < seen - TOLERANCE:
            low = middle + 1
        else:
            high = middle
    return f"c={low}" if near(lse(family(low, vocab), scale), seen) else f"lse={seen:.5f}"
