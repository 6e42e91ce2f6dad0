# SPDX-License-Identifier: Apache-2.0
"""Loops that never apply a head's steps are told so, and others are not; heads that are not to be trained."""

from __future__ import annotations

import contextlib
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402
from server_process import ServerProcess  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead, TiedEmbedding, _step_tracker  # noqa: E402

D, V, N = 16, 90, 32
TOLD_OF_STEPS = hasattr(torch.optim.Optimizer, "register_step_post_hook")


@pytest.fixture(autouse=True)
def seeded(seed):
    torch.manual_seed(seed % 2**31)


@pytest.fixture
def head(client, make_head):
    return LossHead(client, make_head(hidden_size=D, vocab_size=V))


class Loop:
    """A trunk, its optimizer, and losses of a head."""

    def __init__(self, head):
        self.head = head
        self.trunk = torch.nn.Linear(D, D)
        self.optimizer = torch.optim.SGD(self.trunk.parameters(), lr=0.1)

    def backward(self, times=1):
        for _ in range(times):
            self.head(self.trunk(torch.randn(N, D)), torch.randint(0, V, (N,))).backward()


@contextlib.contextmanager
def silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_no_optimizer_was_made(head):
    loop = Loop(head)
    with silence():
        loop.backward(3)
    with pytest.warns(UserWarning, match=r"4 losses of head .* no HeadOptimizer was made.*"
                                         r"head_optimizer = lossd.torch.HeadOptimizer\(head, lr=...\)") as said:
        loop.backward()
    assert said[0].filename == __file__
    with silence():
        loop.backward(4)


@pytest.mark.parametrize("deferred", [False, True])
def test_no_optimizer_of_a_deferred_loss(client, make_head, deferred):
    loop = Loop(LossHead(client, make_head(hidden_size=D, vocab_size=V), deferred=deferred))
    with pytest.warns(UserWarning, match="no HeadOptimizer"):
        loop.backward(4)


@pytest.mark.skipif(not TOLD_OF_STEPS, reason="torch does not tell of steps")
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("zeroed", [False, True])
def test_the_head_is_never_stepped(head, accumulated, zeroed):
    loop, optimizer = Loop(head), HeadOptimizer(head, lr=0.1)

    def step():
        loop.backward(accumulated)
        loop.optimizer.step()
        if zeroed:
            optimizer.zero_grad()

    with silence():
        step()
    with pytest.warns(UserWarning, match=r"SGD has made 2 steps.*add head_optimizer.step\(\)") as said:
        step()
    assert said[0].filename == __file__
    with silence():
        step()


def test_a_head_alone_is_never_stepped(head):
    """There is no other optimizer that could tell."""
    HeadOptimizer(head, lr=0.1)
    hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
    with silence():
        for _ in range(63):
            head(hidden, targets).backward()
    with pytest.warns(UserWarning, match=r"has 64 microbatches.*head_optimizer.step\(\) is missing"):
        head(hidden, targets).backward()


def test_every_step_is_discarded(head):
    optimizer = HeadOptimizer(head, lr=0.1)
    with silence():
        for _ in range(3):
            head(torch.randn(N, D), torch.randint(0, V, (N,))).backward()
            optimizer.zero_grad()
        optimizer.zero_grad()
        head(torch.randn(N, D), torch.randint(0, V, (N,))).backward()
    with pytest.warns(UserWarning, match=r"discarded 4 steps.*add head_optimizer.step\(\) before"):
        optimizer.zero_grad()


@pytest.mark.skipif(not TOLD_OF_STEPS, reason="torch does not tell of steps")
def test_a_step_of_very_many_microbatches(head):
    loop, optimizer = Loop(head), HeadOptimizer(head, lr=0.1)
    with silence():
        loop.backward(150)
        loop.optimizer.step()
        optimizer.step()


def test_the_head_is_never_stepped_under_an_older_torch(head, monkeypatch):
    monkeypatch.setattr(_step_tracker, "_HOOK", None)  # as torch 1.13 has it
    loop = Loop(head)
    HeadOptimizer(head, lr=0.1)
    with silence():
        loop.backward(63)
    with pytest.warns(UserWarning, match=r"has 64 microbatches.*head_optimizer.step\(\) is missing"):
        loop.backward()


@pytest.mark.parametrize("first", ["head", "trunk"])
def test_loops_that_step_are_told_nothing(head, first):
    loop, optimizer = Loop(head), HeadOptimizer(head, lr=0.1)
    both = [optimizer, loop.optimizer]
    with silence():
        for accumulated in (1, 2, 20):
            for _ in range(3):
                loop.backward(accumulated)
                for each in both if first == "head" else both[::-1]:
                    each.step()
                    each.zero_grad()


