# SPDX-License-Identifier: Apache-2.0
"""CUDA arrays: which are taken, what of them is read and written, and how Client says which way their rows go.

The GPUs are fakes on both sides (fake_cuda.py, tests/server/app/shared_device.cc): what follows an address of one ends. Copies,
mappings and routes are those of the C++ client (tests/client/cpp/cuda_ipc_test.cc, cuda_devices_test.cc).
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeArray, FakeGpus, FakeStream, uuid_of
from servers import ServerProcess

import lossd

# A server whose GPU is played (tests/server/app/shared_device.cc), a client that sees it, and one problem for them.

N, D, V = 300, 24, 97
SLICE = 7 * D * 4
OF_THE_SERVER = f"the server's GPU is of this host; 4 MiB of {uuid_of(0)}"


@pytest.fixture(autouse=True)
def gpus() -> FakeGpus:
    return FakeGpus(devices=2)


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
def test_results_are_those_of_messages(gpu_server: ServerProcess, gpus: FakeGpus, size: int) -> None:
    wanted = expected(gpu_server)
    with connect(gpu_server, size) as client:
        gradient, result = on_gpu(client)
        assert client.cuda_transport == ("cuda_ipc", f"the server's GPU is of this host; {size >> 20} MiB of {uuid_of(0)}")
        assert client.shares_gpu()
    np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
    np.testing.assert_allclose(result.rows["loss"], wanted.rows["loss"], atol=1e-5)
    if size >= 16 << 10:  # in a smaller one some slices go in messages
        assert result.sent_bytes == result.received_bytes > 0
        assert gpus.copied() == {"device to device": 2 * result.sent_bytes}, "between the arrays and the region alone"


def test_gradients_of_retained_rows(gpu_server: ServerProcess) -> None:
    weights = np.random.default_rng(1).standard_normal(N).astype(np.float32)

    def run(client: lossd.Client, hidden: Any, gradient: Any) -> Any:
        head = head_on(client)
        client.compute_loss(head, hidden, problem()[1], reduction="none", retain=True, step=0, id=9, slice_bytes=SLICE)
        result = client.backward(head, 9, weights, hidden_size=D, step=0, grad_hidden=gradient)
        client.release_microbatch(head, 9)
        return result.grad_hidden

    with lossd.Client(gpu_server.target, transport="grpc") as client:
        wanted = run(client, problem()[0], True)
    with connect(gpu_server) as client:
        gradient = FakeArray(np.full((N, D), np.nan, np.float32))
        assert run(client, FakeArray(problem()[0]), gradient) is gradient
        np.testing.assert_allclose(gradient.values, wanted, atol=1e-5)


@pytest.mark.parametrize("size", [1 << 20, 2 << 10])
def test_rows_of_an_embedding(gpu_server: ServerProcess, gpus: FakeGpus, size: int) -> None:
    """They come into a CUDA array, and their gradients out of one."""
    rng = np.random.default_rng(2)
    ids = rng.integers(0, V, N)
    with connect(gpu_server, size) as client:
        client.create_head("rows", hidden_size=D, vocab_size=V, compute_dtype="fp32", if_exists="reset")
        stream = FakeStream()
        out = FakeArray(np.full((N, D), np.nan, np.float32), stream=stream.pointer)
        stream.give(out)  # zeros, which are not to come after the rows
        result = client.embed("rows", ids, dtype="fp32", out=out)
        stream.end()
        assert result.rows is out and client.cuda_transport[0] == "cuda_ipc"
        np.testing.assert_array_equal(out.values, client.read_tensor("rows")[ids])
        gradients = FakeArray(rng.standard_normal((N, D)).astype(np.float32))
        added = client.add_row_gradients("rows", ids, gradients, step=0, id=0)
        wanted = np.zeros((V, D))
        np.add.at(wanted, ids, gradients.values.astype(np.float64))
        np.testing.assert_allclose(client.read_tensor("rows", role="gradient"), wanted, atol=1e-5)
        if size == 1 << 20:
            assert gpus.copied() == {"device to device": 2 * out.values.nbytes}, "between the arrays and the region alone"
            assert result.received_bytes == added.sent_bytes == out.values.nbytes
        read_only = FakeArray(out.values, data=(out.__cuda_array_interface__["data"][0], True))
        with pytest.raises(lossd.InvalidArgument, match="out is a CUDA array that is not writeable"):
            client.embed("rows", ids, dtype="fp32", out=read_only)


@pytest.mark.parametrize("transport", ["cuda_ipc", "grpc"])
def test_an_array_for_each_depth(gpu_server: ServerProcess, transport: str) -> None:
    hidden, targets = problem()
    depths = [lossd.Depth(100), lossd.Depth(0), lossd.Depth(200, weight=0.5)]
    parts = [hidden[:100], hidden[100:100], hidden[100:]]
    with lossd.Client(gpu_server.target, transport=transport) as client:
        wanted = client.compute_loss(head_on(client), parts, targets, depths=depths, grad_hidden=True)
        gradients = [FakeArray(np.full_like(part, np.nan)) for part in parts]
        result = client.compute_loss("lm", [FakeArray(part) for part in parts], targets, depths=depths, grad_hidden=gradients)
        assert result.loss == pytest.approx(wanted.loss, rel=1e-5)
        for depth, want, got in zip(result.depths, wanted.depths, gradients):
            assert depth.grad_hidden is got
            np.testing.assert_allclose(got.values, want.grad_hidden, atol=1e-5)


@pytest.fixture
def teacher(server: ServerProcess) -> Iterator[lossd.Distillation]:
    """Of heads of a server that distils, which those with a GPU that is played do not."""
    with lossd.Client(server.target) as client:
        head_on(client)
        client.create_head("teacher", hidden_size=D, vocab_size=V, compute_dtype="fp32", frozen=True)
        yield lossd.Distillation("teacher", "reverse_kl")
        client.delete_head("lm")
        client.delete_head("teacher")


@pytest.mark.parametrize("transport", ["shared_memory", "grpc"])
def test_hidden_states_of_a_teacher(server: ServerProcess, teacher: lossd.Distillation, transport: str) -> None:
    (hidden, targets), (other, _) = problem(), problem(1)
    with lossd.Client(server.target, transport=transport) as client:
        wanted = client.distill("lm", hidden, other, teacher, targets, grad_hidden=True)
        gradient = FakeArray(np.full((N, D), np.nan, np.float32))
        result = client.distill("lm", FakeArray(hidden), FakeArray(other), teacher, targets, grad_hidden=gradient)
        assert result.loss == pytest.approx(wanted.loss, rel=1e-5) and result.grad_hidden is gradient
        np.testing.assert_allclose(gradient.values, wanted.grad_hidden, atol=1e-5)


# What arrays say of themselves.


def test_what_comes_before_on_the_stream_of_an_array(gpu_server: ServerProcess) -> None:
    """It is done when the rows are read; what the stream is given later is not waited for."""
    hidden = problem()[0]
    wanted = expected(gpu_server)
    for transport in ("cuda_ipc", "grpc"):
        with lossd.Client(gpu_server.target, transport=transport) as client:
            stream = FakeStream()
            array = FakeArray(np.full_like(hidden, np.nan), stream=stream.pointer)
            gradient = FakeArray(np.full_like(hidden, np.nan), stream=stream.pointer)
            stream.give(array, hidden)
            stream.give(gradient)
            pending = client.compute_loss_async("lm", array, problem()[1], grad_hidden=gradient)
            stream.give(array)
            pending.wait()
            assert stream.pending == 1
            np.testing.assert_allclose(gradient.values, wanted.grad_hidden, atol=1e-5)
            stream.end()


@pytest.mark.parametrize("with_ready", [False, True])
def test_each_array_has_a_stream_of_its_own(server: ServerProcess, teacher: lossd.Distillation, with_ready: bool) -> None:
    (hidden, targets), (other, _) = problem(), problem(1)
    with lossd.Client(server.target) as client:
        wanted = client.distill("lm", hidden, other, teacher, targets, grad_hidden=True)
        streams = [FakeStream() for _ in range(3)]
        arrays = [FakeArray(np.full_like(hidden, np.nan), stream=stream.pointer) for stream in streams]
        for stream, array, values in zip(streams, arrays, (hidden, other, None)):
            stream.give(array, values)
        told: list[bool] = []
        client.compute_loss("lm", arrays[0], targets, teacher_hidden=arrays[1], grad_hidden=arrays[2],
                            options=lossd.LossOptions(distillation=teacher),
                            ready=(lambda: told.append(True)) if with_ready else None)
        assert [stream.pending for stream in streams] == [0, 0, 0] and told == [True] * with_ready
        np.testing.assert_allclose(arrays[2].values, wanted.grad_hidden, atol=1e-5)
        for stream in streams:
            stream.end()


def test_a_stream_that_is_lost(server: ServerProcess, gpus: FakeGpus) -> None:
    """The call says so, and the client is as it was."""
    wanted = expected(server)
    with lossd.Client(server.target, retry=lossd.RetryOptions(max_attempts=1)) as client:
        streams = [FakeStream(), FakeStream()]
        hidden, gradient = (FakeArray(problem()[0], stream=stream.pointer) for stream in streams)
        gpus.fail("cuEventRecord", 1)
        with pytest.raises(lossd.Unavailable, match="^cuEventRecord failed: an illegal memory access"):
            compute(client, hidden, gradient)
        compute(client, hidden, gradient)
        np.testing.assert_allclose(gradient.values, wanted.grad_hidden, atol=1e-5)
        for stream in streams:
            stream.end()
        client.delete_head("lm")


@pytest.mark.parametrize("interface", [{"stream": 1}, {"stream": 2}, {"stream": None}, {"strides": (4 * D, 4)},
                                       {"version": 2}, {"descr": [("", "<f4")], "mask": None}])
def test_interfaces_that_are_taken(gpu_server: ServerProcess, interface: dict[str, Any]) -> None:
    """Streams 1 and 2 are CUDA's default streams."""
    wanted = expected(gpu_server)
    with connect(gpu_server) as client:
        gradient = FakeArray(np.full((N, D), np.nan, np.float32), **interface)
        compute(client, FakeArray(problem()[0], **interface), gradient)
        np.testing.assert_allclose(gradient.values, wanted.grad_hidden, atol=1e-5)


