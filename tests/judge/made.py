# SPDX-License-Identifier: Apache-2.0
"""Histories made by hand: what is not said of a call is what a good server would answer."""

from __future__ import annotations

from typing import Any

import encoding
from checker import Verdict, check
from encoding import family
from history import Event, History
from model import Model

V, ROWS = 4, 2
SERVER = 7


class Made:
    """A history in the making. Calls are at [start, end]; what is not given is what a good server would say."""

    def __init__(self, incarnation: int = SERVER) -> None:
        self.events: list[Event] = []
        self.incarnation = incarnation
        self.versions: dict[str, int] = {}  # added to every state

    def call(self, call: str, at: tuple[float, float | None], client: str = "A", outcome: str = "OK",
             args: dict[str, Any] | None = None, trainer: bool = False, **result: Any) -> Event:
        event = Event(len(self.events), client, call, args or {}, at[0], at[1], outcome, result, trainer)
        self.events.append(event)
        return event

    def state(self, step: int = 0) -> dict[str, int]:
        return {"incarnation": self.incarnation, "step": step, **self.versions}

    def create(self, at: tuple[float, float] = (0, 1), **more: Any) -> Made:
        self.call("CreateHead", at, args={"vocab": V}, state=self.state(), **more)
        return self

    def write(self, c: int, at: tuple[float, float | None], client: str = "A", sent: tuple[float, ...] | None = None,
              outcome: str = "OK") -> Event:
        values = list(family(c, V))
        messages = [[0, V, values]] if sent is None or len(sent) < 2 else [[0, 2, values[:2]], [2, V, values[2:]]]
        return self.call("WriteTensor", at, client, outcome, {"messages": messages}, sent=list(sent or at[:1]),
                         state=self.state())

    def read(self, values: tuple[int, ...], at: tuple[float, float], client: str = "B", role: str = "value",
             got: tuple[float, ...] = (), outcome: str = "OK") -> Event:
        times = got or (at[1],)
        size = V // len(times)
        slices = [{"rows": [n * size, (n + 1) * size], "values": list(values[n * size:(n + 1) * size]),
                   "state": self.state(), "got": time} for n, time in enumerate(times)]
        return self.call("ReadTensor", at, client, outcome, {"role": role}, slices=slices)

    def loss(self, cs: tuple[int, ...], at: tuple[float, float | None], client: str = "B", *, id: int = 1,
             step: int | None = None, accumulate: bool = False, retain: bool = False, scale: float = 1.0,
             accepted: float | None = None, slices: tuple[tuple[float, float], ...] = (), repeated: int = 0,
             outcome: str = "OK", trainer: bool = False, told_step: int = 0, **more: Any) -> Event:
        """A slice of ROWS rows for each c; `slices`: when each was sent and answered."""
        times = slices or ((at[0], at[1]),) * len(cs)
        total = max(len(cs), 2 if accumulate else 1) * ROWS
        rows = len(cs) * ROWS
        pieces = [{"rows": [n * ROWS, (n + 1) * ROWS], "sent": sent, "got": got,
                   "lse": [encoding.lse(family(c, V), scale)] * ROWS} for n, (c, (sent, got)) in enumerate(
                       zip(cs, times))]
        args = {"id": id, "rows": (0, rows), "total": total, "step": step, "accumulate": accumulate,
                "retain": retain, "scale": scale}
        return self.call("ComputeLoss", at, client, outcome, args, trainer, slices=pieces, repeated=repeated,
                         accumulated=rows - repeated if accumulate else 0,
                         accepted={"time": accepted or at[1], "state": self.state(told_step)}, **more)

    def backward(self, c: int, at: tuple[float, float], scale: float = 1.0, outcome: str = "OK") -> Event:
        if outcome != "OK":
            return self.call("Backward", at, "B", outcome, {"id": 1, "step": None, "rows": (0, ROWS)})
        piece = {"rows": [0, ROWS], "sent": at[0], "got": at[1],
                 "dx": [encoding.lse_gradient(family(c, V), scale)] * ROWS}
        return self.call("Backward", at, "B", outcome, {"id": 1, "step": None, "rows": (0, ROWS)}, slices=[piece],
                         accepted={"time": at[1], "state": self.state()})

    def add(self, a: int, at: tuple[float, float | None], client: str = "A", *, step: int = 0, id: int = 100,
            sent: tuple[float, ...] = (), repeated: int = 0, outcome: str = "OK",
            trainer: bool = False, **more: Any) -> Event:
        values = list(family(a, V))
        messages = [[0, V, values]] if len(sent) < 2 else [[0, 2, values[:2]], [2, V, values[2:]]]
        return self.call("AddGradient", at, client, outcome, {"id": id, "step": step, "messages": messages}, trainer,
                         sent=list(sent or at[:1]), added=V - repeated, repeated=repeated, state=self.state(step), **more)

    def apply(self, step: int, a: int, at: tuple[float, float | None], client: str = "A", *, momentum: int = 0,
              repeated: bool = False, rows: int = 0, microbatches: int = 0, contributions: int = 1,
              outcome: str = "OK", expected: list[int] | None = None, trainer: bool = False,
              **more: Any) -> Event:
        args = {"step": step, "momentum": momentum, "expected": expected}
        result = {"norm": encoding.norm(family(a, V)), "microbatches": microbatches, "rows": rows,
                  "contributions": contributions, "repeated": repeated, "state": self.state(step + 1)}
        return self.call("ApplyStep", at, client, outcome, args, trainer, **(result if outcome == "OK" else {}), **more)

    def zero(self, at: tuple[float, float | None], client: str = "C", step: int = 0, trainer: bool = False) -> Event:
        return self.call("ZeroGradients", at, client, "OK", {"step": step}, trainer, state=self.state(step))

    def save(self, at: tuple[float, float], name: str = "s", step: int = 0) -> Event:
        return self.call("SaveCheckpoint", at, args={"name": name}, state=self.state(step))

    def load(self, at: tuple[float, float], name: str = "s", step: int = 0, outcome: str = "OK") -> Event:
        return self.call("LoadCheckpoint", at, "C", outcome, {"name": name}, state=self.state(step))

    def describe(self, at: tuple[float, float], rows: int = 0, step: int = 0, outcome: str = "OK",
                 call: str = "DescribeHead", exists: bool = True) -> Event:
        return self.call(call, at, "C", outcome, exists=exists, step_rows=rows, state=self.state(step))

    def history(self) -> History:
        return History("h", V, SERVER, self.events)

    def verdict(self, **options: Any) -> Verdict:
        return check(self.history(), Model(**options)).verdict
