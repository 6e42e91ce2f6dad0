# SPDX-License-Identifier: Apache-2.0
"""Microbatches on a deterministic server in any order, and calls that are refused: no id is left out."""

import numpy as np
import pytest
from conftest import delete_when_idle

import lossd

torch = pytest.importorskip("torch", reason="torch is not installed")

from lossd.torch import HeadOptimizer, LossHead, TiedEmbedding  # noqa: E402

D, V, N = 16, 40, 300
TIMEOUT = 300  # seconds; a call that waits for an id which never comes ends with an error then


@pytest.fixture
def client(deterministic_server):
    with lossd.Client(deterministic_server.target) as made:
        made.create_head("a", hidden_size=D, vocab_size=V)
        yield made
        delete_when_idle(made, "a")


@pytest.fixture
def head(client):
    return LossHead(client, "a", timeout=TIMEOUT)


def problem():
    return torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))


@pytest.mark.parametrize("streams", [None, 1, 5])
def test_the_first_microbatch_may_come_last(client, rng, streams):
    """More computations wait for it than the client has threads to spare."""
    hidden, targets = rng.standard_normal((1200, D)).astype(np.float32), rng.integers(0, V, 1200)
    last = 63  # max_pending of them are under way at once
    order = [*range(last, 0, -1), 0]
    pending = [client.compute_loss_async("a", hidden, targets, step=0, id=id, accumulate=True, streams=streams,
                                         timeout=TIMEOUT) for id in order]
    assert [each.wait().accumulated_rows for each in pending] == [1200] * len(order)
    assert client.apply_step("a", 0, lossd.SGD(lr=0.1), expected_microbatches=order).microbatches == len(order)


def test_a_wait_for_a_place_among_the_pending_ends(deterministic_server):
    hidden, targets = np.ones((N, D), np.float32), np.zeros(N, int)
    with lossd.Client(deterministic_server.target, max_pending=2) as client:
        client.create_head("a", hidden_size=D, vocab_size=V)
        pending = [client.compute_loss_async("a", hidden, targets, step=0, id=id, accumulate=True, timeout=TIMEOUT)
                   for id in (1, 2)]
        with pytest.raises(lossd.DeadlineExceeded, match="max_pending is 2"):
            client.compute_loss_async("a", hidden, targets, step=0, id=0, accumulate=True, timeout=0.5)
        for each in pending:
            each.cancel()
        for each in pending:
            with pytest.raises(lossd.Cancelled):
                each.wait()
        delete_when_idle(client, "a")


REFUSED_BY_THE_CLIENT = {
    "a normalizer below 0": {"normalizer": -1.0},
    "a target beyond 32 bits": {"targets": torch.full((N,), 2**40)},
}


@pytest.mark.parametrize("what, deferred", [
    ("a normalizer below 0", False), ("a target beyond 32 bits", False), ("a target beyond 32 bits", True)])
@pytest.mark.parametrize("zero_grad", [False, True])
def test_a_call_that_the_client_refuses_takes_no_number(client, what, deferred, zero_grad):
    hidden, targets = problem()
    head = LossHead(client, "a", timeout=TIMEOUT, deferred=deferred)
    optimizer = HeadOptimizer(head, lr=0.1)
    for _ in range(2):
        with pytest.raises(lossd.InvalidArgument):
            head(**{"hidden": hidden, "targets": targets, **REFUSED_BY_THE_CLIENT[what]})
        if zero_grad:
            optimizer.zero_grad()
    head(hidden, targets).backward()
    optimizer.step()
    assert (optimizer.last.microbatches, optimizer.last.rows) == (1, N)


def test_a_refused_repeat_is_not_forgotten(client, head):
    hidden, targets = problem()
    head(hidden, targets).backward()
    with pytest.raises(lossd.InvalidArgument):
        head(hidden, targets, microbatch=0, normalizer=-1.0)
    assert head.steps.expected() == [0]
    optimizer = HeadOptimizer(head, lr=0.1)
    optimizer.step()
    assert optimizer.last.microbatches == 1


def test_after_a_failed_microbatch_the_next_one_does_not_wait_for_it(client, head):
    hidden, targets = problem()
    with pytest.raises(lossd.NonFinite):
        head(torch.full_like(hidden, float("inf")).requires_grad_(), targets)  # the server refuses it
    with pytest.raises(RuntimeError, match="microbatch 0 of step 0 failed.*microbatch=0"):
        head(hidden, targets)
    head(hidden, targets, microbatch=0).backward()
    head(hidden, targets).backward()
    optimizer = HeadOptimizer(head, lr=0.1)
    optimizer.step()
    assert optimizer.last.microbatches == 2


def test_after_a_failed_contribution_the_next_microbatch_does_not_wait_for_it(client, head):
    hidden, targets = problem()
    weight = torch.nn.Parameter(torch.zeros(V, D))
    tied = TiedEmbedding(head, weight)
    weight.grad = torch.full((V, D), float("nan"))
    with pytest.raises(lossd.NonFinite):
        tied.add_gradient()
    with pytest.raises(RuntimeError, match="a gradient for step 0 failed to be added"):
        head(hidden, targets)
    weight.grad = torch.ones(V, D)
    tied.add_gradient()
    head(hidden, targets).backward()
    optimizer = HeadOptimizer(head, lr=0.1)
    optimizer.step()
    assert (optimizer.last.contributions, optimizer.last.microbatches) == (1, 1)
