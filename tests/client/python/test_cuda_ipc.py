# SPDX-License-Identifier: Apache-2.0
"""Rows of CUDA arrays through memory of the server's GPU: the same results as in messages, whatever ends when.

The GPU is a fake on both sides (fake_cuda.py, tests/server/app/shared_device.cc): what follows an address of it ends.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeArray, FakeDriver, uuid_of
from on_fake_gpu import D, N, SLICE, V, compute, connect, expected, gpu_server, gpus, head_on, on_gpu, problem, start
from server_process import ServerProcess

import lossd
from lossd import _cuda, _regions
from lossd.v1 import region_pb2

__all__ = ["gpu_server", "gpus"]  # fixtures


@pytest.mark.parametrize("size", [1 << 20, 16 << 10, 2 << 10])
def test_results_are_those_of_messages(gpu_server: ServerProcess, gpus: FakeDriver, size: int) -> None:
    wanted = expected(gpu_server)
    with connect(gpu_server, size) as client:
        gradient, result = on_gpu(client)
        assert client.cuda_transport == ("cuda_ipc", f"the server's GPU is of this host; {size >> 20} MiB of {uuid_of(0)}")
        assert client.shares_gpu()
    np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
    np.testing.assert_allclose(result.rows["loss"], wanted.rows["loss"], atol=1e-5)
    if size >= 16 << 10:  # in a smaller one some slices go in messages
        assert set(gpus.copies) == {(True, True)}, "between the arrays and the region, and no other way"
        assert result.sent_bytes == result.received_bytes > 0


def test_a_deterministic_server_gives_the_same_bits(gpus: FakeDriver) -> None:
    server = start("--deterministic")
    try:
        wanted = expected(server, step=0, id=0, accumulate=True, streams=2)
        with connect(server) as client:
            gradient, result = on_gpu(client, step=0, id=0, accumulate=True, streams=2)
            assert client.cuda_transport[0] == "cuda_ipc"
        np.testing.assert_array_equal(gradient, wanted.grad_hidden)
        np.testing.assert_array_equal(result.rows["loss"], wanted.rows["loss"])
    finally:
        server.stop()


@pytest.mark.parametrize("size", [1 << 20, 8 << 10])
def test_gradients_of_retained_rows(gpu_server: ServerProcess, size: int) -> None:
    weights = np.random.default_rng(1).standard_normal(N).astype(np.float32)

    def run(client: lossd.Client, hidden: Any, gradient: Any) -> Any:
        head = head_on(client)
        client.compute_loss(head, hidden, problem()[1], reduction="none", retain=True, step=0, id=9, slice_bytes=SLICE)
        result = client.backward(head, 9, weights, hidden_size=D, step=0, grad_hidden=gradient)
        client.release_microbatch(head, 9)
        return result.grad_hidden

    with lossd.Client(gpu_server.target, transport="grpc") as client:
        wanted = run(client, problem()[0], True)
    with connect(gpu_server, size) as client:
        gradient = FakeArray(np.full((N, D), np.nan, np.float32))
        assert run(client, FakeArray(problem()[0]), gradient) is gradient
        np.testing.assert_allclose(gradient.values, wanted, atol=1e-5)


def test_many_computations_share_a_little_region(gpu_server: ServerProcess) -> None:
    wanted = expected(gpu_server)
    with connect(gpu_server, 16 << 10) as client:
        results: list[Any] = [None] * 8

        def run(i: int) -> None:
            results[i] = on_gpu(client, streams=2)[0]

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for gradient in results:
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)


def test_arrays_of_the_host_take_memory_of_the_host(gpu_server: ServerProcess, gpus: FakeDriver) -> None:
    with connect(gpu_server) as client:
        head_on(client)
        compute(client, problem()[0], True)
        assert client.transport[0] == "grpc", "this backend takes no memory of the host"
        assert not gpus.copies


def test_arrays_of_another_gpu_are_copied_to_the_servers(gpu_server: ServerProcess, gpus: FakeDriver) -> None:
    wanted = expected(gpu_server)
    with connect(gpu_server) as client:
        gradient, _ = on_gpu(client, device=1)
        assert set(gpus.copies) == {(True, True)} and {gpus.device_of(each) for each in gpus.mapped} == {0}
        assert gpus.between == {(1, 0, 1), (0, 1, 0)}, "each GPU writes to the other one's memory"
    np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
    gpus.connected = False
    gpus.between.clear()
    with connect(gpu_server) as client:
        gradient, _ = on_gpu(client, device=1)
        assert gpus.between == {(1, 0, 0), (0, 1, 0)}
    np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)


def test_a_gpu_that_the_client_does_not_see(gpu_server: ServerProcess, gpus: FakeDriver,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find", lambda name: None)
    with pytest.raises(lossd.Unavailable, match=f"the server's GPU is {uuid_of(0)}, which this process does not see"):
        connect(gpu_server)


def test_a_machine_without_a_driver(gpu_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise lossd.Unavailable("no CUDA driver: libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(_cuda, "driver", none)
    with pytest.raises(lossd.Unavailable, match="no CUDA driver"):
        connect(gpu_server)


def test_a_server_without_a_gpu(server: ServerProcess) -> None:
    with pytest.raises(lossd.Unavailable, match="the server shares no memory of a GPU"):
        connect(server)


def test_a_server_that_is_told_to_share_none() -> None:
    server = start("--shared_device_memory_bytes=0")
    try:
        with pytest.raises(lossd.Unavailable, match="the server shares no memory of a GPU"):
            connect(server)
    finally:
        server.stop()


@pytest.mark.parametrize("transport", ["auto", "grpc", "shared_memory"])
def test_with_other_transports_arrays_are_copied_to_the_host(transport: str, server: ServerProcess, gpus: FakeDriver) -> None:
    wanted = expected(server)
    with lossd.Client(server.target, transport=transport) as client:
        gradient, _ = on_gpu(client)
        why = "the server shares no memory of a GPU" if transport == "auto" else f"the transport is {transport}"
        assert client.cuda_transport == ("grpc", why) and not client.shares_gpu()
        assert not gpus.mapped and set(gpus.copies) == {(False, True), (True, False)}
        client.delete_head("lm")
    np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)


def test_a_process_has_at_most_its_share() -> None:
    server = start("--shared_device_memory_bytes=2MiB")
    try:
        with connect(server), pytest.raises(
                lossd.Unavailable, match="^no shared memory: --shared_device_memory_bytes has nothing left for this process"):
            for _ in range(2):
                connect(server)
    finally:
        server.stop()


def test_a_server_that_is_restarted_gives_another_region(gpus: FakeDriver) -> None:
    server = start()
    try:
        expected(server)
        with connect(server) as client:
            on_gpu(client)
            server.kill()
            server.start()
            wanted = expected(server)
            gradient, _ = on_gpu(client)
            np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
            on_gpu(client)
            assert client.cuda_transport[0] == "cuda_ipc"
    finally:
        server.stop()


@pytest.mark.parametrize("to_region", [True, False])
def test_copies_that_fail(gpu_server: ServerProcess, gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch,
                          to_region: bool) -> None:
    """Once: the rows are sent again. Always: the call says so."""
    wanted = expected(gpu_server)
    copy = gpus.copy
    left = [1]

    def fail(to: int, source: int, size: int, device: int) -> None:
        in_region = any(address <= to < address + memory.nbytes for address, memory in gpus.mapped.items())
        if in_region == to_region and left[0] > 0:
            left[0] -= 1
            raise lossd.Unavailable("cuMemcpyAsync failed: an illegal memory access was encountered")
        copy(to, source, size, device)

    with connect(gpu_server) as client:
        monkeypatch.setattr(gpus, "copy", fail)
        gradient, _ = on_gpu(client)
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
    with lossd.Client(gpu_server.target, transport="cuda_ipc", retry=lossd.RetryOptions(max_attempts=2)) as client:
        left[0] = 1 << 30
        with pytest.raises(lossd.Unavailable, match="cuMemcpyAsync failed: an illegal memory access"):
            on_gpu(client)


def test_nothing_stays_mapped_when_clients_go(gpu_server: ServerProcess, gpus: FakeDriver) -> None:
    expected(gpu_server)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        with connect(gpu_server) as client:
            on_gpu(client)
            assert len(gpus.mapped) == 1
        del client
        gc.collect()
        assert not gpus.mapped
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_waits_for_the_stream_that_an_array_names(gpu_server: ServerProcess, gpus: FakeDriver) -> None:
    with connect(gpu_server) as client:
        hidden = FakeArray(problem()[0], stream=7)
        client.compute_loss(head_on(client), hidden, problem()[1])
    assert gpus.waited == [7]


def test_bf16_comes_as_integers(gpu_server: ServerProcess) -> None:
    hidden, targets = problem()
    bits = (hidden.view(np.uint32) >> 16).astype(np.uint16)
    with connect(gpu_server) as client:
        client.create_head("bf16", hidden_size=D, vocab_size=V, if_exists="keep")
        wanted = client.compute_loss("bf16", bits, targets, dtype="bf16", grad_hidden=True)
        for kind in (np.uint16, np.int16):
            gradient = FakeArray(np.zeros((N, D), kind))
            result = client.compute_loss("bf16", FakeArray(bits.view(kind)), targets, dtype="bf16", grad_hidden=gradient)
            assert result.loss == pytest.approx(wanted.loss, rel=1e-6)
            np.testing.assert_array_equal(gradient.values.view(np.uint16), wanted.grad_hidden)


@pytest.mark.parametrize("hidden, gradient, message", [
    (FakeArray(np.zeros((N, D), np.float32)), True, "grad_hidden is True; for a CUDA array it must be one"),
    (FakeArray(np.zeros((N, D), np.float32)), np.zeros((N, D), np.float32), "grad_hidden is on the host; hidden is on GPU-"),
    (np.zeros((N, D), np.float32), FakeArray(np.zeros((N, D), np.float32)), "grad_hidden is on GPU-.*; hidden is on the host"),
    (FakeArray(np.zeros((N, D), np.float32)), FakeArray(np.zeros((N, D), np.float32), device=1),
     "grad_hidden is on GPU-.*2; hidden is on GPU-.*1"),
    (FakeArray(np.zeros((N, D), np.float32)), FakeArray(np.zeros((N, D + 1), np.float32)), r"grad_hidden has shape \(300, 25\)"),
    (FakeArray(np.zeros((N, D), np.float32)), FakeArray(np.zeros((N, D), np.float16)), "dtype float16"),
    (FakeArray(np.zeros((N, D), np.float32), strides=(8 * D, 8)), False, "hidden is a CUDA array that is not C-contiguous"),
    (FakeArray(np.zeros((N * D), np.float32)), False, r"hidden has shape \(7200,\)"),
    (FakeArray(np.zeros((N, D), np.int16)), False, 'pass dtype="bf16"'),
    (FakeArray(np.zeros((N, D), np.float64)), False, "dtype float64"),
    (FakeArray(np.zeros((N - 1, D), np.float32)), False, "targets has 300 entries for 299 rows"),
])
def test_bad_arrays_are_refused(gpu_server: ServerProcess, hidden: Any, gradient: Any, message: str) -> None:
    with connect(gpu_server) as client, pytest.raises(lossd.InvalidArgument, match=message):
        client.compute_loss(head_on(client), hidden, problem()[1], grad_hidden=gradient)


def test_a_read_only_gradient_is_refused(gpu_server: ServerProcess) -> None:
    gradient = FakeArray(np.zeros((N, D), np.float32))
    interface = gradient.__cuda_array_interface__
    interface["data"] = (interface["data"][0], True)
    with connect(gpu_server) as client, pytest.raises(lossd.InvalidArgument, match="not writeable"):
        client.compute_loss(head_on(client), FakeArray(problem()[0]), problem()[1], grad_hidden=gradient)


def test_a_server_that_knows_no_such_regions(tmp_path: Path) -> None:
    """It gives memory of the host, whatever was asked for."""
    path = str(tmp_path / "regions")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(1)

        def serve() -> None:
            session, _ = listener.accept()
            asked = region_pb2.RegionRequest.FromString(session.recv(4096))
            assert asked.of_device
            memory = os.memfd_create("region")
            os.ftruncate(memory, 4096)
            answer = region_pb2.RegionAnswer(opened=region_pb2.RegionOpened(id=b"x" * 16, bytes=4096))
            socket.send_fds(session, [answer.SerializeToString()], [memory])
            os.close(memory)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(lossd.Unavailable, match="the server gives memory of the host, not of GPU-"):
            _regions.SharedRegion(path, 4096, uuid_of(0))
        thread.join()


def test_a_fork_uses_nothing_of_its_parents(gpu_server: ServerProcess) -> None:
    expected(gpu_server)
    with connect(gpu_server) as client:
        on_gpu(client)
        region = client._connections.device_regions.get(uuid_of(0))
        assert region is not None and region.usable()
        child = os.fork()
        if child == 0:
            os._exit(0 if not region.usable() else 1)
        assert os.waitpid(child, 0)[1] == 0
        on_gpu(client)