def test_hidden_states_may_be_read_only(gpu_server: ServerProcess) -> None:
    wanted = expected(gpu_server)
    with connect(gpu_server) as client:
        hidden = FakeArray(problem()[0])
        interface = hidden.__cuda_array_interface__
        interface["data"] = (interface["data"][0], True)
        assert compute(client, hidden, False).loss == pytest.approx(wanted.loss, rel=1e-6)


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


def test_fp16(gpu_server: ServerProcess) -> None:
    hidden, targets = problem()[0].astype(np.float16), problem()[1]
    with connect(gpu_server) as client:
        wanted = client.compute_loss(head_on(client), hidden, targets, grad_hidden=True)
        gradient = FakeArray(np.zeros((N, D), np.float16))
        client.compute_loss("lm", FakeArray(hidden), targets, grad_hidden=gradient)
        np.testing.assert_array_equal(gradient.values, wanted.grad_hidden)


@pytest.mark.parametrize("of_gradient", [None, 0])
def test_empty_arrays(gpu_server: ServerProcess, gpus: FakeGpus, of_gradient: int | None) -> None:
    """They have no address, and so no GPU."""
    empty = np.empty((0, D), np.float32)
    with connect(gpu_server) as client:
        gradient = False if of_gradient is None else FakeArray(empty)
        result = client.compute_loss(head_on(client), FakeArray(empty), [], grad_hidden=gradient)
        assert (result.loss, result.valid_rows) == (0.0, 0)
        assert result.grad_hidden is (None if of_gradient is None else gradient)
        assert gpus.copied() == {}


