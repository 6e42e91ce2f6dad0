# SPDX-License-Identifier: Apache-2.0
"""What the client asks of CUDA's driver, with a library in its place (tests/client/cpp/fake_cuda.h): the same as
tests/client/cpp/cuda_devices_test.cc asks of the C++ client.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import lossd
from lossd import _cuda

SIZE = 8192
KINDS = ("handle", "reservation", "mapping", "allocation", "stream", "event", "pinned")


class Library:
    """What tests ask the library for."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def fail(self, function: str, count: int = 1) -> None:
        """The next calls of this function fail."""
        self._library.lossd_fake_cuda_fail(function.encode(), ctypes.c_int64(count))

    def held(self) -> dict[str, int]:
        """Of each kind of thing that the driver gives out, how many have not been given back."""
        return {kind: self._library.lossd_fake_cuda_held(kind.encode()) for kind in KINDS}

    def context_depth(self) -> int:
        return int(self._library.lossd_fake_cuda_context_depth())

    def set_connected(self, connected: bool) -> None:
        """Whether the GPUs reach each other's memory; they do at the beginning."""
        self._library.lossd_fake_cuda_set_connected(int(connected))

    def take_copied_between(self, way: str) -> int:
        """Bytes since the last call, of copies such as "1 to 0 by 1" (fake_cuda.h)."""
        take = self._library.lossd_fake_cuda_take_copied_between
        take.restype = ctypes.c_int64
        return int(take(way.encode()))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    path = os.environ["LOSSD_FAKE_CUDA"]
    monkeypatch.setattr(_cuda, "_LIBRARY", path)
    return Library(path)


@pytest.fixture
def driver(library: Library) -> _cuda.Driver:
    """Without streams of its own from before."""
    return _cuda.Driver()


class DeviceMemory:
    """Of a GPU, for a test."""

    def __init__(self, driver: _cuda.Driver, device: int = 0) -> None:
        self._driver, self.device = driver, device
        address = ctypes.c_uint64()
        with driver._current(device):
            driver._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(SIZE))
        self.address = address.value

    def free(self) -> None:
        with self._driver._current(self.device):
            self._driver._call("cuMemFree_v2", ctypes.c_uint64(self.address))


@pytest.fixture
def memory(driver: _cuda.Driver) -> Iterator[DeviceMemory]:
    made = DeviceMemory(driver)
    yield made
    made.free()


def numbers(first: int) -> Any:
    return (np.arange(SIZE) + first).astype(np.uint8)


def test_finds_gpus_by_their_uuid(driver: _cuda.Driver) -> None:
    assert driver.uuid(1) == "GPU-00000000-0000-0000-0000-000000000002"
    assert [driver.find(driver.uuid(device)) for device in (0, 1)] == [0, 1]
    assert driver.find("GPU-00000000-0000-0000-0000-000000000003") is None


def test_says_which_gpu_the_thread_works_on_and_how_far_others_are(driver: _cuda.Driver, library: Library) -> None:
    assert driver.current() is None
    with driver._current(1):
        assert driver.current() == 1
    assert [driver.distance(0, 0), driver.distance(0, 1)] == [0, 1]
    assert driver.distance(0, 7) is None
    library.set_connected(False)
    assert driver.distance(0, 1) is None
    library.set_connected(True)


