# SPDX-License-Identifier: Apache-2.0
"""Checks the arrays that callers give and converts them to the form that is sent. InvalidArgument names what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lossd import _native, errors, types
from lossd.types import Depth, DType, RowOutput
from lossd.v1 import types_pb2


@dataclass(frozen=True)
class Array:
    """A C-contiguous array in host memory, or in GPU memory of any library (`__cuda_array_interface__`). Does not copy the memory."""

    owner: Any  # keeps the memory alive
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    address: int
    writeable: bool
    device: str = ""  # the UUID of the GPU, "GPU-..."; "": host memory
    stream: int | None = None  # a stream of the GPU: the rows are read after the work that was enqueued on it

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def place(self) -> str:
        return self.device or "the host"


def array_of(name: str, array: Any) -> Array:
    """The Array of `array`, which may be one already. InvalidArgument, naming the argument `name`, if it is not C-contiguous."""
    if isinstance(array, Array):
        return array
    if not is_cuda_array(array):
        if not array.flags.c_contiguous:
            raise errors.InvalidArgument(f"{name} must be C-contiguous")
        return Array(array, array.shape, array.dtype, array.ctypes.data, array.flags.writeable)
    interface = array.__cuda_array_interface__
    shape, dtype, (address, read_only) = tuple(interface["shape"]), np.dtype(interface["typestr"]), interface["data"]
    contiguous = tuple(dtype.itemsize * math.prod(shape[axis + 1:]) for axis in range(len(shape)))
    if interface.get("strides") not in (None, contiguous):
        raise errors.InvalidArgument(f"{name} is a CUDA array that is not C-contiguous")
    device = _native.gpu_of(name, address) if math.prod(shape) else ""
    return Array(array, shape, dtype, address, not read_only, device, interface.get("stream"))


def is_cuda_array(values: object) -> bool:
    return values.device != "" if isinstance(values, Array) else hasattr(values, "__cuda_array_interface__")


def _kind_of(name: str, found: np.dtype[Any], dtype: DType | None, on_gpu: bool = False) -> DType:
    """The type of elements whose type in memory is `found`. An array on a GPU may hold the bits of bf16 as any 16-bit integers."""
    bits = found == np.uint16 or (on_gpu and found.kind in "iu" and found.itemsize == 2)
    if bits and dtype == "bf16":
        return dtype
    natural: dict[str, DType] = {"float32": "fp32", "float16": "fp16"}
    kind = dtype or natural.get(found.name)
    if kind is None:
        hint = '; pass dtype="bf16" if these are the bits of bf16' if bits else ""
        raise errors.InvalidArgument(f"{name} has dtype {found}; it must be float32, float16 or bf16{hint}")
    types.enum_value("dtype", types.DTYPES, kind)
    if found != types.NUMPY_DTYPES[kind]:
        raise errors.InvalidArgument(f"{name} has dtype {found}; {kind} lies in {types.NUMPY_DTYPES[kind].name}")
    return kind


def as_array(name: str, values: NDArray[Any], dtype: DType | None) -> tuple[DType, NDArray[Any]]:
    array = np.asarray(values)
    if array.dtype.name == "bfloat16":  # the type of the package ml_dtypes
        array, dtype = array.view(np.uint16), dtype or "bf16"
    return _kind_of(name, array.dtype, dtype), np.ascontiguousarray(array)


def as_rows(name: str, values: Any, dtype: DType | None) -> tuple[DType, Array]:
    """A matrix in memory of the host or of a GPU, and the type of its elements."""
    if is_cuda_array(values):
        found = array_of(name, values)
        kind = _kind_of(name, found.dtype, dtype, on_gpu=True)
    else:
        kind, array = as_array(name, values, dtype)
        found = array_of(name, array)
    if len(found.shape) != 2:
        raise errors.InvalidArgument(f"{name} has shape {found.shape}; it must be [N, D]")
    return kind, found


def rows_of_depths(values: Any, dtype: DType | None, depths: Sequence[Depth]) -> tuple[DType, list[Array]]:
    """Like as_rows(), for hidden states that are one array, or a list or tuple with one array for each depth."""
    if not depths or not isinstance(values, (list, tuple)):
        kind, rows = as_rows("hidden", values, dtype)
        return kind, [rows]
    if len(values) != len(depths):
        raise errors.InvalidArgument(f"hidden has {len(values)} arrays for {len(depths)} depths")
    found = [as_rows(f"hidden[{index}]", part, dtype) for index, part in enumerate(values)]
    kind, width = found[0][0], found[0][1].shape[1]
    for index, ((other, part), depth) in enumerate(zip(found, depths)):
        if other != kind or part.shape != (depth.rows, width):
            raise errors.InvalidArgument(f"hidden[{index}] has shape {part.shape} and is {other}; depths[{index}] needs "
                                         f"{(depth.rows, width)} and {kind}")
    places = sorted({part.place for _, part in found if part.nbytes})
    if len(places) > 1:
        raise errors.InvalidArgument(f"hidden has arrays on {' and '.join(places)}; they must be on one")
    return kind, [part for _, part in found]


def gradients_of(wanted: Any, kind: DType, hidden: Sequence[Array], apart: bool) -> tuple[Any, list[Array]]:
    """Like gradient_rows(), for hidden states that are one array or, if `apart`, one for each depth. Returns what the caller
    gets, and the arrays that the gradients are written to."""
    if not apart:
        whole, place = gradient_rows(wanted, kind, hidden[0].shape, hidden[0])
        return whole, [] if place is None else [place]
    if wanted is False:
        return None, []
    if wanted is True:
        wanted = [True] * len(hidden)
    elif not isinstance(wanted, (list, tuple)) or len(wanted) != len(hidden) or any(isinstance(part, bool) for part in wanted):
        raise errors.InvalidArgument(f"grad_hidden must be a bool or a list of {len(hidden)} arrays, one for each depth, as hidden is")
    beside = next((part for part in hidden if part.nbytes), None)
    found = [gradient_rows(each, kind, part.shape, beside if part.shape[0] else None) for each, part in zip(wanted, hidden)]
    return [array for array, _ in found], [place for _, place in found if place is not None]


def gradient_rows(wanted: Any, kind: DType, shape: tuple[int, ...], hidden: Array | None,
                  name: str = "grad_hidden") -> tuple[Any, Array | None]:
    """The array for gradients: as the caller gets it, and as it is sent. None: no gradients are wanted.

    `hidden`: the rows of these gradients, on the same device; None: no rows, or only the server has them. `name`: the argument's name.
    """
    element = types.NUMPY_DTYPES[kind]
    if isinstance(wanted, (bool, np.bool_)):
        if wanted and hidden is not None and is_cuda_array(hidden.owner):  # an empty array has no device
            raise errors.InvalidArgument("grad_hidden is True; for a CUDA array it must be one, to be written into, or False")
        array = np.empty(shape, element) if wanted else None
        return array, None if array is None else array_of(name, array)
    if not isinstance(wanted, np.ndarray) and not is_cuda_array(wanted):
        raise TypeError(f"{name} is {wanted!r}; it must be an array{' or a bool' if name == 'grad_hidden' else ''}")
    found = array_of(name, wanted)
    # A CUDA array may hold the bits in any 16-bit dtype.
    bits = is_cuda_array(wanted) and found.dtype.itemsize == element.itemsize == 2
    if found.shape != shape or not (bits or found.dtype == element):
        raise errors.InvalidArgument(f"{name} has shape {found.shape} and dtype {found.dtype}; {shape} and {element} are needed")
    if not found.writeable:
        raise errors.InvalidArgument(f"{name} is {'a CUDA' if is_cuda_array(wanted) else 'an'} array that is not writeable")
    if hidden is not None and found.device != hidden.device:
        raise errors.InvalidArgument(f"{name} is on {found.place}; hidden is on {hidden.place}")
    return wanted, found


def teacher_rows(values: Any, dtype: DType | None, kind: DType, count: int, hidden: Sequence[Array]) -> Array | None:
    """The hidden states of a teacher. `kind`, `count` and `hidden` belong to the student's hidden states."""
    if values is None:
        return None
    found, rows = as_rows("teacher_hidden", values, dtype)
    if found != kind:
        raise errors.InvalidArgument(f"teacher_hidden is {found}; hidden is {kind}, and both travel as one")
    if rows.shape[0] != count:
        raise errors.InvalidArgument(f"teacher_hidden has {rows.shape[0]} rows; hidden has {count}")
    beside = next((part for part in hidden if part.nbytes), rows)
    if rows.nbytes and rows.device != beside.device:
        raise errors.InvalidArgument(f"teacher_hidden is on {rows.place}; hidden is on {beside.place}")
    return rows


