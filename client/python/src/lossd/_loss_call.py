# SPDX-License-Identifier: Apache-2.0
"""Loss computations: their arguments, as the library takes them, and those under way."""

from __future__ import annotations

import _thread
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from lossd import _native, errors
from lossd._arrays import RowMemory, SoftTargets
from lossd._interrupts import Outcome
from lossd._native import BackwardArguments, Connections, DepthArguments, LossArguments
from lossd.types import (
    ClassOutput,
    Depth,
    DepthResult,
    EmbedResult,
    LossOptions,
    LossResult,
    ObjectiveSums,
    Reduction,
    RowOutput,
    whole_number,
)
from lossd.v1 import loss_pb2, types_pb2


# ---- Arguments ----


@dataclass(frozen=True)
class Arguments:
    """What one computation is asked, and what it refers to until it has ended."""

    for_library: LossArguments | BackwardArguments
    memory: tuple[Any, ...]
    head: str
    rows: str = "hidden"  # the caller's name of the rows, for errors
    streams: Sequence[tuple[int, int]] = ()  # to wait for before it begins, each with an address of its GPU


@dataclass(frozen=True)
class Outputs:
    """Where results go; written in place. Only what is there is computed and sent."""

    grad_hidden: Sequence[RowMemory] = ()  # one, or one for each depth; empty: not wanted
    rows: Mapping[RowOutput, NDArray[Any]] = field(default_factory=dict)  # [N] each
    classes: Mapping[ClassOutput, NDArray[Any]] = field(default_factory=dict)  # [N, K] or [N, k] each

    @property
    def class_count(self) -> int:
        return self.classes["class_logprobs"].shape[1] if "class_logprobs" in self.classes else 0

    @property
    def top_k(self) -> int:
        return self.classes["top_classes"].shape[1] if "top_classes" in self.classes else 0


@dataclass(frozen=True)
class Scale:
    reduction: Reduction
    normalizer: float | None  # mean only; None: the number of valid targets
    grad_output: float


@dataclass(frozen=True)
class Common:
    """What the arguments of loss, backward and embedding have in common."""

    head: str
    step: int | None
    id: int
    accumulate: bool
    rows: int
    hidden_size: int
    streams: int | None = None
    slice_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, least, bits in (("step", 0, 64), ("id", 0, 64), ("streams", 1, 31), ("slice_bytes", 1, 63)):
            if (value := getattr(self, name)) is not None:
                whole_number(name, value, least, bits)


def _pointer(array: NDArray[Any] | None) -> int | None:
    return None if array is None or array.size == 0 else int(array.ctypes.data)


def _of_rows(arguments: LossArguments | BackwardArguments, memory: Sequence[RowMemory | None]) -> list[tuple[int, int]]:
    """Says where rows are, and which stream comes before them. The library waits for one; returns those beside it
    (Arguments.streams)."""
    streams: dict[int, int] = {}
    for each in memory:
        if each is not None and each.nbytes and each.device:
            arguments.on_device = 1
            if each.stream is not None:
                streams.setdefault(each.stream, each.address)
    if not streams:
        return []
    (stream, _), *others = streams.items()
    arguments.has_stream, arguments.stream = 1, stream
    return others