def test_copies_between_gpus_the_host_and_memory_of_other_processes(driver: _cuda.Driver, library: Library) -> None:
    held = library.held()
    descriptor = os.memfd_create("exported")
    os.ftruncate(descriptor, SIZE)
    region = driver.import_memory(descriptor, SIZE, 0)
    os.close(descriptor)
    first, second = DeviceMemory(driver, 0), DeviceMemory(driver, 1)
    assert [driver.device_of(region + 1), driver.device_of(second.address + SIZE - 1)] == [0, 1]
    given, got = numbers(3), np.empty(SIZE, np.uint8)
    with pytest.raises(lossd.Unavailable, match="cuPointerGetAttribute failed: invalid argument"):
        driver.device_of(got.ctypes.data)
    driver.copy(second.address, given.ctypes.data, SIZE, 1)
    driver.copy(region, second.address, SIZE, 0)
    driver.copy(first.address, region, SIZE, 0)
    driver.fill_zeros(first.address + 10, 5, 0)
    driver.copy(got.ctypes.data, first.address, SIZE, 0)
    given[10:15] = 0
    np.testing.assert_array_equal(got, given)
    assert library.context_depth() == 0
    driver.unmap(region, SIZE, 0)
    first.free()
    second.free()
    # One stream for each GPU, which all copies took in turn.
    now = library.held()
    assert {kind: now[kind] - held[kind] for kind in KINDS if now[kind] != held[kind]} == {"stream": 2, "event": 2}


def test_an_import_that_fails_leaves_nothing(driver: _cuda.Driver, library: Library) -> None:
    descriptor = os.memfd_create("exported")
    os.ftruncate(descriptor, SIZE)
    held = library.held()
    for function in ("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuMemImportFromShareableHandle",
                     "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"):
        library.fail(function)
        with pytest.raises(lossd.Unavailable, match=f"^{function}(_v2)? failed: an illegal memory access"):
            driver.import_memory(descriptor, SIZE, 1)
        assert library.held() == held and library.context_depth() == 0, function
    driver.unmap(driver.import_memory(descriptor, SIZE, 1), SIZE, 1)
    assert library.held() == held
    os.close(descriptor)


def test_two_gpus_push_to_each_other(driver: _cuda.Driver, library: Library) -> None:
    """Each writes what it has to the other's memory, unless nothing connects them; the driver is asked once."""
    descriptor = os.memfd_create("exported")
    os.ftruncate(descriptor, SIZE)
    rows = DeviceMemory(driver, 1)
    for function in ("", "cuMemSetAccess", "cuCtxEnablePeerAccess"):
        mapping = _cuda.Mapping(driver, descriptor, SIZE, 0)
        assert mapping.copiers(0) == (0, 0)
        if function:
            library.fail(function)
        assert mapping.copiers(1) == ((1, 0) if not function else (0, 0)), function
        assert mapping.copiers(1) == ((1, 0) if not function else (0, 0)), "as it was"
        assert library.context_depth() == 0
        to_region, from_region = mapping.copiers(1)
        driver.copy(mapping.address, rows.address, SIZE, to_region)
        driver.copy(rows.address, mapping.address, SIZE, from_region)
        if not function:
            assert library.take_copied_between("1 to 0 by 1") == library.take_copied_between("0 to 1 by 0") == SIZE
        del mapping
    library.set_connected(False)
    assert _cuda.Mapping(driver, descriptor, SIZE, 0).copiers(1) == (0, 0)
    library.set_connected(True)
    rows.free()
    os.close(descriptor)


@pytest.mark.parametrize("lane_is_new", [True, False])
def test_a_copy_that_fails_leaves_nothing_and_the_next_one_works(driver: _cuda.Driver, library: Library, memory: DeviceMemory,
                                                                 lane_is_new: bool) -> None:
    """Neither its stream nor its event, which are not used again."""
    given, got = numbers(5), np.empty(SIZE, np.uint8)
    held = library.held()
    makes = ("cuStreamCreate", "cuEventCreate") if lane_is_new else ()
    for function in (*makes, "cuMemcpyAsync", "cuEventRecord", "cuEventSynchronize"):
        if not lane_is_new:
            driver.copy(memory.address, numbers(0).ctypes.data, SIZE, 0)
        library.fail(function)
        with pytest.raises(lossd.Unavailable, match=f"^{function} failed: an illegal memory access"):
            driver.copy(memory.address, given.ctypes.data, SIZE, 0)
        assert library.held() == held and library.context_depth() == 0, function
    library.fail("cuMemsetD8Async")
    with pytest.raises(lossd.Unavailable, match="^cuMemsetD8Async failed"):
        driver.fill_zeros(memory.address, SIZE, 0)
    assert library.held() == held
    driver.copy(memory.address, given.ctypes.data, SIZE, 0)
    driver.copy(got.ctypes.data, memory.address, SIZE, 0)
    np.testing.assert_array_equal(got, given)


