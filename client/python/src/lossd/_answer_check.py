"""Whether the answers to one loss call come from one server process at one step, and from the right one.

client/cpp/answer_check.h does the same; tests/client/golden/incarnations.json holds both to it.
"""

from __future__ import annotations

import threading

from lossd import errors
from lossd._head_cache import HeadCache
from lossd.v1 import types_pb2


class AnswerCheck:
    """Thread-safe. A call that accumulates has a step."""

    def __init__(self, head_cache: HeadCache, head: str, step: int | None, accumulate: bool) -> None:
        self._head_cache = head_cache
        self._head = head
        self._step = step if accumulate else None  # whose gradients are lost with the server process
        self._lock = threading.Lock()
        self._state: types_pb2.HeadState | None = None  # where the first stream found the server; guarded by _lock

    def accept(self, state: types_pb2.HeadState) -> None:
        """Notes where the server stands as a stream is accepted.

        Restarted if it is another process than earlier answers of the call or earlier rows of the step came from;
        Aborted if the step has changed during the call; Internal if the answer cannot be right.
        """
        if state.incarnation == 0:
            raise errors.server_sent("incarnation 0")
        if self._step is not None:
            if state.step != self._step:
                raise errors.server_sent(f"step {state.step} in answer to step {self._step}")
            self._head_cache.note_accumulation(self._head, state.step, state.incarnation)
        with self._lock:
            if self._state is None:
                self._state = state
            before = self._state
        if before.incarnation != state.incarnation:
            raise errors.restarted(self._head, before.incarnation, state.incarnation, self._step)
        if before.step != state.step:
            raise errors.Aborted(
                f'head "{self._head}" moved from step {before.step} to step {state.step} during the call')

    def interpret(self, error: errors.LossdError) -> None:
        """Raises Restarted if the error comes from another server process than that."""
        if error.incarnation == 0:
            return
        if self._step is not None:
            self._head_cache.check_incarnation(self._head, self._step, error.incarnation)
        with self._lock:
            before = self._state
        if before is not None and before.incarnation != error.incarnation:
            raise errors.restarted(self._head, before.incarnation, error.incarnation, self._step)

    def known_incarnation(self) -> int | None:
        """The server process that has earlier rows of the step, or of this call. None: none has."""
        if self._step is not None:
            accumulated = self._head_cache.incarnation_of(self._head, self._step)
            if accumulated is not None:
                return accumulated
        with self._lock:
            return self._state.incarnation if self._state is not None else None
