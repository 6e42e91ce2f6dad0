# SPDX-License-Identifier: Apache-2.0
"""Whether a history is possible; if it is not, the few answers in it that contradict each other, as text for people."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import history
from history import Event, History
from model import Model
from moments import OBSERVERS, Moment, State, expand


# Whether a history is possible: a search for an order of its moments that the model allows.
#
# The search is that of Wing and Gong with the memory of Lowe: moments are put into an order one by one; next may come
# every moment that began before the first unplaced required one ended; a set of placed moments with a state that was
# reached before is not searched again. An observation that holds now and changes nothing is placed at once, without
# trying it later: wherever a solution has it, it has one with it here. (Unless an optional moment would be too late
# then.)
#
# A search that made a wrong choice early can take very long, where another order finds a solution at once. So a search is
# given up after some nodes and begun again, its choices in another order. How many nodes each one has is Luby's sequence.
# One that comes to its end without a solution is a proof, whatever its order was.

_FEW_NODES = 500  # of most searches; others have 2, 4, ... times as many
_DISORDER = 0.3  # the share of choices that are put anywhere


class Verdict(Enum):
    POSSIBLE = "possible"
    IMPOSSIBLE = "impossible"
    UNDECIDED = "undecided"  # the search was given up; this is no pass


@dataclass(frozen=True)
class Limits:
    nodes: int = 300_000
    seconds: float = 60.0


@dataclass(frozen=True)
class Stuck:
    """The furthest that the search came: the state there, and why each moment that could come next does not."""

    state: State
    placed: list[Moment]
    refused: list[tuple[Moment, str]]


@dataclass(frozen=True)
class Result:
    verdict: Verdict
    nodes: int
    stuck: Stuck | None = None  # if impossible


class _Search:
    def __init__(self, moments: list[Moment], model: Model) -> None:
        order = sorted(range(len(moments)), key=lambda number: moments[number].start)
        place = {number: at for at, number in enumerate(order)}
        self.moments = [moments[number] for number in order]
        self._model = model
        self._needs = [_mask(place[need] for need in moment.needs) for moment in self.moments]
        self._needed = _mask(place[need] for moment in moments for need in moment.needs)
        self._before = [_mask(place[later] for later in moment.before) for moment in self.moments]
        forbidding = _mask(place[later] for moment in moments for later in moment.before)
        self._eager = [not moment.optional and not forbidding >> at & 1 and (moment.observes or moment.commutes)
                       for at, moment in enumerate(self.moments)]
        self._optional = [at for at, moment in enumerate(self.moments) if moment.optional]
        self.required = _mask(at for at, moment in enumerate(self.moments) if not moment.optional)

    def candidates(self, done: int) -> list[int]:
        """What may come next, by end."""
        first_end = float("inf")
        latest_start = self.moments[done.bit_length() - 1].start if done else 0
        found = []
        for at in range((~done & (done + 1)).bit_length() - 1, len(self.moments)):
            moment = self.moments[at]
            if done >> at & 1:
                continue
            if moment.start > first_end:
                break
            found.append(at)
            if not moment.optional:
                first_end = min(first_end, moment.end)
        return sorted((at for at in found if self._may(at, done, first_end, latest_start)),
                      key=lambda at: (self.moments[at].optional, self.moments[at].end))

    def _may(self, at: int, done: int, first_end: float, latest_start: float) -> bool:
        moment = self.moments[at]
        return (moment.start <= first_end and moment.end >= latest_start and
                self._needs[at] & ~done == 0 and self._before[at] & done == 0)

    def key(self, done: int, state: State) -> tuple[int, float, State]:
        """The same for nodes from which the same can follow: an optional moment that can come no more is as if placed,
        if none that needs it can come."""
        latest_start = self.moments[done.bit_length() - 1].start if done else 0
        gone = 0
        for at in self._optional:
            if not done >> at & 1 and (self.moments[at].end < latest_start or self._before[at] & done or
                                       self._needs[at] & gone):
                gone |= 1 << at
        return done | gone, latest_start, state

    def settle(self, done: int, state: State) -> tuple[int, State, list[tuple[int, list[State]]]]:
        """Places what holds now and changes nothing; then, the steps that can be taken, the likeliest first."""
        while True:
            steps = []
            candidates = self.candidates(done)
            lapse = min((self.moments[at].end for at in candidates if self.moments[at].optional), default=float("inf"))
            for at in candidates:
                moment = self.moments[at]
                after = self._model.apply(state, moment)
                if isinstance(after, str):
                    continue
                if moment.optional and after == [state] and not self._needed >> at & 1:
                    continue  # to no purpose
                if self._eager[at] and moment.start <= lapse and (moment.commutes or after == [state]):
                    done, state = done | 1 << at, after[0]
                    break
                steps.append((at, after))
            else:
                return done, state, steps

    def explain(self, done: int, state: State) -> Stuck:
        refused = [(self.moments[at], after) for at in self.candidates(done)
                   if isinstance(after := self._model.apply(state, self.moments[at]), str)]
        placed = [moment for at, moment in enumerate(self.moments) if done >> at & 1]
        return Stuck(state, placed, refused)


def _mask(places: object) -> int:
    mask = 0
    for at in places:  # type: ignore[attr-defined]
        mask |= 1 << at
    return mask


class _Try:
    """One search, from the beginning, in an order of its own."""

    def __init__(self, search: _Search, start: State, chance: random.Random | None) -> None:
        """Without `chance` in the likeliest order."""
        self._search = search
        self._chance = chance
        self._stack = [(0, start)]
        self._seen = {search.key(0, start)}
        self._most = (-1, 0)
        self.furthest = (0, start)
        self.nodes = 0

    def run(self, nodes: int, deadline: float) -> Verdict:
        search = self._search
        while self._stack:
            if self.nodes >= nodes or time.monotonic() > deadline:
                return Verdict.UNDECIDED
            done, state, steps = search.settle(*self._stack.pop())
            self.nodes += 1
            if done & search.required == search.required:
                return Verdict.POSSIBLE
            placed = ((done & search.required).bit_count(), done.bit_count())
            if placed > self._most:
                self.furthest, self._most = (done, state), placed
            for at, states in reversed(self._ordered(steps)):
                for after in states:
                    self._push(done | 1 << at, after)
        return Verdict.IMPOSSIBLE

    def _ordered(self, steps: list[tuple[int, list[State]]]) -> list[tuple[int, list[State]]]:
        """The likeliest first, but for some that are put anywhere."""
        if self._chance is None:
            return steps
        rank = [self._chance.random() if self._chance.random() < _DISORDER else at / len(steps)
                for at in range(len(steps))]
        return [steps[at] for at in sorted(range(len(steps)), key=rank.__getitem__)]

    def _push(self, done: int, state: State) -> None:
        key = self._search.key(done, state)
        if key not in self._seen:
            self._seen.add(key)
            self._stack.append((done, state))


def _luby(number: int) -> int:
    """1, 1, 2, 1, 1, 2, 4, 1, ...: the element of that number, from 1 on."""
    bits = number.bit_length()
    return 1 << (bits - 1) if number == (1 << bits) - 1 else _luby(number - (1 << (bits - 1)) + 1)


def check(history: History, model: Model, limits: Limits = Limits(),
          hidden: frozenset[int] = frozenset()) -> Result:
    """`hidden`: events of which is assumed only that they may have happened (moments.expand)."""
    search = _Search(expand(history, hidden), model)
    deadline = time.monotonic() + limits.seconds
    nodes, number = 0, 0
    while True:
        most = min(_FEW_NODES * _luby(number + 1), limits.nodes - nodes)
        attempt = _Try(search, State(incarnation=history.incarnation), random.Random(number) if number else None)
        verdict = attempt.run(most, deadline)
        nodes += attempt.nodes
        if verdict is Verdict.IMPOSSIBLE:
            return Result(verdict, nodes, search.explain(*attempt.furthest))
        if verdict is Verdict.POSSIBLE or nodes >= limits.nodes or time.monotonic() > deadline:
            return Result(verdict, nodes)
        number += 1


# From an impossible history to the few answers in it that contradict each other.


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


# A history and a verdict as text, for people.


def _time(nanoseconds: float) -> str:
    return "      ..." if nanoseconds == float("inf") else f"{nanoseconds / 1e6:9.2f}"


def _spread(lses: list[float], vocab: int, scale: float) -> str:
    low, high = min(lses), max(lses)
    seen = [low] if history.near(low, high) else [low, high]
    return " to ".join(history.decode_lse(value, vocab, scale) for value in seen)


def _rows(begin_end: list[int]) -> str:
    return f"[{begin_end[0]}, {begin_end[1]})"


def _piece(event: Event, piece: dict[str, Any], vocab: int) -> str:
    rows = _rows(piece["rows"])
    if "lse" in piece:
        return f"rows {rows} with {_spread(piece['lse'], vocab, event.args.get('scale', 1.0))}"
    if "dx" in piece:
        return f"rows {rows} dx {piece['dx'][0]:.5f}"
    if "values" not in piece:  # gradients of an embedding
        return f"rows {rows}"
    return f"rows {rows} {history.describe(tuple(piece['values']), piece['rows'][0])}"


def _joined(pieces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring pieces with the same lse as one."""
    joined: list[dict[str, Any]] = []
    for piece in sorted(pieces, key=lambda piece: piece["rows"]):
        before = joined[-1] if joined else None
        if before and "lse" in piece and all(history.near(lse, before["lse"][0]) for lse in piece["lse"]):
            joined[-1] = {**before, "rows": [before["rows"][0], piece["rows"][1]]}
        else:
            joined.append(piece)
    return joined


