# SPDX-License-Identifier: Apache-2.0
"""Rows of CUDA arrays through memory of the server's GPU: the same results as in messages, whatever ends when.

The GPU is a fake on both sides (fake_cuda.py, tests/server/app/shared_device.cc): what follows an address of it ends.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeArray, FakeDriver, uuid_of
from servers import ServerProcess

import lossd
from lossd import _cuda, _regions, _wire
from lossd.v1 import region_pb2


# A server whose GPU is played (tests/server/app/shared_device.cc), a client that sees it, and one problem for them.

N, D, V = 300, 24, 97
SLICE = 7 * D * 4


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver(devices=2)
    monkeypatch.setattr(_cuda, "driver", lambda: driver)
    return driver


def start(*flags: str) -> ServerProcess:
    """A server that shares memory of its GPUs and none of the host, so that a client without the former sends messages."""
    return ServerProcess("--backend=cuda", "--shared_memory_bytes=0", *flags, program="LOSSD_WITH_SHARED_DEVICE")


@pytest.fixture(scope="module")
def gpu_server() -> Iterator[ServerProcess]:
    process = start()
    yield process
    process.stop()


def problem(seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, V, N).astype(np.int32)
    targets[::10] = -100
    targets[40:80] = -100
    return rng.standard_normal((N, D)).astype(np.float32), targets


def connect(server: ServerProcess, size: int = 1 << 20) -> lossd.Client:
    return lossd.Client(server.target, transport="cuda_ipc", shared_memory_bytes=size)


def head_on(client: lossd.Client) -> str:
    client.create_head("lm", hidden_size=D, vocab_size=V, compute_dtype="fp32", if_exists="keep")
    return "lm"


def compute(client: lossd.Client, hidden: Any, gradient: Any, **arguments: Any) -> lossd.LossResult:
    return client.compute_loss("lm", hidden, problem()[1], grad_hidden=gradient, rows=("loss",), slice_bytes=SLICE, **arguments)


def on_gpu(client: lossd.Client, device: int = 0, **arguments: Any) -> tuple[Any, lossd.LossResult]:
    gradient = FakeArray(np.full((N, D), np.nan, np.float32), device)
    return gradient.values, compute(client, FakeArray(problem()[0], device), gradient, **arguments)


def expected(server: ServerProcess, **arguments: Any) -> lossd.LossResult:
    with lossd.Client(server.target, transport="grpc") as client:
        head_on(client)
        return compute(client, problem()[0], True, **arguments)


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


@pytest.mark.parametrize("size", [1 << 20, 2 << 10])
def test_rows_of_an_embedding(gpu_server: ServerProcess, gpus: FakeDriver, size: int) -> None:
    """They come into a CUDA array, and their gradients out of one."""
    rng = np.random.default_rng(2)
    ids = rng.integers(0, V, N)
    with connect(gpu_server, size) as client:
        client.create_head("rows", hidden_size=D, vocab_size=V, compute_dtype="fp32", if_exists="reset")
        out = FakeArray(np.zeros((N, D), np.float32), stream=7)
        result = client.embed("rows", ids, dtype="fp32", out=out)
        assert result.rows is out and client.cuda_transport[0] == "cuda_ipc" and gpus.waited == [7]
        np.testing.assert_array_equal(out.values, client.read_tensor("rows")[ids])
        gradients = FakeArray(rng.standard_normal((N, D)).astype(np.float32))
        added = client.add_row_gradients("rows", ids, gradients, step=0, id=0)
        wanted = np.zeros((V, D))
        np.add.at(wanted, ids, gradients.values.astype(np.float64))
        np.testing.assert_allclose(client.read_tensor("rows", role="gradient"), wanted, atol=1e-5)
        if size == 1 << 20:
            assert set(gpus.copies) == {(True, True)}, "between the arrays and the region, and no other way"
            assert result.received_bytes == added.sent_bytes == out.values.nbytes
        read_only = FakeArray(out.values, data=(out.__cuda_array_interface__["data"][0], True))
        with pytest.raises(lossd.InvalidArgument, match="out is a CUDA array that is not writeable"):
            client.embed("rows", ids, dtype="fp32", out=read_only)


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
        assert client.transport[0] == "grpc", "this server shares no memory of the host"
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


# Rows of CUDA arrays with transport="auto", and how large their slices are.


def test_auto_takes_it_for_arrays_of_the_servers_gpu(gpu_server: ServerProcess, gpus: FakeDriver) -> None:
    wanted = expected(gpu_server)
    with lossd.Client(gpu_server.target, transport="auto") as client:
        assert client.cuda_transport == ("grpc", "nothing was sent yet") and not gpus.mapped
        assert client.shares_gpu() and client.shares_gpu(0)
        gradient, _ = on_gpu(client)
        assert client.cuda_transport == ("cuda_ipc", f"the server's GPU is of this host; 4 MiB of {uuid_of(0)}")
        assert set(gpus.copies) == {(True, True)}
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
        gpus.copies.clear()
        assert not client.shares_gpu(1)
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
    monkeypatch.setattr(_wire, "_PATIENCE", 60.0)
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


# Memory of the host that is registered with CUDA's driver for rows of CUDA arrays, on GPUs that are played (fake_cuda.py).
#
# The same as tests/client/cpp/cuda_ipc_test.cc asks of the C++ client.


@pytest.fixture
def wanted(server: ServerProcess) -> Any:
    """Of a server without a GPU, whose memory of the host the rows go through."""
    return expected(server)


def connect_registered(server: ServerProcess) -> lossd.Client:
    return lossd.Client(server.target, transport="shared_memory")


def is_released(gpus: FakeDriver) -> bool:
    """Whether nothing is registered. The thread that made a call for the main thread may hold its region a moment longer."""
    end = time.monotonic() + 10.0
    while gpus.pinned and time.monotonic() < end:
        time.sleep(0.001)
    return not gpus.pinned


def test_it_is_registered_once_with_the_first_cuda_array(server: ServerProcess, gpus: FakeDriver, wanted: Any) -> None:
    with connect_registered(server) as client:
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
    assert is_released(gpus) and gpus.pins == 1


def test_all_copies_are_to_and_from_what_is_registered(server: ServerProcess, gpus: FakeDriver, wanted: Any,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    copy, on_host = gpus.copy, []

    def watch(to: int, source: int, size: int, device: int) -> None:
        on_host.append(gpus.is_pinned(min(to, source)))  # addresses of the host are lower
        copy(to, source, size, device)

    monkeypatch.setattr(gpus, "copy", watch)
    with connect_registered(server) as client:
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
    with connect_registered(server) as client:
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
    with connect_registered(server) as client:
        head_on(client)
        with pytest.raises(lossd.NonFinite) as kept:
            compute(client, FakeArray(hidden), FakeArray(hidden))
        assert kept.value.__traceback__ is not None and gpus.pins == 1
        assert is_released(gpus)
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

    with connect_registered(server) as client:
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
    assert is_released(gpus)


def test_memory_of_a_gpu_is_not_registered(gpu_server: ServerProcess, gpus: FakeDriver) -> None:
    expected(gpu_server)
    with lossd.Client(gpu_server.target, transport="cuda_ipc") as client:
        on_gpu(client)
    assert gpus.pins == 0
