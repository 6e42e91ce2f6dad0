# SPDX-License-Identifier: Apache-2.0
"""Clips of a trunk together with HeadOptimizer's stand-in: as of a local head, or refused."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # noqa: E402

from conftest import EPS  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead  # noqa: E402

D, V, N, LR = 16, 90, 48, 0.5
INF = float("inf")


class Twins:
    """A trunk with a head on a server, and the same with a local one; SGD."""

    def __init__(self, client, name):
        self.client, self.name = client, name
        self.trunk = torch.nn.Linear(D, D)
        self.twin = copy.deepcopy(self.trunk)
        self.layer = torch.nn.Linear(D, V, bias=False)
        self.layer.weight.data.copy_(torch.from_numpy(client.read_tensor(name)))
        self.head = LossHead(client, name)
        self.optimizer = HeadOptimizer(self.head, lr=LR, algorithm="sgd")
        self.ours = [*self.trunk.parameters(), self.optimizer.stand_in]
        self.theirs = [*self.twin.parameters(), self.layer.weight]

    def backward(self, factor=1.0):
        hidden, targets = torch.randn(N, D), torch.randint(0, V, (N,))
        (self.head(self.trunk(hidden), targets) * factor).backward()
        (torch.nn.functional.cross_entropy(self.layer(self.twin(hidden)), targets) * factor).backward()

    def step_and_compare(self):
        self.optimizer.step()
        with torch.no_grad():
            expected = self.layer.weight - LR * self.layer.weight.grad
        torch.testing.assert_close(torch.from_numpy(self.client.read_tensor(self.name)), expected, atol=1e-6, rtol=1e-5)
        for one, other in zip(self.trunk.parameters(), self.twin.parameters()):
            torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)


@pytest.fixture
def twins(client, make_head, seed):
    torch.manual_seed(seed % 2**31)
    return Twins(client, make_head(hidden_size=D, vocab_size=V))


def foreach_options():
    return [{}] if torch.__version__.startswith("1.") else [{}, {"foreach": True}, {"foreach": False}]


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("options", foreach_options())
@pytest.mark.parametrize("most", [0.05, 1e3])
def test_a_clip_by_the_2_norm(twins, loaded, options, most):
    for _ in range(2):
        twins.backward(0.5)
    if loaded:
        twins.optimizer.load_grad_norm()
    ours, theirs = (clip_grad_norm_(each, most, **options) for each in (twins.ours, twins.theirs))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    assert type(ours) is torch.Tensor
    twins.step_and_compare()


@pytest.mark.parametrize("norm_type", [INF, 1.0, 3.0])
@pytest.mark.parametrize("options", foreach_options())
def test_a_clip_by_another_norm_is_refused(client, twins, norm_type, options):
    before = client.read_tensor(twins.name)
    twins.backward()
    twins.optimizer.load_grad_norm()
    clip_grad_norm_(twins.ours, 0.05, norm_type=norm_type, **options)
    said = r"norm_type=inf" if norm_type == INF else rf"norm_type={norm_type:g}"
    with pytest.raises(RuntimeError, match=rf"is the 2-norm .*{said}.*Clip by the 2-norm, torch.nn.utils.clip_grad_norm_"):
        twins.optimizer.step()
    assert (client.read_tensor(twins.name) == before).all()
    twins.optimizer.zero_grad()
    twins.backward()
    twins.optimizer.step()


def test_an_infinity_norm_that_clips_nothing_is_right(twins):
    """The 2-norm is not smaller."""
    twins.backward()
    for each in (twins.ours, twins.theirs):
        clip_grad_norm_(each, 1e3, norm_type=INF)
    twins.step_and_compare()


def test_a_1_norm_that_seems_to_clip_nothing_is_refused(twins):
    """The 1-norm of the head's gradient may be larger than what stands for it."""
    twins.backward()
    clip_grad_norm_(twins.ours, 1e3, norm_type=1)
    with pytest.raises(RuntimeError, match="2-norm"):
        twins.optimizer.step()


@pytest.mark.skipif(not hasattr(torch.nn.utils, "get_total_norm"), reason="torch has no get_total_norm")
@pytest.mark.parametrize("norm_type", [2.0, INF])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_a_clip_in_two_calls(twins, norm_type, foreach):
    twins.backward()
    for each in (twins.ours, twins.theirs):
        norm = torch.nn.utils.get_total_norm([p.grad for p in each], norm_type, foreach=foreach)
        torch.nn.utils.clip_grads_with_norm_(each, 0.05, norm, foreach=foreach)
    if norm_type == 2:
        twins.step_and_compare()
    else:
        with pytest.raises(RuntimeError, match="norm_type=inf"):
            twins.optimizer.step()