def bad_arrays() -> list[tuple[Any, Any, str]]:
    def zeros(*shape: int, dtype: Any = np.float32, **options: Any) -> FakeArray:
        return FakeArray(np.zeros(shape, dtype), **options)

    on_host = np.zeros((N, D), np.float32)
    return [
        (zeros(N, D), True, "^grad_hidden is True; for a CUDA array it must be one"),
        (zeros(0, D), True, "^grad_hidden is True; for a CUDA array it must be one"),
        (zeros(N, D), on_host, "^grad_hidden is on the host; hidden is on GPU-.*1$"),
        (on_host, zeros(N, D), "^grad_hidden is on GPU-.*1; hidden is on the host$"),
        (zeros(N, D), zeros(N, D, device=1), "^grad_hidden is on GPU-.*2; hidden is on GPU-.*1$"),
        (zeros(N, D), zeros(N, D + 1), r"^grad_hidden has shape \(300, 25\)"),
        (zeros(N, D), zeros(N, D, dtype=np.float16), "^grad_hidden has .* dtype float16"),
        (zeros(N, D), zeros(N, D, data=(zeros(N, D).__cuda_array_interface__["data"][0], True)),
         "^grad_hidden is a CUDA array that is not writeable$"),
        (zeros(N, D), zeros(N, D, strides=(4, 4 * N)), "^grad_hidden is a CUDA array that is not C-contiguous$"),
        (zeros(N, D, strides=(8 * D, 8)), False, "^hidden is a CUDA array that is not C-contiguous$"),
        (zeros(N * D), False, r"^hidden has shape \(7200,\)"),
        (zeros(N, D, dtype=np.int16), False, '^hidden has .* pass dtype="bf16"'),
        (zeros(N, D, dtype=np.float64), False, "^hidden has dtype float64"),
        (zeros(N - 1, D), False, "^targets has 300 entries for 299 rows"),
        (zeros(N, D, data=(on_host.ctypes.data, False)), False,
         "^hidden is not memory of a GPU: cuPointerGetAttribute failed: invalid argument"),
        (zeros(N, D), zeros(N, D, data=(on_host.ctypes.data, False)), "^grad_hidden is not memory of a GPU"),
    ]