def _classes(name: str, values: ArrayLike, form: str, has_form: Callable[[NDArray[Any]], bool]) -> NDArray[np.int32]:
    """Class numbers as int32, in an array of the same shape."""
    array = np.asarray(values)
    if not has_form(array) or (array.dtype.kind not in "iu" and array.size):
        raise errors.InvalidArgument(f"{name} has shape {array.shape} and dtype {array.dtype}; it must be {form}")
    classes = array.astype("<i4", order="C")
    if array.dtype != np.int32 and not np.array_equal(classes, array):  # it has numbers that do not fit into 32 bits
        worst = int(np.flatnonzero(classes != array)[0])
        raise errors.InvalidArgument(f"{name}[{worst}] is {int(array.reshape(-1)[worst])}: not a class")
    return classes


def as_targets(targets: ArrayLike, name: str = "targets") -> NDArray[np.int32]:
    return _classes(name, targets, "[N] of integers", lambda array: array.ndim == 1 or array.size == 0).reshape(-1)


def as_ids(ids: ArrayLike) -> NDArray[np.int32]:
    """Row numbers of a weight. InvalidArgument if one is negative."""
    numbers = as_targets(ids, "ids")
    if (numbers < 0).any():
        row = int((numbers < 0).argmax())
        raise errors.InvalidArgument(f"ids[{row}] is {numbers[row]}; an id is a row of the weight, so it must not be negative",
                                     types_pb2.ErrorDetail(field=f"ids[{row}]", value=str(numbers[row])))
    return numbers


