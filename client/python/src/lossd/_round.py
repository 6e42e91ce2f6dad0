# SPDX-License-Identifier: Apache-2.0
"""One pass of a loss call over its rows, on streams that are sent again where they break."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lossd import _retry, errors
from lossd._answer_check import AnswerCheck
from lossd._cancellation import Cancellation
from lossd._connections import Connection, Connections, Deadline
from lossd._plan import Rows, SliceRule
from lossd._slice_places import SlicePlaces
from lossd._slice_rules import SliceRules
from lossd._stream import LossStream
from lossd._stream_threads import StreamThreads
from lossd._work import Work
from lossd.types import LossResult

_FOR_LIMITS = (errors.InvalidArgument, errors.ResourceExhausted)  # what a server says to rows that are cut wrongly


@dataclass(frozen=True)
class RoundParts:
    """What the rounds of one call have in common."""

    connections: Connections
    threads: StreamThreads
    work: Work
    check: AnswerCheck
    rules: SliceRules
    deadline: Deadline


class Round:
    """Used once. run() is called on one thread; cancel() on any."""

    def __init__(self, parts: RoundParts, ranges: Sequence[Rows], total: LossResult) -> None:
        """`total` gets the sums over the streams, and what they cost."""
        self._parts = parts
        self._ranges = ranges
        self._total = total
        self._cancellation = Cancellation()
        self._lock = threading.Lock()  # guards _total too
        self._error: BaseException | None = None  # the first one; guarded by _lock

    def run(self, lent: int) -> None:
        """Blocks until every range is done, or until nothing is under way after an error, which it raises.

        `lent`: threads (StreamThreads.lend).
        """
        try:
            self._parts.threads.run_all([partial(self._try_range, rows) for rows in self._ranges], lent)
        except RuntimeError:
            self._fail(errors.ClientClosed("this client was closed during the call"))
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self._fail(errors.Cancelled("cancelled by the caller"))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
        self._cancellation.cancel()

    def _try_range(self, rows: Rows) -> None:
        try:
            self._run_range(rows)
        except BaseException as error:
            self._fail(error)

    def _run_range(self, rows: Rows) -> None:
        """One stream until it has succeeded or may not be repeated."""
        parts = self._parts
        attempt = 1
        unanswered = 0  # attempts
        while not self._cancellation.cancelled:
            rule = parts.rules.rule()
            try:
                with parts.connections.lend() as connection:
                    return self._run_stream(connection, rows, rule)
            except errors.LossdError as error:
                parts.check.interpret(error)
                if errors.is_transient(error):
                    pause = parts.deadline.wait_before_repeat(parts.connections.options.retry, error, attempt)
                    if pause is None:
                        raise _retry.with_attempts(error, attempt) from None
                    unanswered += 1
                    self._cancellation.wait(pause)
                elif not (isinstance(error, _FOR_LIMITS) and parts.rules.may_cut_otherwise(rule)):
                    raise self._final(error, unanswered) from None
            attempt += 1
            with self._lock:
                self._total.repeats += 1

    def _final(self, error: errors.LossdError, unanswered: int) -> errors.LossdError:
        """Of a call that may begin again nothing counts until it ends well."""
        return error if self._parts.work.restartable else _retry.with_attempts(error, 1 + unanswered)

    def _run_stream(self, connection: Connection, rows: Rows, rule: SliceRule) -> None:
        parts = self._parts
        work = parts.work
        region = None
        if work.memory is not None:
            region = parts.connections.region_for(work.memory.device, work.moved_rows * work.row_bytes)
        # Where rows have an order, those of other calls may have to come before a slice is answered.
        with SlicePlaces(region, may_wait=rule.row_grid == 0) as places:
            region = places.region
            room = places.reserve(rows, work.row_bytes) if work.hidden is None else None
            cut = rule if region is None else rule.in_region(len(rows), region.wanted_rows(work.row_bytes))
            plan = work.plan(rows, cut, parts.check.meant(), b"" if region is None else region.id, room)
            stream = LossStream(parts.connections, connection, parts.work, plan, rule, parts.check.accept, places)
            try:
                summary = stream.run(parts.deadline, self._cancellation)
                with self._lock:
                    self._total.add(summary)
            finally:
                with self._lock:
                    self._total.sent_bytes += stream.sent_bytes
                    self._total.received_bytes += stream.received_bytes