@pytest.mark.parametrize("number", range(len(bad_arrays())))
def test_bad_arrays_are_refused(gpu_server: ServerProcess, gpus: FakeGpus, number: int) -> None:
    hidden, gradient, message = bad_arrays()[number]
    with connect(gpu_server) as client, pytest.raises(lossd.InvalidArgument, match=message):
        targets = [] if isinstance(hidden, FakeArray) and not hidden.values.size else problem()[1]
        client.compute_loss(head_on(client), hidden, targets, grad_hidden=gradient)
    assert gpus.copied() == {}


@pytest.mark.parametrize(("hidden_on", "teacher_on"), [(None, 0), (0, None), (0, 1)])
def test_a_teacher_is_on_the_device_of_the_rows(gpu_server: ServerProcess, hidden_on: int | None, teacher_on: int | None) -> None:
    hidden, targets = problem()

    def at(device: int | None) -> Any:
        return hidden if device is None else FakeArray(hidden, device)

    def named(device: int | None) -> str:
        return "the host" if device is None else uuid_of(device)

    with connect(gpu_server) as client, pytest.raises(
            lossd.InvalidArgument, match=f"^teacher_hidden is on {named(teacher_on)}; hidden is on {named(hidden_on)}$"):
        client.distill(head_on(client), at(hidden_on), at(teacher_on), lossd.Distillation("lm", "forward_kl"), targets)


def test_arrays_of_depths_are_on_one_device(gpu_server: ServerProcess) -> None:
    hidden, targets = problem()
    depths = [lossd.Depth(100), lossd.Depth(200)]
    with connect(gpu_server) as client:
        head_on(client)
        for second, where in ((FakeArray(hidden[100:], 1), f"{uuid_of(0)} and {uuid_of(1)}"),
                              (hidden[100:], f"{uuid_of(0)} and the host")):
            with pytest.raises(lossd.InvalidArgument, match=f"^hidden has arrays on {where}; they must be on one$"):
                client.compute_loss("lm", [FakeArray(hidden[:100]), second], targets, depths=depths)


