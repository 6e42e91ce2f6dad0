"""Whether a history is possible: a search for an order of its moments that the model allows.

The search is that of Wing and Gong with the memory of Lowe: moments are put into an order one by one; next may come
every moment that began before the first unplaced required one ended; a set of placed moments with a state that was
reached before is not searched again. An observation that holds now and changes nothing is placed at once, without
trying it later: wherever a solution has it, it has one with it here. (Unless an optional moment would be too late
then.)
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum

from history import History
from model import Model
from moments import Moment, expand
from state import State


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


def check(history: History, model: Model, limits: Limits = Limits(),
          hidden: frozenset[int] = frozenset()) -> Result:
    """`hidden`: events of which is assumed only that they may have happened (moments.expand)."""
    search = _Search(expand(history, hidden), model)
    deadline = time.monotonic() + limits.seconds
    stack = [(0, State(incarnation=history.incarnation))]
    seen = {search.key(*stack[0])}
    furthest, most, nodes = stack[0], (-1, 0), 0
    while stack:
        done, state, steps = search.settle(*stack.pop())
        nodes += 1
        placed = ((done & search.required).bit_count(), done.bit_count())
        if done & search.required == search.required:
            return Result(Verdict.POSSIBLE, nodes)
        if placed > most:
            furthest, most = (done, state), placed
        if nodes >= limits.nodes or time.monotonic() > deadline:
            return Result(Verdict.UNDECIDED, nodes)
        for at, states in reversed(steps):
            for after in states:
                node = (done | 1 << at, after)
                key = search.key(*node)
                if key not in seen:
                    seen.add(key)
                    stack.append(node)
    return Result(Verdict.IMPOSSIBLE, nodes, search.explain(*furthest))
