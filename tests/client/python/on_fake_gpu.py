# SPDX-License-Identifier: Apache-2.0
"""A server whose GPU is played (tests/server/app/shared_device.cc), a client that sees it, and one problem for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeArray, FakeDriver
from server_process import ServerProcess

import lossd
from lossd import _cuda

N, D, V = 300, 24, 97
SLICE = 7 * D * 4


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver(devices=2)
    monkeypatch.setattr(_cuda, "driver", lambda: driver)
    return driver


def start(*flags: str) -> ServerProcess:
    return ServerProcess("--backend=cuda", *flags, program="LOSSD_WITH_SHARED_DEVICE")


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
