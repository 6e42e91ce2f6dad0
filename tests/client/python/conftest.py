# SPDX-License-Identifier: Apache-2.0
"""What the tests share: a server process, a client, heads of their own, random numbers whose seed is printed."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from servers import EmbeddedServer, ServerProcess

import lossd

# `eps` of both sides where steps of AdamW are compared: with 1e-8 AdamW makes whole steps of gradients that are no more than
# their rounding.
EPS = 1e-3


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU")
    config.addinivalue_line("markers", "nightly: takes minutes; make test-integrations-nightly runs it")


@pytest.fixture(autouse=True)
def accelerate_forgets() -> None:
    """Accelerate keeps the data loaders of a process in one list, and a Trainer that ends within an epoch leaves its own there:
    the next test's gradient accumulation would take that loader's last batch for the end of its own."""
    if state := sys.modules.get("accelerate.state"):
        state.GradientState._reset_state()


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess | EmbeddedServer]:
    """A process of its own, or with LOSSD_TEST_EMBEDDED a server in this one."""
    made = EmbeddedServer() if os.environ.get("LOSSD_TEST_EMBEDDED") else ServerProcess()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def client(server: ServerProcess | EmbeddedServer) -> Iterator[lossd.Client]:
    with lossd.Client(server.target) as made:
        yield made


@pytest.fixture(scope="module")
def deterministic_server() -> Iterator[ServerProcess]:
    """Computes the microbatches of a step in the order of their ids: one with id 1 waits for one with id 0."""
    process = ServerProcess("--deterministic")
    yield process
    process.stop()


def delete_when_idle(client: lossd.Client, name: str) -> None:
    """Deletes a head; the server may not have noticed yet that calls on it were cancelled."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return client.delete_head(name)
        except lossd.FailedPrecondition:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


_numbers = itertools.count()


@pytest.fixture
def make_head(client: lossd.Client) -> Iterator[Callable[..., str]]:
    """Creates a head with create_head's arguments and returns its name; heads go when the test ends.

    It computes in fp32 unless told otherwise, on a GPU too.
    """
    names: list[str] = []

    def make(**spec: Any) -> str:
        name = f"head-{os.getpid()}-{next(_numbers)}"
        client.create_head(name, **{"compute_dtype": "fp32", **spec})
        names.append(name)
        return name

    yield make
    for name in names:
        delete_when_idle(client, name)


@pytest.fixture
def seed() -> int:
    value = int(os.environ.get("LOSSD_TEST_SEED", np.random.SeedSequence().generate_state(1)[0]))
    print(f"LOSSD_TEST_SEED={value}")
    return value


@pytest.fixture
def head_name(client: lossd.Client, seed: int) -> Iterator[str]:
    """The name of a head that the test makes; the head goes when the test ends."""
    name = f"hf-{seed}"
    yield name
    if name in [each.spec.name for each in client.list_heads()]:
        client.delete_head(name)


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
