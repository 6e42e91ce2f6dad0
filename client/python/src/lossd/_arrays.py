# SPDX-License-Identifier: Apache-2.0
"""What callers give as arrays, checked and in the form that is sent. InvalidArgument names what is wrong."""

from __future__ import annotations

import bisect
import difflib
import functools
import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lossd import _cuda, errors, types
from lossd._regions import SharedRegion
from lossd.types import ClassOutput, Depth, DType, RowOutput


# Errors of calls with arguments that do not exist.

P = ParamSpec("P")
T = TypeVar("T")


def known_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose TypeError for an unknown keyword argument names the one that was probably meant.

    Its signature and documentation stay visible.
    """
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    called = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in names:
                raise TypeError(f"{called}() has no argument {name!r}{_suggestion(name, names)}")
        return function(*args, **kwargs)

    return checked


def _suggestion(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}"


# Where a caller has the rows of a microbatch: hidden states, or the place of their gradients; as bytes of [N, D].
#
# Memory of the host is used where it lies. Memory of a GPU is copied to and from a region, which is of the server's GPU
# unless only memory of the host is to be had.


class RowMemory(ABC):
    """Positions are in bytes from the first row on. Thread-safe for parts that do not overlap."""

    nbytes: int
    device: str = ""  # the GPU, "GPU-..."; "": memory of the host
    is_sent = True  # whether slices bring the rows

    def wait(self) -> None:
        """Blocks until the memory says that it may be read, if it can say that."""

    @abstractmethod
    def read(self, begin: int, end: int) -> memoryview:
        """A part, to be sent in a message."""

    @abstractmethod
    def write(self, begin: int, data: memoryview) -> None:
        """Takes what came in a message."""

    @abstractmethod
    def to_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        """Copies a part to a place in a region, of the same device; it is there when this returns."""

    @abstractmethod
    def from_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        """Fills a part from a place in a region; the place may be used again when this returns."""

    @abstractmethod
    def zero(self, begin: int, end: int) -> None:
        """Fills a part with zeros."""


class HostRows(RowMemory):
    """NumPy copies without the interpreter's lock."""

    def __init__(self, array: NDArray[Any]) -> None:
        """`array` is C-contiguous; it is referred to, not copied."""
        self._bytes = array.reshape(-1).view(np.uint8)
        self.nbytes = self._bytes.nbytes

    def read(self, begin: int, end: int) -> memoryview:
        return self._bytes[begin:end].data

    def write(self, begin: int, data: memoryview) -> None:
        self._bytes[begin:begin + data.nbytes] = np.frombuffer(data, np.uint8)

    def to_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        region.memory[offset:offset + end - begin] = self._bytes[begin:end]

    def from_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        self._bytes[begin:end] = region.memory[offset:offset + end - begin]

    def zero(self, begin: int, end: int) -> None:
        self._bytes[begin:end] = 0


class UnsentRows(RowMemory):
    """Rows that slices name and do not bring, since the server has them: only the rows that come back have a place."""

    is_sent = False
    nbytes = 0

    def __init__(self, device: str) -> None:
        """`device`: of the memory that the rows come to."""
        self.device = device

    def read(self, begin: int, end: int) -> memoryview:
        return memoryview(b"")

    def write(self, begin: int, data: memoryview) -> None:
        raise NotImplementedError

    def to_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        """The place in the region is taken for what comes back."""

    def from_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        raise NotImplementedError

    def zero(self, begin: int, end: int) -> None:
        raise NotImplementedError


