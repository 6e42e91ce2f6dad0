# SPDX-License-Identifier: Apache-2.0
"""Servers of several GPUs, and CUDA arrays on each of them: what Client says of the way of their rows. The GPUs are fakes on
both sides (fake_cuda.py, tests/server/app/shared_device.cc); what is copied by which of them, and limits, are the subject of
tests/client/cpp/cuda_devices_test.cc.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeGpus, uuid_of
from servers import ServerProcess
from test_cuda_ipc import connect, expected, on_gpu, start

import lossd
from lossd import _native


@pytest.fixture(scope="module", params=["rows", "vocabulary"])
def several(request: pytest.FixtureRequest) -> Any:
    """A server of the second, third and fourth GPU of a machine of four."""
    process = start("--devices=1,2,3", f"--split={request.param}")
    yield process
    process.stop()


@pytest.fixture(autouse=True)
def gpus() -> FakeGpus:
    return FakeGpus(devices=4)


def said(device: int) -> str:
    return f"the server's GPU is of this host; 4 MiB of {uuid_of(device)}"


def test_one_client_with_arrays_on_each(several: ServerProcess, gpus: FakeGpus) -> None:
    wanted = expected(several)
    results: list[Any] = [None] * 6
    with lossd.Client(several.target, transport="auto") as client:
        server = client.get_server()
        assert server.region_device == uuid_of(1)
        assert server.region_devices == (uuid_of(1), uuid_of(2), uuid_of(3))
        assert client.shares_gpu(2) and client.cuda_transport == ("cuda_ipc", said(2))

        def run(i: int) -> None:
            for _ in range(3):
                results[i] = on_gpu(client, device=1 + i % 3)[0]

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert gpus.held("mapping") == 3 and gpus.copied().keys() == {"device to device"}
        assert client.cuda_transport == (
            "cuda_ipc", "; ".join(f"rows on {uuid_of(device)}: cuda_ipc, {said(device)}" for device in (1, 2, 3)))
        assert [client.shares_gpu(device) for device in range(4)] == [False, True, True, True]
    for gradient in results:
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
    assert gpus.held("mapping") == 0


def test_arrays_of_a_gpu_that_is_not_the_servers(several: ServerProcess, gpus: FakeGpus) -> None:
    """With "auto" their rows go as those of the host, with "cuda_ipc" through memory of the nearest one."""
    wanted = expected(several)
    with lossd.Client(several.target, transport="auto") as client:
        gradient, _ = on_gpu(client, device=0)
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
        assert client.cuda_transport == ("grpc", f"the rows are on {uuid_of(0)}, and the server's GPUs are {uuid_of(1)}, "
                                                 f"{uuid_of(2)}, {uuid_of(3)}")
    gpus.set_rank(0, 1, 1)
    gpus.set_rank(0, 2, 1)
    with connect(several) as client:
        gradient, _ = on_gpu(client, device=0)
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
        assert client.cuda_transport[0] == "cuda_ipc" and client.shares_gpu(0)
    assert gpus.copied_between("0 to 3 by 0") > 0 == gpus.copied_between("0 to 1 by 0")


@pytest.mark.parametrize("on_main_thread", [True, False])
def test_connecting_tries_memory_of_the_threads_gpu(several: ServerProcess, gpus: FakeGpus, on_main_thread: bool) -> None:
    found: list[tuple[int, str]] = []

    def run() -> None:
        for entered in (None, 0, 1, 3):
            with gpus.entered(entered):
                assert _native.current_gpu() == (None if entered is None else (entered, uuid_of(entered)))
                with connect(several) as client:
                    found.append((gpus.held("mapping"), client.cuda_transport[1]))

    if on_main_thread:
        run()
    else:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert found == [(1, f"the server's GPU is of this host; 1 MiB of {uuid_of(mapped)}") for mapped in (1, 1, 1, 3)]


def test_none_of_the_servers_gpus_is_seen(several: ServerProcess, gpus: FakeGpus) -> None:
    gpus.set_devices(1)
    with pytest.raises(lossd.Unavailable, match=f"^no shared memory: the server's GPUs are {uuid_of(1)}, {uuid_of(2)}, "
                                                f"{uuid_of(3)}, none of which this process sees$"):
        connect(several)


def test_gpus_that_nothing_connects() -> None:
    server = start("--devices=1,0")
    try:
        wanted = expected(server)
        for device in (0, 1):
            with lossd.Client(server.target, transport="auto") as client:
                gradient, _ = on_gpu(client, device=device)
                why = (f"no shared memory: the server's GPU {uuid_of(1 - device)} does not reach memory of {uuid_of(device)}: "
                       "nothing connects these GPUs; tried again from time to time")
                assert client.cuda_transport == ("grpc", why) and not client.shares_gpu(device)
            np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
    finally:
        server.stop()