def forward(call: Common, *, hidden: Sequence[RowMemory], hidden_dtype: types_pb2.DType, targets: NDArray[np.int32],
            row_weights: NDArray[np.float32] | None, options: LossOptions, scale: Scale, reduction: loss_pb2.Reduction,
            retain: bool, outputs: Outputs, numbers: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
            teacher: RowMemory | None = None, teacher_hidden_size: int = 0, classes: NDArray[np.int32] | None = None,
            soft: SoftTargets | None = None, depths: Sequence[Depth] = ()) -> Arguments:
    """Of a loss. `hidden`: one, or one for each depth. `numbers`: those of options.objective, by name. `classes`: [K] or [N, K],
    those that outputs.classes is for. `soft`: with options.rest."""
    weights = {} if row_weights is None else {"row_weights": row_weights}
    for name, values in {**weights, **numbers}.items():
        if len(values) != call.rows:
            raise errors.InvalidArgument(f"{name} has {len(values)} entries for {call.rows} rows")
    _check_objective(options, scale, numbers)
    if soft is not None and (outputs.class_count or outputs.top_k):
        raise errors.InvalidArgument("classes and top_k are not for rows with soft targets (options.rest)")

    open_ = loss_pb2.OpenMicrobatch(
        head=call.head, step=call.step, microbatch_id=call.id, hidden_dtype=hidden_dtype, options=options.to_proto(),
        reduction=reduction, normalizer=scale.normalizer, grad_output=scale.grad_output,
        accumulate_gradients=call.accumulate, retain=retain, class_count=outputs.class_count, top_k=outputs.top_k,
        target_count=0 if soft is None else soft.count)
    packed = open_.SerializeToString()
    apart = len(hidden) > 1 or (len(hidden) == len(depths) == 1)
    grads = outputs.grad_hidden
    parts = (DepthArguments * len(depths))(*(
        DepthArguments(depth.rows, hidden[index].pointer if apart else None,
                       grads[index].pointer if apart and grads else None, depth.normalizer or 0.0, depth.weight,
                       depth.normalizer is not None)
        for index, depth in enumerate(depths)))
    rows, of_classes = outputs.rows, outputs.classes
    arguments = LossArguments(
        open=packed, open_size=len(packed), rows=call.rows, hidden_size=call.hidden_size,
        hidden=None if apart else hidden[0].pointer,
        grad_hidden=grads[0].pointer if grads and not apart else None,
        teacher_hidden=None if teacher is None else teacher.pointer, teacher_hidden_size=teacher_hidden_size,
        targets=_pointer(targets), row_weights=_pointer(row_weights), advantages=_pointer(numbers.get("advantages")),
        old_logprobs=_pointer(numbers.get("old_logprobs")), ref_logprobs=_pointer(numbers.get("ref_logprobs")),
        classes=_pointer(classes), classes_size=0 if classes is None else classes.size,
        target_classes=None if soft is None else _pointer(soft.classes),
        target_weights=None if soft is None else _pointer(soft.weights),
        depths=parts, depth_count=len(depths),
        row_loss=_pointer(rows.get("loss")), row_lse=_pointer(rows.get("lse")), row_entropy=_pointer(rows.get("entropy")),
        row_logprob=_pointer(rows.get("logprob")), row_argmax=_pointer(rows.get("argmax")),
        class_logprobs=_pointer(of_classes.get("class_logprobs")), top_logprobs=_pointer(of_classes.get("top_logprobs")),
        top_classes=_pointer(of_classes.get("top_classes")), slice_bytes=call.slice_bytes or 0, streams=call.streams or 0)
    streams = _of_rows(arguments, [*hidden, teacher, *grads])
    memory = (packed, parts, hidden, teacher, targets, row_weights, dict(numbers), classes, soft, outputs)
    return Arguments(arguments, memory, call.head, streams=streams)


def _check_objective(options: LossOptions, scale: Scale, numbers: Mapping[str, Any]) -> None:
    objective = options.objective
    needed = () if objective is None else objective.numbers
    for name in ("advantages", "old_logprobs", "ref_logprobs"):
        if name in needed and name not in numbers:
            raise errors.InvalidArgument(f"{name} is None; objective {objective} needs one for each row")
        if name in numbers and name not in needed:
            raise errors.InvalidArgument(f"{name} is given, but objective {objective} does not use it")
    if objective is not None and scale.reduction == "none":
        raise errors.InvalidArgument("reduction is 'none'; with an objective it must be 'sum' or 'mean'")