def test_a_copy_is_over_when_it_fails(driver: _cuda.Driver, library: Library, memory: DeviceMemory) -> None:
    """What it was given has been done, so that its memory may be used for something else."""
    given, got = numbers(7), np.empty(SIZE, np.uint8)
    library.fail("cuEventRecord")
    with pytest.raises(lossd.Unavailable):
        driver.copy(memory.address, given.ctypes.data, SIZE, 0)
    driver.copy(got.ctypes.data, memory.address, SIZE, 0)
    np.testing.assert_array_equal(got, given)


def test_a_wait_that_fails_leaves_nothing(driver: _cuda.Driver, library: Library) -> None:
    held = library.held()
    library.fail("cuEventSynchronize")
    with pytest.raises(lossd.Unavailable, match="^cuEventSynchronize failed"):
        driver.wait(0, 0)
    assert library.held() == held and library.context_depth() == 0


def test_many_threads_copy_at_once(driver: _cuda.Driver) -> None:
    problems: list[BaseException] = []

    def run(number: int) -> None:
        try:
            given, memory = numbers(number), DeviceMemory(driver, number % 2)
            for _ in range(50):
                got = np.empty(SIZE, np.uint8)
                driver.copy(memory.address, given.ctypes.data, SIZE, memory.device)
                driver.copy(got.ctypes.data, memory.address, SIZE, memory.device)
                np.testing.assert_array_equal(got, given)
            memory.free()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_pins_memory_of_the_host(driver: _cuda.Driver, library: Library) -> None:
    held = library.held()
    with mmap.mmap(-1, 3 * mmap.PAGESIZE) as mapping:
        memory = np.frombuffer(mapping, np.uint8)
        address = int(memory.ctypes.data)
        pin = _cuda.Pin(driver, address, 2 * mmap.PAGESIZE - 100, 1)
        assert library.held() == held | {"pinned": held["pinned"] + 1}
        with pytest.raises(lossd.Unavailable, match="^cuMemHostRegister_v2 failed"):
            _cuda.Pin(driver, address + mmap.PAGESIZE, mmap.PAGESIZE, 0)
        _cuda.Pin(driver, address + 2 * mmap.PAGESIZE, mmap.PAGESIZE, 0)  # which goes at once
        assert library.held() == held | {"pinned": held["pinned"] + 1}
        library.fail("cuCtxPushCurrent")
        pin.release()  # as with a driver that is gone
        assert library.held() == held | {"pinned": held["pinned"] + 1}
        driver.unpin(address, 1)
        again = _cuda.Pin(driver, address, 1, 0)
        again.release()
        again.release()
        assert library.held() == held and library.context_depth() == 0
        del memory


def test_says_why_there_is_none(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.fail("cuInit")
    with pytest.raises(lossd.Unavailable, match="^cuInit failed: an illegal memory access"):
        _cuda.Driver()
    for name in ("cuInit", "cuMemHostRegister_v2"):  # as of a driver that is older than the function
        monkeypatch.setattr(_cuda, "_LIBRARY", "libm.so.6")
        monkeypatch.setattr(_cuda, "_FUNCTIONS", ("cos", name))
        with pytest.raises(lossd.Unavailable, match=f"^no CUDA driver: libm.so.6 lacks {name}$"):
            _cuda.Driver()
    monkeypatch.setattr(_cuda, "_LIBRARY", "libnowhere.so.1")
    with pytest.raises(lossd.Unavailable, match="^no CUDA driver: libnowhere.so.1"):
        _cuda.Driver()