@pytest.mark.parametrize("options", foreach_options())
def test_a_clip_of_values(twins, options):
    twins.backward()
    clip_grad_value_(twins.ours, 1e-3, **options)
    with pytest.raises(RuntimeError, match=r"clamp.*as clip_grad_value_ does"):
        twins.optimizer.step()


def test_a_clip_of_values_that_are_all_smaller(twins):
    twins.backward()
    for each in (twins.ours, twins.theirs):
        clip_grad_value_(each, 1e3)
    twins.step_and_compare()


@pytest.mark.skipif(not hasattr(getattr(torch, "amp", None), "GradScaler"), reason="torch has no GradScaler for CPUs")
@pytest.mark.parametrize("clipped", [False, True])
def test_a_grad_scaler(client, twins, clipped):
    """It reads the stand-in's gradient, which is fetched then."""
    hidden, targets = torch.randn(N, D), torch.randint(0, V, (N,))
    pairs = [(lambda: twins.head(twins.trunk(hidden), targets), twins.ours,
              [torch.optim.SGD(twins.trunk.parameters(), lr=LR), twins.optimizer]),
             (lambda: torch.nn.functional.cross_entropy(twins.layer(twins.twin(hidden)), targets), twins.theirs,
              [torch.optim.SGD(twins.theirs, lr=LR)])]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1) for _ in pairs]
    for _ in range(2):
        for scaler, (loss, parameters, optimizers) in zip(scalers, pairs):
            scaler.scale(loss()).backward()
            if clipped:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                clip_grad_norm_(parameters, 0.05)
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    torch.testing.assert_close(torch.from_numpy(client.read_tensor(twins.name)), twins.layer.weight.data, atol=1e-5,
                               rtol=1e-4)
    torch.testing.assert_close(twins.trunk.weight, twins.twin.weight, atol=1e-5, rtol=1e-4)


