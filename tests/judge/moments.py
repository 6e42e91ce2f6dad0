# SPDX-License-Identifier: Apache-2.0
"""Calls as moments: the instants at which a call takes effect or sees something, and when each may lie.

With the state of a head, in which a moment sees something, and the reasons in it for which a call may be refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from history import Event, History, Values


# The state of one head in the model: plain values, hashable, never changed in place.

NO, MAYBE, YES = 0, 1, 2  # of a row: not accumulated, one that a failed call may have accumulated, accumulated


PAST, CLOSED, PRESENT = 0, 1, 2  # of a generation: zeroed, zeroed by the step that was its own, not zeroed


class Applied(NamedTuple):
    """The last ApplyStep: what it was asked, and what it answered (microbatches and rows as the least and the most)."""

    step: int
    momentum: int
    norm: float
    microbatches: tuple[int, int]
    rows: tuple[int, int]
    contributions: tuple[int, int]
    generation: int | None = None  # the number of the gradients that it was applied with, where that was told

    def applied_another(self, named: int | None) -> bool:
        return named is not None and self.generation is not None and named != self.generation


class Saved(NamedTuple):
    """A checkpoint."""

    values: Values
    moment: Values
    step: int
    updates: int
    last: Applied | None


class Entry(NamedTuple):
    """What the ledger of the open step knows of one id."""

    kind: str  # "microbatch" or "contribution"
    rows: tuple[int, ...]  # NO, MAYBE or YES


class Under(NamedTuple):
    """A stream under way: which of the versions that it is bound to are still the head's."""

    weights: bool = True
    generation: bool = True
    gradients: bool = True  # no gradient other than zero was added either
    touched: bool = False  # rows may have been accumulated, of weight 0 or other
    repeated: tuple[int, int] = (0, 0)  # of its rows, those that had been accumulated before: least and most
    terms: Any = None
    stream: bool = False  # a ComputeLoss that ends with OK
    unbooked: int = 0  # of a stream that ends with OK: moments in which its rows are still to be accumulated


