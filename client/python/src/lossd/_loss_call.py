# SPDX-License-Identifier: Apache-2.0
"""A loss call under way: from its start on a thread of the client to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from lossd import _retry, errors
from lossd._answer_check import AnswerCheck
from lossd._cancellation import Cancellation
from lossd._connections import Connections, Deadline
from lossd._head_cache import HeadCache
from lossd._interrupts import Outcome, run_apart
from lossd._plan import Rows
from lossd._round import Round, RoundParts
from lossd._slice_rules import SliceRules
from lossd._stream_threads import StreamThreads
from lossd._work import Work
from lossd.types import LossResult
from lossd.v1 import head_pb2


@dataclass(frozen=True)
class CallOptions:
    streams: int | None  # about so many streams; fewer if rows are few. None: one for each idle connection
    slice_bytes: int | None  # of hidden states; the server's limits bound it too. None: what suits the way they travel
    timeout: float  # seconds, attempts and waits together
    ready: Callable[[], None] | None = None  # blocks until the hidden states may be read; runs on a client's thread


@dataclass(frozen=True)
class Core:
    """What the parts of one client share."""

    connections: Connections
    head_cache: HeadCache
    threads: StreamThreads
    describe: Callable[[str, Deadline, Cancellation], head_pb2.HeadDescription]


class LossCall:
    """Runs on a thread of its own, and its streams on others that can be had.

    The caller's memory is free when it has ended.
    """

    def __init__(self, core: Core, work: Work, options: CallOptions, on_end: Callable[[LossCall], None]) -> None:
        """`on_end` is called once, before the result is there."""
        if options.slice_bytes is not None and options.slice_bytes < 1:
            raise errors.InvalidArgument(f"slice_bytes is {options.slice_bytes}; it must be positive")
        if options.streams is not None and not 1 <= options.streams <= 1024:
            raise errors.InvalidArgument(f"streams is {options.streams}; it must be in [1, 1024]")
        self.outcome: Outcome[LossResult] = Outcome()
        self.deadline = Deadline(options.timeout)
        self._core = core
        self._work = work
        self._options = options
        self._on_end = on_end
        self._start = time.monotonic()
        self._check = AnswerCheck(core.head_cache, work.head, work.step, accumulate=work.accumulate,
                                  in_step=work.in_step)
        self._cancellation = Cancellation()

    def start(self) -> None:
        """RuntimeError if the client's threads have ended."""
        run_apart(lambda: self._core.threads.start(lambda: self.outcome.run(self._run)))

    def cancel(self) -> None:
        run_apart(self._cancellation.cancel)

    def _run(self) -> LossResult:
        try:
            result = self._compute()
        finally:
            self._on_end(self)
        result.rows = self._work.outputs.rows
        result.wall_seconds = time.monotonic() - self._start
        return result

    def _compute(self) -> LossResult:
        """Rounds until one has succeeded or the call may not begin again."""
        if self._options.ready is not None:
            self._options.ready()
        self._check_cancelled()
        core, cancellation, deadline = self._core, self._cancellation, self.deadline
        rules = SliceRules(core.head_cache, self._work, self._check, self._options.slice_bytes,
                           lambda head: core.describe(head, deadline, cancellation))
        rules.learn()
        parts = RoundParts(core.connections, core.threads, self._work, self._check, rules, deadline)
        streams = self._options.streams or max(1, core.connections.idle())
        with core.threads.lend(streams - 1) as lent:
            ranges = self._work.split(1 + lent, core.connections.options.max_message_bytes)
            return self._run_rounds(parts, ranges, lent)

    def _run_rounds(self, parts: RoundParts, ranges: list[Rows], lent: int) -> LossResult:
        total = LossResult(streams=len(ranges))
        attempt = 1
        while (pause := self._try_round(Round(parts, ranges, total), lent, attempt)) is not None:
            self._cancellation.wait(pause)
            attempt += 1
            total = LossResult(streams=len(ranges), repeats=total.repeats + len(ranges), sent_bytes=total.sent_bytes,
                               received_bytes=total.received_bytes)
            self._check.begin_again()
        self._work.conclude(total)
        return total

    def _try_round(self, round_: Round, lent: int, attempt: int) -> float | None:
        """Seconds to wait before another round; None: this one has succeeded."""
        try:
            with self._cancellation.ends(round_.cancel):
                round_.run(lent)
        except errors.Aborted as error:
            self._check_cancelled()
            pause = self.deadline.wait_before_repeat(self._core.connections.options.retry, error, attempt,
                                                     restartable=self._work.restartable)
            if pause is None:
                raise _retry.with_attempts(error, attempt) from None
            return pause
        self._check_cancelled()
        return None

    def _check_cancelled(self) -> None:
        if self._cancellation.cancelled:
            raise errors.Cancelled("cancelled by the caller")


class PendingLoss:
    """A loss computation under way. Its memory, inputs and outputs, is in use until it is done."""

    def __init__(self, call: LossCall, result: Callable[[LossResult], LossResult]) -> None:
        self._call = call
        self._result = result

    def __repr__(self) -> str:
        return f"<lossd.PendingLoss, {'done' if self.done() else 'under way'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a loss computation that is under way cannot be copied or pickled; copy what its wait() returns")

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._call.outcome.done()

    def wait(self, timeout: float | None = None) -> LossResult:
        """Blocks until the result is there and returns it, or raises what went wrong. May be repeated.

        TimeoutError after `timeout` seconds; the computation goes on. An interrupt (KeyboardInterrupt) ends the
        computation before it is passed on, so that the memory is free; a second one is passed on at once.
        """
        try:
            ended = self._call.outcome.await_end(timeout)
        except BaseException:
            self._call.cancel()
            self._call.outcome.await_end()
            raise
        if not ended:
            raise TimeoutError(f"the loss is not there after {timeout} s")
        return self._result(self._call.outcome.result())

    def cancel(self) -> None:
        """Asks for an early end with Cancelled; no effect when done. wait() says when it has ended."""
        self._call.cancel()
