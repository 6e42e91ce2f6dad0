# SPDX-License-Identifier: Apache-2.0
"""Whether a history is possible: a search for an order of its moments that the model allows.

The search is that of Wing and Gong with the memory of Lowe: moments are put into an order one by one; next may come
every moment that began before the first unplaced required one ended; a set of placed moments with a state that was
reached before is not searched again. An observation that holds now and changes nothing is placed at once, without
trying it later: wherever a solution has it, it has one with it here. (Unless an optional moment would be too late
then.)

A search that made a wrong choice early can take very long, where another order finds a solution at once. So a search is
given up after some nodes and begun again, its choices in another order. How many nodes each one has is Luby's sequence.
One that comes to its end without a solution is a proof, whatever its order was.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from enum import Enum

from history import History
from model import Model
from moments import Moment, expand
from state import State

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
