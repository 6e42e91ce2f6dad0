# SPDX-License-Identifier: Apache-2.0
"""What callers give as arrays, checked and in the form that is sent. InvalidArgument names what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lossd import errors, types
from lossd._row_memory import CudaRows, HostRows, RowMemory, is_cuda_array
from lossd.types import DType, RowOutput


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


def as_targets(targets: ArrayLike) -> NDArray[np.int32]:
    array = np.asarray(targets)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise errors.InvalidArgument(
            f"targets has shape {array.shape} and dtype {array.dtype}; it must be [N] of integers")
    classes = array.astype("<i4")
    beyond = np.flatnonzero(classes != array)  # of the 32 bits in which they travel
    if len(beyond):
        worst = int(beyond[0])
        raise errors.InvalidArgument(f"targets[{worst}] is {int(array[worst])}: not a class")
    return classes


def as_floats(name: str, values: ArrayLike | None) -> NDArray[np.float32] | None:
    if values is None:
        return None
    array = np.array(values, "<f4")
    if array.ndim != 1:
        raise errors.InvalidArgument(f"{name} has shape {array.shape}; it must be [N]")
    return array


def gradient_rows(wanted: Any, kind: DType, shape: tuple[int, int], hidden: RowMemory | None) -> tuple[Any, RowMemory | None]:
    """The array that gradients go to, and its rows; None: they are not wanted.

    `hidden`: the rows whose gradients they are, on the same device; None: the server has them.
    """
    element = types.NUMPY_DTYPES[kind]
    if isinstance(wanted, bool):
        if wanted and hidden is not None and hidden.device:
            raise errors.InvalidArgument("grad_hidden is True; for a CUDA array it must be one, to be written into, or False")
        array = np.empty(shape, element) if wanted else None
        return array, None if array is None else HostRows(array)
    if is_cuda_array(wanted):
        rows = CudaRows("grad_hidden", wanted)
        _check_gradient(rows.shape, rows.dtype, shape, element, rows.dtype.itemsize == element.itemsize == 2)
        if rows.read_only:
            raise errors.InvalidArgument("grad_hidden is a CUDA array that is not writeable")
        if hidden is not None and hidden.device != rows.device:
            raise errors.InvalidArgument(f"grad_hidden is on {rows.device}; hidden is on {hidden.device or 'the host'}")
        return wanted, rows
    _check_gradient(wanted.shape, wanted.dtype, shape, element)
    if not wanted.flags.c_contiguous or not wanted.flags.writeable:
        raise errors.InvalidArgument("grad_hidden must be C-contiguous and writeable")
    if hidden is not None and hidden.device:
        raise errors.InvalidArgument(f"grad_hidden is on the host; hidden is on {hidden.device}")
    return wanted, HostRows(wanted)


def _check_gradient(shape: tuple[int, ...], dtype: Any, needed_shape: tuple[int, int], needed: Any, bits: bool = False) -> None:
    """`bits`: any dtype of as many bits will do, as for bf16."""
    if tuple(shape) != needed_shape or not (bits or dtype == needed):
        raise errors.InvalidArgument(
            f"grad_hidden has shape {tuple(shape)} and dtype {dtype}; {needed_shape} and {needed} are needed")


def row_arrays(names: Iterable[RowOutput], rows: int) -> dict[RowOutput, NDArray[Any]]:
    arrays: dict[RowOutput, NDArray[Any]] = {}
    for name in names:
        if name not in types.ROW_OUTPUTS:
            raise errors.InvalidArgument(f"rows names {name!r}; there are {', '.join(types.ROW_OUTPUTS)}")
        arrays[name] = np.empty(rows, np.int32 if name == "argmax" else np.float32)
    return arrays
