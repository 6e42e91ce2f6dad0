# SPDX-License-Identifier: Apache-2.0
"""The arguments of LossHead and ServedEmbedding: checks of them before anything is sent, their conversion to the arrays that
lossd.Client sends, and the memory that the client sends from and writes into."""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

import lossd
from lossd import _arrays, _native, errors, types
from lossd.types import DType
from lossd.v1 import types_pb2


P = ParamSpec("P")
T = TypeVar("T")


def known_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator for better errors: the TypeError for an unknown keyword argument suggests the argument that was probably
    meant. The signature and the documentation of the function stay visible.
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


def check_words(client: Any, head: Any, reduction: Any, state: Any) -> None:
    """Checks arguments of LossHead. TypeError or ValueError names the argument that is wrong."""
    if not hasattr(client, "compute_loss_async"):
        raise TypeError(f"client is {_a(client)}; it must be a lossd.Client: LossHead(client, head)")
    if not isinstance(head, str):
        raise TypeError(f"head is {_a(head)}; it must be the name of a head on the server, a str")
    types.enum_value("reduction", types.REDUCTIONS, reduction)
    if state not in ("checkpoint", "none"):
        raise ValueError(f"state is {state!r}; it must be 'checkpoint' or 'none'")


def check_numbers(required: dict[str, Any], optional: dict[str, Any]) -> None:
    """Checks arguments by name. TypeError if a value is not a number. Values in `optional` may also be None."""
    for name, value in {**required, **optional}.items():
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            continue
        if value is None and name in optional:
            continue
        rule = "a number or None" if name in optional else "a number"
        raise TypeError(f"{name} is {value!r}; it must be {rule}")


def number(name: str, value: Any) -> float:
    """The value of a number, or of a tensor or array with one element."""
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
    """`extras` as a tuple. ValueError if a name is not one of `known`."""
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


def listed(targets: NDArray[np.int32], classes: NDArray[np.int32]) -> NDArray[np.bool_]:
    """For each target, whether it is in `classes`, the ascending numbers of a head's classes."""
    places = np.minimum(np.searchsorted(classes, targets), len(classes) - 1)
    found: NDArray[np.bool_] = classes[places] == targets
    return found


# ---- Arguments of forward ----


def check_tensors(hidden: Any, targets: Any, optional: dict[str, Any]) -> None:
    """TypeError if an argument is not a tensor, RuntimeError if it is within a function transform of torch.func. Values in
    `optional` may also be None."""
    for name, value in ({"hidden": hidden, "targets": targets} | optional).items():
        if value is None and name in optional:
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is {_a(value)}; it must be a tensor: torch.as_tensor({name})")
        if _is_transformed(value):
            raise RuntimeError(
                f"{name} is inside a function transform of torch.func (grad, vmap, jvp, ...), which cannot pass through a "
                "server: use loss.backward() or torch.autograd.grad, and LossHead(..., reduction='none') for the "
                "losses of single rows")


def _is_transformed(tensor: torch.Tensor) -> bool:
    return any(is_so(tensor) for is_so in _TRANSFORMS)


# The functions that recognize tensors of a function transform. torch 1.13 lacks some of them.
_TRANSFORMS = [getattr(torch._C._functorch, name) for name in ("is_functorch_wrapped_tensor", "is_batchedtensor", "is_gradtrackingtensor")
               if hasattr(getattr(torch._C, "_functorch", None), name)]