def backward(call: Common, *, hidden_dtype: types_pb2.DType, grad_loss: NDArray[np.float32], grad_lse: NDArray[np.float32] | None,
             grad_entropy: NDArray[np.float32] | None, grad_hidden: Sequence[RowMemory]) -> Arguments:
    """Of gradients of rows that the server retained."""
    for name, values in (("grad_lse", grad_lse), ("grad_entropy", grad_entropy)):
        if values is not None and len(values) != call.rows:
            raise errors.InvalidArgument(f"{name} has {len(values)} entries for {call.rows} rows")
    packed = loss_pb2.OpenBackward(head=call.head, step=call.step, microbatch_id=call.id,
                                   accumulate_gradients=call.accumulate).SerializeToString()
    arguments = BackwardArguments(
        open=packed, open_size=len(packed), rows=call.rows, hidden_size=call.hidden_size, hidden_dtype=hidden_dtype,
        grad_loss=_pointer(grad_loss), grad_lse=_pointer(grad_lse), grad_entropy=_pointer(grad_entropy),
        grad_hidden=grad_hidden[0].pointer if grad_hidden else None, streams=call.streams or 0)
    streams = _of_rows(arguments, grad_hidden)
    return Arguments(arguments, (packed, grad_loss, grad_lse, grad_entropy, grad_hidden), call.head, streams=streams)


def embedding(call: Common, *, ids: NDArray[np.int32], padding_idx: int | None, dtype: types_pb2.DType,
              gradients: RowMemory | None, scale: float, place: RowMemory | None) -> Arguments:
    """Of rows of the weight, one for each id, which go to `place`; or of their `gradients`, which join that of the weight, times
    `scale`: those of ids that are `padding_idx` are left out."""
    if (ids < 0).any():
        row = int((ids < 0).argmax())
        raise errors.InvalidArgument(f"ids[{row}] is {ids[row]}; an id is a row of the weight, so it must not be negative",
                                     types_pb2.ErrorDetail(field=f"ids[{row}]", value=str(ids[row])))
    if not math.isfinite(scale):
        raise errors.InvalidArgument(f"scale is {scale}; it must be finite")
    open_ = loss_pb2.OpenMicrobatch(
        head=call.head, step=call.step, microbatch_id=call.id, hidden_dtype=dtype,
        options=loss_pb2.LossOptions(ignore_index=padding_idx), reduction=loss_pb2.REDUCTION_SUM,
        accumulate_gradients=call.accumulate,
        embedding=loss_pb2.EMBEDDING_ROWS if gradients is None else loss_pb2.EMBEDDING_GRADIENTS)
    if gradients is not None:
        open_.grad_output = scale
    packed = open_.SerializeToString()
    arguments = LossArguments(
        open=packed, open_size=len(packed), rows=call.rows, hidden_size=call.hidden_size,
        hidden=None if gradients is None else gradients.pointer, grad_hidden=None if place is None else place.pointer,
        targets=_pointer(ids), slice_bytes=call.slice_bytes or 0, streams=call.streams or 0)
    streams = _of_rows(arguments, [gradients, place])
    return Arguments(arguments, (packed, ids, gradients, place), call.head, "out" if gradients is None else "gradients",
                     streams)


# ---- Computations under way ----


