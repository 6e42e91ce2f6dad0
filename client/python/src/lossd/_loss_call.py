# SPDX-License-Identifier: Apache-2.0
"""Loss computations: their arguments, as the library takes them, and those under way."""

from __future__ import annotations

import _thread
import ctypes
import functools
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from lossd import _native, errors
from lossd._arrays import Array, array_of
from lossd._interrupts import Clock, await_end, run_apart
from lossd._native import NativeClient
from lossd.types import (
    Depth, DepthResult, EmbedResult, LossOptions, LossResult, ObjectiveSums, Reduction, RetryOptions, whole_number)
from lossd.v1 import loss_pb2, types_pb2
from lossd.v1.library import lossd_depth, lossd_loss, lossd_result


# ---- Arguments ----


_COST = ("loss", "wall_seconds", "sent_bytes", "received_bytes", "streams", "repeats")  # what a lossd_result has of a LossResult
_LIMITS = {"step": (0, 64), "id": (0, 64), "streams": (1, 31), "slice_bytes": (1, 63)}  # the least, and bits


class Asked:
    """What one computation is asked, in a structure of the library, and the memory that it points to."""

    def __init__(self, arguments: lossd_loss, open_: loss_pb2.OpenMicrobatch | loss_pb2.OpenBackward,
                 rows: str = "hidden") -> None:
        """`rows`: the caller's name of the rows, for errors."""
        arguments.open, arguments.open_size = open_.SerializeToString(), open_.ByteSize()
        self.arguments = arguments
        self.rows = rows
        self.streams: dict[int, int] = {}  # to wait for beside the one that the library waits for, each with an address of its GPU
        self._kept: list[Array] = []

    def put(self, **arrays: NDArray[Any] | Array | None) -> None:
        """Has fields of the structure point to arrays; to none if they are None or empty."""
        for name, array in arrays.items():
            setattr(self.arguments, name, self.pointer_to(array_of(name, array) if isinstance(array, np.ndarray) else array))

    def pointer_to(self, memory: Array | None) -> int | None:
        """The address of memory that is kept."""
        if memory is None or not memory.nbytes:
            return None
        self._kept.append(memory)
        if memory.device:
            self.arguments.on_device = 1
        if memory.stream is not None and not self.arguments.has_stream:
            self.arguments.has_stream, self.arguments.stream = 1, memory.stream
        elif memory.stream is not None and memory.stream != (self.arguments.stream or 0):
            self.streams.setdefault(memory.stream, memory.address)
        return memory.address

    def put_rows(self, hidden: Sequence[Array], grad_hidden: Sequence[Array], depths: Sequence[Depth]) -> None:
        """Hidden states and their gradients: one piece, or one for each depth; no gradients if none are wanted."""
        apart = len(hidden) > 1 or len(hidden) == len(depths) == 1
        if not apart:
            self.put(hidden=hidden[0], grad_hidden=grad_hidden[0] if grad_hidden else None)
        self.arguments.depth_count = len(depths)
        self.arguments.depths = (lossd_depth * len(depths))(*(
            lossd_depth(depth.rows, self.pointer_to(hidden[index]) if apart else None,
                           self.pointer_to(grad_hidden[index]) if apart and grad_hidden else None, depth.normalizer or 0.0,
                           depth.weight, depth.normalizer is not None)
            for index, depth in enumerate(depths)))


def check_numbers(**numbers: int | None) -> None:
    """InvalidArgument, naming it, for a number that is out of range; None is none."""
    for name, value in numbers.items():
        if value is not None:
            whole_number(name, value, *_LIMITS[name])


