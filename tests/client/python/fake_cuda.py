# SPDX-License-Identifier: Apache-2.0
"""A machine with GPUs for tests: CUDA's driver as lossd._cuda has it, and arrays on its devices.

Addresses of devices are those of memory of the host plus a distance, so that who follows one of them ends with SIGSEGV.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

_FAR = 1 << 60  # no address of the host; device n begins at (n + 1) times it


def uuid_of(device: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{device + 1:012}"


class FakeDriver:
    def __init__(self, devices: int = 1) -> None:
        self.devices = devices
        self.mapped: dict[int, Any] = {}  # by address
        self.copies: list[tuple[bool, bool]] = []  # whether the target, and the source, is of a device
        self.between: set[tuple[int, int, int]] = set()  # of copies between two: which has it, which gets it, whose work it is
        self.connected = True  # whether GPUs reach each other's memory
        self.ranks: dict[tuple[int, int], int] = {}  # of what connects two of them, 0 being the fastest
        self.entered: int | None = None  # the GPU that threads work on
        self.reached: set[tuple[int, int]] = set()  # address of what was imported, and the other GPU that reaches it
        self.waited: list[int] = []
        self.pinned: dict[int, int] = {}  # address to size, of memory of the host
        self.pins = 0  # attempts

    def find(self, name: str) -> int | None:
        return next((device for device in range(self.devices) if uuid_of(device) == name), None)

    def uuid(self, device: int) -> str:
        return uuid_of(device)

    def current(self) -> int | None:
        return self.entered

    def distance(self, source: int, to: int) -> int | None:
        if source == to:
            return 0
        return 1 + self.ranks.get((source, to), 0) if self.connected else None

    def device_of(self, address: int) -> int:
        assert address >= _FAR
        return address // _FAR - 1

    def import_memory(self, descriptor: int, size: int, device: int) -> int:
        memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        address = int(memory.ctypes.data) + (device + 1) * _FAR
        self.mapped[address] = memory
        return address

    def let_reach(self, address: int, size: int, owner: int, other: int) -> bool:
        assert self.mapped[address].nbytes == size and self.device_of(address) == owner != other
        if self.connected:
            self.reached.add((address, other))
        return self.connected

    def unmap(self, address: int, size: int, device: int) -> None:
        self.reached -= {(address, other) for other in range(self.devices)}
        assert self.mapped.pop(address).nbytes == size

    def pin(self, address: int, size: int, device: int) -> None:
        assert address < _FAR and device < self.devices
        assert all(address + size <= begin or begin + length <= address for begin, length in self.pinned.items())
        self.pins += 1
        self.pinned[address] = size

    def unpin(self, address: int, device: int) -> None:
        size = self.pinned.pop(address)
        libc = ctypes.CDLL(None)
        assert libc.msync(ctypes.c_void_p(address), ctypes.c_size_t(size), 1) == 0, "it was unmapped before"

    def is_pinned(self, address: int) -> bool:
        return any(begin <= address < begin + size for begin, size in self.pinned.items())

    def copy(self, to: int, source: int, size: int, device: int) -> None:
        self.copies.append((to >= _FAR, source >= _FAR))
        for address in (to, source):
            begin = next((each for each, memory in list(self.mapped.items()) if each <= address < each + memory.nbytes), None)
            assert begin is None or device == self.device_of(begin) or (begin, device) in self.reached, "it has no access"
        if to >= _FAR and source >= _FAR and self.device_of(to) != self.device_of(source):
            self.between.add((self.device_of(source), self.device_of(to), device))
        ctypes.memmove(to % _FAR, source % _FAR, size)

    def fill_zeros(self, to: int, size: int, device: int) -> None:
        assert to >= _FAR
        ctypes.memset(to % _FAR, 0, size)

    def wait(self, stream: int, device: int) -> None:
        self.waited.append(stream)


class FakeArray:
    """An array on a device, as a library of GPU arrays has it."""

    def __init__(self, values: Any, device: int = 0, **interface: Any) -> None:
        self.values = np.array(values)
        self.__cuda_array_interface__ = {
            "shape": self.values.shape, "typestr": self.values.dtype.str, "version": 3, "strides": None,
            "data": (int(self.values.ctypes.data) + (device + 1) * _FAR, False), **interface}
