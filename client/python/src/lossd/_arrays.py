# SPDX-License-Identifier: Apache-2.0
"""What callers give as arrays, checked and in the form that is sent. InvalidArgument names what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lossd import _native, errors, types
from lossd.types import Depth, DType, RowOutput


@dataclass(frozen=True)
class RowMemory:
    """Where a caller has rows: hidden states, or the place of their gradients; [N, D], C-contiguous."""

    address: int  # of the first row
    nbytes: int
    owner: Any  # keeps the memory
    device: str = ""  # the GPU, "GPU-..."; "": memory of the host
    stream: int | None = None  # of the GPU: what it has been given comes before the rows are read

    @property
    def pointer(self) -> int | None:
        return self.address if self.nbytes else None


def host_rows(array: NDArray[Any]) -> RowMemory:
    """`array` is C-contiguous; it is referred to, not copied."""
    return RowMemory(array.ctypes.data, array.nbytes, array)


@dataclass(frozen=True)
class Array:
    """An array of the host, or of a GPU as any library has it (`__cuda_array_interface__`); referred to, not copied."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    writeable: bool
    rows: RowMemory


def array_of(name: str, array: Any) -> Array:
    """InvalidArgument, naming the argument `name`, if it is not C-contiguous."""
    if not is_cuda_array(array):
        if not array.flags.c_contiguous:
            raise errors.InvalidArgument(f"{name} must be C-contiguous")
        return Array(array.shape, array.dtype, array.flags.writeable, host_rows(array))
    interface = array.__cuda_array_interface__
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    address, read_only = interface["data"]
    nbytes = int(np.prod(shape)) * dtype.itemsize
    if interface.get("strides") not in (None, _contiguous_strides(shape, dtype.itemsize)):
        raise errors.InvalidArgument(f"{name} is a CUDA array that is not C-contiguous")
    device = _native.gpu_of(name, address) if nbytes else ""
    return Array(shape, dtype, not read_only, RowMemory(address, nbytes, array, device, interface.get("stream")))


def _contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides))


def is_cuda_array(values: object) -> bool:
    return hasattr(values, "__cuda_array_interface__")


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
    if is_cuda_array(values):
        found = array_of(name, values)
        kind = _kind_of(name, found.dtype, dtype)
    else:
        kind, array = as_array(name, values, dtype)
        found = array_of(name, array)
    if len(found.shape) != 2:
        raise errors.InvalidArgument(f"{name} has shape {found.shape}; it must be [N, D]")
    return kind, (found.shape[0], found.shape[1]), found.rows


def rows_of_depths(values: Any, dtype: DType | None,
                   depths: Sequence[Depth]) -> tuple[DType, tuple[int, int], list[RowMemory]]:
    """as_rows() of hidden states, or of a list or tuple with an array for each depth: then as many rows."""
    if not depths or not isinstance(values, (list, tuple)):
        kind, shape, rows = as_rows("hidden", values, dtype)
        return kind, shape, [rows]
    if len(values) != len(depths):
        raise errors.InvalidArgument(f"hidden has {len(values)} arrays for {len(depths)} depths")
    found = [as_rows(f"hidden[{index}]", part, dtype) for index, part in enumerate(values)]
    kind, (_, width), _ = found[0]
    for index, ((other, shape, _), depth) in enumerate(zip(found, depths)):
        if other != kind or shape != (depth.rows, width):
            raise errors.InvalidArgument(f"hidden[{index}] has shape {shape} and is {other}; depths[{index}] needs "
                                         f"{(depth.rows, width)} and {kind}")
    parts = [rows for _, _, rows in found]
    _check_one_device("hidden", parts)
    return kind, (sum(depth.rows for depth in depths), width), parts


def _check_one_device(name: str, parts: Sequence[RowMemory]) -> None:
    devices = {part.device for part in parts if part.nbytes}
    if len(devices) > 1:
        raise errors.InvalidArgument(
            f"{name} has arrays on {' and '.join(sorted(device or 'the host' for device in devices))}; they must be on one")


def gradients_of_depths(wanted: Any, kind: DType, width: int, hidden: Sequence[RowMemory],
                        depths: Sequence[Depth]) -> tuple[Any, list[RowMemory]]:
    """gradient_rows() of hidden states with an array for each depth: a list of arrays."""
    if wanted is False:
        return None, []
    if wanted is True:
        wanted = [True] * len(depths)
    elif not isinstance(wanted, (list, tuple)) or len(wanted) != len(depths) or any(isinstance(part, bool) for part in wanted):
        raise errors.InvalidArgument(
            f"grad_hidden must be a bool or a list of {len(depths)} arrays, one for each depth, as hidden is")
    beside = next((part for part in hidden if part.nbytes), None)
    found = [gradient_rows(part, kind, (depth.rows, width), beside if depth.rows else None)
             for part, depth in zip(wanted, depths)]
    return [array for array, _ in found], [rows for _, rows in found if rows is not None]