# The way that the rows go, and why.


def test_auto_takes_memory_of_the_servers_gpu_for_arrays_there(gpu_server: ServerProcess, gpus: FakeGpus) -> None:
    wanted = expected(gpu_server)
    with lossd.Client(gpu_server.target, transport="auto") as client:
        assert client.cuda_transport == ("grpc", "nothing was sent yet") and gpus.held("mapping") == 0
        assert client.shares_gpu() and client.shares_gpu(0)
        gradient, _ = on_gpu(client)
        assert client.cuda_transport == ("cuda_ipc", OF_THE_SERVER)
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
        assert gpus.copied().keys() == {"device to device"}
        assert not client.shares_gpu(1)
        gradient, _ = on_gpu(client, device=1)
        assert gpus.copied().keys() == {"device to host", "host to device"}
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
        assert client.cuda_transport == (
            "grpc", f"rows on {uuid_of(0)}: cuda_ipc, {OF_THE_SERVER}; rows on "
            f"{uuid_of(1)}: grpc, the rows are on {uuid_of(1)}, and the server's GPU is {uuid_of(0)}")


@pytest.mark.parametrize("transport", ["auto", "grpc", "shared_memory"])
def test_with_other_transports_rows_go_as_those_of_the_host(transport: str, server: ServerProcess, gpus: FakeGpus) -> None:
    wanted = expected(server)
    with lossd.Client(server.target, transport=transport) as client:
        gradient, _ = on_gpu(client)
        why = "the server shares no memory of a GPU" if transport == "auto" else f"the transport is {transport}"
        assert client.cuda_transport == ("grpc" if transport == "grpc" else "shared_memory", why) and not client.shares_gpu()
        way = "host" if transport == "grpc" else "pinned"
        assert gpus.copied().keys() == {f"device to {way}", f"{way} to device"}
        client.delete_head("lm")
    np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)


def test_a_gpu_that_the_client_does_not_see(gpu_server: ServerProcess, gpus: FakeGpus) -> None:
    why = f"the server's GPU is {uuid_of(0)}, which this process does not see"
    gpus.set_devices(0)
    with pytest.raises(lossd.Unavailable, match=why):
        connect(gpu_server)
    with lossd.Client(gpu_server.target, transport="auto") as client:
        assert not client.shares_gpu() and not client.shares_gpu(0)


def test_a_server_without_a_gpu(server: ServerProcess) -> None:
    with pytest.raises(lossd.Unavailable, match="the server shares no memory of a GPU"):
        connect(server)


def test_the_driver_is_loaded_for_cuda_arrays_alone(gpu_server: ServerProcess) -> None:
    """A process that has loaded it cannot fork children that use GPUs."""
    code = f"""
import numpy as np, lossd
def say(): print("libcuda" in open("/proc/self/maps").read())
with lossd.Client({gpu_server.target!r}) as client:
    client.create_head("host", hidden_size={D}, vocab_size={V})
    client.compute_loss("host", np.ones((5, {D}), np.float32), np.zeros(5, int), grad_hidden=True)
    client.delete_head("host")
    client.transport, client.cuda_transport, client.connections
    say()
    client.shares_gpu()
    say()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, "LD_LIBRARY_PATH": str(Path(os.environ["LOSSD_FAKE_CUDA"]).parent)})
    assert done.stdout.split() == ["False", "True"], done


def test_a_machine_without_a_driver(gpu_server: ServerProcess, tmp_path: Path) -> None:
    """Rows of the host need none; all that needs one says what is missing."""
    (tmp_path / "libcuda.so.1").touch()
    code = f"""
import numpy as np, lossd
hidden, targets = np.ones((5, {D}), np.float32), np.zeros(5, int)
class Array:
    __cuda_array_interface__ = dict(shape=hidden.shape, typestr="<f4", version=3, strides=None, data=(1 << 60, False))
def say(body):
    try:
        print(body())
    except lossd.LossdError as error:
        print(type(error).__name__, error)