def check_shapes(head: str, hidden_size: int, shift: bool, hidden: torch.Tensor, targets: torch.Tensor,
                 optional: dict[str, torch.Tensor | None]) -> None:
    if hidden.dtype not in DTYPES:
        raise TypeError(f"hidden is {hidden.dtype}; lossd takes float32, float16 and bfloat16: use hidden.float()")
    if hidden.dim() == 0 or hidden.shape[-1] != hidden_size:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; head {head!r} needs (..., {hidden_size})")
    for name, tensor in ({"targets": targets} | optional).items():
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
    """Raises the error that the server would raise if a label is neither a class nor ignore_index."""
    beyond = labels.view(np.uint32) >= vocab_size  # negative numbers are large as unsigned ones
    if not beyond.any() or not (wrong := beyond & (labels != ignore_index)).any():
        return
    index = int(wrong.argmax())
    field, value = f"open.targets[{index}]", str(labels[index])
    raise errors.InvalidArgument(f"{field} must be in [0, {vocab_size}) or ignore_index ({ignore_index}), got {value}",
                                 types_pb2.ErrorDetail(field=field, value=value))


def check_ids(ids: Any) -> None:
    """TypeError or RuntimeError if `ids` cannot be row numbers."""
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"ids is {_a(ids)}; it must be a tensor: torch.as_tensor(ids)")
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
        raise TypeError(f"ids is {ids.dtype}; it must hold integers: use ids.long()")
    if _is_transformed(ids):
        raise RuntimeError("ids is inside a function transform of torch.func (grad, vmap, jvp, ...), which cannot pass through "
                           "a server")


def ids_of_rows(ids: torch.Tensor, vocab_size: int) -> NDArray[np.int32]:
    """The ids as a flat array. InvalidArgument names the first id that is not in [0, vocab_size)."""
    array: NDArray[Any] = ids.detach().to("cpu").numpy()
    wrong = array.astype(np.int64, copy=False).view(np.uint64) >= vocab_size  # negative numbers are large as unsigned ones
    if wrong.any():
        place = tuple(int(each) for each in np.argwhere(wrong)[0])
        field, value = f"ids[{', '.join(map(str, place))}]", str(array[place])
        raise errors.InvalidArgument(f"{field} must be in [0, {vocab_size}), got {value}",
                                     types_pb2.ErrorDetail(field=field, value=value))
    return _arrays.as_targets(array.reshape(-1), "ids")


# ---- Conversion to what is sent ----


def labels(targets: torch.Tensor, shift: bool, ignore_index: int) -> NDArray[np.int32]:
    """One label for each row of hidden states, as a flat array. With `shift`, each position gets the target of the next
    position, and the last position gets ignore_index."""
    array: NDArray[Any] = targets.detach().to("cpu").numpy()
    found = _arrays.as_targets(array.reshape(-1)).reshape(array.shape)
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
    """The hidden states in the dtype in which a linear layer would use them under autocast."""
    dtype = autocast_dtype(hidden.device)
    return hidden if dtype is None or hidden.dtype is dtype else hidden.to(dtype)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast for the device. None: autocast is off."""
    find = _autocast_dtype if hasattr(torch, "get_autocast_dtype") else _old_autocast_dtype
    return find(device.type)


def _autocast_dtype(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _old_autocast_dtype(kind: str) -> torch.dtype | None:
    if kind == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


# The memory of tensors, which the client sends from and writes into.
#
# A CPU tensor is used without a copy. A CUDA tensor is also used without a copy if the client can copy between it and memory
# of the server's GPU. Other tensors are copied through pinned host memory. torch caches this memory, and reuses a freed block
# only after the copies that use the block have run.

Array = NDArray[Any]

DTYPES: dict[torch.dtype, DType] = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def as_array(tensor: torch.Tensor) -> Array:
    """A contiguous CPU tensor as an array that shares its memory and has the dtype that lossd.Client takes: uint16 for
    bf16."""
    if tensor.dtype is torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: Array = tensor.numpy()
    return array


def as_tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of as_array."""
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


Place: TypeAlias = Literal["host", "device"]  # where the client finds the rows of a CUDA tensor when it sends them


def place_of(tensor: torch.Tensor, client: lossd.Client) -> Place:
    """"device" if the client can copy between the tensor's GPU and the server's GPU, else "host". The first call for a GPU may
    open the memory that client and server share."""
    return place_on(tensor.device, client)