def teacher_rows(values: Any, dtype: DType | None, kind: DType, rows: int,
                 hidden: Sequence[RowMemory]) -> tuple[RowMemory | None, int]:
    """Hidden states of a teacher and the size of one; `kind`, `rows`, `hidden`: of the hidden states beside them."""
    if values is None:
        return None, 0
    found, shape, memory = as_rows("teacher_hidden", values, dtype)
    if found != kind:
        raise errors.InvalidArgument(f"teacher_hidden is {found}; hidden is {kind}, and both travel as one")
    if shape[0] != rows:
        raise errors.InvalidArgument(f"teacher_hidden has {shape[0]} rows; hidden has {rows}")
    if shape[1] < 1:
        raise errors.InvalidArgument("teacher_hidden: a row has no elements")
    beside = next((part for part in hidden if part.nbytes), memory)
    if memory.nbytes:
        _check_beside("teacher_hidden", memory, beside)
    return memory, shape[1]


def _kind_of(name: str, found: np.dtype[Any], dtype: DType | None) -> DType:
    """Of a CUDA array, whose 16-bit integers may be the bits of bf16."""
    if found.kind in "iu" and found.itemsize == 2:
        if dtype == "bf16":
            return dtype
        raise errors.InvalidArgument(f'{name} has dtype {found}; pass dtype="bf16" if these are the bits of bf16')
    return as_array(name, np.empty((0, 0), found), dtype)[0]


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


def as_floats(name: str, values: ArrayLike, rows: int | None = None) -> NDArray[np.float32]:
    """A copy, one for each of `rows` rows; None: of as many as there are."""
    array = np.array(values, "<f4")
    if array.ndim != 1:
        raise errors.InvalidArgument(f"{name} has shape {array.shape}; it must be [N]")
    if rows is not None and len(array) != rows:
        raise errors.InvalidArgument(f"{name} has {len(array)} entries for {rows} rows")
    return array


def gradient_rows(wanted: Any, kind: DType, shape: tuple[int, int], hidden: RowMemory | None,
                  name: str = "grad_hidden") -> tuple[Any, RowMemory | None]:
    """The array that gradients go to, and its rows; None: they are not wanted.

    `hidden`: the rows whose gradients they are, on the same device; None: the server has them. `name`: of the argument.
    """
    element = types.NUMPY_DTYPES[kind]
    if isinstance(wanted, bool):
        if wanted and hidden is not None and is_cuda_array(hidden.owner):  # an empty one has no device
            raise errors.InvalidArgument("grad_hidden is True; for a CUDA array it must be one, to be written into, or False")
        array = np.empty(shape, element) if wanted else None
        return array, None if array is None else host_rows(array)
    found = array_of(name, wanted)
    bits = is_cuda_array(wanted) and found.dtype.itemsize == element.itemsize == 2  # other 16-bit dtypes will do, as for bf16
    if found.shape != shape or not (bits or found.dtype == element):
        raise errors.InvalidArgument(f"{name} has shape {found.shape} and dtype {found.dtype}; {shape} and {element} are needed")
    if not found.writeable:
        raise errors.InvalidArgument(f"{name} is {'a CUDA' if is_cuda_array(wanted) else 'an'} array that is not writeable")
    if hidden is not None:
        _check_beside(name, found.rows, hidden)
    return wanted, found.rows


def _check_beside(name: str, rows: RowMemory, hidden: RowMemory) -> None:
    if rows.device != hidden.device:
        raise errors.InvalidArgument(f"{name} is on {rows.device or 'the host'}; hidden is on {hidden.device or 'the host'}")


def row_arrays(names: Iterable[RowOutput], rows: int) -> dict[RowOutput, NDArray[Any]]:
    """For results [rows] each."""
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


def as_soft_targets(classes: ArrayLike | None, weights: ArrayLike | None, rows: int) -> dict[str, NDArray[Any]]:
    """target_classes and target_weights, [rows, K] each; {}: there are none."""
    if (classes is None) != (weights is None):
        raise errors.InvalidArgument("target_classes and target_weights come together")
    if classes is None or weights is None:
        return {}
    places, values = np.asarray(classes), np.array(weights, "<f4")
    if places.ndim != 2 or (places.dtype.kind not in "iu" and places.size) or len(places) != rows or places.shape[1] == 0:
        raise errors.InvalidArgument(
            f"target_classes has shape {places.shape} and dtype {places.dtype}; it must be [{rows}, K] of integers, K above 0")
    if values.shape != places.shape:
        raise errors.InvalidArgument(
            f"target_weights has shape {values.shape}; it must be {places.shape}, as target_classes")
    return {"target_classes": as_targets(places.reshape(-1), "target_classes").reshape(places.shape), "target_weights": values}


def class_arrays(classes: NDArray[np.int32] | None, top_k: int, rows: int) -> dict[str, NDArray[Any]]:
    """For results [rows, K] and [rows, top_k] each."""
    if top_k < 0:
        raise errors.InvalidArgument(f"top_k is {top_k}; it must be 0 or positive")
    arrays: dict[str, NDArray[Any]] = {}
    if classes is not None and classes.shape[-1]:
        arrays["class_logprobs"] = np.empty((rows, classes.shape[-1]), np.float32)
    if top_k:
        arrays["top_logprobs"] = np.empty((rows, top_k), np.float32)
        arrays["top_classes"] = np.empty((rows, top_k), np.int32)
    return arrays