def _arguments(event: Event) -> str:
    parts = []
    for name, value in event.args.items():
        if name == "messages":
            parts += [f"{_rows(message)} {history.describe(tuple(message[2]), message[0])}" for message in value]
        elif name in ("accumulate", "retain"):
            parts += [name] if value else []
        elif value not in (None, ()) and name not in ("total", "vocab"):
            parts.append(f"{name}={value}")
    return ", ".join(parts)


def _told(event: Event, vocab: int) -> str:
    result = event.result
    parts = ["no answer yet" if event.outcome == "PENDING" else event.outcome]
    accepted = result.get("accepted")
    if accepted:
        state = accepted["state"]
        parts.append(f"accepted by {_time(accepted['time']).strip()}" + (f" in step {state['step']}" if state else ""))
    parts += [_piece(event, piece, vocab) for piece in _joined(result.get("slices", ()))]
    for name in ("accumulated", "repeated", "repeats", "added", "rows", "microbatches", "contributions", "norm",
                 "step_rows", "exists", "released"):
        if name in result:
            parts.append(f"{name} {result[name]}")
    if result.get("state"):
        parts.append(f"step {result['state']['step']}")
    if not event.ok and result.get("message"):
        parts.append(f'"{result["message"][:110]}"')
    return "; ".join(parts)


