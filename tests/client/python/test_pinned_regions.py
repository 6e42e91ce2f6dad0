# SPDX-License-Identifier: Apache-2.0
"""Memory of the host that is registered with CUDA's driver for rows of CUDA arrays, on GPUs that are played (fake_cuda.py).

The same as tests/client/cpp/cuda_ipc_test.cc asks of the C++ client.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeArray, FakeDriver
from on_fake_gpu import D, N, compute, expected, gpu_server, gpus, head_on, on_gpu, problem
from server_process import ServerProcess

import lossd
from lossd import _regions

__all__ = ["gpu_server", "gpus"]  # fixtures


@pytest.fixture
def wanted(server: ServerProcess) -> Any:
    """Of a server without a GPU, whose memory of the host the rows go through."""
    return expected(server)


def connect(server: ServerProcess) -> lossd.Client:
    return lossd.Client(server.target, transport="shared_memory")


def test_it_is_registered_once_with_the_first_cuda_array(server: ServerProcess, gpus: FakeDriver, wanted: Any) -> None:
    with connect(server) as client:
        compute(client, problem()[0], True)
        assert gpus.pins == 0, "rows of the host need nothing of the driver"
        for device in (0, 1, 0):
            gradient, result = on_gpu(client, device)
            np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
            assert result.sent_bytes == result.received_bytes > 0
        threads = [threading.Thread(target=on_gpu, args=(client,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert gpus.pins == len(gpus.pinned) == 1
        region = client._connections.regions.get()
        assert region is not None and gpus.pinned == {region.address: region.size}
        assert client.transport[1] == "the server is on this host; 4 MiB"
        del region
    del client
    gc.collect()
    assert not gpus.pinned and gpus.pins == 1


def test_all_copies_are_to_and_from_what_is_registered(server: ServerProcess, gpus: FakeDriver, wanted: Any,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    copy, on_host = gpus.copy, []

    def watch(to: int, source: int, size: int, device: int) -> None:
        on_host.append(gpus.is_pinned(min(to, source)))  # addresses of the host are lower
        copy(to, source, size, device)

    monkeypatch.setattr(gpus, "copy", watch)
    with connect(server) as client:
        gradient, _ = on_gpu(client)
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
        client.compute_loss(head_on(client), FakeArray(problem()[0]), problem()[1], reduction="none", retain=True, step=0, id=9)
        gradient = FakeArray(np.full((N, D), np.nan, np.float32))
        client.backward("lm", 9, np.ones(N, np.float32), hidden_size=D, step=0, grad_hidden=gradient)
        client.release_microbatch("lm", 9)
    assert on_host and all(on_host)


def test_a_registration_that_fails_is_not_repeated(server: ServerProcess, gpus: FakeDriver, wanted: Any,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a limit of the process forbids it."""
    attempts = []

    def fail(address: int, size: int, device: int) -> None:
        attempts.append(address)
        raise lossd.Unavailable("cuMemHostRegister_v2 failed: out of memory")

    monkeypatch.setattr(gpus, "pin", fail)
    with connect(server) as client:
        for _ in range(3):
            gradient, _ = on_gpu(client)
            np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
        assert len(attempts) == 1
        assert client.transport == ("shared_memory", "the server is on this host; 4 MiB; GPUs copy to it by a detour: "
                                                     "cuMemHostRegister_v2 failed: out of memory")


def test_a_region_that_is_given_up_is_released_at_once(server: ServerProcess, gpus: FakeDriver, wanted: Any) -> None:
    """Also while its error, and so its frames, are kept; the next one is registered anew."""
    hidden = problem()[0]
    hidden[151] = np.inf
    with connect(server) as client:
        head_on(client)
        with pytest.raises(lossd.NonFinite) as kept:
            compute(client, FakeArray(hidden), FakeArray(hidden))
        assert kept.value.__traceback__ is not None and gpus.pins == 1
        assert not gpus.pinned
        gradient, _ = on_gpu(client)
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
        assert gpus.pins == 2 and len(gpus.pinned) == 1


def test_a_copy_keeps_it_registered_until_it_has_ended(server: ServerProcess, gpus: FakeDriver, wanted: Any,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the call has been given up, and with it the region."""
    copy, copying, go_on, pinned = gpus.copy, threading.Event(), threading.Event(), []

    def slow(to: int, source: int, size: int, device: int) -> None:
        copying.set()
        go_on.wait()
        pinned.append(gpus.is_pinned(to))
        copy(to, source, size, device)

    with connect(server) as client:
        head_on(client)
        monkeypatch.setattr(gpus, "copy", slow)
        pending = client.compute_loss_async("lm", FakeArray(problem()[0]), problem()[1])
        copying.wait()
        pending.cancel()
        with pytest.raises(lossd.Cancelled):
            pending.wait()
        go_on.set()
    del client, pending
    while gpus.pinned:
        gc.collect()
    assert pinned == [True]


def test_a_fork_leaves_it_to_its_parent(server: ServerProcess, gpus: FakeDriver) -> None:
    with lossd.Client(server.target) as client:
        region = _regions.SharedRegion(client.get_server().region_socket, 100 << 10)
    region.pin_for(gpus.uuid(1))
    region.pin_for(gpus.uuid(0))
    assert gpus.pins == 1
    child = os.fork()
    if child == 0:
        del region
        gc.collect()
        os._exit(0 if len(gpus.pinned) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(gpus.pinned) == 1
    del region
    gc.collect()
    assert not gpus.pinned


def test_memory_of_a_gpu_is_not_registered(gpu_server: ServerProcess, gpus: FakeDriver) -> None:
    expected(gpu_server)
    with lossd.Client(gpu_server.target, transport="cuda_ipc") as client:
        on_gpu(client)
    assert gpus.pins == 0
