# SPDX-License-Identifier: Apache-2.0
"""NativeClient: a client of the library with its connections, its calls, and the arguments and state of its computations."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import dataclasses
import functools
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from lossd import _native, errors
from lossd._arrays import Array, array_of
from lossd._native import Call
from lossd.types import Depth, DepthResult, EmbedResult, LossResult, ObjectiveSums, RetryOptions, whole_number
from lossd.v1 import loss_pb2
from lossd.v1.library import lossd_depth, lossd_loss, lossd_request, lossd_result

# ---- Arguments ----

# The fields of LossResult that come from lossd_result.
_COST = ("loss", "wall_seconds", "sent_bytes", "received_bytes", "streams", "repeats")
# The names of the fields that a message and a result have both.
_common_names = functools.cache(
    lambda message, kind: [each.name for each in dataclasses.fields(kind) if each.name in message.fields_by_name])
_LIMITS = {"step": (0, 64), "id": (0, 64), "streams": (1, 31), "slice_bytes": (1, 63), "padding_idx": (0, 31),
           "top_k": (0, 31)}  # for each argument: its least value, and the number of bits


class Asked:
    """The arguments of one computation, in a structure of the library, and the memory that the structure points to."""

    def __init__(self, arguments: lossd_loss, open_: loss_pb2.OpenMicrobatch | loss_pb2.OpenBackward, rows: str = "hidden") -> None:
        """`rows`: the caller's name for the rows, which errors use."""
        arguments.open, arguments.open_size = open_.SerializeToString(), open_.ByteSize()
        self.arguments = arguments
        self.rows = rows
        # The streams to wait for in addition to arguments.stream: stream -> some address in memory of that stream's GPU.
        self.streams: dict[int, int] = {}
        self._kept: list[Array] = []

    def put(self, **arrays: NDArray[Any] | Array | None) -> None:
        """Makes fields of the structure point to arrays; to null if an array is None or empty."""
        for name, array in arrays.items():
            setattr(self.arguments, name, self.pointer_to(array_of(name, array) if isinstance(array, np.ndarray) else array))

    def pointer_to(self, memory: Array | None) -> int | None:
        """The address of the memory, which is kept alive from now on."""
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

    def put_rows(self, hidden: Sequence[Array], grad_hidden: Sequence[Array | None], depths: Sequence[Depth]) -> None:
        """Puts hidden states and their gradients into the structure, one array for all or for each depth; no `grad_hidden`: not wanted."""
        apart = len(hidden) > 1 or len(hidden) == len(depths) == 1
        if not apart:
            self.put(hidden=hidden[0], grad_hidden=grad_hidden[0] if grad_hidden else None)
        parts = zip(depths, hidden, grad_hidden or [None] * len(depths)) if apart else ((depth, None, None) for depth in depths)
        self.arguments.depth_count = len(depths)
        self.arguments.depths = (lossd_depth * len(depths))(*(
            lossd_depth(depth.rows, self.pointer_to(rows), self.pointer_to(gradients), depth.normalizer or 0.0, depth.weight,
                        depth.normalizer is not None) for depth, rows, gradients in parts))


def check_numbers(**numbers: int | None) -> None:
    """InvalidArgument, naming the argument, if a number is out of range. None is allowed."""
    for name, value in numbers.items():
        if value is not None:
            whole_number(name, value, *_LIMITS[name])


def _positive(timeout: float) -> float:
    if not timeout > 0:
        raise errors.InvalidArgument(f"timeout is {timeout}; it must be positive")
    return timeout


# ---- Clients ----

C = TypeVar("C")
M = TypeVar("M", bound=Message)
P = TypeVar("P", bound="Pending[Any]")
R = TypeVar("R")
A = ParamSpec("A")


def _in_process(pid: int, function: Callable[..., Any], *arguments: Any) -> None:
    if pid == os.getpid():  # a forked process has no client
        function(*arguments)


