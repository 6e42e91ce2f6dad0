# SPDX-License-Identifier: Apache-2.0
"""From an impossible history to the few answers in it that contradict each other."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from checker import Limits, Result, Stuck, Verdict, check
from history import Event, History
from model import Model


@dataclass(frozen=True)
class Least:
    """`history` ends as early as it can; of its events the visible ones contradict each other, whatever became of
    those that are hidden: a hidden write may have happened or not."""

    history: History
    visible: frozenset[int]  # by number
    stuck: Stuck | None  # where the search ended; None if it was given up

    def events(self) -> list[Event]:
        return [event for event in self.history.events if event.number in self.visible]


def until(history: History, time: float) -> History:
    """What the clients had been told at that time."""
    events = []
    for event in history.events:
        if event.start > time:
            continue
        if event.last > time:
            result = {name: event.result[name] for name in ("accepted", "slices", "sent", "incarnation", "broken")
                      if name in event.result}
            if "accepted" in result and result["accepted"]["time"] > time:
                del result["accepted"]
            if "slices" in result:
                result["slices"] = [piece for piece in result["slices"] if piece["got"] <= time]
            if "sent" in result:
                result["sent"] = [sent for sent in result["sent"] if sent <= time]
            if "broken" in result:
                result["broken"] = [cut for cut in result["broken"] if cut <= time]
            event = replace(event, outcome="PENDING", end=None, result=result)
        events.append(event)
    return history.of(events)


def _shortest(whole: History, model: Model, limits: Limits) -> History:
    """The history up to the first answer with which it is impossible."""
    ends = sorted(event.end for event in whole.events if event.end is not None)
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if check(until(whole, ends[middle]), model, limits).verdict is Verdict.IMPOSSIBLE:
            high = middle
        else:
            low = middle + 1
    short = until(whole, ends[low])
    return short if check(short, model, limits).verdict is Verdict.IMPOSSIBLE else whole


def minimise(history: History, model: Model, seconds: float = 20.0,
             limits: Limits = Limits(nodes=5_000, seconds=2.0)) -> Least:
    """`history` is impossible. Hides its events one after the other as long as it stays so, for so many seconds; what
    cannot be decided within the limits counts as needed."""
    deadline = time.monotonic() + seconds
    history = _shortest(history, model, limits)
    everything = [event.number for event in history.events]

    def result_with(kept: list[int]) -> Result:
        return check(history, model, limits, frozenset(everything) - frozenset(kept))

    visible, least = everything, result_with(everything)
    size = max(1, len(visible) // 2)
    at, shrunk = 0, False
    while time.monotonic() < deadline:
        if at >= len(visible):
            if size == 1 and not shrunk:
                break
            size, at, shrunk = max(1, size // 2), 0, False
        kept = visible[:at] + visible[at + size:]
        result = result_with(kept)
        if result.verdict is Verdict.IMPOSSIBLE:
            visible, least, shrunk = kept, result, True
        else:
            at += size
    return Least(history, frozenset(visible), least.stuck)