BY_HAND = {
    "mul_": lambda p: p.grad.mul_(0.25),
    "*=": lambda p: p.grad.__imul__(0.25),
    "/=": lambda p: p.grad.__itruediv__(4),
    "data": lambda p: p.grad.data.mul_(0.25),
    "detached": lambda p: p.grad.detach().div_(4),
    "assigned": lambda p: setattr(p, "grad", p.grad * 0.25),
    "assigned quotient": lambda p: setattr(p, "grad", p.grad.clone() / 4),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_multiplication_by_hand(twins, name):
    twins.backward()
    for each in (twins.ours, twins.theirs):
        for parameter in each:
            BY_HAND[name](parameter)
    twins.step_and_compare()


def test_a_global_norm_by_hand(twins):
    twins.backward()
    for each in (twins.ours, twins.theirs):
        norm = sum(p.grad.detach().pow(2).sum() for p in each).sqrt()
        for parameter in each:
            parameter.grad.mul_(0.05 / norm)
    twins.step_and_compare()


CHANGES = {
    "clamp_": lambda p: p.grad.clamp_(max=1e-3),
    "data": lambda p: p.grad.data.clamp_(-1e-3, 1e-3),
    "fill_": lambda p: p.grad.fill_(7.0),
    "add_": lambda p: p.grad.add_(0.1),
    "copy_": lambda p: p.grad.copy_(torch.tensor(3.0)),
    "sign_": lambda p: p.grad.sign_().mul_(3.0),
    "largest": lambda p: p.grad.mul_(1e-3 / p.grad.abs().max()),
    "another tensor": lambda p: setattr(p, "grad", torch.tensor(5.0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_is_no_multiplication_is_refused(twins, name):
    twins.backward()
    CHANGES[name](twins.optimizer.stand_in)
    with pytest.raises(RuntimeError, match="stand-in's gradient"):
        twins.optimizer.step()
    twins.optimizer.zero_grad()
    twins.backward()
    twins.optimizer.step()


def test_a_norm_for_the_log_changes_nothing(twins):
    twins.backward()
    assert all(float((p.grad * p.grad).sum()) >= 0 for p in twins.ours)
    twins.backward()
    for each in (twins.ours, twins.theirs):
        assert all(float(p.grad.abs().max()) >= 0 for p in each)
        clip_grad_norm_(each, 0.05)
        assert all(float(p.grad.abs().max()) >= 0 for p in each)
    twins.step_and_compare()


def test_the_gradient_follows_the_step(twins):
    """It is fetched when it is read and something has come since; None where a local one has none."""
    stand_in = twins.optimizer.stand_in
    assert stand_in.grad is None and twins.optimizer.load_grad_norm() == 0.0
    for _ in range(3):
        twins.backward()
        torch.testing.assert_close(float(stand_in.grad), float(twins.layer.weight.grad.norm()), rtol=1e-5, atol=0)
        assert stand_in.grad is stand_in.grad
    twins.step_and_compare()
    assert stand_in.grad is None


def test_a_clip_before_the_last_backward_is_refused(twins):
    """A local gradient would get the rest unclipped; this one is one sum."""
    twins.backward()
    clip_grad_norm_(twins.ours, 0.05)
    twins.backward()
    with pytest.raises(RuntimeError, match="before the last backward"):
        twins.optimizer.step()


def test_a_clip_is_not_forgotten_by_a_look(twins):
    twins.backward()
    for each in (twins.ours, twins.theirs):
        clip_grad_norm_(each, 0.05)
    torch.testing.assert_close(twins.optimizer.load_grad_norm(), float(twins.layer.weight.grad.norm()), rtol=1e-4, atol=0)
    twins.step_and_compare()


def test_reading_asks_the_server_once(client, twins, monkeypatch):
    asked = []
    norm = client.grad_norm
    monkeypatch.setattr(client, "grad_norm", lambda *arguments: asked.append(1) or norm(*arguments))
    twins.backward()
    clip_grad_norm_(twins.ours, 0.05)
    clip_grad_norm_(twins.ours, 0.05)
    twins.optimizer.step()
    twins.optimizer.zero_grad()
    assert len(asked) == 1


# ---- Steps without rows ----

@pytest.mark.parametrize("kept", [False, True])
def test_a_step_without_rows_moves_nothing(client, twins, kept):
    """As of a parameter whose gradient is None."""
    if kept:
        twins.backward()
        twins.step_and_compare()
    optimizer = HeadOptimizer(twins.head, lr=1e-2, weight_decay=0.1)
    before, step = client.read_tensor(twins.name), client.describe_head(twins.name).state.step
    for _ in range(3):
        optimizer.step()
    assert (client.read_tensor(twins.name) == before).all() and client.describe_head(twins.name).state.step == step
    twins.backward()
    optimizer.step()
    assert optimizer.last.rows == N


@pytest.mark.parametrize("deferred", [False, True])
def test_a_step_of_ignored_rows_is_one_of_a_gradient_of_zeros(client, make_head, seed, deferred):
    torch.manual_seed(seed % 2**31)
    name = make_head(hidden_size=D, vocab_size=V)
    layer = torch.nn.Linear(D, V, bias=False)
    layer.weight.data.copy_(torch.from_numpy(client.read_tensor(name)))
    head = LossHead(client, name, reduction="sum", deferred=deferred)
    pairs = [(head, HeadOptimizer(head, lr=1e-2, eps=EPS, weight_decay=0.1)),
             (lambda x, t: torch.nn.functional.cross_entropy(layer(x), t, reduction="sum"),
              torch.optim.AdamW(layer.parameters(), lr=1e-2, eps=EPS, weight_decay=0.1))]
    targets = torch.randint(0, V, (N,))
    for step in range(3):
        hidden = torch.randn(N, D)
        for loss, optimizer in pairs:
            loss(hidden, torch.full((N,), -100) if step == 1 else targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(torch.from_numpy(client.read_tensor(name)), layer.weight.data, atol=1e-5, rtol=1e-5)


def test_rows_of_another_client_are_stepped(client, twins):
    """The program that steps a head may be one that sends nothing itself."""
    client.compute_loss(twins.name, torch.randn(N, D).numpy(), torch.randint(0, V, (N,)).numpy(), step=0, id=0,
                        accumulate=True)
    twins.optimizer.step()
    assert twins.optimizer.last.rows == N


def test_a_step_that_failed_is_made_again(client, twins, monkeypatch):
    twins.backward()
    with monkeypatch.context() as broken:
        broken.setattr(client, "apply_step", lambda *_, **__: (_ for _ in ()).throw(lossd.Unavailable("gone")))
        with pytest.raises(lossd.Unavailable):
            twins.optimizer.step()
    twins.step_and_compare()
