# SPDX-License-Identifier: Apache-2.0
"""A loss call under way: from its start on a thread of the client to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, NoReturn, TypeVar

from lossd import _connections, errors
from lossd._connections import Connection, Connections, Deadline
from lossd._head_cache import GradientsId, HeadCache, HeadInfo, TrainerStep
from lossd._interrupts import Cancellation, Outcome, run_apart
from lossd._plan import Rows, SliceRule, make_slice_rule
from lossd._wire import SlicePlaces
from lossd._stream import LossStream
from lossd._work import Work
from lossd.types import EmbedResult, LossResult
from lossd.v1 import head_pb2, types_pb2


# Whether the answers to one loss call are about one state of a head, and the right one.
#
# client/cpp/core.h does the same; tests/client/golden/incarnations.json holds both to it.


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


# How a call may cut its rows into slices: as its head's limits say, which are learnt anew where they have changed.


class SliceRules:
    """Thread-safe, once learn() has returned."""

    def __init__(self, head_cache: HeadCache, work: Work, check: AnswerCheck, slice_bytes: int | None,
                 describe: Callable[[str], head_pb2.HeadDescription]) -> None:
        self._head_cache = head_cache
        self._work = work
        self._check = check
        self._slice_bytes = slice_bytes
        self._describe = describe
        self._lock = threading.Lock()
        self._facts: HeadInfo | None = None  # guarded by _lock
        self._fresh = False  # _facts were learnt during this call, since a stream was refused; guarded by _lock

    def learn(self) -> HeadInfo:
        """Finds the head's limits; blocks if the client does not know them yet. What is known of the head."""
        facts = self._head_cache.facts(self._work.head)
        if facts is None or facts.hidden_size != self._work.hidden_size:
            facts = self._ask()
        with self._lock:
            self._facts = facts
        return facts

    def rule(self) -> SliceRule:
        with self._lock:
            assert self._facts is not None
            return make_slice_rule(self._work.sent_row_bytes, self._slice_bytes, self._facts.limits)

    def may_cut_otherwise(self, rule: SliceRule) -> bool:
        """The server may have been restarted with other limits: learns them once; true if they cut otherwise."""
        with self._lock:
            fresh = self._fresh
        if not fresh:
            facts = self._ask()
            with self._lock:
                self._facts, self._fresh = facts, True
        now = self.rule()
        return (now.max_rows < rule.max_rows or now.row_grid != rule.row_grid
                or now.max_rows_in_region < rule.max_rows_in_region)

    def _ask(self) -> HeadInfo:
        try:
            description = self._describe(self._work.head)
        except errors.LossdError as error:
            self._check.interpret(error)
            raise
        if description.spec.hidden_size != self._work.hidden_size:
            raise errors.InvalidArgument(
                f'{self._work.rows_argument}: a row has {self._work.hidden_size} elements, but head "{self._work.head}" has '
                f"{description.spec.hidden_size}")
        return self._head_cache.learn(description)


# One pass of a loss call over its rows, on streams that are sent again where they break.

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
                        raise _connections.with_attempts(error, attempt) from None
                    unanswered += 1
                    self._cancellation.wait(pause)
                elif not (isinstance(error, _FOR_LIMITS) and parts.rules.may_cut_otherwise(rule)):
                    raise self._final(error, unanswered) from None
            attempt += 1
            with self._lock:
                self._total.repeats += 1

    def _final(self, error: errors.LossdError, unanswered: int) -> errors.LossdError:
        """Of a call that may begin again nothing counts until it ends well."""
        return error if self._parts.work.restartable else _connections.with_attempts(error, 1 + unanswered)

    def _run_stream(self, connection: Connection, rows: Rows, rule: SliceRule) -> None:
        parts = self._parts
        work = parts.work
        region = None
        if work.memory is not None:
            region = parts.connections.region_for(work.memory.device, work.moved_rows * work.sent_row_bytes)
        # Where rows have an order, those of other calls may have to come before a slice is answered.
        with SlicePlaces(region, may_wait=rule.row_grid == 0) as places:
            region = places.region
            room = places.reserve(rows, work.row_bytes) if work.hidden is None else None
            cut = rule if region is None else rule.in_region(len(rows), region.wanted_rows(work.sent_row_bytes))
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