def place_on(device: torch.device, client: lossd.Client) -> Place:
    """place_of() for any tensor on the device. A "device" is known for a second, since asking takes a tenth of a millisecond.
    If the GPU is not shared any more, the client copies the rows through host memory."""
    if device.type != "cuda":
        return "host"
    shared = _shared.setdefault(client, {})
    now = time.monotonic()
    if now < shared.get(device.index, 0.0):
        return "device"
    if not client.shares_gpu(device.index):
        return "host"
    shared[device.index] = now + _KNOWN_SECONDS
    return "device"


_KNOWN_SECONDS = 1.0
# For each client and GPU that the client shares with its server: the time until which this counts as known.
_shared: weakref.WeakKeyDictionary[lossd.Client, dict[int | None, float]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Ready:
    """Work on GPUs that must end before some memory may be read or written. Calling the object blocks until it has ended."""

    events: tuple[torch.cuda.Event, ...]  # recorded after the work
    # True: the thread that begins a computation calls this object, because that thread waits for the result next. False: a
    # thread of the client calls this object.
    by_caller: bool = False

    def __call__(self) -> None:
        if self.by_caller:
            return self.await_here()
        for event in self.events:
            event.synchronize()

    def await_here(self) -> None:
        """Waits like a call, but polls, so that signal handlers run meanwhile, such as that of KeyboardInterrupt. For the
        thread that needs the result; it costs less than to have another thread wait."""
        for event in self.events:
            for _ in range(_QUERIES_AT_ONCE):
                if event.query():
                    break
            else:
                while not event.query():
                    time.sleep(_PAUSE_BETWEEN_QUERIES)


_QUERIES_AT_ONCE = 20  # a query takes some microseconds
_PAUSE_BETWEEN_QUERIES = 20e-6  # seconds; the system adds about 60e-6


@dataclass(frozen=True)
class Sent:
    """Rows [N, D] in the form that lossd.Client takes."""

    array: Any  # a NumPy array, or a CUDA array that the client copies from
    ready: Ready | None  # the work to wait for before the rows may be read; None: there is none


def to_send(tensor: torch.Tensor, place: Place) -> Sent:
    """The rows of a tensor in the form that lossd.Client takes. `place`: what place_of() said."""
    if place == "device":
        return Sent(as_sent(tensor.contiguous()), _work_so_far(tensor.device))
    host, ready = to_host(tensor)
    return Sent(as_array(host), ready)


def both(*waits: Ready | None) -> Ready | None:
    """The work of all `waits` together. None if there is none."""
    events = tuple(event for wait in waits if wait is not None for event in wait.events)
    return Ready(events) if events else None


def check_teacher(teacher_hidden: Any, hidden: torch.Tensor, distillation: Any, targets: Any, extras: Sequence[str]) -> None:
    """Checks arguments of LossHead.distill. TypeError or ValueError if they do not fit each other, or if `extras` needs
    targets that are not given."""
    if not isinstance(distillation, lossd.Distillation):
        raise TypeError(f"distillation is {_a(distillation)}; it must be a lossd.Distillation")
    if not isinstance(teacher_hidden, torch.Tensor):
        raise TypeError(f"teacher_hidden is {_a(teacher_hidden)}; it must be a tensor")
    if teacher_hidden.dim() == 0 or teacher_hidden.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(f"teacher_hidden has shape {tuple(teacher_hidden.shape)}; hidden of shape {tuple(hidden.shape)} "
                         f"needs {tuple(hidden.shape[:-1])} and the teacher's hidden size")
    if teacher_hidden.device != hidden.device:
        raise ValueError(f"teacher_hidden is on {teacher_hidden.device}; hidden is on {hidden.device}")
    if teacher_hidden.requires_grad:
        raise ValueError("teacher_hidden requires a gradient, but lossd computes none for it: use teacher_hidden.detach()")
    if targets is None and distillation.target_weight != 0:
        raise ValueError(f"targets is None; distillation.target_weight is {distillation.target_weight}, and needs them")
    if targets is None and (needs := [extra for extra in extras if extra in ("accuracy", "logprob")]):
        raise ValueError(f"targets is None; extras has {needs[0]!r}, and needs them")


def soft_targets(classes: Any, weights: Any, hidden: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Classes and weights as arrays [N, K]. TypeError or ValueError if they do not fit `hidden`."""
    for name, value in (("target_classes", classes), ("target_weights", weights)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is {_a(value)}; it must be a tensor")
        if value.dim() == 0 or value.shape[:-1] != hidden.shape[:-1] or value.shape[-1] == 0:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; hidden of shape {tuple(hidden.shape)} needs "
                             f"{tuple(hidden.shape[:-1])} and the number of classes of a row")
        if value.requires_grad:
            raise ValueError(f"{name} requires a gradient, but lossd computes none for it: use {name}.detach()")
    if classes.is_floating_point() or classes.dtype is torch.bool:
        raise TypeError(f"target_classes has dtype {classes.dtype}; it must have integers")
    if weights.shape != classes.shape:
        raise ValueError(f"target_weights has shape {tuple(weights.shape)}; target_classes has {tuple(classes.shape)}")
    count = classes.shape[-1]
    return classes.reshape(-1, count).cpu().numpy().astype(np.int64), weights.reshape(-1, count).float().cpu().numpy()


def as_sent(tensor: torch.Tensor) -> Any:
    """A contiguous tensor as lossd.Client takes it, without a copy: an array for a CPU tensor, else the client's own form of a
    CUDA array, with bf16 viewed as int16. Its `__cuda_array_interface__` would say the same, but takes longer."""
    if tensor.device.type == "cpu":
        return as_array(tensor)
    if not tensor.numel():
        return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    address = tensor.data_ptr()
    gpu = _gpus.get(tensor.device.index)
    if gpu is None:
        gpu = _gpus[tensor.device.index] = _native.gpu_of("hidden", address)
    return _arrays.Array(tensor, tuple(tensor.shape), _DTYPES_ON_GPU[tensor.dtype], address, True, gpu)


_gpus: dict[int, str] = {}  # the UUIDs of GPUs, by the numbers that torch has for them
_DTYPES_ON_GPU: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32), torch.float16: np.dtype(np.float16), torch.bfloat16: np.dtype(np.int16)}


def settle(memory: torch.Tensor | None) -> None:
    """Blocks until newly allocated memory may be written. torch may give out memory that enqueued GPU work still uses."""
    wait = None if memory is None else settled(memory, by_caller=True)
    if wait is not None:
        wait()


def settled(memory: torch.Tensor, by_caller: bool) -> Ready | None:
    """The work that settle() waits for; None if there is none."""
    return _work_so_far(memory.device, by_caller) if memory.device.type == "cuda" else None


def _work_so_far(device: torch.device, by_caller: bool = False) -> Ready:
    """The work that was enqueued on the current stream before this call. `by_caller`: as in Ready."""
    event = torch.cuda.Event(blocking=True)  # a blocking wait takes no CPU time
    event.record(torch.cuda.current_stream(device))
    return Ready((event,), by_caller)


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Ready | None]:
    """A contiguous copy in host memory, and the work to wait for before it is read (None: there is none)."""
    tensor = tensor.detach().contiguous()
    if tensor.device.type == "cpu":
        return tensor, None
    host = empty(tensor.shape, tensor.dtype, tensor.device, "host")
    host.copy_(tensor, non_blocking=True)
    if tensor.device.type != "cuda":
        return host, None
    return host, _work_so_far(tensor.device)


def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device, place: Place) -> torch.Tensor:
    """Uninitialized memory for a tensor on `device` that the client sends or receives: on the device itself, or (place "host")
    in host memory, which is pinned for a GPU."""
    if place == "device":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host if device.type == "cpu" else host.to(device, non_blocking=True)  # no copy if it is already there