class NativeClient:
    """The part of lossd.Client that is about connections and computations in flight. Threads, units and errors are as described there."""

    def __init__(self, retry: RetryOptions, max_pending: int, **options: Any) -> None:
        """`options` are the options of the library (lossd_client_connect)."""
        if max_pending < 1:
            raise errors.InvalidArgument(f"max_pending is {max_pending}; it must be at least 1")
        self._library = _native.library()
        self._pid = os.getpid()
        self.closed = False  # whether close() was called
        self._ended = ""  # why the server has ended, if that is known from elsewhere than a call
        self._loss_timeout, self._transfer_timeout = options["loss_timeout"], options["transfer_timeout"]
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._pending: set[Pending[Any]] = set()  # computations in flight, which keep their arrays alive; guarded by _lock
        self._pointer: int = self._library.lossd_client_new()
        # At the end of the process, the client is closed but not freed, because daemon threads may still call it. When the
        # client is collected, the finalizer that was made later runs first: close, then free.
        weakref.finalize(self, _in_process, self._pid, self._library.lossd_client_free, self._pointer).atexit = False
        weakref.finalize(self, _in_process, self._pid, self._library.lossd_client_close, self._pointer, None)
        try:
            Call().run("lossd_client_connect", self._pointer, _native.option_texts({**options, **dataclasses.asdict(retry)}))
        except errors.Unavailable as error:
            if error.field == "target":
                error.add("; start lossd, or give the address that its --listen names (LOSSD_SERVER)")
                if not options["wait_for_server"]:
                    error.add("; if it is being started, wait_for_server=True waits for it")
            raise
        self._target, self._run = self._described()[:2]

    @property
    def target(self) -> str:
        """The address of the server, as it was given."""
        return self._target

    @property
    def run(self) -> str:
        """The name under which this client trains: the argument `run`, or its default."""
        return self._run

    @property
    def transport(self) -> tuple[str, str]:
        """How rows are sent, "shared_memory" or "grpc", and why. Decided with the first loss computation."""
        found = self._described()
        return found[2], found[3]

    @property
    def cuda_transport(self) -> tuple[str, str]:
        """How rows of CUDA arrays are sent, and why: "cuda_ipc": through memory of a GPU of the server; "grpc": copied to the
        host and sent like rows of the host. Decided with the first such rows on each GPU, or by shares_gpu. If it differs
        between GPUs, this is "grpc", and the reason names the way of each GPU."""
        found = self._described()
        return found[6], found[7]

    @property
    def connections(self) -> tuple[int, str]:
        """The number of connections over which loss computations are spread, and why. It may change unless `channels` fixes it."""
        found = self._described()
        return int(found[4]), found[5]

    def _described(self) -> list[str]:
        """The texts that lossd_client_describe returns."""
        return os.fsdecode(Call().run("lossd_client_describe", self._pointer)).split("\0")

    def shares_gpu(self, device: int | None = None) -> bool:
        """Whether rows of CUDA arrays on this GPU are sent through memory of a GPU of the server. `device`: the GPU's number in this
        process; None: the first GPU that is also the server's. The first call opens that memory, which takes some milliseconds."""
        with contextlib.suppress(errors.Cancelled):  # the client is closed
            return bool(Call().run("lossd_client_open_memory", self._pointer, -1 if device is None else device))
        return False

    def check_usable(self) -> None:
        """ClientClosed or ForkedClient if the client cannot make calls. Unavailable if it is known that the server has ended."""
        if self._pid != os.getpid():
            raise errors.ForkedClient(f"this client was made in process {self._pid}, before a fork; make a lossd.Client in this process, "
                                      "or start processes with multiprocessing's spawn")
        if self.closed:
            raise errors.ClientClosed("this client is closed; make a new lossd.Client")
        if self._ended:
            raise errors.Unavailable(self._ended)

    def acknowledge_restart(self, head: str) -> None:
        """Says that the trainer starts the open step again, so that Restarted and StepDiscarded are not raised for it any more.

        Not needed after this client called load_checkpoint, create_head, reset_head, delete_head or zero_gradients for the head.
        """
        self.check_usable()
        self._library.lossd_client_acknowledge_restart(self._pointer, head.encode())

    def close(self) -> None:
        """Cancels the calls in flight, waits for them, and closes the connections. May be called again."""
        self.closed = True
        if self._pid != os.getpid():  # a forked process has no client
            return
        with self._lock:
            pending = list(self._pending)
        for each in pending:
            each.cancel()
        Call().run("lossd_client_close", self._pointer)
        self._sweep()

    def _fail(self, why: str) -> None:
        """Notes that the server has ended: calls in flight and later calls raise Unavailable with this reason."""
        self._ended = why
        self._library.lossd_client_close(self._pointer, None)

    def _meant(self, error: errors.LossdError) -> errors.LossdError:
        """The error that the caller should see for an error of a call."""
        if isinstance(error, errors.Cancelled):
            if self.closed:
                return errors.ClientClosed("this client was closed during the call")
            if self._ended:
                return errors.Unavailable(self._ended)
        return error

    def _call(self, method: str, request: Message, answer: type[M], timeout: float | None, *,
              payload: NDArray[Any] | None = None, head: Message | None = None, if_exists: int = 0,
              on_progress: Callable[[bytes], None] | None = None) -> M:
        """Calls one method of the services (lossd_client_request). `payload`: a C-contiguous array, read or written. `head`:
        for ReadTensor, the description `payload` was made for. `if_exists`: for CreateHead; 0: error, 1: keep, 2: reset."""
        self.check_usable()
        message = request.SerializeToString()
        asked = lossd_request(method=method.encode(), message=message, message_size=len(message),
                              timeout=0.0 if timeout is None else _positive(timeout), if_exists=if_exists)
        if payload is not None:
            asked.payload, asked.payload_size = payload.ctypes.data, payload.nbytes
            asked.shape, asked.dimensions = (ctypes.c_uint64 * payload.ndim)(*payload.shape), payload.ndim
        if head is not None:
            asked.head, asked.head_size = head.SerializeToString(), head.ByteSize()
        call = Call(asked, payload)

        def tell() -> None:
            if on_progress is not None and (told := call.progress()) is not None:
                on_progress(told)

        try:
            return answer.FromString(call.run("lossd_client_request", self._pointer, ctypes.byref(asked),
                                              meanwhile=None if on_progress is None else tell))
        except errors.Cancelled as error:
            raise self._meant(error) from None

    def _launch(self, pending: P, timeout: float | None, ready: Callable[[], None] | None) -> P:
        """Begins a computation as soon as there are fewer than max_pending."""
        seconds = self._loss_timeout if timeout is None else _positive(timeout)
        end = time.monotonic() + seconds
        self._sweep()
        enter = functools.partial(self._library.lossd_client_enter, self._pointer, pending._call.pointer, self._max_pending)
        if not _native.await_end(enter, seconds):
            raise errors.DeadlineExceeded(f"max_pending is {self._max_pending}, and none of so many loss computations has ended in time")
        try:
            with self._lock:
                self._pending.add(pending)
            pending._start(max(end - time.monotonic(), 1e-3), ready)
        except BaseException:  # an interrupt
            pending.cancel()
            pending._await_end()  # after this, the memory is not in use any more
            raise
        return pending

    def _sweep(self) -> None:
        """Forgets computations that have ended without a call of wait()."""
        with self._lock:
            self._pending = {each for each in self._pending if not each.done()}


