# SPDX-License-Identifier: Apache-2.0
"""Whether the answers to one loss call are about one state of a head, and the right one.

client/cpp/head_cache.h does the same; tests/client/golden/incarnations.json holds both to it.
"""

from __future__ import annotations

import threading

from lossd import errors
from lossd._head_cache import GradientsId, HeadCache, TrainerStep
from lossd.v1 import types_pb2


class AnswerCheck:
    """Thread-safe."""

    def __init__(self, head_cache: HeadCache, head: str, step: int | None, *, accumulate: bool, in_step: bool) -> None:
        """
        Args:
          accumulate: the call adds gradients to `step`, which then is there.
          in_step: what the call does ends with the gradients of the step: it accumulates, retains, or uses what was
            retained.
        """
        self._head_cache = head_cache
        self._head = head
        self._accumulates = accumulate
        self._in_step = in_step
        self._at: TrainerStep | None = None  # the step that the call belongs to
        if in_step and step is not None:
            self._at = head_cache.trainer_step(head, step)
        self._lock = threading.Lock()
        self._state: types_pb2.HeadState | None = None  # where the first stream found the server; guarded by _lock

    def accept(self, state: types_pb2.HeadState) -> None:
        """Notes where the server stands as a stream is accepted.

        Restarted if it is another process than earlier answers of the call or earlier rows of the step came from;
        StepDiscarded if it has other gradients; Aborted if step or weights have changed during the call; Internal if
        the answer cannot be right.
        """
        if state.incarnation == 0:
            raise errors.server_sent("incarnation 0")
        if self._at is not None:
            self._check_step(self._at, state)
        with self._lock:
            if self._state is None:
                self._state = state
            before = self._state
        self._compare(before, state)

    def interpret(self, error: errors.LossdError) -> None:
        """Raises Restarted or StepDiscarded if that is what the error means."""
        if self._at is not None:
            self._head_cache.interpret(self._at, error)
        with self._lock:
            before = self._state
        if error.incarnation and before is not None and before.incarnation != error.incarnation:
            raise self._restarted(before.incarnation, error.incarnation)

    def meant(self) -> GradientsId | None:
        """What the next stream is meant for: where earlier rows of the step, or of this call, went. None: anything.

        The generation is 0 for a call that does not belong to a step. StepDiscarded if this client has started the
        step over since the call began.
        """
        if self._at is not None:
            self._head_cache.check_current(self._at)
            known = self._head_cache.gradients_of(self._at)
            if known is not None:
                return known
        with self._lock:
            if self._state is None:
                return None
            return GradientsId(self._state.incarnation, self._state.generation if self._in_step else 0)

    def begin_again(self) -> None:
        """The call begins again, with whatever it finds. Only for calls that do not belong to a step."""
        with self._lock:
            self._state = None

    def _check_step(self, at: TrainerStep, state: types_pb2.HeadState) -> None:
        if not self._accumulates:
            self._head_cache.check(at, GradientsId.of(state))
            return
        if state.step != at.step:
            raise errors.server_sent(f"step {state.step} in answer to step {at.step}")
        self._head_cache.note_accumulation(at, GradientsId.of(state))

    def _compare(self, before: types_pb2.HeadState, now: types_pb2.HeadState) -> None:
        if before.incarnation != now.incarnation:
            raise self._restarted(before.incarnation, now.incarnation)
        if before.step != now.step:
            raise errors.Aborted(f'head "{self._head}" moved from step {before.step} to step {now.step} during the call')
        if self._in_step and before.generation != now.generation:
            raise errors.discarded(self._head, now.step, before.generation, now.generation)
        if before.weights_version != now.weights_version:
            raise errors.Aborted(f'the weights of head "{self._head}" changed during the call')

    def _restarted(self, before: int, now: int) -> errors.Restarted:
        step = self._at.step if self._at is not None and self._accumulates else None
        return errors.restarted(self._head, before, now, step)