def as_classes(classes: ArrayLike | None, rows: int) -> NDArray[np.int32] | None:
    """Class numbers of shape [K] or [rows, K]."""
    return None if classes is None else _classes("classes", classes, f"[K] or [{rows}, K] of integers",
                                                 lambda array: array.ndim == 1 or (array.ndim == 2 and len(array) == rows))


def as_soft_targets(classes: ArrayLike | None, weights: ArrayLike | None, rows: int) -> dict[str, NDArray[Any]]:
    """The arguments target_classes and target_weights, [rows, K] each; {} if they are not given."""
    if (classes is None) != (weights is None):
        raise errors.InvalidArgument("target_classes and target_weights come together")
    if classes is None or weights is None:
        return {}
    places = _classes("target_classes", classes, f"[{rows}, K] of integers, K above 0",
                      lambda array: array.ndim == 2 and len(array) == rows and array.shape[1] > 0)
    values = np.array(weights, "<f4", order="C")
    if values.shape != places.shape:
        raise errors.InvalidArgument(f"target_weights has shape {values.shape}; it must be {places.shape}, as target_classes")
    return {"target_classes": places, "target_weights": values}


def as_floats(name: str, values: ArrayLike, rows: int | None = None) -> NDArray[np.float32]:
    """A copy with one value for each of `rows` rows; None: of any length."""
    array = np.array(values, "<f4")
    if array.ndim != 1:
        raise errors.InvalidArgument(f"{name} has shape {array.shape}; it must be [N]")
    if rows is not None and len(array) != rows:
        raise errors.InvalidArgument(f"{name} has {len(array)} entries for {rows} rows")
    return array


def row_arrays(names: Iterable[RowOutput], rows: int) -> dict[RowOutput, NDArray[Any]]:
    """The arrays for results of shape [rows]."""
    arrays: dict[RowOutput, NDArray[Any]] = {}
    for name in names:
        if name not in types.ROW_OUTPUTS:
            raise errors.InvalidArgument(f"rows names {name!r}; there are {', '.join(types.ROW_OUTPUTS)}")
        arrays[name] = np.empty(rows, np.int32 if name == "argmax" else np.float32)
    return arrays


def class_arrays(classes: NDArray[np.int32] | None, top_k: int, rows: int) -> dict[str, NDArray[Any]]:
    """The arrays for results of shapes [rows, K] and [rows, top_k]."""
    arrays: dict[str, NDArray[Any]] = {}
    if classes is not None and classes.shape[-1]:
        arrays["class_logprobs"] = np.empty((rows, classes.shape[-1]), np.float32)
    if top_k:
        arrays["top_logprobs"] = np.empty((rows, top_k), np.float32)
        arrays["top_classes"] = np.empty((rows, top_k), np.int32)
    return arrays