# ---- Computations under way ----

class Pending(Generic[R]):
    """A computation in flight. Its inputs and outputs are in use until it is done."""

    _RESULT, _NAME = "the loss", "a loss computation that is under way"

    def __init__(self, client: NativeClient, asked: Asked, finish: Callable[[LossResult], R]) -> None:
        # The computation runs in the library, without a Python thread. `finish` makes the result from the server's answer.
        self._client = client
        self._asked: Asked | None = asked  # kept until the end
        self._of_rows = asked.rows
        self._finish = finish
        self._call = Call()
        if not client._library.lossd_check_loss(ctypes.byref(asked.arguments), self._call.pointer):
            self._call.answer()  # raises the reason
        self._lock = threading.Lock()  # guards _value, and _error from the end of the call on
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
        """Blocks until the result is there and returns it, or raises the computation's error. May be called again.

        TimeoutError after `timeout` seconds; the computation continues. An interrupt (KeyboardInterrupt) first ends the
        computation, so that its memory is free, and is raised then. A second interrupt is raised at once.
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
        """Asks the computation to end early with Cancelled; no effect when it is done. wait() returns when it has ended."""
        self._call.cancel()

    def _start(self, timeout: float, ready: Callable[[], None] | None) -> None:
        """Begins the computation. `ready` runs first, on a thread of its own unless it is `by_caller`."""
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
                    Call().run("lossd_await_stream", stream, address)
            except BaseException as error:
                self._error = error
                return self._call.cancel()
            begin()

        if ready is not None and getattr(ready, "by_caller", False):  # this thread waits for the result next
            ready()
            ready = None
        if ready is None and not asked.streams:
            return begin()
        try:
            _thread.start_new_thread(begin_when_ready, ())  # Thread.start() takes a lock that an interrupt may keep
        except RuntimeError:  # the interpreter is ending
            begin_when_ready()

    def _await_end(self, timeout: float | None = None) -> bool:
        """Whether the computation ends within `timeout` seconds; None: waits without a limit."""
        if not _native.await_end(self._call.wait, timeout):
            return False
        self._asked = None
        with self._client._lock:
            self._client._pending.discard(self)
        return True

    def _conclude(self) -> None:
        try:
            summary = loss_pb2.MicrobatchSummary.FromString(self._call.answer())
            self._value = self._finish(_result_of(summary, self._call.result()))
        except errors.LossdError as error:
            if error.field.startswith("open.targets") and self._of_rows != "hidden":  # for rows of an embedding
                error.reword(error.message.replace("open.targets", "ids", 1))
            if error.field == "hidden_size":
                said = f"{self._of_rows}: a row has {error.value} elements"
                error.reword(error.message.replace(f"hidden_size is {error.value}", said, 1))
            self._error = self._client._meant(error)


def _result_of(summary: loss_pb2.MicrobatchSummary, cost: lossd_result) -> LossResult:
    """The result of a call. Its fields have the same names as in the messages."""
    def same(message: Message, kind: Any) -> dict[str, Any]:
        return {name: getattr(message, name) for name in _common_names(message.DESCRIPTOR, kind)}

    depths = [DepthResult(depth.loss_sum / depth.normalizer if depth.valid_rows else 0.0, **same(depth, DepthResult))
              for depth in summary.depths]
    own = {"depths": depths, "objective": ObjectiveSums(**same(summary.objective, ObjectiveSums)),
           **{name: getattr(cost, name) for name in _COST}}
    return LossResult(**{**same(summary, LossResult), **same(summary.state, LossResult), **own})


class PendingLoss(Pending[LossResult]):
    """A loss computation in flight. Its inputs and outputs are in use until it is done."""


class PendingRows(Pending[EmbedResult]):
    """Rows of an embedding that were asked for. The memory for them is in use until they are there."""

    _RESULT, _NAME = "the last row", "rows that are on their way"


def waiting(begin: Callable[Concatenate[C, A], Pending[R]], result: type[R]) -> Callable[Concatenate[C, A], R]:
    """Makes the blocking method for `begin`, a method NAME_async: it has the same arguments, and waits for the result."""
    @functools.wraps(begin)
    def blocking(self: C, /, *arguments: A.args, **named: A.kwargs) -> R:
        begun: Pending[R] = getattr(self, begin.__name__)(*arguments, **named)
        return begun.wait()

    name = begin.__name__.removesuffix("_async")
    blocking.__name__, blocking.__qualname__ = name, begin.__qualname__.removesuffix("_async")
    blocking.__doc__ = f"As {begin.__name__}(), and waits for the result.\n\n{begin.__doc__}"
    blocking.__signature__ = inspect.signature(begin).replace(return_annotation=result.__name__)  # type: ignore[attr-defined]
    return blocking
