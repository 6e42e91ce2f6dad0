# SPDX-License-Identifier: Apache-2.0
"""Which microbatches of the open step a trainer has sent, and what has become of them. Thread-safe.

Microbatches are numbered 0, 1, ... within a step and trainer; on the wire trainer `rank` of `world_size` uses the ids
number * world_size + rank, so that trainers never take each other's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_APART = 1 << 40  # numbers of microbatches are below


class StepTracker:
    def __init__(self, step: int, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must be in [0, world_size) with world_size {world_size}")
        self.rank = rank
        self.world_size = world_size
        self.group = 1  # a step has a multiple of so many microbatches
        self.discards = 0  # how often what was in an open step was discarded
        self._changes = 0  # of the gradients, as far as this trainer is concerned
        self._lock = threading.Lock()
        self._begin(step)

    @property
    def alone(self) -> bool:
        """Whether this is the only trainer."""
        return self.world_size == 1

    def _begin(self, step: int) -> None:
        self.step = step
        self._next = 0
        self._next_apart = 0
        self._accumulated: set[int] = set()  # the server has, or may have, rows of these
        self._failed: set[int] = set()  # of those: the call did not succeed
        self._gaps: set[int] = set()  # the call has failed, and no other one has been made
        self._rows: dict[int, int] = {}  # valid rows of those that succeeded
        self._passed_over = False  # some failed and are not missed
        self._lost: str | None = None  # why the server has none of them any more
        self._waiting: set[int] = set()  # of those: the loss had no backward() yet
        self._contribution: int | None = None  # the number of a gradient from elsewhere that is being added
        self._contributions: set[int] = set()  # numbers of those added

    def advance(self, step: int) -> None:
        """The step is over (applied or discarded) and `step` is open."""
        with self._lock:
            self._begin(step)

    def number(self, wanted: int | None) -> int:
        """The number of the microbatch that begins: the next one, or an earlier one that is sent again."""
        with self._lock:
            return self._next if wanted is None else wanted

    def number_apart(self) -> int:
        """A number for rows that are not accumulated, out of the way of those that are."""
        with self._lock:
            self._next_apart += 1
            return _APART + self._next_apart

    def wire_id(self, number: int) -> int:
        return number * self.world_size + self.rank

    @contextmanager
    def sending(self, number: int, accumulates: bool) -> Iterator[None]:
        """The block hands a microbatch to the client. If that raises an Exception, nothing of it was sent."""
        with self._lock:
            before = self._next, number in self._accumulated, number in self._failed, number in self._gaps
            if number < _APART:
                self._next = max(self._next, number + 1)
            self._gaps.discard(number)
            if accumulates:
                self._accumulated.add(number)
                self._failed.add(number)
        try:
            yield
        except Exception:
            with self._lock:
                if self._next == number + 1:
                    self._next = before[0]
                for numbers, was_in in zip((self._accumulated, self._failed, self._gaps), before[1:]):
                    (numbers.add if was_in else numbers.discard)(number)
            raise

    def failed(self, number: int) -> None:
        """Its call has ended with an error."""
        with self._lock:
            if number < _APART:
                self._gaps.add(number)

    def lost(self, why: str) -> None:
        """The server has nothing of this step any more."""
        with self._lock:
            self._lost = why

    def arrived(self, number: int, rows: int, waits_for_backward: bool) -> None:
        """Its gradients are accumulated: those of so many valid rows."""
        with self._lock:
            self._rows[number] = rows
            self._changes += 1
            self._failed.discard(number)
            self._gaps.discard(number)
            if waits_for_backward:
                self._waiting.add(number)

    @property
    def has_some_failures(self) -> bool:
        """Whether calls of this step have failed that were not made again, and others have succeeded."""
        with self._lock:
            return bool(self._gaps & self._failed) and bool(self._rows)

    @property
    def rows(self) -> int:
        """How many valid rows of this trainer were accumulated by calls that succeeded."""
        with self._lock:
            return sum(self._rows.values())

    def pass_over_failures(self) -> None:
        """The server has nothing of the calls that failed, so the step does without them."""
        with self._lock:
            self._passed_over = True
            self._accumulated -= self._gaps
            self._failed -= self._gaps
            self._gaps.clear()

    def expected_rows(self) -> int | None:
        """How many rows the step must have so that nothing is in it of what was passed over. None: nothing was."""
        return self.rows if self._passed_over else None

    def had_backward(self, number: int) -> None:
        with self._lock:
            self._waiting.discard(number)
            self._changes += 1

    def contribution(self) -> int:
        """The number of a gradient from elsewhere that is to be added; the same again until contributed()."""
        with self._lock:
            if self._contribution is None:
                self._contribution = self._next
                self._next += 1
            return self._contribution

    def contributed(self) -> None:
        with self._lock:
            if self._contribution is not None:
                self._contributions.add(self._contribution)
                self._changes += 1
            self._contribution = None

    @property
    def sent(self) -> int:
        """How many microbatches and contributions of this step the server has, or may have, of this trainer.

        Those whose gradients are computed in backward count: the server keeps their hidden states.
        """
        with self._lock:
            return self._next

    @property
    def moment(self) -> tuple[int, int, int]:
        """Another one when this trainer has accumulated something since, or the gradients are others."""
        with self._lock:
            return self.step, self.discards, self._changes

    @property
    def has_gradients(self) -> bool:
        """Whether something was accumulated, if only of rows that are ignored: a local head would have a gradient."""
        with self._lock:
            return bool(self._accumulated or self._rows or self._contributions)

    def discarded(self) -> None:
        """What is in the open step is going to be discarded."""
        with self._lock:
            self.discards += 1

    def succeeded(self) -> None:
        """Another LossHead of this program has discarded what this trainer had in the open step, and goes on."""
        with self._lock:
            self.discards += 1
            self._lost = "another LossHead of this program has taken the head over: use that one"

    def check_settled(self, what: str) -> None:
        """RuntimeError if a gradient would be applied, or lost, that the trainer does not know of."""
        with self._lock:
            failed, waiting, lost = sorted(self._failed), sorted(self._waiting), self._lost
            contribution = self._contribution
        if lost is not None:
            raise RuntimeError(f"{what}: step {self.step} is lost ({lost}). Start it again: load a checkpoint and call "
                               "LossHead.sync(), or discard the step with HeadOptimizer.discard()")
        if contribution is not None:
            raise RuntimeError(f"{what}: a gradient for step {self.step} failed to be added; add it again, or discard "
                               "the step with HeadOptimizer.discard()")
        if failed:
            raise RuntimeError(
                f"{what}: microbatch {failed[0]} of step {self.step} failed, or is not finished. Compute it again with "
                f"head(..., microbatch={failed[0]}), or discard the step with HeadOptimizer.discard()")
        if waiting:
            raise RuntimeError(
                f"{what}: the loss of microbatch {waiting[0]} of step {self.step} had no backward(), but the server "
                "accumulated its weight gradient in forward. Compute losses that are only looked at under "
                "torch.no_grad(), call zero_grad() before forward, or discard the step with HeadOptimizer.discard()")

        with self._lock:
            microbatches = len(self._accumulated | self._rows.keys())
        if microbatches % self.group != 0:
            raise RuntimeError(
                f"{what}: step {self.step} has {microbatches} microbatches, but they come in groups of "
                f"{self.group}; discard the step with HeadOptimizer.discard()")

    def check_order(self, number: int) -> None:
        """RuntimeError if something before this microbatch has failed: a deterministic server would wait for it."""
        with self._lock:
            failed, contribution = min(self._gaps, default=number), self._contribution
        waits = f"and a deterministic server keeps microbatch {number} waiting for it"
        if contribution is not None and contribution < number < _APART:
            raise RuntimeError(f"a gradient for step {self.step} failed to be added, {waits}. Add it again, or discard the "
                               "step with HeadOptimizer.discard()")
        if failed < number < _APART:
            raise RuntimeError(f"microbatch {failed} of step {self.step} failed, {waits}. Compute it again with "
                               f"head(..., microbatch={failed}), or discard the step with HeadOptimizer.discard()")

    def expected(self, takes_part: Sequence[bool] | None = None) -> list[int]:
        """Wire ids that the step needs, of all trainers that take part (None: of all); each of them has accumulated as many
        as this one."""
        with self._lock:
            return [n * self.world_size + rank for n in sorted(self._accumulated | self._contributions)
                    for rank in range(self.world_size) if takes_part is None or takes_part[rank]]
