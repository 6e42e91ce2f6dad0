# SPDX-License-Identifier: Apache-2.0
"""Calls as moments: the instants at which a call takes effect or sees something, and when each may lie.

A linearizable call has one moment between its start and its end. A stream has several: a microbatch is accepted, its
slices are computed, its rows are booked, it closes. What a moment does is in model.py.

A moment is required if the client was told of it, and optional if the call may or may not have got so far. The window
of an unanswered call's moments has no end, but for a restart of the server that began after the client gave up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from history import Event, History
from refusals import rivals

INFINITY = float("inf")

# Calls that change nothing: hidden, they can be left out.
OBSERVERS = frozenset({"ReadTensor", "GradNorm", "DescribeHead", "ListHeads", "Backward"})


@dataclass(frozen=True)
class Moment:
    event: Event
    what: str
    start: float
    end: float
    optional: bool = False
    needs: tuple[int, ...] = ()  # moments, by number, that must have been before
    before: tuple[int, ...] = ()  # moments that must not have been before
    data: Any = None
    told: bool = False  # the call ended with OK, and what its client was told counts

    @property
    def observes(self) -> bool:
        """Sees the state and, but for learning the number of a version, never changes it."""
        return (self.what in ("rows", "refused", "read") or self.event.call in OBSERVERS and self.what == "do" or
                self.event.call == "ApplyStep" and self.what == "do" and bool(self.event.result["repeated"]))

    @property
    def commutes(self) -> bool:
        """Ends a call without an effect that another call sees: as soon as it may come it can."""
        return self.what == "close" and not self.event.args.get("retain")


class _Call:
    """Collects the moments of one call; numbers are those of the whole history."""

    def __init__(self, event: Event, history: History, first: int, hidden: bool) -> None:
        self.event = event
        self.hidden = hidden
        self.history = history
        self.moments: list[Moment] = []
        self._first = first
        self.told = event.ok and not hidden
        self.end = _horizon(event.last, history) if event.unanswered else event.last

    def add(self, what: str, start: float | None = None, end: float | None = None, *, optional: bool = False,
            needs: tuple[int, ...] = (), data: Any = None) -> int:
        start = self.event.start if start is None else start
        end = self.end if end is None else min(end, self.end)
        self.moments.append(Moment(self.event, what, start, end, optional, needs, (), data, self.told))
        return self._first + len(self.moments) - 1

    def attempt(self, what: str, start: float, end: float, data: Any) -> None:
        """An optional moment of an attempt of which the client was told nothing."""
        self.moments.append(Moment(self.event, what, start, end, optional=True, data=data))

    def has_company(self) -> bool:
        """Whether other attempts of this call or calls of the same id may book its rows while it is under way."""
        event = self.event
        return bool(event.result.get("repeats")) or any(
            other.call == "ComputeLoss" and other.args["id"] == event.args["id"] and
            (other.overlaps(event) or other.lingers) for other in self.history.events if other is not event)

    def refuse(self, needs: tuple[int, ...] = ()) -> int:
        return self.add("refused", needs=needs, data=rivals(self.event, self.history))

    def forbid_after(self, number: int, later: int) -> None:
        """Moment `number` is none of those after moment `later`."""
        at = number - self._first
        self.moments[at] = replace(self.moments[at], before=(*self.moments[at].before, later))


def _horizon(time: float, history: History) -> float:
    """The end of the first restart that began after that time, when a client had given up."""
    ends = [other.last for other in history.events if other.call == "Restart" and other.start > time]
    return min(ends, default=INFINITY)


def _broken_attempts(event: Event, history: History) -> list[tuple[float, float]]:
    """When each earlier attempt of a trainer's call, which its client has repeated by itself, may have taken effect. An
    attempt that was broken off is an unanswered call, whatever became of the last one; others had an answer, and it
    was that nothing was done. Each cut and each restart has broken off at most one."""
    if not event.trainer:
        return []
    breaks = [(cut, _horizon(cut, history)) for cut in event.result.get("broken", ())]
    breaks += [(other.start, other.last) for other in history.events
               if other.call == "Restart" and other.overlaps(event)]
    breaks.sort()
    starts = [event.start, *(max(event.start, at) for at, _ in breaks)]
    return [(start, end) for start, (_, end) in zip(starts, breaks)]


def _attempts(call: _Call) -> None:
    """Optional moments of the attempts that were broken off."""
    for start, end in _broken_attempts(call.event, call.history):
        if call.event.call == "ComputeLoss":
            call.attempt("open", start, end, (None, False))
        elif call.event.call == "AddGradient":
            for message in call.event.args["messages"]:
                call.attempt("add", start, end, (message, True, True))
        elif call.event.call != "Acknowledge":
            call.attempt("attempt", start, end, None)


def _unary(call: _Call) -> None:
    event = call.event
    if call.told:
        call.add("do", data=event.result)
    elif call.hidden or event.unanswered:
        call.add("attempt", optional=True)
    else:
        call.refuse()


def _microbatch(call: _Call) -> None:
    """open, then rows and book of each slice, then close; or abort."""
    event = call.event
    accepted = event.result.get("accepted")
    seen = [] if call.hidden else event.result.get("slices", [])
    if accepted and _broken_attempts(event, call.history) and not event.ok:
        accepted = None  # perhaps an earlier attempt, and not the last one, was accepted
    if not (call.told or call.hidden or event.unanswered or event.outcome == "ABORTED" or accepted):
        call.refuse()
        return
    told_open = not call.hidden and (call.told or accepted is not None)
    goes_on = not (call.hidden or event.unanswered) or bool(seen or event.args.get("retain"))
    opened = call.add("open", end=accepted["time"] if told_open and accepted else None, optional=not told_open,
                      data=(accepted if told_open else None, goes_on))
    rows = [call.add("rows", piece["sent"], piece["got"], needs=(opened,), data=piece) for piece in seen]
    if call.told:
        sent = [piece["sent"] for piece in seen]
        booked = []
        if event.args.get("accumulate"):
            booked = [call.add("book", piece["sent"], needs=(number,), data=piece["rows"])
                      for number, piece in zip(rows, seen)] if not event.trainer else [
                          call.add("book", _booked_from(event), needs=(opened,), data=event.args["rows"])]
        call.add("close", max(sent, default=event.start), needs=(opened, *rows, *booked),
                 data=event.trainer and call.has_company())
    elif not (call.hidden or event.unanswered):
        ended = call.add("abort", needs=tuple(rows) + ((opened,) if told_open else ()))
        call.forbid_after(opened, ended)
    elif event.args.get("retain"):
        call.add("close", optional=True, needs=(opened, *rows))


def _booked_from(event: Event) -> float:
    """The earliest that all rows of a trainer's call were booked: the attempt that succeeded booked some of them."""
    return float(event.result["resent"]) if "resent" in event.result and event.result["accumulated"] else event.start