class PairedRows(RowMemory):
    """Rows of a student and of its teacher, as slices bring them: the student's rows, then the teacher's. Only read.

    Positions are those of rows as wide as both.
    """

    def __init__(self, student: RowMemory, student_row: int, teacher: RowMemory, teacher_row: int) -> None:
        """`student_row`, `teacher_row`: bytes of one row. InvalidArgument if the two are on different devices."""
        if student.device != teacher.device:
            raise errors.InvalidArgument(f"teacher_hidden is on {teacher.device or 'the host'}; hidden is on "
                                         f"{student.device or 'the host'}")
        self.device = student.device
        self.nbytes = student.nbytes + teacher.nbytes
        self._parts = (student, student_row), (teacher, teacher_row)

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[RowMemory, int, int]]:
        width = sum(row for _, row in self._parts)
        for memory, row in self._parts:
            yield memory, begin // width * row, end // width * row

    def wait(self) -> None:
        for memory, _ in self._parts:
            memory.wait()

    def read(self, begin: int, end: int) -> memoryview:
        return memoryview(b"".join(memory.read(first, last) for memory, first, last in self._pieces(begin, end)))

    def write(self, begin: int, data: memoryview) -> None:
        raise NotImplementedError

    def to_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        for memory, first, last in self._pieces(begin, end):
            memory.to_region(first, last, region, offset)
            offset += last - first

    def from_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        raise NotImplementedError

    def zero(self, begin: int, end: int) -> None:
        raise NotImplementedError


class JoinedRows(RowMemory):
    """Rows that lie apart, one array behind the other. What is read or written at once lies in one of them."""

    def __init__(self, name: str, parts: Sequence[RowMemory]) -> None:
        """`parts`: at least one. InvalidArgument, naming the argument `name`, if they are on different devices."""
        self.device = next((part.device for part in parts if part.nbytes), "")
        for part in parts:
            if part.nbytes and part.device != self.device:
                raise errors.InvalidArgument(
                    f"{name} has depths on {self.device or 'the host'} and on {part.device or 'the host'}")
        self._parts = [part for part in parts if part.nbytes]
        self._ends = list(itertools.accumulate(part.nbytes for part in self._parts))
        self.nbytes = self._ends[-1] if self._ends else 0

    def _at(self, begin: int, end: int) -> tuple[RowMemory, int, int]:
        """The part that has these bytes, and their place in it."""
        part = self._parts[bisect.bisect_right(self._ends, begin)]
        before = self._ends[bisect.bisect_right(self._ends, begin)] - part.nbytes
        assert end - before <= part.nbytes
        return part, begin - before, end - before

    def wait(self) -> None:
        for part in self._parts:
            part.wait()

    def read(self, begin: int, end: int) -> memoryview:
        part, first, last = self._at(begin, end)
        return part.read(first, last)

    def write(self, begin: int, data: memoryview) -> None:
        part, first, _ = self._at(begin, begin + data.nbytes)
        part.write(first, data)

    def to_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        part, first, last = self._at(begin, end)
        part.to_region(first, last, region, offset)

    def from_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        part, first, last = self._at(begin, end)
        part.from_region(first, last, region, offset)

    def zero(self, begin: int, end: int) -> None:
        while begin < end:
            last = min(end, self._ends[bisect.bisect_right(self._ends, begin)])
            part, first, until = self._at(begin, last)
            part.zero(first, until)
            begin = last


class CudaRows(RowMemory):
    """An array of a GPU, as any library has it (`__cuda_array_interface__`)."""

    def __init__(self, name: str, array: Any) -> None:
        """InvalidArgument, naming the argument `name`, if it is not C-contiguous."""
        interface = array.__cuda_array_interface__
        self.array = array  # keeps the memory
        self.shape = tuple(interface["shape"])
        self.dtype = np.dtype(interface["typestr"])
        self._address, self.read_only = interface["data"]
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self._stream: int | None = interface.get("stream")
        if interface.get("strides") not in (None, _contiguous_strides(self.shape, self.dtype.itemsize)):
            raise errors.InvalidArgument(f"{name} is a CUDA array that is not C-contiguous")
        self._driver = _cuda.driver()
        self._number = self._driver.device_of(self._address) if self.nbytes else 0
        self.device = self._driver.uuid(self._number)

    def wait(self) -> None:
        """Waits for the stream that the array's interface names, if it names one."""
        if self._stream is not None:
            self._driver.wait(self._stream, self._number)

    def read(self, begin: int, end: int) -> memoryview:
        data = np.empty(end - begin, np.uint8)
        self._driver.copy(data.ctypes.data, self._address + begin, data.nbytes, self._number)
        return data.data

    def write(self, begin: int, data: memoryview) -> None:
        if data.nbytes:
            self._driver.copy(self._address + begin, np.frombuffer(data, np.uint8).ctypes.data, data.nbytes, self._number)

    def to_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        self._driver.copy(region.address + offset, self._address + begin, end - begin, self._copiers(region)[0])

    def from_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        self._driver.copy(self._address + begin, region.address + offset, end - begin, self._copiers(region)[1])

    def _copiers(self, region: SharedRegion) -> tuple[int, int]:
        """The GPUs that copy to the region and from it."""
        return (self._number, self._number) if region.mapping is None else region.mapping.copiers(self._number)

    def zero(self, begin: int, end: int) -> None:
        if end > begin:
            self._driver.fill_zeros(self._address + begin, end - begin, self._number)


