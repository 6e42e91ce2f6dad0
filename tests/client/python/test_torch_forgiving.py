# SPDX-License-Identifier: Apache-2.0
"""Loops that are interrupted, begun again, or leave things unfinished: what they find, and how they get on."""

from __future__ import annotations

import gc
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from server_process import ServerProcess  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead  # noqa: E402

D, V, N = 16, 90, 64


@pytest.fixture
def problem(seed):
    torch.manual_seed(seed % 2**31)
    return torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))


def other_rows():
    return torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))


# ---- A cell that makes its LossHead and runs again ----

@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_new_head_takes_over(client, make_head, problem, stage, forgotten):
    """The loop calls zero_grad() after step(), so nothing has discarded what the interrupted one left."""
    name = make_head(hidden_size=D, vocab_size=V)
    earlier = LossHead(client, name)
    loss = earlier(*problem)
    if stage == "backward":
        loss.backward()
    if forgotten:
        del earlier, loss
        gc.collect()
    again = LossHead(client, name)
    optimizer = HeadOptimizer(again, lr=0.1)
    with pytest.warns(RuntimeWarning, match=rf"earlier LossHead of '{name}' left in step 0 \(microbatches: 1\)"):
        again(*other_rows()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again(*other_rows()).backward()
        optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (2 * N, 2)
    if forgotten:
        return
    if stage == "forward":
        with pytest.raises(RuntimeError, match="discarded the weight gradient"):
            loss.backward()
    with pytest.raises(RuntimeError, match="step 0 is lost .*another LossHead"):
        HeadOptimizer(earlier, lr=0.1).step()


def test_looking_takes_nothing_over(client, make_head, problem):
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name)
    head(*problem).backward()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        LossHead(client, name)(*problem)
    optimizer = HeadOptimizer(head, lr=0.1)
    optimizer.step()
    assert optimizer.last.microbatches == 1


def test_what_another_program_left_is_not_taken_over(client, make_head, problem):
    """It may go on with its step. The message says what to do."""
    name = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = problem
    client.compute_loss(name, hidden.detach().numpy(), targets.numpy(), step=0, id=7, accumulate=True)
    head = LossHead(client, name)
    with pytest.raises(RuntimeError, match=r"1 microbatches of another LossHead.*zero_grad\(\)"):
        head(*problem)
    HeadOptimizer(head, lr=0.1).zero_grad()
    head(*problem).backward()
    # Nor is what an earlier LossHead of this program left together with another program.
    client.compute_loss(name, hidden.detach().numpy(), targets.numpy(), step=0, id=7, accumulate=True)
    with pytest.raises(RuntimeError, match="2 microbatches of another LossHead"):
        LossHead(client, name)(*problem)


def test_a_new_head_of_several_trainers(client, make_head, problem):
    """zero_grad() of the new one discards what the earlier one of this trainer left."""
    name = make_head(hidden_size=D, vocab_size=V)
    loss = LossHead(client, name, rank=1, world_size=2)(*problem)
    head = LossHead(client, name, rank=1, world_size=2)
    optimizer = HeadOptimizer(head, lr=0.1)
    with pytest.raises(RuntimeError, match=r"another LossHead.*zero_grad\(\)"):
        head(*other_rows())
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="discarded the weight gradient"):
        loss.backward()
    head(*other_rows()).backward()
    assert client.describe_head(name).step_microbatches == 1
    assert LossHead(client, name, rank=0, world_size=2).left_over == 0


@pytest.mark.parametrize("options", [{}, {"rank": 1, "world_size": 2}])
def test_a_new_head_after_a_reset(client, make_head, problem, options):
    """A script, or a cell, that begins with a reset finds nothing of what it left."""
    name = make_head(hidden_size=D, vocab_size=V)
    for _ in range(2):
        client.create_head(name, hidden_size=D, vocab_size=V, compute_dtype="fp32", if_exists="reset")
        head = LossHead(client, name, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = head(*problem)
            loss.backward()
        assert client.describe_head(name).step_microbatches == 1


# ---- Losses that get no backward ----

def test_a_deferred_loss_without_backward(client, make_head, problem):
    """The server keeps its hidden states; zero_grad() lets it have its memory back."""
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name, deferred=True)
    optimizer = HeadOptimizer(head, lr=0.1)
    for _ in range(3):
        loss = head(*problem)
        optimizer.zero_grad()
        assert client.describe_head(name).retained_microbatches == 0
    with pytest.raises(RuntimeError, match="between forward and backward"):
        loss.backward()
    head(*problem).backward()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)


def test_a_deferred_loss_without_backward_holds_nothing_up(deterministic_server, problem):
    """Of a deterministic server the next microbatch would wait for it."""
    with lossd.Client(deterministic_server.target) as client:
        client.create_head("held-up", hidden_size=D, vocab_size=V)
        head = LossHead(client, "held-up", deferred=True, timeout=120)
        optimizer = HeadOptimizer(head, lr=0.1)
        head(*problem)
        optimizer.zero_grad()
        head(*problem).backward()
        optimizer.step()
        assert optimizer.last.microbatches == 1
        client.delete_head("held-up")