def _tensor_read(call: _Call) -> None:
    event = call.event
    slices = event.result.get("slices", [])
    before: tuple[int, ...] = ()
    for number, piece in enumerate(slices):
        last = call.told and number == len(slices) - 1
        before = (call.add("read", None, piece["got"], needs=before, data=(piece, number == 0, last)),)
    if event.outcome == "ABORTED":
        opened = before or (call.add("read open", optional=True),)
        ended = call.add("abort", needs=before)
        if not before:
            call.forbid_after(opened[0], ended)
    elif not (event.ok or event.unanswered):
        call.refuse(before)


def _row_stream(call: _Call, what: str) -> None:
    """WriteTensor and AddGradient: a moment for each message, and how it ended."""
    event = call.event
    refused = not (call.told or call.hidden or event.unanswered)
    aborted = refused and event.outcome == "ABORTED"
    if refused and not aborted and len(event.result.get("sent", ())) < 2:
        call.refuse()
        return
    before: tuple[int, ...] = ()
    if aborted and what == "add":
        before = (call.add("add open", optional=True),)
    parts = []
    messages = event.args["messages"]
    for number, (message, sent) in enumerate(zip(messages, event.result.get("sent", ()))):
        data = (message, number == 0, number == len(messages) - 1)
        before = (call.add(what, sent, optional=not call.told, needs=before, data=data),)
        parts.append(before[0])
    if refused:
        ended = call.add("abort") if aborted else call.refuse()
        for part in parts:
            call.forbid_after(part, ended)
    elif not call.told and what == "write" and len(messages) > 1 and parts:
        ended = call.add("break", optional=True, needs=(parts[0],))
        for part in parts:
            call.forbid_after(part, ended)


def _moments_of(call: _Call) -> None:
    kind = call.event.call
    if kind in ("ComputeLoss", "Backward"):
        _microbatch(call)
    elif kind == "ReadTensor":
        _tensor_read(call)
    elif kind == "WriteTensor":
        _row_stream(call, "write")
    elif kind == "AddGradient":
        _row_stream(call, "add")
    else:
        _unary(call)


def _refused_at_once(event: Event) -> bool:
    return not (event.ok or event.unanswered or event.outcome == "ABORTED" or "accepted" in event.result or
                len(event.result.get("sent", ())) > 1)


def expand(history: History, hidden: frozenset[int] = frozenset()) -> list[Moment]:
    """The moments of all events. A hidden event (by its number) may have happened or not, in whole or in part, at any
    time at which it may have; what its client was told is left out."""
    moments: list[Moment] = []
    for event in history.events:
        if event.number in hidden and event.call in OBSERVERS:
            continue
        call = _Call(event, history, len(moments), event.number in hidden)
        if not (call.hidden and _refused_at_once(event)):
            _moments_of(call)
        _attempts(call)
        moments += call.moments
    return moments
