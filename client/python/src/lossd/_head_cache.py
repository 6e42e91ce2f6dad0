# SPDX-License-Identifier: Apache-2.0
"""What the client remembers of heads between calls. Thread-safe; bounded by the number of heads it has used.

client/cpp/core.h does the same; tests/client/golden/incarnations.json holds both to it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lossd import errors
from lossd.v1 import head_pb2, loss_pb2, types_pb2


@dataclass(frozen=True)
class HeadInfo:
    hidden_size: int  # D
    limits: loss_pb2.SliceLimits
    histories: bool = True  # the server knows of histories, and so of optimizers that begin with a step, and of lazy rows
    classes: NDArray[np.int32] | None = None  # HeadSpec.class_list, ascending; None: the head has no draft vocabulary


@dataclass(frozen=True)
class GradientsId:
    """Names the gradients that a server process has accumulated for a head since they were last zero."""

    incarnation: int
    generation: int = 0  # 0: not known, or the server is one that does not say

    @staticmethod
    def of(state: types_pb2.HeadState) -> GradientsId:
        return GradientsId(state.incarnation, state.generation)


def names(meant: GradientsId | None) -> dict[str, Any]:
    """The fields by which a call names the gradients that it is meant for; None: any."""
    return {} if meant is None else {"incarnation": meant.incarnation, "generation": meant.generation or None}


@dataclass(frozen=True)
class TrainerStep:
    """A step of a head as a call found it when it began."""

    head: str
    step: int
    starts: int  # how often this client had started a step of the head over (HeadCache.forget_accumulation)


_MOST_LOADED = 1024
_loaded_lock = threading.Lock()
_loaded: dict[tuple[int, str], None] = {}  # incarnation and head; of all clients of this program; guarded by _loaded_lock


class HeadCache:
    def __init__(self, expected_incarnation: int = 0) -> None:
        """`expected_incarnation`: the client's; 0: none."""
        self._expected = expected_incarnation
        self._lock = threading.Lock()
        self._acknowledged: set[str] = set()  # heads for which nothing is expected
        self._facts: dict[str, HeadInfo] = {}
        self._accumulations: dict[str, tuple[int, GradientsId]] = {}  # head -> step, and where its rows are
        self._starts: dict[str, int] = {}  # head -> TrainerStep.starts

    def facts(self, head: str) -> HeadInfo | None:
        with self._lock:
            return self._facts.get(head)

    def learn(self, description: head_pb2.HeadDescription) -> HeadInfo:
        """Of an answer that is about one head: ListHeads leaves class lists out."""
        spec = description.spec
        classes = np.array(spec.class_list, np.int32) if spec.class_list else None
        facts = HeadInfo(spec.hidden_size, description.slice_limits, description.HasField("history"), classes)
        with self._lock:
            self._facts[description.spec.name] = facts
        return facts

    def forget_facts(self, head: str) -> None:
        with self._lock:
            self._facts.pop(head, None)

    def trainer_step(self, head: str, step: int) -> TrainerStep:
        """For a call that begins."""
        with self._lock:
            return TrainerStep(head, step, self._starts.get(head, 0))

    def check_current(self, at: TrainerStep) -> None:
        """StepDiscarded if this client has started the step over since the call began."""
        with self._lock:
            self._check_current(at)

    def note_accumulation(self, at: TrainerStep, gradients: GradientsId) -> None:
        """Rows of the step are being added to these gradients.

        Restarted or StepDiscarded if earlier ones of the step went to others, or if another process is expected; then
        nothing changes.
        """
        with self._lock:
            self._check_current(at)
            self._check(at, gradients)
            self._accumulations[at.head] = (at.step, gradients)

    def gradients_of(self, at: TrainerStep) -> GradientsId | None:
        """Where rows of the step have to go: earlier ones went there, or it is expected. None: anywhere."""
        with self._lock:
            return self._gradients_of(at)

    def check(self, at: TrainerStep, gradients: GradientsId) -> None:
        """As note_accumulation, for an answer that says where the head stands. Nothing is noted.

        If this client has started the step over meanwhile, there is nothing to check.
        """
        with self._lock:
            if self._starts.get(at.head, 0) == at.starts:
                self._check(at, gradients)

    def interpret(self, at: TrainerStep, error: errors.LossdError) -> None:
        """Raises Restarted or StepDiscarded if that is what the error means."""
        if error.incarnation:
            self.check(at, GradientsId(error.incarnation))
        if errors.refuses_generation(error):
            raise errors.discarded_says_server(at.head, at.step, error) from None

    def close_step(self, head: str, step: int) -> None:
        """The step has been applied: its gradients are not outstanding any more, those of a later one are."""
        with self._lock:
            if head in self._accumulations and self._accumulations[head][0] <= step:
                del self._accumulations[head]

    def forget_accumulation(self, head: str) -> None:
        """This client starts its step over: no gradients of the head are outstanding any more.

        Calls of the step that are under way are not repeated.
        """
        with self._lock:
            self._accumulations.pop(head, None)
            self._starts[head] = self._starts.get(head, 0) + 1
            if self._expected:
                self._acknowledged.add(head)

    # ---- Internal to this package: lossd.torch asks whether this program has loaded what it continues ----

    def note_loaded(self, head: str, incarnation: int) -> None:
        """A client of this program has loaded a checkpoint into the head of this server process."""
        with _loaded_lock:
            _loaded[incarnation, head] = None
            if len(_loaded) > _MOST_LOADED:
                _loaded.pop(next(iter(_loaded)))

    def loaded(self, head: str, incarnation: int) -> bool:
        """Whether one has, since forget_loaded."""
        with _loaded_lock:
            return (incarnation, head) in _loaded

    def forget_loaded(self, head: str, incarnation: int | None = None) -> None:
        """None: of all server processes."""
        with _loaded_lock:
            for key in [key for key in _loaded if key[1] == head and incarnation in (None, key[0])]:
                del _loaded[key]

    def _gradients_of(self, at: TrainerStep) -> GradientsId | None:
        noted_step, gradients = self._accumulations.get(at.head, (None, None))
        if noted_step == at.step:
            return gradients
        expected = self._expected if at.head not in self._acknowledged else 0
        return GradientsId(expected) if expected else None

    def _check_current(self, at: TrainerStep) -> None:
        if self._starts.get(at.head, 0) != at.starts:
            raise errors.discarded_by_this_client(at.head, at.step)

    def _check(self, at: TrainerStep, now: GradientsId) -> None:
        before = self._gradients_of(at)
        if before is None:
            return
        if before.incarnation != now.incarnation:
            raise errors.restarted(at.head, before.incarnation, now.incarnation, at.step)
        if before.generation and now.generation and before.generation != now.generation:
            raise errors.discarded(at.head, at.step, before.generation, now.generation)