def _contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides))


def is_cuda_array(values: object) -> bool:
    return hasattr(values, "__cuda_array_interface__")


def bytes_of(array: NDArray[Any]) -> memoryview:
    """The memory of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def as_array(name: str, values: NDArray[Any], dtype: DType | None) -> tuple[DType, NDArray[Any]]:
    array = np.asarray(values)
    if array.dtype.name == "bfloat16":  # of ml_dtypes
        array, dtype = array.view(np.uint16), dtype or "bf16"
    natural: dict[str, DType] = {"float32": "fp32", "float16": "fp16"}
    kind = dtype or natural.get(array.dtype.name)
    if kind is None:
        hint = '; pass dtype="bf16" if these are the bits of bf16' if array.dtype == np.uint16 else ""
        raise errors.InvalidArgument(f"{name} has dtype {array.dtype}; it must be float32, float16 or bf16{hint}")
    types.enum_value("dtype", types.DTYPES, kind)
    if array.dtype != types.NUMPY_DTYPES[kind]:
        raise errors.InvalidArgument(f"{name} has dtype {array.dtype}; {kind} lies in {types.NUMPY_DTYPES[kind].name}")
    return kind, np.ascontiguousarray(array)


def as_rows(name: str, values: Any, dtype: DType | None) -> tuple[DType, tuple[int, int], RowMemory]:
    """A matrix of the host or of a GPU: the type of its elements, its shape, and its rows."""
    rows: RowMemory
    if is_cuda_array(values):
        rows = CudaRows(name, values)
        kind, shape = _kind_of(name, rows, dtype), rows.shape
    else:
        kind, array = as_array(name, values, dtype)
        rows, shape = HostRows(array), array.shape
    if len(shape) != 2:
        raise errors.InvalidArgument(f"{name} has shape {shape}; it must be [N, D]")
    return kind, (shape[0], shape[1]), rows


def rows_of_depths(values: Any, dtype: DType | None, depths: Sequence[Depth]) -> tuple[DType, tuple[int, int], RowMemory]:
    """as_rows() of hidden states, or of a list or tuple with an array for each depth."""
    if not depths or not isinstance(values, (list, tuple)):
        return as_rows("hidden", values, dtype)
    if len(values) != len(depths):
        raise errors.InvalidArgument(f"hidden has {len(values)} arrays for {len(depths)} depths")
    found = [as_rows(f"hidden[{index}]", part, dtype) for index, part in enumerate(values)]
    kind, (_, width), _ = found[0]
    for index, ((other, shape, _), depth) in enumerate(zip(found, depths)):
        if other != kind or shape != (depth.rows, width):
            raise errors.InvalidArgument(f"hidden[{index}] has shape {shape} and is {other}; depths[{index}] needs "
                                         f"{(depth.rows, width)} and {kind}")
    return kind, (sum(depth.rows for depth in depths), width), JoinedRows("hidden", [rows for _, _, rows in found])


def gradients_of_depths(wanted: Any, kind: DType, width: int, hidden: RowMemory,
                        depths: Sequence[Depth]) -> tuple[Any, RowMemory | None]:
    """gradient_rows() of hidden states with an array for each depth: a list of arrays."""
    if wanted is False:
        return None, None
    if wanted is True:
        wanted = [True] * len(depths)
    elif not isinstance(wanted, (list, tuple)) or len(wanted) != len(depths) or any(isinstance(part, bool) for part in wanted):
        raise errors.InvalidArgument(
            f"grad_hidden must be a bool or a list of {len(depths)} arrays, one for each depth, as hidden is")
    found = [gradient_rows(part, kind, (depth.rows, width), hidden if depth.rows else None)
             for part, depth in zip(wanted, depths)]
    return [array for array, _ in found], JoinedRows("grad_hidden", [rows for _, rows in found if rows is not None])


def teacher_rows(values: Any, dtype: DType | None, kind: DType, rows: int) -> tuple[RowMemory | None, int]:
    """Hidden states of a teacher and the bytes of one; `kind`, `rows`: of the hidden states beside them."""
    if values is None:
        return None, 0
    found, shape, memory = as_rows("teacher_hidden", values, dtype)
    if found != kind:
        raise errors.InvalidArgument(f"teacher_hidden is {found}; hidden is {kind}, and both travel as one")
    if shape[0] != rows:
        raise errors.InvalidArgument(f"teacher_hidden has {shape[0]} rows; hidden has {rows}")
    if shape[1] < 1:
        raise errors.InvalidArgument("teacher_hidden: a row has no elements")
    return memory, shape[1] * types.NUMPY_DTYPES[kind].itemsize


def _kind_of(name: str, rows: CudaRows, dtype: DType | None) -> DType:
    """Of a CUDA array, whose 16-bit integers may be the bits of bf16."""
    if rows.dtype.kind in "iu" and rows.dtype.itemsize == 2:
        if dtype == "bf16":
            return dtype
        raise errors.InvalidArgument(f'{name} has dtype {rows.dtype}; pass dtype="bf16" if these are the bits of bf16')
    return as_array(name, np.empty((0, 0), rows.dtype), dtype)[0]


def ready_with(rows: RowMemory, ready: Callable[[], None] | None) -> Callable[[], None] | None:
    """What to wait for before the rows may be read."""
    if not rows.device:
        return ready

    def both() -> None:
        if ready is not None:
            ready()
        rows.wait()

    return both


@dataclass(frozen=True)
class SoftTargets:
    """[N, K] each."""

    classes: NDArray[np.int32]
    weights: NDArray[np.float32]

    @property
    def count(self) -> int:
        return self.classes.shape[1]


def as_targets(targets: ArrayLike, name: str = "targets") -> NDArray[np.int32]:
    array = np.asarray(targets)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise errors.InvalidArgument(
            f"{name} has shape {array.shape} and dtype {array.dtype}; it must be [N] of integers")
    classes = array.astype("<i4")
    beyond = np.flatnonzero(classes != array)  # of the 32 bits in which they travel
    if len(beyond):
        worst = int(beyond[0])
        raise errors.InvalidArgument(f"{name}[{worst}] is {int(array[worst])}: not a class")
    return classes


def as_floats(name: str, values: ArrayLike | None) -> NDArray[np.float32] | None:
    if values is None:
        return None
    array = np.array(values, "<f4")
    if array.ndim != 1:
        raise errors.InvalidArgument(f"{name} has shape {array.shape}; it must be [N]")
    return array


def gradient_rows(wanted: Any, kind: DType, shape: tuple[int, int], hidden: RowMemory | None,
                  name: str = "grad_hidden") -> tuple[Any, RowMemory | None]:
    """The array that gradients go to, and its rows; None: they are not wanted.

    `hidden`: the rows whose gradients they are, on the same device; None: the server has them. `name`: of the argument.
    """
    element = types.NUMPY_DTYPES[kind]
    if isinstance(wanted, bool):
        if wanted and hidden is not None and hidden.device:
            raise errors.InvalidArgument("grad_hidden is True; for a CUDA array it must be one, to be written into, or False")
        array = np.empty(shape, element) if wanted else None
        return array, None if array is None else HostRows(array)
    if is_cuda_array(wanted):
        rows = CudaRows(name, wanted)
        _check_gradient(name, rows.shape, rows.dtype, shape, element, rows.dtype.itemsize == element.itemsize == 2)
        if rows.read_only:
            raise errors.InvalidArgument(f"{name} is a CUDA array that is not writeable")
        if hidden is not None and hidden.device != rows.device:
            raise errors.InvalidArgument(f"{name} is on {rows.device}; hidden is on {hidden.device or 'the host'}")
        return wanted, rows
    _check_gradient(name, wanted.shape, wanted.dtype, shape, element)
    if not wanted.flags.c_contiguous or not wanted.flags.writeable:
        raise errors.InvalidArgument(f"{name} must be C-contiguous and writeable")
    if hidden is not None and hidden.device:
        raise errors.InvalidArgument(f"{name} is on the host; hidden is on {hidden.device}")
    return wanted, HostRows(wanted)


def _check_gradient(name: str, shape: tuple[int, ...], dtype: Any, needed_shape: tuple[int, int], needed: Any,
                    bits: bool = False) -> None:
    """`bits`: any dtype of as many bits will do, as for bf16."""
    if tuple(shape) != needed_shape or not (bits or dtype == needed):
        raise errors.InvalidArgument(
            f"{name} has shape {tuple(shape)} and dtype {dtype}; {needed_shape} and {needed} are needed")


def row_arrays(names: Iterable[RowOutput], rows: int) -> dict[RowOutput, NDArray[Any]]:
    arrays: dict[RowOutput, NDArray[Any]] = {}
    for name in names:
        if name not in types.ROW_OUTPUTS:
            raise errors.InvalidArgument(f"rows names {name!r}; there are {', '.join(types.ROW_OUTPUTS)}")
        arrays[name] = np.empty(rows, np.int32 if name == "argmax" else np.float32)
    return arrays


def as_classes(classes: ArrayLike | None, rows: int) -> NDArray[np.int32] | None:
    """[K] or [rows, K]."""
    if classes is None:
        return None
    array = np.asarray(classes)
    if array.ndim not in (1, 2) or (array.dtype.kind not in "iu" and array.size) or (array.ndim == 2 and len(array) != rows):
        raise errors.InvalidArgument(
            f"classes has shape {array.shape} and dtype {array.dtype}; it must be [K] or [{rows}, K] of integers")
    return as_targets(array.reshape(-1), "classes").reshape(array.shape)


def as_soft_targets(classes: ArrayLike | None, weights: ArrayLike | None, rows: int) -> SoftTargets | None:
    if (classes is None) != (weights is None):
        raise errors.InvalidArgument("target_classes and target_weights come together")
    if classes is None or weights is None:
        return None
    places, values = np.asarray(classes), np.array(weights, "<f4")
    if places.ndim != 2 or (places.dtype.kind not in "iu" and places.size) or len(places) != rows or places.shape[1] == 0:
        raise errors.InvalidArgument(
            f"target_classes has shape {places.shape} and dtype {places.dtype}; it must be [{rows}, K] of integers, K above 0")
    if values.shape != places.shape:
        raise errors.InvalidArgument(
            f"target_weights has shape {values.shape}; it must be {places.shape}, as target_classes")
    return SoftTargets(as_targets(places.reshape(-1), "target_classes").reshape(places.shape), values)


def class_arrays(classes: NDArray[np.int32] | None, top_k: int, rows: int) -> dict[ClassOutput, NDArray[Any]]:
    if top_k < 0:
        raise errors.InvalidArgument(f"top_k is {top_k}; it must be 0 or positive")
    arrays: dict[ClassOutput, NDArray[Any]] = {}
    if classes is not None and classes.shape[-1]:
        arrays["class_logprobs"] = np.empty((rows, classes.shape[-1]), np.float32)
    if top_k:
        arrays["top_logprobs"] = np.empty((rows, top_k), np.float32)
        arrays["top_classes"] = np.empty((rows, top_k), np.int32)
    return arrays
