# SPDX-License-Identifier: Apache-2.0
"""What this client takes from CUDA's driver, which is loaded when a CUDA array comes: importing memory that a server
shares, and copies between it and arrays of the caller.

Nothing here is enqueued on a stream of the caller's: a copy has ended when its function returns, also with an error.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from lossd import errors

_LIBRARY = "libcuda.so.1"
_POSIX_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
_FOR_ALL_GPUS = 1  # CU_MEMHOSTREGISTER_PORTABLE
_PEER_RANK = 1  # CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, 0: the fastest
_PEER_ACCESS = 2  # CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
_DEVICE_OF_POINTER = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
_SLEEPING = 3  # CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING: who waits for the event takes no CPU time
_FUNCTIONS = (
    "cuInit", "cuGetErrorString", "cuDeviceGetCount", "cuDeviceGetUuid_v2", "cuDeviceGetP2PAttribute", "cuPointerGetAttribute",
    "cuDevicePrimaryCtxRetain", "cuCtxGetDevice", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuCtxEnablePeerAccess",
    "cuMemImportFromShareableHandle", "cuMemRelease", "cuMemAddressReserve", "cuMemAddressFree", "cuMemMap", "cuMemUnmap",
    "cuMemSetAccess", "cuMemHostRegister_v2", "cuMemHostUnregister", "cuMemcpyAsync", "cuMemsetD8Async", "cuStreamCreate",
    "cuStreamSynchronize", "cuStreamDestroy_v2", "cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuEventDestroy_v2")


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


@dataclass(frozen=True)
class _Lane:
    """A stream of the client's, and the event that says that its work has ended."""

    stream: ctypes.c_void_p
    end: ctypes.c_void_p