def test_zero_grad_of_a_step_without_anything_asks_nobody(client, make_head, problem, monkeypatch):
    """It is called in every step of every loop."""
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    optimizer = HeadOptimizer(head, lr=0.1)
    head(*problem).backward()
    optimizer.step()
    monkeypatch.setattr(client, "zero_gradients", lambda *_: pytest.fail("it discarded"))
    monkeypatch.setattr(client, "describe_head", lambda *_: pytest.fail("it asked"))
    optimizer.zero_grad()


# ---- Losses that are divided ----

@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_divided_losses_add_up(client, make_head, seed, deferred, reduction):
    """(loss / n).backward() over n microbatches, with a remainder of fewer, is what torch has."""
    torch.manual_seed(seed % 2**31)
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name, deferred=deferred, reduction=reduction)
    optimizer = HeadOptimizer(head, lr=0.25, algorithm="sgd")
    linear = torch.nn.Linear(D, V, bias=False)
    local = torch.optim.SGD(linear.parameters(), lr=0.25)
    for microbatches in (4, 4, 2):
        linear.weight.data.copy_(torch.from_numpy(client.read_tensor(name)))
        for _ in range(microbatches):
            hidden, targets = other_rows()
            ours, theirs = hidden.detach().requires_grad_(), hidden.detach().requires_grad_()
            (head(ours, targets) / 4).backward()
            (torch.nn.functional.cross_entropy(linear(theirs), targets, reduction=reduction) / 4).backward()
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        for each in (optimizer, local):
            each.step()
            each.zero_grad()
        torch.testing.assert_close(torch.from_numpy(client.read_tensor(name)), linear.weight.data, rtol=1e-4, atol=1e-5)


# ---- Servers that begin again ----

def test_zero_grad_after_a_restart_that_restored_the_head(problem):
    """Whoever restored it. Without a head zero_grad() says so."""
    server = ServerProcess()
    try:
        with lossd.Client(server.target, retry=lossd.RetryOptions(max_attempts=30, initial_backoff=0.05)) as client:
            client.create_head("a", hidden_size=D, vocab_size=V)
            head = LossHead(client, "a")
            optimizer = HeadOptimizer(head, lr=0.1)
            head(*problem).backward()
            optimizer.step()
            saved = client.save_checkpoint("a").checkpoint
            head(*problem).backward()
            server.kill()
            server.start()
            with pytest.raises(lossd.NotFound):
                optimizer.zero_grad()
            with lossd.Client(server.target) as other:
                other.load_checkpoint(saved)
            with pytest.raises(lossd.Restarted):
                head(*problem)
            optimizer.zero_grad()
            head(*problem).backward()
            optimizer.step()
            assert (optimizer.last.rows, optimizer.last.microbatches, head.step) == (N, 1, 2)
    finally:
        server.stop()


# ---- Batches that fail ----

def test_a_batch_of_which_nothing_was_accumulated_is_passed_over(client, make_head, problem):
    """The loop catches the error and goes on, as it would with a loss of its own that is not finite."""
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    optimizer = HeadOptimizer(head, lr=0.1)
    hidden, targets = problem
    for microbatch in range(4):
        bad = hidden.detach().clone()
        if microbatch % 2 == 0:
            bad[3, 1] = torch.inf
        try:
            head(bad.requires_grad_(), targets).backward()
        except lossd.NonFinite:
            assert microbatch % 2 == 0
    optimizer.load_grad_norm()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (2 * N, 2)
    head(hidden, targets).backward()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)


def test_a_batch_of_which_something_was_accumulated_is_not(client, make_head, problem):
    """Some of its slices were accumulated before one was refused."""
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V), slice_bytes=D * 4 * 8, streams=1)
    optimizer = HeadOptimizer(head, lr=0.1)
    hidden, targets = problem
    bad = hidden.detach().clone()
    bad[N - 1, 1] = torch.inf
    with pytest.raises(lossd.NonFinite):
        head(bad.requires_grad_(), targets)
    head(hidden, targets).backward()
    for what in (optimizer.load_grad_norm, optimizer.step):
        with pytest.raises(RuntimeError, match="microbatch 0 .* failed"):
            what()
    optimizer.zero_grad()
    head(hidden, targets).backward()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)


def test_a_batch_that_was_passed_over_does_not_come_back(client, make_head, problem):
    """Rows of it that come late, after step() has looked, are noticed by the server."""
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name)
    optimizer = HeadOptimizer(head, lr=0.1)
    hidden, targets = problem
    bad = hidden.detach().clone()
    bad[3, 1] = torch.inf
    with pytest.raises(lossd.NonFinite):
        head(bad.requires_grad_(), targets)
    with pytest.raises(RuntimeError, match="microbatch 0 .* failed"):  # a step of nothing is not applied
        optimizer.step()
    head(hidden, targets).backward()
    optimizer.load_grad_norm()
    client.compute_loss(name, hidden.detach().numpy(), targets.numpy(), step=0, id=9, accumulate=True)
    with pytest.raises(lossd.FailedPrecondition, match="rows"):
        optimizer.step()
    optimizer.zero_grad()
    head(hidden, targets).backward()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)
