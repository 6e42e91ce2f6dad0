# SPDX-License-Identifier: Apache-2.0
"""Shares of a head that lies on several devices by vocabulary: changed between steps, once, without a bit lost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from server_process import ServerProcess

import lossd

D, V, N = 16, 40, 64
ADAMW = lossd.AdamW(lr=0.05, weight_decay=0.1)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--backend=cpu", "--cpu_devices=3", "--split=vocabulary")
    yield process
    process.stop()


def train(client: lossd.Client, steps: range) -> None:
    for step in steps:
        random = np.random.default_rng(step)
        client.compute_loss("lm", random.standard_normal((N, D), np.float32), random.integers(0, V, N).astype(np.int32),
                            step=step, id=1, accumulate=True)
        client.apply_step("lm", step, ADAMW)


def tensors(client: lossd.Client) -> list[np.ndarray]:
    return [client.read_tensor("lm", param, role) for param in ("weight", "bias") for role in ("value", "moment1", "moment2")]


def test_shares_change_between_steps(server: ServerProcess) -> None:
    with lossd.Client(server.target) as client:
        client.create_head("lm", hidden_size=D, vocab_size=V, bias=True)
        train(client, range(3))
        before = tensors(client)
        head = client.set_shares("lm", (2, 0, 3))
        assert head.spec.shares == (2, 0, 3)
        assert [device.share for device in head.devices] == [2, 0, 3]
        assert head.devices[1].classes == 0 and sum(device.classes for device in head.devices) == V
        assert all(device.busy_seconds >= device.exchange_seconds for device in head.devices)
        for got, wanted in zip(tensors(client), before, strict=True):
            np.testing.assert_array_equal(got, wanted)
        train(client, range(3, 5))
        assert client.set_shares("lm", ()).spec.shares == ()
        train(client, range(5, 6))


def test_within_a_step_they_stay(server: ServerProcess) -> None:
    with lossd.Client(server.target) as client:
        client.create_head("lm", hidden_size=D, vocab_size=V)
        client.compute_loss("lm", np.zeros((2, D), np.float32), np.zeros(2, np.int32), step=0, id=1, accumulate=True)
        with pytest.raises(lossd.FailedPrecondition, match="shares change between steps; at step 0 .* accumulated rows: 2"):
            client.set_shares("lm", (2, 0, 3))
        client.zero_gradients("lm", 0)
        client.set_shares("lm", (2, 0, 3))
        with pytest.raises(lossd.InvalidArgument, match=r"shares\[1\] must be a whole number"):
            client.set_shares("lm", (1, -1, 1))
        with pytest.raises(lossd.InvalidArgument, match="shares must have one entry for each"):
            client.set_shares("lm", (1, 1))
        assert client.describe_head("lm").spec.shares == (2, 0, 3)


def test_shares_are_kept_in_checkpoints_and_a_restart_has_those(server: ServerProcess) -> None:
    with lossd.Client(server.target) as client:
        client.create_head("lm", hidden_size=D, vocab_size=V, bias=True)
        train(client, range(2))
        client.set_shares("lm", (2, 0, 3))
        client.save_checkpoint("lm", "saved")
        saved = tensors(client)
        client.set_shares("lm", (0, 1, 0))
    server.kill()
    server.start()
    with lossd.Client(server.target) as client:
        assert client.load_checkpoint("lm/saved").spec.shares == (2, 0, 3)
        for got, wanted in zip(tensors(client), saved, strict=True):
            np.testing.assert_array_equal(got, wanted)
