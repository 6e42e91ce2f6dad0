# SPDX-License-Identifier: Apache-2.0
"""What a LossHead is given: checks before anything is sent, and what travels of it."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lossd import errors, types
from lossd._arrays import as_targets
from lossd.torch import _memory
from lossd.v1 import types_pb2

# ---- Arguments of LossHead ----


def check_words(client: Any, head: Any, reduction: Any, state: Any) -> None:
    """TypeError or ValueError that names the argument."""
    if not hasattr(client, "compute_loss_async"):
        raise TypeError(f"client is {_a(client)}; it must be a lossd.Client: LossHead(client, head)")
    if not isinstance(head, str):
        raise TypeError(f"head is {_a(head)}; it must be the name of a head on the server, a str")
    types.enum_value("reduction", types.REDUCTIONS, reduction)
    if state not in ("checkpoint", "none"):
        raise ValueError(f"state is {state!r}; it must be 'checkpoint' or 'none'")


def check_numbers(required: dict[str, Any], optional: dict[str, Any]) -> None:
    """TypeError if one is not a number; an optional one may be None."""
    for name, value in {**required, **optional}.items():
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            continue
        if value is None and name in optional:
            continue
        rule = "a number or None" if name in optional else "a number"
        raise TypeError(f"{name} is {value!r}; it must be {rule}")


def number(name: str, value: Any) -> float:
    """Of a number, or a tensor or array that holds one."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} is {value!r}; it must be a number") from None


def check_integer(name: str, value: Any) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be an integer")


def check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if not isinstance(value, (bool, int, np.bool_)):
            raise TypeError(f"{name} is {value!r}; it must be True or False")


def names_of_extras(extras: Any, known: tuple[str, ...]) -> tuple[Any, ...]:
    """`extras` as a tuple of some of those `known`."""
    if isinstance(extras, str) or not isinstance(extras, Iterable):
        shown = (extras,) if isinstance(extras, str) else ("lse",)
        raise TypeError(f"extras is {extras!r}; it must be a tuple or list of names: extras={shown!r}")
    names = tuple(extras)
    for name in names:
        if name not in known:
            raise ValueError(f"extras names {name!r}; there are {', '.join(known)}")
    return names


def _a(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")


# ---- Arguments of forward ----


def check_tensors(hidden: Any, targets: Any, row_weights: Any) -> None:
    """TypeError or RuntimeError if they are not what can be sent."""
    for name, value in (("hidden", hidden), ("targets", targets), ("row_weights", row_weights)):
        if value is None and name == "row_weights":
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is {_a(value)}; it must be a tensor: torch.as_tensor({name})")
        if _is_transformed(value):
            raise RuntimeError(
                f"{name} is inside a function transform of torch.func (grad, vmap, jvp, ...), which cannot pass through a "
                "server: use loss.backward() or torch.autograd.grad, and LossHead(..., reduction='none') for the "
                "losses of single rows")


def _is_transformed(tensor: torch.Tensor) -> bool:
    functorch = getattr(torch._C, "_functorch", None)  # torch 1.13 has it, without all of these
    for name in ("is_functorch_wrapped_tensor", "is_batchedtensor", "is_gradtrackingtensor"):
        is_so = getattr(functorch, name, None)
        if is_so is not None and is_so(tensor):
            return True
    return False


def check_shapes(head: str, hidden_size: int, shift: bool, hidden: torch.Tensor, targets: torch.Tensor,
                 row_weights: torch.Tensor | None) -> None:
    if hidden.dtype not in _memory.DTYPES:
        raise TypeError(f"hidden is {hidden.dtype}; lossd takes float32, float16 and bfloat16: use hidden.float()")
    if hidden.dim() == 0 or hidden.shape[-1] != hidden_size:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; head {head!r} needs (..., {hidden_size})")
    for name, tensor in (("targets", targets), ("row_weights", row_weights)):
        if tensor is None:
            continue
        if tensor.shape != hidden.shape[:-1]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; hidden of shape {tuple(hidden.shape)} needs "
                             f"{tuple(hidden.shape[:-1])}")
        if tensor.requires_grad:
            raise ValueError(f"{name} requires a gradient, but lossd computes none for it: use {name}.detach()")
    if targets.dtype.is_floating_point or targets.dtype.is_complex or targets.dtype is torch.bool:
        raise TypeError(f"targets is {targets.dtype}; it must hold class indices: use targets.long()")
    if shift and targets.dim() == 0:
        raise ValueError("shift=True needs targets with at least one dimension")


def check_labels(labels: NDArray[np.int32], vocab_size: int, ignore_index: int) -> None:
    """What the server would say, before anything is sent."""
    wrong = ((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)
    if not wrong.any():
        return
    index = int(wrong.argmax())
    field, value = f"open.targets[{index}]", str(labels[index])
    raise errors.InvalidArgument(f"{field} must be in [0, {vocab_size}) or ignore_index ({ignore_index}), got {value}",
                                 types_pb2.ErrorDetail(field=field, value=value))


# ---- What travels ----


def labels(targets: torch.Tensor, shift: bool, ignore_index: int) -> NDArray[np.int32]:
    """One label a row of hidden states. Shifted ones are ignored at the last position; hidden states stay in place."""
    array: NDArray[Any] = targets.detach().to("cpu").numpy()
    found = as_targets(array.reshape(-1)).reshape(array.shape)
    if shift:
        shifted = np.full_like(found, ignore_index)
        shifted[..., :-1] = found[..., 1:]
        found = shifted
    return found.reshape(-1)


def weights(row_weights: torch.Tensor | None) -> NDArray[np.float32] | None:
    if row_weights is None:
        return None
    array: NDArray[np.float32] = row_weights.detach().reshape(-1).to("cpu", torch.float32).numpy()
    return array


def autocast(hidden: torch.Tensor) -> torch.Tensor:
    """As a linear layer would take it."""
    find = _autocast_dtype if hasattr(torch, "get_autocast_dtype") else _old_autocast_dtype
    dtype = find(hidden.device.type)
    return hidden if dtype is None or hidden.dtype is dtype else hidden.to(dtype)


def _autocast_dtype(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _old_autocast_dtype(kind: str) -> torch.dtype | None:
    if kind == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
