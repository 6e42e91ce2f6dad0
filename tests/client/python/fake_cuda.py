# SPDX-License-Identifier: Apache-2.0
"""A machine with GPUs for tests: the library that LOSSD_FAKE_CUDA names (tests/client/cpp/fake_cuda.h) in the place of CUDA's
driver, and arrays on its devices.

This module loads the library, so that the client finds it under the driver's name. Addresses of devices are those of memory of
the host plus a distance, so that who follows one of them ends with SIGSEGV.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_FAR = 1 << 60  # no address of the host; device n begins at (n + 1) times it
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64

_library = ctypes.CDLL(os.environ["LOSSD_FAKE_CUDA"], mode=ctypes.RTLD_GLOBAL)


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_library, name)
    function.restype, function.argtypes = result, arguments
    return function


_allocate = _function("cuMemAlloc_v2", _I, ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)
_free = _function("cuMemFree_v2", _I, ctypes.c_uint64)
_set_devices = _function("lossd_fake_cuda_set_devices", None, _I)
_set_connected = _function("lossd_fake_cuda_set_connected", None, _I)
_set_rank = _function("lossd_fake_cuda_set_rank", None, _I, _I, _I)
_enter = _function("lossd_fake_cuda_enter_device", None, _I)
_leave = _function("lossd_fake_cuda_leave_device", None)
_fail = _function("lossd_fake_cuda_fail", None, ctypes.c_char_p, _L)
_held = _function("lossd_fake_cuda_held", _I, ctypes.c_char_p)
_calls = _function("lossd_fake_cuda_calls", _L, ctypes.c_char_p)
_take_copied = _function("lossd_fake_cuda_take_copied", _L, ctypes.c_char_p)
_take_copied_between = _function("lossd_fake_cuda_take_copied_between", _L, ctypes.c_char_p)
_new_stream = _function("lossd_fake_cuda_new_stream", _P)
_end_stream = _function("lossd_fake_cuda_end_stream", None, _P)
_give = _function("lossd_fake_cuda_give", None, _P, ctypes.c_uint64, _P, ctypes.c_uint64)
_pending = _function("lossd_fake_cuda_pending", _L, _P)


def uuid_of(device: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{device + 1:012}"


class FakeGpus:
    """What tests ask the machine for; its state is that of the process. Functions are as in fake_cuda.h."""

    WAYS = ("host to device", "device to host", "device to device", "pinned to device", "device to pinned")

    def __init__(self, devices: int = 2) -> None:
        """As at the beginning, with so many GPUs."""
        _set_devices(devices)
        self.set_connected(True)
        for other in range(1, devices):
            for one in range(other):
                _set_rank(one, other, 0)
        self.copied()

    def set_devices(self, devices: int) -> None:
        _set_devices(devices)

    def set_connected(self, connected: bool) -> None:
        _set_connected(int(connected))

    def set_rank(self, one: int, other: int, rank: int) -> None:
        _set_rank(one, other, rank)

    @contextmanager
    def entered(self, device: int | None) -> Iterator[None]:
        """The calling thread works on this GPU meanwhile; None: on none."""
        if device is not None:
            _enter(device)
        try:
            yield
        finally:
            if device is not None:
                _leave()

    def fail(self, function: str, count: int = 1) -> None:
        _fail(function.encode(), count)

    def held(self, kind: str) -> int:
        return int(_held(kind.encode()))

    def calls(self, function: str) -> int:
        return int(_calls(function.encode()))

    def copied(self) -> dict[str, int]:
        """Bytes that were copied since the last call, by way."""
        taken = {way: int(_take_copied(way.encode())) for way in self.WAYS}
        return {way: size for way, size in taken.items() if size}

    def copied_between(self, way: str) -> int:
        """Bytes that were copied "0 to 1 by 0" since the last call: which GPU had them, which got them, and whose work it was."""
        return int(_take_copied_between(way.encode()))


class FakeStream:
    """A stream of a program's own, whose work is done when something waits for it."""

    def __init__(self) -> None:
        self.pointer = int(_new_stream())

    def end(self) -> None:
        """What it was given is done now."""
        _end_stream(self.pointer)

    def give(self, array: FakeArray, values: Any = None) -> None:
        """Work that fills an array, with zeros if there are no values; these stay as they are until it is done."""
        address, _ = array.__cuda_array_interface__["data"]
        _give(self.pointer, address, None if values is None else values.ctypes.data, array.values.nbytes)

    @property
    def pending(self) -> int:
        """How much that it was given is not done yet."""
        return int(_pending(self.pointer))


class _Memory:
    """Of a device, until the object goes; NumPy takes it as bytes of the host."""

    def __init__(self, size: int, device: int) -> None:
        address = ctypes.c_uint64()
        self._device = device
        _enter(device)
        result = _allocate(ctypes.byref(address), size)
        _leave()
        assert result == 0, "the GPU has no memory left"
        self.address = address.value
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (self.address % _FAR, False), "version": 3}

    def __del__(self) -> None:
        if hasattr(self, "address"):
            _enter(self._device)
            _free(self.address)
            _leave()


class FakeArray:
    """An array on a device, as a library of GPU arrays has it. `values` is its memory, as the host sees it."""

    def __init__(self, values: Any, device: int = 0, **interface: Any) -> None:
        """A copy of values. `interface`: entries that are to be others."""
        self.values = np.array(values, order="C")
        address = 0  # that of an empty array
        if self.values.nbytes:
            memory = _Memory(self.values.nbytes, device)
            address = memory.address
            on_device = np.asarray(memory).view(self.values.dtype).reshape(self.values.shape)
            on_device[...] = self.values
            self.values = on_device
        self.__cuda_array_interface__ = {
            "shape": self.values.shape, "typestr": self.values.dtype.str, "version": 3, "strides": None,
            "data": (address, False), **interface}
