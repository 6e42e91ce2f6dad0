"""Tensors as memory that the client sends from and writes into.

A CPU tensor is used where it lies. A CUDA tensor goes through pinned host memory, which torch caches: freed blocks are
taken again only after the copies that use them have run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """The tensor in host memory, contiguous, and what to wait for before it may be read (None: nothing)."""
    tensor = tensor.detach().contiguous()
    if tensor.device.type == "cpu":
        return tensor, None
    host = empty_host(tensor.shape, tensor.dtype, tensor.device)
    host.copy_(tensor, non_blocking=True)
    if tensor.device.type != "cuda":
        return host, None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return host, event.synchronize


def empty_host(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory for a tensor on its way to or from `device`."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host if device.type == "cpu" else host.to(device, non_blocking=True)