def embedding(head: str, *, step: int | None, ids: NDArray[np.int32], hidden_size: int, dtype: types_pb2.DType,
              streams: int | None, place: Array | None = None, id: int = 0, gradients: Array | None = None,
              scale: float | None = None, padding_idx: int | None = None) -> Asked:
    """Rows of the weight, one for each id, which go to `place`; or their `gradients`, which join that of the weight, times
    `scale`: those of ids that are `padding_idx` are left out."""
    check_numbers(step=step, id=id, streams=streams)
    if (ids < 0).any():
        row = int((ids < 0).argmax())
        raise errors.InvalidArgument(f"ids[{row}] is {ids[row]}; an id is a row of the weight, so it must not be negative",
                                     types_pb2.ErrorDetail(field=f"ids[{row}]", value=str(ids[row])))
    if scale is not None and not math.isfinite(scale):
        raise errors.InvalidArgument(f"scale is {scale}; it must be finite")
    reads = place is not None
    asked = Asked(
        lossd_loss(rows=len(ids), hidden_size=hidden_size, streams=streams or 0),
        loss_pb2.OpenMicrobatch(
            head=head, step=step, microbatch_id=id, hidden_dtype=dtype, options=loss_pb2.LossOptions(ignore_index=padding_idx),
            reduction=loss_pb2.REDUCTION_SUM, grad_output=scale, accumulate_gradients=not reads,
            embedding=loss_pb2.EMBEDDING_ROWS if reads else loss_pb2.EMBEDDING_GRADIENTS),
        "out" if reads else "gradients")
    asked.put(targets=ids, hidden=gradients, grad_hidden=place)
    return asked


# ---- Computations under way ----


R = TypeVar("R")
C = TypeVar("C")
P = TypeVar("P", bound="Pending[Any]")
A = ParamSpec("A")


class Computations(NativeClient):
    """The part of lossd.Client that is about computations under way; threads, units and errors as there."""

    def __init__(self, context: str | None, retry: RetryOptions, max_pending: int, **options: Any) -> None:
        if max_pending < 1:
            raise errors.InvalidArgument(f"max_pending is {max_pending}; it must be at least 1")
        super().__init__(context, retry, **options)
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._pending: set[Pending[Any]] = set()  # those under way, which keep their arrays; guarded by _lock

    def close(self) -> None:
        """Cancels what is under way, waits for it, and closes the connections. May be repeated."""
        run_apart(self._close)

    def _close(self) -> None:
        with self._lock:
            pending = list(self._pending)
        for each in pending:
            each.cancel()
        self._end()
        self._sweep()

    def _launch(self, pending: P, timeout: float | None, ready: Callable[[], None] | None) -> P:
        """Begins a computation, once there are fewer than max_pending."""
        seconds = self._loss_timeout if timeout is None else timeout
        if not seconds > 0:
            raise errors.InvalidArgument(f"timeout is {timeout}; it must be positive")
        clock = Clock(seconds)
        self._sweep()
        if not pending._enter(self._max_pending, seconds):
            raise errors.DeadlineExceeded(
                f"max_pending is {self._max_pending}, and none of so many loss computations has ended in time")
        try:
            with self._lock:
                self._pending.add(pending)
            pending._start(max(clock.left() or 0.0, 1e-3), ready)
        except BaseException:  # an interrupt
            pending.cancel()
            pending._await_end()  # the memory is free then
            raise
        return pending

    def _forget(self, pending: Pending[Any]) -> None:
        with self._lock:
            self._pending.discard(pending)

    def _sweep(self) -> None:
        """Lets go of computations that have ended, and that nobody has waited for."""
        with self._lock:
            self._pending = {each for each in self._pending if not each.done()}


