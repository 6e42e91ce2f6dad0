# SPDX-License-Identifier: Apache-2.0
"""Rows of CUDA arrays with transport="auto", and how large their slices are."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from fake_cuda import FakeArray, FakeDriver, uuid_of
from on_fake_gpu import D, N, V, compute, connect, expected, gpu_server, gpus, head_on, on_gpu, problem, start
from server_process import ServerProcess

import lossd
from lossd import _slice_places

__all__ = ["gpu_server", "gpus"]  # fixtures


def test_auto_takes_it_for_arrays_of_the_servers_gpu(gpu_server: ServerProcess, gpus: FakeDriver) -> None:
    wanted = expected(gpu_server)
    with lossd.Client(gpu_server.target, transport="auto") as client:
        assert client.cuda_transport == ("grpc", "nothing was sent yet") and not gpus.mapped
        assert client.shares_gpu() and client.shares_gpu(0) and not client.shares_gpu(1)
        gradient, _ = on_gpu(client)
        assert client.cuda_transport == ("cuda_ipc", f"the server's GPU is of this host; 4 MiB of {uuid_of(0)}")
        assert set(gpus.copies) == {(True, True)}
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
        gpus.copies.clear()
        gradient, _ = on_gpu(client, device=1)
        assert set(gpus.copies) == {(False, True), (True, False)}, "between the array and the host"
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
        assert client.cuda_transport == (
            "grpc", f"rows on {uuid_of(0)}: cuda_ipc, the server's GPU is of this host; 4 MiB of {uuid_of(0)}; rows on "
            f"{uuid_of(1)}: grpc, the rows are on {uuid_of(1)}, and the server's GPU is {uuid_of(0)}")


def test_auto_on_a_machine_without_that_gpu(gpu_server: ServerProcess, gpus: FakeDriver,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find", lambda name: None)
    with lossd.Client(gpu_server.target, transport="auto") as client:
        assert not client.shares_gpu()
        compute(client, FakeArray(problem()[0]), FakeArray(problem()[0]))
        assert client.cuda_transport[0] == "grpc"
        assert "which this process does not see" in client.cuda_transport[1]


def test_a_slice_is_as_large_as_the_memory_allows(gpus: FakeDriver) -> None:
    """Larger than messages may be, and the parts of a call are equal."""
    server = start("--slice_bytes=1KiB", "--staging_bytes=1MiB")
    try:
        targets = np.arange(N, dtype=np.int32) % V
        for size, slices in ((256 << 10, 1), (64 << 10, 2), (16 << 10, 8)):  # a quarter of it holds 682, 170, 42 rows
            with connect(server, size) as client:
                head_on(client)
                assert 0 < client.describe_head("lm").slice_limits.max_bytes <= 1024
                gpus.copies.clear()
                gradient = FakeArray(np.full((N, D), np.nan, np.float32))
                client.compute_loss("lm", FakeArray(problem()[0]), targets, grad_hidden=gradient)
                assert gpus.copies == [(True, True)] * 2 * slices
                with lossd.Client(server.target, transport="grpc") as other:
                    wanted = other.compute_loss("lm", problem()[0], targets, grad_hidden=True)
                np.testing.assert_allclose(gradient.values, wanted.grad_hidden, atol=1e-5)
    finally:
        server.stop()


def test_a_slice_that_finds_no_room_goes_in_messages_that_are_small_enough(gpus: FakeDriver) -> None:
    server = start("--slice_bytes=1KiB", "--staging_bytes=1MiB")
    try:
        wanted = expected(server)
        with connect(server, 256 << 10) as client:
            region = client._connections.device_regions.get(uuid_of(0))
            assert region is not None
            offset = region.take(region.size)
            gradient = FakeArray(np.full((N, D), np.nan, np.float32))
            hidden, targets = problem()
            result = client.compute_loss("lm", FakeArray(hidden), targets, grad_hidden=gradient, rows=("loss",))
            assert set(gpus.copies) == {(False, True), (True, False)}
            np.testing.assert_allclose(gradient.values, wanted.grad_hidden, atol=1e-5)
            np.testing.assert_allclose(result.rows["loss"], wanted.rows["loss"], atol=1e-5)
            assert offset is not None
            region.give(offset)
    finally:
        server.stop()


def test_a_call_waits_a_moment_for_the_room_of_others(gpu_server: ServerProcess, gpus: FakeDriver,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_slice_places, "_PATIENCE", 60.0)
    wanted = expected(gpu_server)
    with connect(gpu_server, 256 << 10) as client:
        region = client._connections.device_regions.get(uuid_of(0))
        assert region is not None
        offset = region.take(region.size)
        assert offset is not None
        timer = threading.Timer(0.2, region.give, (offset,))
        timer.start()
        gradient, _ = on_gpu(client)
        timer.join()
        assert set(gpus.copies) == {(True, True)}
    np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
