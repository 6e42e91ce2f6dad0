"""What the client remembers of heads between calls. Thread-safe; bounded by the number of heads it has used."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from lossd import errors
from lossd.v1 import head_pb2, loss_pb2


@dataclass(frozen=True)
class HeadFacts:
    hidden_size: int  # D
    limits: loss_pb2.SliceLimits


class HeadBook:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._facts: dict[str, HeadFacts] = {}
        self._accumulations: dict[str, tuple[int, int]] = {}  # head -> step, incarnation

    def facts(self, head: str) -> HeadFacts | None:
        with self._lock:
            return self._facts.get(head)

    def learn(self, description: head_pb2.HeadDescription) -> HeadFacts:
        facts = HeadFacts(description.spec.hidden_size, description.slice_limits)
        with self._lock:
            self._facts[description.spec.name] = facts
        return facts

    def forget_facts(self, head: str) -> None:
        with self._lock:
            self._facts.pop(head, None)

    def note_accumulation(self, head: str, step: int, incarnation: int) -> None:
        """Gradients of `step` are being accumulated in `incarnation`. Restarted if earlier ones went to another."""
        with self._lock:
            self._check(head, step, incarnation)
            self._accumulations[head] = (step, incarnation)

    def incarnation_of(self, head: str, step: int) -> int | None:
        """Where gradients of `step` were accumulated; None: nowhere yet."""
        with self._lock:
            noted_step, incarnation = self._accumulations.get(head, (None, None))
            return incarnation if noted_step == step else None

    def check_incarnation(self, head: str, step: int, incarnation: int) -> None:
        """Restarted if gradients of `step` were accumulated in another incarnation than this one."""
        with self._lock:
            self._check(head, step, incarnation)

    def forget_accumulation(self, head: str) -> None:
        with self._lock:
            self._accumulations.pop(head, None)

    def _check(self, head: str, step: int, incarnation: int) -> None:
        noted_step, noted = self._accumulations.get(head, (step, incarnation))
        if noted_step == step and noted != incarnation:
            raise errors.restarted(head, noted, incarnation, step)