def test_several_optimizers_of_a_trunk(head):
    """Each makes its step before the head's, and an optimizer of another model makes many."""
    loop, optimizer = Loop(head), HeadOptimizer(head, lr=0.1)
    others = [torch.optim.SGD(loop.trunk.parameters(), lr=0.1) for _ in range(3)]
    elsewhere = Loop(None)
    with silence():
        for _ in range(3):
            loop.backward()
            for _ in range(3):
                elsewhere.optimizer.step()
            for each in others:
                each.step()
            optimizer.step()


def test_evaluation_and_frozen_heads_are_told_nothing(client, head):
    with silence():
        Loop(LossHead(client, head.head_name, train_head=False)).backward(6)
        for _ in range(6):
            with torch.no_grad():
                head(torch.randn(N, D), torch.randint(0, V, (N,)))


def test_a_program_that_steps_by_itself_is_told_nothing(client, head):
    """With Client.apply_step, or where another process does; sync() takes the head as it is then."""
    loop = Loop(head)
    with silence():
        for step in range(4):
            loop.backward(2)
            client.apply_step(head.head_name, step, lossd.AdamW(lr=0.1))
            head.sync()


def test_a_full_ledger_names_the_step_that_is_missing():
    server = ServerProcess("--ledger_bytes", "64KiB")
    try:
        with lossd.Client(server.target) as client:
            client.create_head("lm", hidden_size=D, vocab_size=V)
            head = LossHead(client, "lm")
            with pytest.raises(lossd.ResourceExhausted, match=r"no step\(\): if the loop never calls step\(\)"), \
                    warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(3000):
                    Loop(head).backward()
    finally:
        server.stop()


# ---- Heads that are not to be trained ----

def bits(client, head):
    return client.read_tensor(head.head_name).view(np.uint32)


@pytest.mark.parametrize("how", ["head", "model", "outer model", "constructor"])
def test_requires_grad_freezes_the_head(client, make_head, how):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V), train_head=how != "constructor")
    model = torch.nn.ModuleDict({"inner": torch.nn.Sequential(torch.nn.Linear(D, D), head)})
    loop, optimizer = Loop(head), HeadOptimizer(head, lr=0.1)
    if how != "constructor":
        {"head": head, "model": model["inner"], "outer model": model}[how].requires_grad_(False)
    before = bits(client, head)
    for _ in range(2):
        loop.backward()
        assert optimizer.load_grad_norm() == 0.0 and optimizer.stand_in.grad is None
        torch.nn.utils.clip_grad_norm_([*loop.trunk.parameters(), optimizer.stand_in], 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert (bits(client, head) == before).all() and client.describe_head(head.head_name).state.step == 0
    assert loop.trunk.weight.grad.abs().sum() > 0
    (head if how == "head" else model).requires_grad_(True)
    loop.backward()
    optimizer.step()
    assert (bits(client, head) != before).any()


def test_requires_grad_of_another_module_changes_nothing(client, head):
    model = torch.nn.Sequential(torch.nn.Linear(D, D), head)
    model[0].requires_grad_(False)
    assert head.train_head
    list(model.parameters())
    list(model.named_modules())
    assert head.train_head
    model.requires_grad_()
    assert head.train_head


def test_a_tied_embedding_of_a_frozen_head(client, head):
    """The matrix that the two share stays as it is."""
    embedding = torch.nn.Embedding(V, D)
    tied, optimizer = TiedEmbedding(head, embedding.weight), HeadOptimizer(head, lr=0.1)
    tied.pull()
    head.requires_grad_(False)
    before = bits(client, head)
    head(embedding(torch.arange(N)), torch.arange(N)).backward()
    tied.add_gradient()
    optimizer.step()
    tied.pull()
    assert (bits(client, head) == before).all() and (embedding.weight.detach().numpy().view(np.uint32) == before).all()
    assert client.describe_head(head.head_name).step_contributions == 0 and embedding.weight.grad is None


def test_a_head_that_was_created_frozen(client, make_head):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V, frozen=True))
    with pytest.raises(ValueError, match="was created with frozen=True"):
        head.requires_grad_(True)
    torch.nn.Sequential(torch.nn.Linear(D, D), head).requires_grad_(True)
    assert not head.train_head
    optimizer = HeadOptimizer(head, lr=0.1)
    Loop(head).backward(5)
    optimizer.step()
