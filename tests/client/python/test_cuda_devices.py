# SPDX-License-Identifier: Apache-2.0
"""Servers of several GPUs, and rows on each of them: the same as tests/client/cpp/cuda_devices_test.cc asks of the C++
client. The GPUs are fakes on both sides (fake_cuda.py, tests/server/app/shared_device.cc)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeDriver, uuid_of
from test_cuda_ipc import connect, expected, gpus, head_on, on_gpu, start
from servers import ServerProcess

import lossd

__all__ = ["gpus"]  # a fixture


@pytest.fixture(scope="module", params=["rows", "vocabulary"])
def several(request: pytest.FixtureRequest) -> Any:
    """A server of the second, third and fourth GPU of a machine of four."""
    process = start("--devices=1,2,3", f"--split={request.param}")
    yield process
    process.stop()


@pytest.fixture(autouse=True)
def four(gpus: FakeDriver) -> FakeDriver:
    gpus.devices = 4
    return gpus


def devices_mapped(gpus: FakeDriver) -> list[int]:
    return sorted(gpus.device_of(address) for address in gpus.mapped)


def said(device: int) -> str:
    return f"the server's GPU is of this host; 4 MiB of {uuid_of(device)}"


@pytest.mark.parametrize("device", [1, 2, 3])
def test_rows_take_memory_of_the_gpu_that_they_are_on(several: ServerProcess, gpus: FakeDriver, device: int) -> None:
    wanted = expected(several)
    with lossd.Client(several.target, transport="auto") as client:
        server = client.get_server()
        assert server.region_device == uuid_of(1)
        assert server.region_devices == (uuid_of(1), uuid_of(2), uuid_of(3))
        gradient, result = on_gpu(client, device=device)
        assert devices_mapped(gpus) == [device] and not gpus.between, "nothing crosses from one GPU to another"
        assert set(gpus.copies) == {(True, True)}
        assert client.cuda_transport == ("cuda_ipc", said(device))
        assert client.shares_gpu(device) and not client.shares_gpu(0)
    np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
    np.testing.assert_allclose(result.rows["loss"], wanted.rows["loss"], atol=1e-5)
    assert not gpus.mapped


def test_one_client_has_a_region_of_each_gpu(several: ServerProcess, gpus: FakeDriver) -> None:
    wanted = expected(several)
    results: list[Any] = [None] * 6
    with lossd.Client(several.target, transport="auto") as client:
        def run(i: int) -> None:
            for _ in range(3):
                results[i] = on_gpu(client, device=1 + i % 3)[0]

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert devices_mapped(gpus) == [1, 2, 3] and not gpus.between
        assert client.cuda_transport == (
            "cuda_ipc", "; ".join(f"rows on {uuid_of(device)}: cuda_ipc, {said(device)}" for device in (1, 2, 3)))
    for gradient in results:
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)


def test_rows_of_a_gpu_that_is_not_the_servers_go_as_those_of_the_host(several: ServerProcess, gpus: FakeDriver) -> None:
    wanted = expected(several)
    with lossd.Client(several.target, transport="auto") as client:
        gradient, _ = on_gpu(client, device=0)
        assert set(gpus.copies) == {(False, True), (True, False)} and not gpus.mapped
        assert client.cuda_transport == ("grpc", f"the rows are on {uuid_of(0)}, and the server's GPUs are {uuid_of(1)}, "
                                                 f"{uuid_of(2)}, {uuid_of(3)}")
    np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)


def test_with_cuda_ipc_they_take_memory_of_the_nearest(several: ServerProcess, gpus: FakeDriver) -> None:
    wanted = expected(several)

    def nearest() -> set[int]:
        gpus.between.clear()
        with connect(several) as client:
            gradient, _ = on_gpu(client, device=0)
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
        return {to for source, to, _ in gpus.between if source == 0}

    assert nearest() == {1}
    gpus.ranks[0, 1] = gpus.ranks[0, 2] = 1
    assert nearest() == {3}


def test_connecting_tries_memory_of_the_threads_gpu(several: ServerProcess, gpus: FakeDriver) -> None:
    for entered, mapped in ((None, 1), (0, 1), (1, 1), (3, 3)):
        gpus.entered = entered
        with connect(several) as client:
            assert devices_mapped(gpus) == [mapped], "of no other GPU"
            assert client.cuda_transport[1].endswith(f" of {uuid_of(mapped)}")
    gpus.devices = 1
    with pytest.raises(lossd.Unavailable, match=f"^no shared memory: the server's GPUs are {uuid_of(1)}, {uuid_of(2)}, "
                                                f"{uuid_of(3)}, none of which this process sees$"):
        connect(several)


def test_gpus_that_nothing_connects(gpus: FakeDriver) -> None:
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


def test_a_server_that_is_restarted_gives_another_region_of_that_gpu(gpus: FakeDriver) -> None:
    server = start("--devices=all")
    try:
        expected(server)
        with lossd.Client(server.target, transport="auto") as client:
            on_gpu(client, device=1)
            server.kill()
            server.start()
            wanted = expected(server)
            for _ in range(2):
                gradient, _ = on_gpu(client, device=1)
                np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
            assert client.cuda_transport == ("cuda_ipc", said(1)) and not gpus.between
    finally:
        server.stop()


def test_limits_hold_for_each_gpu(gpus: FakeDriver) -> None:
    server = start("--devices=all", "--shared_device_memory_bytes=4MiB")
    try:
        with lossd.Client(server.target, transport="auto") as client:
            head_on(client)
            on_gpu(client, device=0)
            on_gpu(client, device=1)
            assert devices_mapped(gpus) == [0, 1]
            with lossd.Client(server.target, transport="auto") as second:
                on_gpu(second, device=1)
                assert second.cuda_transport == (
                    "grpc", "no shared memory: --shared_device_memory_bytes has nothing left for this process on "
                    f"{uuid_of(1)}; tried again from time to time")
    finally:
        server.stop()


def test_a_server_that_knows_of_one_gpu_alone(monkeypatch: pytest.MonkeyPatch, gpus: FakeDriver) -> None:
    """It is older than ServerDescription.region_devices, and gives memory of its first GPU whatever was asked for."""
    from lossd import _connections
    from lossd.v1 import server_pb2

    server = start("--devices=all")
    await_server = _connections.await_server

    def older(*arguments: Any) -> server_pb2.ServerDescription:
        description = await_server(*arguments)
        del description.region_devices[:]
        return description

    monkeypatch.setattr(_connections, "await_server", older)
    try:
        wanted = expected(server)
        with lossd.Client(server.target, transport="auto") as client:
            for device in (0, 1):
                gradient, _ = on_gpu(client, device=device)
                np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
            assert devices_mapped(gpus) == [0]
    finally:
        server.stop()