def line(event: Event, vocab: int) -> str:
    return (f"{_time(event.start)} -{_time(event.last)} ms  {event.client + ('*' if event.trainer else ''):4} "
            f"{event.call}({_arguments(event)})\n{'':27}-> {_told(event, vocab)}")


def _state(state: State) -> str:
    if not state.exists:
        return "the head does not exist"
    parts = [f"step {state.step}", history.describe(state.values), f"gradient {history.describe(state.gradient)}"]
    parts += [f"id {id}: {sum(row == 2 for row in entry.rows)} rows of {len(entry.rows)} in the ledger"
              for id, entry in state.ledger if entry.kind == "microbatch"]
    parts += [f"id {id} retained" for id, _ in state.retained]
    return ", ".join(parts)


def counter_example(least: Least) -> str:
    """The events that contradict each other, what else was under way meanwhile, and where the search got stuck."""
    history, shown = least.history, least.events()
    first = min(event.start for event in shown)
    last = max((event.last for event in shown if event.end is not None), default=float("inf"))
    lines = ["These answers contradict each other, whatever became of all other calls:"]
    lines += [line(event, history.vocab) for event in shown]
    changes = [event for event in history.events if event.number not in least.visible and event.start <= last and
               event.call not in OBSERVERS | {"Acknowledge"}]
    meanwhile = [event for event in changes if event.last >= first]
    earlier = [event for event in changes if event.last < first][-4:]
    if earlier or meanwhile:
        lines.append("What else was called, just before or meanwhile:")
        lines += [line(event, history.vocab) for event in earlier + meanwhile]
    if least.stuck is not None:
        lines.append(f"No order explains them. The longest begun comes to this: {_state(least.stuck.state)}; then")
        lines += dict.fromkeys(f"  {moment.event.client} {moment.event.call}, {moment.what}: {why}"
                               for moment, why in least.stuck.refused if moment.event.number in least.visible)
    return "\n".join(lines)