class Driver:
    """CUDA's driver. Thread-safe."""

    def __init__(self) -> None:
        """Unavailable, saying why, if this machine has no driver or no GPU."""
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise errors.Unavailable(f"no CUDA driver: {error}") from None
        if missing := next((name for name in _FUNCTIONS if not hasattr(self._library, name)), None):
            raise errors.Unavailable(f"no CUDA driver: {_LIBRARY} lacks {missing}")
        self._lock = threading.Lock()  # guards what follows
        self._contexts: dict[int, ctypes.c_void_p] = {}  # by device
        self._lanes: dict[int, list[_Lane]] = {}  # those that nothing uses, by device
        self._call("cuInit", ctypes.c_uint(0))

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(result, ctypes.byref(text))
            raise errors.Unavailable(f"{name} failed: {(text.value or b'').decode() or result}")

    def find(self, name: str) -> int | None:
        """The number of the GPU with this UUID ("GPU-..."); None if this process does not see it."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return next((device for device in range(count.value) if self.uuid(device) == name), None)

    def uuid(self, device: int) -> str:
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(raw), ctypes.c_int(device))
        return f"GPU-{uuid.UUID(bytes=bytes(raw))}"

    def current(self) -> int | None:
        """The GPU whose context is the calling thread's; None: it has none."""
        device = ctypes.c_int()
        return device.value if self._library.cuCtxGetDevice(ctypes.byref(device)) == 0 else None

    def distance(self, source: int, to: int) -> int | None:
        """How far the memory of the GPU `to` is for `source`: 0 if they are the same, and the less the faster what connects
        them; None: nothing does."""
        if source == to:
            return 0
        reached, rank = ctypes.c_int(), ctypes.c_int()
        for value, attribute in ((reached, _PEER_ACCESS), (rank, _PEER_RANK)):
            if self._library.cuDeviceGetP2PAttribute(ctypes.byref(value), ctypes.c_int(attribute), ctypes.c_int(source),
                                                     ctypes.c_int(to)) != 0:
                return None
        return 1 + rank.value if reached.value else None

    def device_of(self, address: int) -> int:
        """The number of the GPU whose memory is at this address."""
        device = ctypes.c_int()
        self._call("cuPointerGetAttribute", ctypes.byref(device), ctypes.c_int(_DEVICE_OF_POINTER), ctypes.c_uint64(address))
        return device.value

    @contextmanager
    def _current(self, device: int) -> Iterator[None]:
        """Makes the device's primary context, which is that of all libraries of the process, the thread's."""
        with self._lock:
            if device not in self._contexts:
                context = ctypes.c_void_p()
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
                self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def import_memory(self, descriptor: int, size: int, device: int) -> int:
        """Maps memory of `device` that another process shares; its address. The descriptor stays the caller's."""
        handle, address = ctypes.c_uint64(), ctypes.c_uint64()
        with self._current(device):
            self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor),
                       ctypes.c_int(_POSIX_DESCRIPTOR))
            try:
                self._call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0),
                           ctypes.c_uint64(0), ctypes.c_uint64(0))
                try:
                    self._map(address, size, handle, device)
                except BaseException:
                    self._library.cuMemAddressFree(address, ctypes.c_size_t(size))
                    raise
            finally:
                self._library.cuMemRelease(handle)  # the mapping keeps the memory
        return address.value

    def _map(self, address: ctypes.c_uint64, size: int, handle: ctypes.c_uint64, device: int) -> None:
        self._call("cuMemMap", address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        try:
            self._give_access(address, size, device)
        except BaseException:
            self._library.cuMemUnmap(address, ctypes.c_size_t(size))
            raise

    def _give_access(self, address: ctypes.c_uint64, size: int, device: int) -> None:
        access = _Access(_Location(_ON_DEVICE, device), _READ_AND_WRITE)
        self._call("cuMemSetAccess", address, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))

    def let_reach(self, address: int, size: int, owner: int, other: int) -> bool:
        """Lets the GPU `other` and `owner`, whose memory was imported to this address, reach each other's memory, so that
        either copies what it has to the other one's without a detour through memory of the host. False if nothing connects
        the two."""
        try:
            with self._current(other):  # which makes its context
                pass
            with self._current(owner):
                self._give_access(ctypes.c_uint64(address), size, other)
                result = self._library.cuCtxEnablePeerAccess(self._contexts[other], ctypes.c_uint(0))
            return result in (0, _ALREADY_ENABLED)
        except errors.Unavailable:
            return False

    def unmap(self, address: int, size: int, device: int) -> None:
        with self._current(device):
            self._library.cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(size))
            self._library.cuMemAddressFree(ctypes.c_uint64(address), ctypes.c_size_t(size))

    def pin(self, address: int, size: int, device: int) -> None:
        """Locks memory of the host, which the caller has mapped, so that all GPUs copy to and from it without a detour: whole
        pages, from the one that begins at `address` on."""
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._current(device):
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(whole), ctypes.c_uint(_FOR_ALL_GPUS))

    def unpin(self, address: int, device: int) -> None:
        with self._current(device):
            self._library.cuMemHostUnregister(ctypes.c_void_p(address))

    def copy(self, to: int, source: int, size: int, device: int) -> None:
        """Copies between any two addresses, of GPUs or of the host, and waits for that, with work of `device` alone.

        Memory that was imported is one of them only if it is the device's, or if let_reach was true.
        """
        with self._waiting(device) as stream:
            self._call("cuMemcpyAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size), stream)

    def fill_zeros(self, to: int, size: int, device: int) -> None:
        with self._waiting(device) as stream:
            self._call("cuMemsetD8Async", ctypes.c_uint64(to), ctypes.c_ubyte(0), ctypes.c_size_t(size), stream)

    def wait(self, stream: int, device: int) -> None:
        """Waits for all that the caller has enqueued on a stream."""
        with self._lane(device) as lane:
            self._await(ctypes.c_void_p(stream), lane)

    @contextmanager
    def _waiting(self, device: int) -> Iterator[ctypes.c_void_p]:
        """A stream that nothing else uses; waits for what it was given."""
        with self._lane(device) as lane:
            yield lane.stream
            self._await(lane.stream, lane)

    def _await(self, stream: ctypes.c_void_p, lane: _Lane) -> None:
        self._call("cuEventRecord", lane.end, stream)
        self._call("cuEventSynchronize", lane.end)

    @contextmanager
    def _lane(self, device: int) -> Iterator[_Lane]:
        """A lane that nothing else uses. One that has failed is destroyed, after its work has ended."""
        with self._current(device):
            with self._lock:
                idle = self._lanes.setdefault(device, [])
                lane = idle.pop() if idle else None
            if lane is None:
                lane = self._make_lane()
            try:
                yield lane
            except BaseException:
                self._destroy(lane)
                raise
        with self._lock:
            self._lanes[device].append(lane)

    def _make_lane(self) -> _Lane:
        stream, end = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        try:
            self._call("cuEventCreate", ctypes.byref(end), ctypes.c_uint(_SLEEPING))
        except BaseException:
            self._library.cuStreamDestroy_v2(stream)
            raise
        return _Lane(stream, end)

    def _destroy(self, lane: _Lane) -> None:
        self._library.cuStreamSynchronize(lane.stream)
        self._library.cuEventDestroy_v2(lane.end)
        self._library.cuStreamDestroy_v2(lane.stream)


@functools.lru_cache(maxsize=None)
def _driver_of(pid: int) -> Driver:
    return Driver()


def driver() -> Driver:
    """The driver of this process; a fork has none of its parent's. Unavailable, saying why, if there is none."""
    return _driver_of(os.getpid())


class Mapping:
    """Memory of a GPU that a server shares, in this process's address space until the object goes."""

    def __init__(self, owner: Driver, descriptor: int, size: int, device: int) -> None:
        self.driver = owner
        self.device = device
        self.size = size
        self.address = owner.import_memory(descriptor, size, device)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._reached: dict[int, bool] = {}  # by other GPU

    def copiers(self, gpu: int) -> tuple[int, int]:
        """Which GPU copies from memory of `gpu` to this one, and which one back.

        Of two GPUs each writes what it has to the other's memory: reading from there is far slower on some.
        """
        if gpu == self.device:
            return gpu, gpu
        with self._lock:
            if gpu not in self._reached:
                self._reached[gpu] = self.driver.let_reach(self.address, self.size, self.device, gpu)
            return (gpu, self.device) if self._reached[gpu] else (self.device, self.device)

    def __del__(self) -> None:
        if getattr(self, "_pid", -1) == os.getpid():
            self.driver.unmap(self.address, self.size, self.device)


class Pin:
    """Memory of the host that GPUs copy to and from without a detour, until release() or until the object goes; the memory is
    to stay mapped until then."""

    def __init__(self, owner: Driver, address: int, size: int, device: int) -> None:
        owner.pin(address, size, device)
        self._owner: Driver | None = owner
        self._address = address
        self._device = device
        self._pid = os.getpid()

    def release(self) -> None:
        """May be repeated. In a fork it has no effect."""
        owner, self._owner = self._owner, None
        if owner is not None and self._pid == os.getpid():
            with suppress(errors.LossdError):  # the driver is gone
                owner.unpin(self._address, self._device)

    def __del__(self) -> None:
        if getattr(self, "_owner", None) is not None:
            self.release()