class Pending(Generic[R]):
    """A computation under way. Its memory, inputs and outputs, is in use until it is done."""

    _RESULT, _NAME = "the loss", "a loss computation that is under way"

    def __init__(self, client: Computations, asked: Asked, finish: Callable[[LossResult], R]) -> None:
        # It runs in the library, on no thread of Python. `finish` makes the result of what the server says.
        self._client = client
        self._asked: Asked | None = asked  # is kept until the end
        self._of_rows = asked.rows
        self._finish = finish
        self._call = _native.Call()
        if not client._library.lossd_check_loss(ctypes.byref(asked.arguments), self._call.pointer):
            self._call.check()
        self._lock = threading.Lock()  # guards what follows
        self._value: R | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<lossd.{type(self).__name__}, {'done' if self.done() else 'under way'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self._NAME} cannot be copied or pickled; copy what wait() returns")

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._call.wait(0.0) != 0

    def wait(self, timeout: float | None = None) -> R:
        """Blocks until the result is there and returns it, or raises what went wrong. May be repeated.

        TimeoutError after `timeout` seconds; the computation goes on. An interrupt (KeyboardInterrupt) ends the
        computation before it is passed on, so that the memory is free; a second one is passed on at once.
        """
        try:
            ended = self._await_end(timeout)
        except BaseException:
            self.cancel()
            self._await_end()
            raise
        if not ended:
            raise TimeoutError(f"{self._RESULT} is not there after {timeout} s")
        with self._lock:
            if self._value is None and self._error is None:
                self._conclude()
            if self._error is not None:
                raise self._error
            assert self._value is not None
            return self._value

    def cancel(self) -> None:
        """Asks for an early end with Cancelled; no effect when done. wait() says when it has ended."""
        self._call.cancel()

    def _enter(self, most: int, seconds: float) -> bool:
        """Whether it has got one of `most` places of the client within so many seconds."""
        enter = self._client._library.lossd_client_enter
        return await_end(lambda left: enter(self._client._pointer, self._call.pointer, most, left), seconds)

    def _start(self, timeout: float, ready: Callable[[], None] | None) -> None:
        """`ready` runs on a thread of its own before the computation begins."""
        assert self._asked is not None
        asked, client = self._asked, self._client
        asked.arguments.timeout = timeout

        def begin() -> None:
            client._library.lossd_client_compute(client._pointer, ctypes.byref(asked.arguments), self._call.pointer)

        def begin_when_ready() -> None:
            try:
                if ready is not None:
                    ready()
                for stream, address in asked.streams.items():
                    _native.await_stream(stream, address)
            except BaseException as error:
                self._error = error
                return self._call.cancel()
            begin()

        if ready is None and not asked.streams:
            return begin()
        try:
            _thread.start_new_thread(begin_when_ready, ())  # Thread.start() takes a lock that an interrupt may keep
        except RuntimeError:  # the interpreter is ending
            begin_when_ready()

    def _await_end(self, timeout: float | None = None) -> bool:
        """Whether it has ended within so many seconds; None: waits without a limit."""
        if not await_end(self._call.wait, timeout):
            return False
        self._asked = None
        self._client._forget(self)
        return True

    def _conclude(self) -> None:
        if (error := self._call.error()) is not None:
            if error.field == "hidden_size":
                error.replace(f"hidden_size is {error.value}", f"{self._of_rows}: a row has {error.value} elements")
            self._error = self._client._meant(error)
        else:
            self._value = self._finish(
                _result_of(loss_pb2.MicrobatchSummary.FromString(self._call.answer()), self._call.result()))


def _result_of(summary: loss_pb2.MicrobatchSummary, cost: lossd_result) -> LossResult:
    """Fields have the names that they have in the messages."""
    def same(message: Any, kind: type[Any]) -> dict[str, Any]:
        return {each.name: getattr(message, each.name) for each in fields(kind) if each.name in message.DESCRIPTOR.fields_by_name}

    depths = [DepthResult(**same(depth, DepthResult)) for depth in summary.depths]
    for depth in depths:
        depth.loss = depth.loss_sum / depth.normalizer if depth.valid_rows else 0.0
    values: dict[str, Any] = {
        **same(summary, LossResult), **same(summary.state, LossResult), "depths": depths,
        "objective": ObjectiveSums(**same(summary.objective, ObjectiveSums)),
        **{name: getattr(cost, name) for name in _COST}}
    return LossResult(**values)


class PendingLoss(Pending[LossResult]):
    """A loss computation under way. Its memory, inputs and outputs, is in use until it is done."""


class PendingRows(Pending[EmbedResult]):
    """Rows of an embedding on their way. The memory that they go to is in use until they are there."""

    _RESULT, _NAME = "the last row", "rows that are on their way"


def waiting(begin: Callable[Concatenate[C, A], Pending[R]], result: type[R]) -> Callable[Concatenate[C, A], R]:
    """The method that has the arguments of `begin`, a method NAME_async, and waits for the result of what that begins."""
    @functools.wraps(begin)
    def blocking(self: C, /, *arguments: A.args, **named: A.kwargs) -> R:
        begun: Pending[R] = getattr(self, begin.__name__)(*arguments, **named)
        return begun.wait()

    name = begin.__name__.removesuffix("_async")
    blocking.__name__, blocking.__qualname__ = name, begin.__qualname__.removesuffix("_async")
    blocking.__doc__ = f"As {begin.__name__}(), and waits for the result.\n\n{begin.__doc__}"
    blocking.__signature__ = inspect.signature(begin).replace(return_annotation=result.__name__)  # type: ignore[attr-defined]
    return blocking