# The threads that a client's streams run on. Thread-safe.


class StreamThreads:
    """One thread for each loss computation under way, and spare ones that are lent to those with several streams.

    So all streams of all computations are open at once. On a deterministic server they may all have to be: the first
    microbatch may come last, and a row may wait for any other one.
    """

    def __init__(self, computations: int, spare: int) -> None:
        self._pool = ThreadPoolExecutor(computations + spare, thread_name_prefix="lossd")
        self._lock = threading.Lock()
        self._spare = spare  # not lent; guarded by _lock

    def start(self, body: Callable[[], None]) -> None:
        """Runs the body of a computation. RuntimeError after close()."""
        self._pool.submit(body)

    @contextmanager
    def lend(self, wanted: int) -> Iterator[int]:
        """How many spare threads the block may use: at most `wanted`, fewer if there are fewer."""
        with self._lock:
            count = min(wanted, self._spare)
            self._spare -= count
        try:
            yield count
        finally:
            with self._lock:
                self._spare += count

    def run_all(self, bodies: list[Callable[[], None]], lent: int) -> None:
        """Runs bodies, which must not raise, at the same time, the first one on this thread. RuntimeError after close().

        `lent` is what the caller has of lend(). Threads that lack beyond them are made for the occasion.
        """
        first, *others = bodies
        with ThreadPoolExecutor(max(1, len(others) - lent), thread_name_prefix="lossd") as more:  # starts none yet
            futures = [more.submit(body) for body in others[lent:]]
            try:
                futures += [self._pool.submit(body) for body in others[:lent]]
                first()
            finally:
                wait(futures)

    def close(self) -> None:
        """Waits until everything has ended."""
        self._pool.shutdown(wait=True)


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
        several = self._work.outputs.classes
        result.class_logprobs = several.get("class_logprobs")
        result.top_classes, result.top_logprobs = several.get("top_classes"), several.get("top_logprobs")
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
        facts = rules.learn()
        if facts.classes is not None:
            self._work.know_classes(facts.classes)
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
                raise _connections.with_attempts(error, attempt) from None
            return pause
        self._check_cancelled()
        return None

    def _check_cancelled(self) -> None:
        if self._cancellation.cancelled:
            raise errors.Cancelled("cancelled by the caller")


R = TypeVar("R")


class Pending(Generic[R]):
    """A computation under way. Its memory, inputs and outputs, is in use until it is done."""

    _WHAT = "the loss"

    def __init__(self, call: LossCall, result: Callable[[LossResult], R]) -> None:
        self._call = call
        self._result = result

    def __repr__(self) -> str:
        return f"<lossd.{type(self).__name__}, {'done' if self.done() else 'under way'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a loss computation that is under way cannot be copied or pickled; copy what its wait() returns")

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._call.outcome.done()

    def wait(self, timeout: float | None = None) -> R:
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
            raise TimeoutError(f"{self._WHAT} is not there after {timeout} s")
        return self._result(self._call.outcome.result())

    def cancel(self) -> None:
        """Asks for an early end with Cancelled; no effect when done. wait() says when it has ended."""
        self._call.cancel()


class PendingLoss(Pending[LossResult]):
    """A loss computation under way. Its memory, inputs and outputs, is in use until it is done."""


class PendingRows(Pending[EmbedResult]):
    """Rows of an embedding on their way. The memory that they go to is in use until they are there."""

    _WHAT = "the last row"

    def __reduce__(self) -> NoReturn:
        raise TypeError("rows that are on their way cannot be copied or pickled; copy what wait() returns")
