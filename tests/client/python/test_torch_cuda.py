# SPDX-License-Identifier: Apache-2.0
"""LossHead and Client with CUDA tensors against a server on the same GPU; needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead, ServedEmbedding  # noqa: E402
from servers import ServerProcess  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

N, D, V = 3000, 192, 1111
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module", params=["arrival", "deterministic"])
def gpu_server(request: Any) -> Iterator[ServerProcess]:
    process = ServerProcess("--backend=cuda", *(["--deterministic"] if request.param == "deterministic" else []))
    yield process
    process.stop()


def connect(server: ServerProcess, transport: str = "cuda_ipc", size: int = 8 << 20) -> lossd.Client:
    client = lossd.Client(server.target, transport=transport, shared_memory_bytes=size)
    client.create_head("lm", hidden_size=D, vocab_size=V, compute_dtype="fp32", if_exists="keep")
    return client


def problem(dtype: torch.dtype) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(torch.initial_seed() % 2**31)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::7] = -100
    targets[1000:1500] = -100
    return torch.randn(N, D, generator=generator).to(dtype).cuda(), targets


def run(client: lossd.Client, hidden: Any, targets: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Loss, its gradient, and the weight's."""
    head = LossHead(client, "lm", slice_bytes=64 << 10, **options)
    ours = hidden.clone().requires_grad_()
    loss = head(ours, targets)
    (loss * 1.0).backward()
    weight = client.read_tensor("lm", role="gradient")
    HeadOptimizer(head, lr=0.0).discard()
    return loss.detach().cpu(), ours.grad.cpu(), weight


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8 << 20, 256 << 10])
def test_the_results_are_those_of_rows_in_messages(gpu_server: ServerProcess, dtype: Any, deferred: bool, size: int) -> None:
    hidden, targets = problem(dtype)
    with connect(gpu_server, "grpc") as client:
        wanted = run(client, hidden, targets, deferred=deferred)
    with connect(gpu_server, size=size) as client:
        got = run(client, hidden, targets, deferred=deferred)
        assert client.cuda_transport[0] == "cuda_ipc", client.cuda_transport
        assert client.transport == ("grpc", "nothing was sent yet"), "nothing went through memory of the host"
    # Gradients in fp16 are near the smallest steps of its range here.
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1e-2}[dtype]
    assert got[0].item() == pytest.approx(wanted[0].item(), rel=1e-5)
    scale = wanted[1].float().abs().max().item()
    torch.testing.assert_close(got[1].float(), wanted[1].float(), atol=tolerance * scale, rtol=0)
    np.testing.assert_allclose(got[2], wanted[2], atol=1e-4 * np.abs(wanted[2]).max())


def test_tensors_that_the_gpu_is_still_computing(gpu_server: ServerProcess) -> None:
    """The client waits for the stream that makes them, and memory that is used again is not overwritten too early."""
    _, targets = problem(torch.float32)
    with connect(gpu_server) as client:
        head = LossHead(client, "lm", train_head=False)
        layer = torch.nn.Linear(D, D, bias=False, device="cuda")
        big = torch.randn(4096, 4096, device="cuda")
        for i in range(8):
            x = torch.randn(N, D, device="cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                for _ in range(20):
                    big = (big @ big).clamp(-1, 1)  # keeps the stream busy before the layer
                loss = head(layer(x + 0 * big[0, 0]), targets)
                loss.backward()
                torch.cuda.current_stream().synchronize()
            ours = layer.weight.grad.clone()
            layer.weight.grad = None
            weight = torch.from_numpy(client.read_tensor("lm")).cuda()
            torch.nn.functional.cross_entropy((layer(x) @ weight.T).double(), targets.cuda()).backward()
            torch.testing.assert_close(ours, layer.weight.grad, atol=2e-5, rtol=1e-2)
            layer.weight.grad = None


def test_many_microbatches_under_way(gpu_server: ServerProcess) -> None:
    with connect(gpu_server, size=1 << 20) as client:
        head = LossHead(client, "lm", train_head=False, slice_bytes=64 << 10)
        inputs = [problem(torch.float32)[0].requires_grad_() for _ in range(12)]
        targets = problem(torch.float32)[1]
        pending = [head.start(each, targets) for each in inputs]
        for each in pending:
            each.wait().backward()
        weight = torch.from_numpy(client.read_tensor("lm")).cuda()
        for each in inputs:
            (wanted,) = torch.autograd.grad(torch.nn.functional.cross_entropy((each @ weight.T).double(), targets.cuda()), each)
            torch.testing.assert_close(each.grad, wanted, atol=1e-6, rtol=1e-2)


@pytest.mark.parametrize("transport", ["cuda_ipc", "grpc"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_an_embedding(gpu_server: ServerProcess, dtype: Any, transport: str) -> None:
    """Rows and gradients of a tied model, some of them prefetched; gradients leave while the trainer goes on."""
    with connect(gpu_server, transport) as client:
        head = LossHead(client, "lm")
        embedding, optimizer = ServedEmbedding(head, dtype=dtype, device="cuda"), HeadOptimizer(head, lr=0.0)
        layer = torch.nn.Linear(D, D, bias=False, device="cuda", dtype=dtype)
        weight = torch.from_numpy(client.read_tensor("lm")).cuda().requires_grad_()
        for i in range(4):
            ids, targets = torch.randint(0, V, (2, N)), torch.randint(0, V, (2, N))
            if i % 2:
                embedding.prefetch(ids)
            rows = embedding(ids)
            assert rows.device.type == "cuda" and torch.equal(rows, weight.detach().to(dtype)[ids.cuda()])
            head(layer(rows), targets).backward()
            hidden = layer.float()(weight[ids.cuda()])
            layer.to(dtype)
            torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.cuda().flatten()).backward()
        wanted = weight.grad
        assert optimizer.load_grad_norm() == pytest.approx(wanted.norm().item(), rel=2e-2)
        gradient = torch.from_numpy(client.read_tensor("lm", role="gradient")).cuda()
        assert (gradient - wanted).norm() <= 2e-2 * wanted.norm()
        assert client.describe_head("lm").step_microbatches == 8
        optimizer.discard()


def test_memory_of_the_gpu_comes_back(gpu_server: ServerProcess) -> None:
    hidden, targets = problem(torch.bfloat16)
    free = []
    for i in range(40):
        with connect(gpu_server) as client:
            run(client, hidden, targets)
        if i in (9, 39):
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
    assert free[1] >= free[0] - (16 << 20)


def test_a_server_that_is_killed_and_restarted() -> None:
    server = ServerProcess("--backend=cuda")
    try:
        hidden, targets = problem(torch.float32)
        with connect(server) as client:
            wanted = run(client, hidden, targets)
            server.kill()
            server.start()
            connect(server).close()
            head = LossHead(client, "lm", train_head=False)
            ours = hidden.clone().requires_grad_()
            head(ours, targets).backward()
            torch.testing.assert_close(ours.grad.cpu(), wanted[1], atol=1e-6, rtol=1e-3)
            assert client.cuda_transport[0] in ("cuda_ipc", "grpc")
    finally:
        server.stop()