class LossCall:
    """One that runs in the library, on no thread of Python. What it refers to is kept until it has ended. Thread-safe."""

    def __init__(self, connections: Connections, arguments: Arguments, on_end: Callable[[LossCall], None]) -> None:
        """`on_end` is called when its end has been noticed, maybe more than once."""
        self._connections = connections
        self._on_end = on_end
        self._arguments: Arguments | None = arguments
        self._head, self._rows = arguments.head, arguments.rows
        self._call = _native.Call()
        connections.check(arguments.for_library, self._call)
        self._begun: Outcome[None] | None = None  # of what has to be there before it begins
        self._lock = threading.Lock()  # guards what follows
        self._result: LossResult | None = None
        self._error: BaseException | None = None

    def enter(self, most: int, seconds: float) -> bool:
        """Whether it has got one of the client's places within so many seconds."""
        return self._connections.enter(self._call, most, seconds)

    def start(self, timeout: float, ready: Callable[[], None] | None) -> None:
        """`ready` runs on a thread of its own before the computation begins."""
        assert self._arguments is not None
        arguments: Arguments = self._arguments
        arguments.for_library.timeout = timeout

        def begin() -> None:
            try:
                if ready is not None:
                    ready()
                for stream, address in arguments.streams:
                    _native.await_stream(stream, address)
            except BaseException:
                self._call.cancel()
                raise
            self._connections.compute(arguments.for_library, self._call)

        if ready is None and not arguments.streams:
            return begin()
        begun: Outcome[None] = Outcome()
        self._begun = begun
        try:
            _thread.start_new_thread(begun.run, (begin,))  # Thread.start() takes a lock that an interrupt may keep
        except RuntimeError:  # the interpreter is ending
            begun.run(begin)

    def cancel(self) -> None:
        self._call.cancel()

    def done(self) -> bool:
        """Whether it has ended."""
        return (self._begun is None or self._begun.done()) and self._call.wait(0.0)

    def await_end(self, timeout: float | None = None) -> bool:
        """Whether it has ended within so many seconds; None: waits without a limit."""
        clock = _native.Clock(timeout)
        if self._begun is not None and not self._begun.await_end(timeout):
            return False
        if not _native.await_end(self._call, clock.left()):
            return False
        self._arguments = None
        self._on_end(self)
        return True

    def result(self) -> LossResult:
        """Of one that has ended; the same object each time. Raises what went wrong."""
        with self._lock:
            if self._result is None and self._error is None:
                self._conclude()
            if self._error is not None:
                raise self._error
            assert self._result is not None
            return self._result

    def _conclude(self) -> None:
        if self._begun is not None:
            try:
                self._begun.result()
            except BaseException as failed:
                self._error = failed
                return
        error = self._call.error()
        if error is not None:
            if error.field == "hidden_size":
                self._connections.sizes.pop(self._head, None)
                error.replace(f"hidden_size is {error.value}", f"{self._rows}: a row has {error.value} elements")
            self._error = self._connections.meant(error)
            return
        self._result = _result_of(loss_pb2.MicrobatchSummary.FromString(self._call.answer()), self._call.cost())


def _result_of(summary: loss_pb2.MicrobatchSummary, cost: _native.Cost) -> LossResult:
    """Fields have the names that they have in the messages."""
    def same(message: Any, kind: type[Any]) -> dict[str, Any]:
        return {each.name: getattr(message, each.name) for each in fields(kind) if each.name in message.DESCRIPTOR.fields_by_name}

    depths = [DepthResult(**same(depth, DepthResult)) for depth in summary.depths]
    for depth in depths:
        depth.loss = depth.loss_sum / depth.normalizer if depth.valid_rows else 0.0
    values: dict[str, Any] = {
        **same(summary, LossResult), **same(summary.state, LossResult), "depths": depths,
        "objective": ObjectiveSums(**same(summary.objective, ObjectiveSums)),
        **{name: getattr(cost, name) for name, *_ in cost._fields_}}
    return LossResult(**values)


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
        return self._call.done()

    def wait(self, timeout: float | None = None) -> R:
        """Blocks until the result is there and returns it, or raises what went wrong. May be repeated.

        TimeoutError after `timeout` seconds; the computation goes on. An interrupt (KeyboardInterrupt) ends the
        computation before it is passed on, so that the memory is free; a second one is passed on at once.
        """
        try:
            ended = self._call.await_end(timeout)
        except BaseException:
            self._call.cancel()
            self._call.await_end()
            raise
        if not ended:
            raise TimeoutError(f"{self._WHAT} is not there after {timeout} s")
        return self._result(self._call.result())

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
