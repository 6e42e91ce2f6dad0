# SPDX-License-Identifier: Apache-2.0
"""Tensors as memory that the client sends from and writes into.

A CPU tensor is used where it lies. So is a CUDA tensor if the client can copy between it and memory of the server's GPU.
Otherwise it goes through pinned host memory, which torch caches: freed blocks are taken again only after the copies that use
them have run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

import lossd
from lossd.types import DType

Array = NDArray[Any]

DTYPES: dict[torch.dtype, DType] = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def as_array(tensor: torch.Tensor) -> Array:
    """A contiguous CPU tensor's memory, of the dtype that lossd.Client takes; bf16 as uint16."""
    if tensor.dtype is torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: Array = tensor.numpy()
    return array


def as_tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """The reverse of as_array."""
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


Place: TypeAlias = Literal["host", "device"]  # where a CUDA tensor's rows are when the client sends them


def place_of(tensor: torch.Tensor, client: lossd.Client) -> Place:
    """The device if the client can copy from there to the server's GPU; may open the memory that takes."""
    return "device" if tensor.device.type == "cuda" and client.shares_gpu(tensor.device.index) else "host"


@dataclass(frozen=True)
class Sent:
    """Rows [N, D] as lossd.Client takes them."""

    array: Any
    ready: Callable[[], None] | None  # blocks until they may be read, and memory that was made before be written


def to_send(tensor: torch.Tensor, place: Place) -> Sent:
    if place == "device":
        return Sent(as_sent(tensor.contiguous()), _work_so_far(tensor.device))
    host, ready = to_host(tensor)
    return Sent(as_array(host), ready)


def as_sent(tensor: torch.Tensor) -> Any:
    """A contiguous tensor as lossd.Client takes it; on a GPU bf16 as int16."""
    if tensor.device.type == "cpu":
        return as_array(tensor)
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


def settle(memory: torch.Tensor | None) -> None:
    """Blocks until nothing that was enqueued before uses memory that was just made."""
    if memory is not None and memory.device.type == "cuda":
        _work_so_far(memory.device)()


def _work_so_far(device: torch.device) -> Callable[[], None]:
    """Blocks until what the current stream was given before this call has run."""
    event = torch.cuda.Event(blocking=True)  # who waits takes no CPU time
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """The tensor in host memory, contiguous, and what to wait for before it may be read (None: nothing)."""
    tensor = tensor.detach().contiguous()
    if tensor.device.type == "cpu":
        return tensor, None
    host = empty(tensor.shape, tensor.dtype, tensor.device, "host")
    host.copy_(tensor, non_blocking=True)
    if tensor.device.type != "cuda":
        return host, None
    return host, _work_so_far(tensor.device)


def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device, place: Place) -> torch.Tensor:
    """Memory for a tensor on its way to or from `device`."""
    if place == "device":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host if device.type == "cpu" else host.to(device, non_blocking=True)  # no copy if it is there
