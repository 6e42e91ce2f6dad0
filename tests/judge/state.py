# SPDX-License-Identifier: Apache-2.0
"""The state of one head in the model: plain values, hashable, never changed in place."""

from __future__ import annotations

from typing import Any, NamedTuple

from encoding import Values

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
