"""What callers give as arrays, checked and in the form that is sent. InvalidArgument names what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lossd import errors, types
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


def as_matrix(name: str, values: NDArray[Any], dtype: DType | None) -> tuple[DType, NDArray[Any]]:
    kind, array = as_array(name, values, dtype)
    if array.ndim != 2:
        raise errors.InvalidArgument(f"{name} has shape {array.shape}; it must be [N, D]")
    return kind, array


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


def gradient_array(wanted: bool | NDArray[Any], like: NDArray[Any]) -> NDArray[Any] | None:
    if isinstance(wanted, bool):
        return np.empty(like.shape, like.dtype) if wanted else None
    if wanted.shape != like.shape or wanted.dtype != like.dtype:
        raise errors.InvalidArgument(
            f"grad_hidden has shape {wanted.shape} and dtype {wanted.dtype}; {like.shape} and {like.dtype} are needed")
    if not wanted.flags.c_contiguous or not wanted.flags.writeable:
        raise errors.InvalidArgument("grad_hidden must be C-contiguous and writeable")
    return wanted


def row_arrays(names: Iterable[RowOutput], rows: int) -> dict[RowOutput, NDArray[Any]]:
    arrays: dict[RowOutput, NDArray[Any]] = {}
    for name in names:
        if name not in types.ROW_OUTPUTS:
            raise errors.InvalidArgument(f"rows names {name!r}; there are {', '.join(types.ROW_OUTPUTS)}")
        arrays[name] = np.empty(rows, np.int32 if name == "argmax" else np.float32)
    return arrays
