"""A loss call under way: its streams, their repetitions, and its end.

Each stream is a task of the client's thread pool that repeats itself where the contract allows; the task that ends
last ends the call. So a call needs no thread of its own, and the caller's memory is free once it has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial

from lossd import _retry, errors
from lossd._answer_check import AnswerCheck
from lossd._connections import Connections, Deadline
from lossd._head_cache import HeadCache, HeadInfo
from lossd._plan import Rows, SliceRule, make_slice_rule
from lossd._stream import LossStream
from lossd._work import Work
from lossd.types import LossResult
from lossd.v1 import head_pb2


@dataclass(frozen=True)
class CallOptions:
    streams: int | None  # about so many streams; fewer if rows are few. None: one for each idle connection
    slice_bytes: int  # of hidden states per message; the server's limits bound it too
    timeout: float  # seconds, attempts and waits together
    ready: Callable[[], None] | None = None  # blocks until the hidden states may be read; runs on a client's thread


@dataclass(frozen=True)
class Core:
    """What the parts of one client share."""

    connections: Connections
    head_cache: HeadCache
    pool: ThreadPoolExecutor
    describe: Callable[[str, Deadline], head_pb2.HeadDescription]


class LossCall:
    def __init__(self, core: Core, work: Work, options: CallOptions, on_end: Callable[[LossCall], None]) -> None:
        """`on_end` is called once, before the result is there."""
        if options.slice_bytes < 1:
            raise errors.InvalidArgument(f"slice_bytes is {options.slice_bytes}; it must be positive")
        if options.streams is not None and not 1 <= options.streams <= 1024:
            raise errors.InvalidArgument(f"streams is {options.streams}; it must be in [1, 1024]")
        self.future: Future[LossResult] = Future()
        self._core = core
        self._work = work
        self._options = options
        self._on_end = on_end
        self._deadline = Deadline(options.timeout)
        self._start = time.monotonic()
        self._check = AnswerCheck(core.head_cache, work.head, work.step, work.accumulate)
        self._ended = threading.Event()  # failed or cancelled: nothing new is begun
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._under_way = 1  # tasks; the first is _begin
        self._streams: set[LossStream] = set()
        self._error: BaseException | None = None
        self._facts: HeadInfo | None = None
        self._fresh = False  # _facts were learnt during this call
        self._total = LossResult()

    def start(self) -> None:
        self._core.pool.submit(self._task, self._begin)

    def cancel(self) -> None:
        self._fail(errors.Cancelled("cancelled by the caller"))

    # ---- tasks ----

    def _task(self, body: Callable[[], None]) -> None:
        try:
            if not self._ended.is_set():
                body()
        except BaseException as error:
            self._fail(error)
        finally:
            with self._lock:
                self._under_way -= 1
                last = self._under_way == 0
            if last:
                self._finish()

    def _begin(self) -> None:
        if self._options.ready is not None:
            self._options.ready()
        facts = self._core.head_cache.facts(self._work.head)
        if facts is None or facts.hidden_size != self._work.hidden_size:
            facts = self._learn_facts()
        with self._lock:
            self._facts = facts
        connections = self._core.connections
        ranges = self._work.split(self._options.streams or max(1, connections.idle()),
                                  connections.options.max_message_bytes)
        with self._lock:
            self._total.streams = len(ranges)
            self._under_way += len(ranges) - 1
        for index, rows in enumerate(ranges[1:], 1):
            try:
                self._core.pool.submit(self._task, partial(self._run_part, rows))
            except RuntimeError as error:  # the pool was shut down: the client is being closed
                with self._lock:
                    self._under_way -= len(ranges) - index
                raise errors.ClientClosed("this client was closed during the call") from error
        self._run_part(ranges[0])

    def _learn_facts(self) -> HeadInfo:
        try:
            description = self._core.describe(self._work.head, self._deadline)
        except errors.LossdError as error:
            self._check.interpret(error)
            raise
        if description.spec.hidden_size != self._work.hidden_size:
            raise errors.InvalidArgument(
                f'hidden: a row has {self._work.hidden_size} elements, but head "{self._work.head}" has '
                f"{description.spec.hidden_size}")
        return self._core.head_cache.learn(description)

    def _run_part(self, rows: Rows) -> None:
        """One stream until it has succeeded or may not be repeated."""
        attempt = 1
        while not self._ended.is_set():
            rule = self._rule()
            try:
                with self._core.connections.lend() as channel:
                    return self._run_stream(channel, rows, rule)
            except errors.Unavailable as error:
                self._check.interpret(error)
                wait = self._deadline.wait_before_repeat(self._core.connections.options.retry, error, attempt)
                if wait is None:
                    raise _retry.with_attempts(error, attempt) from None
                self._ended.wait(wait)
            except (errors.InvalidArgument, errors.ResourceExhausted) as error:
                self._check.interpret(error)
                if not self._may_cut_otherwise(rule):
                    raise
            except errors.LossdError as error:
                self._check.interpret(error)
                raise
            attempt += 1
            with self._lock:
                self._total.repeats += 1

    def _run_stream(self, channel: int, rows: Rows, rule: SliceRule) -> None:
        plan = self._work.plan(rows, rule, self._check.known_incarnation())
        stream = LossStream(self._core.connections, channel, self._work, plan, self._check.accept)
        with self._lock:
            self._streams.add(stream)
        try:
            if self._ended.is_set():
                return
            summary = stream.run(self._deadline)
            with self._lock:
                self._total.add(summary)
        finally:
            with self._lock:
                self._streams.discard(stream)
                self._total.sent_bytes += stream.sent_bytes
                self._total.received_bytes += stream.received_bytes

    # ---- what the server says ----

    def _rule(self) -> SliceRule:
        with self._lock:
            assert self._facts is not None
            return make_slice_rule(self._work.row_bytes, self._options.slice_bytes, self._facts.limits)

    def _may_cut_otherwise(self, rule: SliceRule) -> bool:
        """The server may have been restarted with other limits: learns them once; true if they cut otherwise."""
        with self._lock:
            fresh = self._fresh
        if not fresh:
            facts = self._learn_facts()
            with self._lock:
                self._facts, self._fresh = facts, True
        now = self._rule()
        return now.max_rows < rule.max_rows or now.row_grid != rule.row_grid

    # ---- the end ----

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._under_way == 0:
                return
            if self._error is None:
                self._error = error
            streams = list(self._streams)
        self._ended.set()
        for stream in streams:
            stream.cancel()

    def _finish(self) -> None:
        self._on_end(self)
        total = self._total
        try:
            if self._error is not None:
                raise self._error
            self._work.conclude(total)
        except BaseException as error:
            self.future.set_exception(error)
            return
        total.rows = self._work.outputs.rows
        total.wall_seconds = time.monotonic() - self._start
        self.future.set_result(total)


class PendingLoss:
    """A loss computation under way. Its memory, inputs and outputs, is in use until it is done."""

    def __init__(self, call: LossCall, result: Callable[[LossResult], LossResult]) -> None:
        self._call = call
        self._result = result

    def done(self) -> bool:
        return self._call.future.done()

    def wait(self, timeout: float | None = None) -> LossResult:
        """Blocks until the result is there and returns it, or raises what went wrong. May be repeated.

        TimeoutError after `timeout` seconds; the computation goes on.
        """
        try:
            return self._result(self._call.future.result(timeout))
        except FutureTimeout:
            if self._call.future.done():
                raise
            raise TimeoutError(f"the loss is not there after {timeout} s") from None

    def cancel(self) -> None:
        """Asks for an early end with Cancelled; no effect when done. wait() says when it has ended."""
        self._call.cancel()
