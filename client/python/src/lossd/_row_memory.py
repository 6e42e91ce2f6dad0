# SPDX-License-Identifier: Apache-2.0
"""Where a caller has the rows of a microbatch: hidden states, or the place of their gradients; as bytes of [N, D].

Memory of the host is used where it lies. Memory of a GPU is copied to and from a region, which is of the server's GPU
unless only memory of the host is to be had.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lossd import _cuda, errors
from lossd._regions import SharedRegion


class RowMemory(ABC):
    """Positions are in bytes from the first row on. Thread-safe for parts that do not overlap."""

    nbytes: int
    device: str = ""  # the GPU, "GPU-..."; "": memory of the host

    def wait(self) -> None:
        """Blocks until the memory says that it may be read, if it can say that."""

    @abstractmethod
    def read(self, begin: int, end: int) -> memoryview:
        """A part, to be sent in a message."""

    @abstractmethod
    def write(self, begin: int, data: memoryview) -> None:
        """Takes what came in a message."""

    @abstractmethod
    def to_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        """Copies a part to a place in a region, of the same device; it is there when this returns."""

    @abstractmethod
    def from_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        """Fills a part from a place in a region; the place may be used again when this returns."""

    @abstractmethod
    def zero(self, begin: int, end: int) -> None:
        """Fills a part with zeros."""


class HostRows(RowMemory):
    """NumPy copies without the interpreter's lock."""

    def __init__(self, array: NDArray[Any]) -> None:
        """`array` is C-contiguous; it is referred to, not copied."""
        self._bytes = array.reshape(-1).view(np.uint8)
        self.nbytes = self._bytes.nbytes

    def read(self, begin: int, end: int) -> memoryview:
        return self._bytes[begin:end].data

    def write(self, begin: int, data: memoryview) -> None:
        self._bytes[begin:begin + data.nbytes] = np.frombuffer(data, np.uint8)

    def to_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        region.memory[offset:offset + end - begin] = self._bytes[begin:end]

    def from_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        self._bytes[begin:end] = region.memory[offset:offset + end - begin]

    def zero(self, begin: int, end: int) -> None:
        self._bytes[begin:end] = 0


class CudaRows(RowMemory):
    """An array of a GPU, as any library has it (`__cuda_array_interface__`)."""

    def __init__(self, name: str, array: Any) -> None:
        """InvalidArgument, naming the argument `name`, if it is not C-contiguous."""
        interface = array.__cuda_array_interface__
        self.array = array  # keeps the memory
        self.shape = tuple(interface["shape"])
        self.dtype = np.dtype(interface["typestr"])
        self._address, self.read_only = interface["data"]
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self._stream: int | None = interface.get("stream")
        if interface.get("strides") not in (None, _contiguous_strides(self.shape, self.dtype.itemsize)):
            raise errors.InvalidArgument(f"{name} is a CUDA array that is not C-contiguous")
        self._driver = _cuda.driver()
        self._number = self._driver.device_of(self._address) if self.nbytes else 0
        self.device = self._driver.uuid(self._number)

    def wait(self) -> None:
        """Waits for the stream that the array's interface names, if it names one."""
        if self._stream is not None:
            self._driver.wait(self._stream, self._number)

    def read(self, begin: int, end: int) -> memoryview:
        data = np.empty(end - begin, np.uint8)
        self._driver.copy(data.ctypes.data, self._address + begin, data.nbytes, self._number)
        return data.data

    def write(self, begin: int, data: memoryview) -> None:
        if data.nbytes:
            self._driver.copy(self._address + begin, np.frombuffer(data, np.uint8).ctypes.data, data.nbytes, self._number)

    def to_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        self._driver.copy(region.address + offset, self._address + begin, end - begin, self._copiers(region)[0])

    def from_region(self, begin: int, end: int, region: SharedRegion, offset: int) -> None:
        self._driver.copy(self._address + begin, region.address + offset, end - begin, self._copiers(region)[1])

    def _copiers(self, region: SharedRegion) -> tuple[int, int]:
        """The GPUs that copy to the region and from it."""
        return (self._number, self._number) if region.mapping is None else region.mapping.copiers(self._number)

    def zero(self, begin: int, end: int) -> None:
        if end > begin:
            self._driver.fill_zeros(self._address + begin, end - begin, self._number)


def _contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides))


def is_cuda_array(values: object) -> bool:
    return hasattr(values, "__cuda_array_interface__")
