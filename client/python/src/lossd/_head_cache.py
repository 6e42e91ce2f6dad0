"""What the client remembers of heads between calls. Thread-safe; bounded by the number of heads it has used."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from lossd import errors
from lossd.v1 import head_pb2, loss_pb2


@dataclass(frozen=True)
class HeadInfo:
    hidden_size: int  # D
    limits: loss_pb2.SliceLimits


class HeadCache:
    def __init__(self, expected_incarnation: int = 0) -> None:
        """`expected_incarnation`: the client's; 0: none."""
        self._expected = expected_incarnation
        self._lock = threading.Lock()
        self._acknowledged: set[str] = set()  # heads for which nothing is expected
        self._facts: dict[str, HeadInfo] = {}
        self._accumulations: dict[str, tuple[int, int]] = {}  # head -> step, incarnation

    def facts(self, head: str) -> HeadInfo | None:
        with self._lock:
            return self._facts.get(head)

    def learn(self, description: head_pb2.HeadDescription) -> HeadInfo:
        facts = HeadInfo(description.spec.hidden_size, description.slice_limits)
        with self._lock:
            self._facts[description.spec.name] = facts
        return facts

    def forget_facts(self, head: str) -> None:
        with self._lock:
            self._facts.pop(head, None)

    def note_accumulation(self, head: str, step: int, incarnation: int) -> None:
        """Gradients of `step` are being accumulated in `incarnation`.

        Restarted if earlier ones of the step went to another one, or if another one is expected.
        """
        with self._lock:
            self._check(head, step, incarnation)
            self._accumulations[head] = (step, incarnation)

    def incarnation_of(self, head: str, step: int) -> int | None:
        """Where gradients of `step` have to go: earlier ones went there, or it is expected. None: anywhere."""
        with self._lock:
            noted_step, incarnation = self._accumulations.get(head, (None, None))
            return incarnation if noted_step == step else self._expected_of(head)

    def check_incarnation(self, head: str, step: int, incarnation: int) -> None:
        """Restarted if gradients of `step` were accumulated in another incarnation, or if another one is expected."""
        with self._lock:
            self._check(head, step, incarnation)

    def close_step(self, head: str, step: int) -> None:
        """The step has been applied: its gradients are not outstanding any more, those of a later one are."""
        with self._lock:
            if head in self._accumulations and self._accumulations[head][0] <= step:
                del self._accumulations[head]

    def forget_accumulation(self, head: str) -> None:
        """No gradients of the head are outstanding any more, whatever the incarnation."""
        with self._lock:
            self._accumulations.pop(head, None)
            if self._expected:
                self._acknowledged.add(head)

    def _expected_of(self, head: str) -> int | None:
        return self._expected if self._expected and head not in self._acknowledged else None

    def _check(self, head: str, step: int, incarnation: int) -> None:
        noted_step, before = self._accumulations.get(head, (None, None))
        if noted_step != step:
            before = self._expected_of(head)
        if before is not None and before != incarnation:
            raise errors.restarted(head, before, incarnation, step)