class State(NamedTuple):
    incarnation: int
    exists: bool = False
    step: int = 0
    updates: int = 0
    values: Values = ()
    gradient: Values = ()
    moment: Values = ()
    ledger: tuple[tuple[int, Entry], ...] = ()  # by id, ascending
    retained: tuple[tuple[int, float], ...] = ()  # id, logit_scale
    last: Applied | None = None
    under: tuple[tuple[int, Under], ...] = ()  # by event, ascending
    writing: frozenset[int] = frozenset()  # writes between their first and their last row
    # By trainer: the step of which it was told that rows were accumulated, and what their generation is by now.
    notes: tuple[tuple[str, tuple[int, int]], ...] = ()
    checkpoints: tuple[tuple[str, Saved], ...] = ()
    zeroed: bool = False  # the gradients have become zero before
    # The server's numbers of versions, where it said them: name, whether it is the present one's, and the number.
    numbers: frozenset[tuple[str, bool, int]] = frozenset()

    # Each of these fields is a small sorted tuple of pairs, used like a dictionary.

    def find(self, field: str, key: Any) -> Any:
        return next((value for name, value in getattr(self, field) if name == key), None)

    def put(self, field: str, key: Any, value: Any) -> State:
        pairs = [pair for pair in getattr(self, field) if pair[0] != key]
        if value is not None:
            pairs.append((key, value))
        return self._replace(**{field: tuple(sorted(pairs, key=lambda pair: pair[0]))})

    def number(self, name: str) -> int | None:
        """Of the present version, where that was told."""
        return next((number for known, present, number in self.numbers if known == name and present), None)

    # What calls have in common.

    def _past(self, field: str) -> tuple[tuple[int, Under], ...]:
        return tuple((event, under._replace(**{field: False})) for event, under in self.under)

    def _numbers_past(self, name: str) -> frozenset[tuple[str, bool, int]]:
        return frozenset((n, present and n != name, number) for n, present, number in self.numbers)

    def new_weights(self) -> State:
        """The weights are about to be other ones: whatever was bound to the old ones is not any more."""
        return self._replace(under=self._past("weights"), retained=(), numbers=self._numbers_past("weights_version"))

    def touched(self) -> State:
        """Rows are accumulated, or may be from now on."""
        return self._replace(under=tuple((event, under._replace(touched=True)) for event, under in self.under))

    def unsettled(self) -> bool:
        """Whether rows may be accumulated at any time: those of calls under way, or that have failed."""
        return any(MAYBE in entry.rows for _, entry in self.ledger) or any(under.stream for _, under in self.under)

    def dead_end(self) -> bool:
        """Whether rows would have to be accumulated in a generation that has ended: no moment can mend that."""
        return any(under.unbooked and not under.generation for _, under in self.under)

    def new_gradients(self) -> State:
        return self._replace(under=self._past("gradients"))

    def new_generation(self) -> State:
        state = self.new_gradients()
        return state._replace(
            under=state._past("generation"), numbers=self._numbers_past("generation"), zeroed=True, ledger=(), retained=(),
            gradient=(0,) * len(self.values), notes=tuple(
                (name, (step, PAST if known == PRESENT else known)) for name, (step, known) in self.notes))

    def closed(self) -> State:
        """The open step is applied: its generation ends with it."""
        notes = tuple((name, (step, CLOSED if known == PRESENT and step == self.step else known))
                      for name, (step, known) in self.notes)
        return self.new_weights().new_generation()._replace(notes=notes, step=self.step + 1)

    def gone(self) -> State:
        """The head does not exist any more."""
        return self.new_weights().new_generation()._replace(
            exists=False, step=0, updates=0, values=(), gradient=(), moment=(), last=None, writing=frozenset())

    def book(self, id: int, kind: str, total: int, rows: range, status: int) -> tuple[State, tuple[int, int]] | None:
        """Enters rows as accumulated (YES, or MAYBE where they are not yet); also how many were there before, least
        and most. None if the id is another kind's."""
        entry = self.find("ledger", id) or Entry(kind, (NO,) * total)
        if entry.kind != kind:
            return None
        before = [entry.rows[row] for row in rows]
        after = list(entry.rows)
        for row in rows:
            after[row] = max(after[row], status)
        repeated = (before.count(YES), before.count(YES) + before.count(MAYBE))
        return self.put("ledger", id, Entry(kind, tuple(after))), repeated

    def counted(self, kind: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """Ids of that kind with accumulated rows, and rows: least and most each."""
        entries = [entry.rows for _, entry in self.ledger if entry.kind == kind]
        ids = (sum(YES in rows for rows in entries), sum(any(rows) for rows in entries))
        least = sum(rows.count(YES) for rows in entries)
        return ids, (least, least + sum(rows.count(MAYBE) for rows in entries))


# When a call may be refused: a refusal changes nothing, and has to have its reason in the state of that moment.

# Where a server answers otherwise than docs/consistency.md says, a run can go on judging the rest of the rules. Each
# name is one such answer; a server that keeps the page needs none of them.
DEVIATIONS = {
    "closed-step-code": "a stream that accumulates and whose step was closed ends with FAILED_PRECONDITION, and not "
                        "with ABORTED",
}

_STREAMS = ("ComputeLoss", "Backward")


def rivals(event: Event, history: History) -> bool:
    """Whether another call at the same time, or an unanswered one before, may be the reason of a refusal that leaves
    no trace in the state: a creation or a save under way, an open stream, a retaining call of the same id."""
    def rival(other: Event) -> bool:
        if event.call == "DeleteHead":
            return other.call in _STREAMS
        if event.call == "ComputeLoss":
            return bool(other.args.get("retain")) and other.args["id"] == event.args["id"]
        if event.call == "CreateHead":
            return other.call in ("CreateHead", "LoadCheckpoint")
        return other.call == event.call and other.args.get("name") == event.args.get("name")

    return any(rival(other) for other in history.events if other is not event and
               (other.overlaps(event) or (other.lingers and other.start < event.start)))


def reason_to_refuse(state: State, event: Event, data: Any) -> str | None:
    """None if the refusal is right, else why it is not. `data`: whether the call had rivals."""
    code = event.outcome
    judge = _JUDGES.get(code)
    if judge is None:
        return f"no rule allows {code}"
    return None if judge(state, event, bool(data)) else f"{code} has no reason now"


def names_another(state: State, event: Event) -> bool:
    """Whether the call names a generation other than the head's, as far as that is known."""
    return "generation" in event.args and ("generation", True, event.args["generation"]) not in state.numbers


def _not_found(state: State, event: Event, _: bool) -> bool:
    if event.call == "Backward":  # what is retained may be released at any time
        return True
    if event.call == "LoadCheckpoint":
        return state.find("checkpoints", event.args["name"]) is None
    return not state.exists


def _already_exists(state: State, event: Event, has_rivals: bool) -> bool:
    if event.call == "CreateHead":
        return state.exists or has_rivals
    if event.call == "SaveCheckpoint":
        return state.find("checkpoints", event.args["name"]) is not None or has_rivals
    return event.call == "ComputeLoss" and _retained_otherwise(state, event, has_rivals)


def _failed_precondition(state: State, event: Event, has_rivals: bool) -> bool:
    if event.call == "DeleteHead":
        return has_rivals
    if event.call == "LoadCheckpoint":
        saved = state.find("checkpoints", event.args["name"])
        return state.exists and saved is not None and len(saved.values) != len(state.values)
    step = event.args.get("step")
    if event.args.get("incarnation", state.incarnation) != state.incarnation:
        return True
    if not state.exists:
        return False
    if event.call == "ApplyStep":
        return _refusable_step(state, event)
    return (step is not None and step != state.step) or _retained_otherwise(state, event, has_rivals)


def _refusable_step(state: State, event: Event) -> bool:
    """Not the open one, or not whole; a repeat that asks for something else than what was applied."""
    step, last = event.args["step"], state.last
    expected = event.args.get("expected") or ()
    if last is not None and last.step == step and state.step == step + 1:
        return last.momentum != event.args["momentum"] or bool(expected)
    if step != state.step:
        return True
    kept = dict(state.ledger)
    wanted = [kept.get(id) for id in expected]
    if any(entry is None or any(row != YES for row in entry.rows) for entry in wanted):
        return True
    return bool(expected) and any(id not in expected and any(row != YES for row in entry.rows) and any(entry.rows)
                                  for id, entry in kept.items())


def _retained_otherwise(state: State, event: Event, has_rivals: bool) -> bool:
    if event.call != "ComputeLoss" or not event.args.get("retain"):
        return False
    kept = state.find("retained", event.args["id"])
    return has_rivals or (kept is not None and kept != event.args["scale"])


def _aborted(state: State, event: Event, _: bool) -> bool:
    """The call names another generation. What a trainer's client names, or knows itself, is not recorded."""
    repeats = event.call == "ApplyStep" and state.last is not None and state.last.step == event.args["step"]
    if repeats and "generation" in event.args:
        return event.args["generation"] != state.last.generation
    return names_another(state, event) or (event.trainer and state.zeroed)


def _no_room(state: State, event: Event, _: bool) -> bool:
    return True


_JUDGES = {
    "NOT_FOUND": _not_found,
    "ALREADY_EXISTS": _already_exists,
    "FAILED_PRECONDITION": _failed_precondition,
    "ABORTED": _aborted,
    "RESOURCE_EXHAUSTED": _no_room,
}


# Calls as moments: the instants at which a call takes effect or sees something, and when each may lie.
#
# A linearizable call has one moment between its start and its end. A stream has several: a microbatch is accepted, its
# slices are computed, its rows are booked, it closes. What a moment does is in model.py.
#
# A moment is required if the client was told of it, and optional if the call may or may not have got so far. The window
# of an unanswered call's moments has no end, but for a restart of the server that began after the client gave up.

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