with lossd.Client({gpu_server.target!r}) as client:
    client.create_head("host", hidden_size={D}, vocab_size={V})
    client.compute_loss("host", hidden, targets)
    say(lambda: client.shares_gpu())
    say(lambda: client.transport[0])
    say(lambda: client.compute_loss("host", Array(), targets))
    client.delete_head("host")
say(lambda: lossd.Client({gpu_server.target!r}, transport="cuda_ipc"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    none = f"no CUDA driver: {tmp_path / 'libcuda.so.1'}: file too short"
    assert done.stdout.splitlines() == ["False", "grpc", f"Unavailable {none}",
                                        f"Unavailable no shared memory: {none}"], done


def test_a_copy_that_fails_is_an_error_of_the_call(gpu_server: ServerProcess, gpus: FakeGpus) -> None:
    wanted = expected(gpu_server)
    with lossd.Client(gpu_server.target, transport="cuda_ipc", retry=lossd.RetryOptions(max_attempts=2)) as client:
        gpus.fail("copy to region", 1)
        gradient, result = on_gpu(client)
        np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
        assert result.repeats >= 1
        gpus.fail("copy to region", 1 << 30)
        with pytest.raises(lossd.Unavailable, match="cuMemcpyAsync failed: an illegal memory access"):
            on_gpu(client)
        gpus.fail("copy to region", 0)
        np.testing.assert_allclose(on_gpu(client)[0], wanted.grad_hidden, atol=1e-5)


# What stays, and forks.


def test_nothing_stays_when_clients_go(gpu_server: ServerProcess, gpus: FakeGpus) -> None:
    expected(gpu_server)
    before = len(os.listdir("/proc/self/fd"))
    for closed in range(30):
        client = connect(gpu_server)
        on_gpu(client)
        assert gpus.held("mapping") == gpus.held("reservation") == 1
        if closed % 2:
            client.close()
        del client
        gc.collect()
        assert [gpus.held(kind) for kind in ("mapping", "reservation", "handle", "allocation")] == [0] * 4
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_memory_of_the_host_is_registered_while_there_is_a_client(server: ServerProcess, gpus: FakeGpus) -> None:
    wanted = expected(server)
    before = gpus.calls("cuMemHostRegister")
    with lossd.Client(server.target, transport="shared_memory") as client:
        compute(client, problem()[0], True)
        assert gpus.held("pinned") == 0, "rows of the host need nothing of the driver"
        for device in (0, 1, 0):
            gradient, _ = on_gpu(client, device)
            np.testing.assert_allclose(gradient, wanted.grad_hidden, atol=1e-5)
        threads = [threading.Thread(target=on_gpu, args=(client,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert gpus.held("pinned") == 1 and client.transport == ("shared_memory", "the server is on this host; 4 MiB")
        with pytest.raises(lossd.NonFinite) as kept:
            hidden = problem()[0]
            hidden[151] = np.inf
            compute(client, FakeArray(hidden), FakeArray(hidden))
    assert kept.value.__traceback__ is not None and gpus.held("pinned") == 0
    assert gpus.calls("cuMemHostRegister") <= before + 2, "once, and once again after the error"


@pytest.mark.parametrize("transport", ["cuda_ipc", "shared_memory"])
def test_a_fork_uses_nothing_of_its_parents(server: ServerProcess, gpu_server: ServerProcess, gpus: FakeGpus,
                                            transport: str) -> None:
    of = gpu_server if transport == "cuda_ipc" else server
    wanted = expected(of)
    with lossd.Client(of.target, transport=transport) as client:
        on_gpu(client)
        held = gpus.held("mapping"), gpus.held("pinned")
        assert held == ((1, 0) if transport == "cuda_ipc" else (0, 1))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with pytest.raises(lossd.ForkedClient):
                    on_gpu(client)
                client.close()
                del client
                gc.collect()
                status = 0 if (gpus.held("mapping"), gpus.held("pinned")) == held else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        np.testing.assert_allclose(on_gpu(client)[0], wanted.grad_hidden, atol=1e-5)
        assert (gpus.held("mapping"), gpus.held("pinned")) == held
