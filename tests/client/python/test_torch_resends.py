# SPDX-License-Identifier: Apache-2.0
"""Deferred losses whose rows backward sends again, because the server does not retain them: LossHead.distill() and
LossHead.policy_loss() with deferred=True or reduction "none", against torch in double precision."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from servers import ServerProcess  # noqa: E402
from test_distillation import divergence, logits  # noqa: E402
from test_policy_loss import row_losses  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead  # noqa: E402

D, TAUGHT, V, B, T = 20, 28, 90, 3, 20
_NAMES = itertools.count()

KINDS: dict[str, Any] = {
    "forward_kl": {"divergence": "forward_kl", "temperature": 2.0},
    "reverse_kl": {"divergence": "reverse_kl", "temperature": 0.5},
    "jensen_shannon": {"divergence": "jensen_shannon", "temperature": 1.5, "beta": 0.3},
    "mixture": {"divergence": "forward_kl", "temperature": 2.0, "weight": 0.7, "target_weight": 0.5},
    "ppo": lossd.Objective("ppo", clip_low=0.1, clip_high=0.28, kl_coef=0.04),
    "cispo": lossd.Objective("cispo", entropy_bonus=0.1),
}
MODES = {"none": {"reduction": "none"}, "mean": {"deferred": True}, "sum": {"reduction": "sum", "deferred": True}}


class Problem:
    """Rows, two heads on the server, and the same loss by lossd and by torch."""

    def __init__(self, client: lossd.Client, kind: str, **spec: Any) -> None:
        self.client, self.kind = client, KINDS[kind]
        self.head, self.teacher = (f"{what}-{next(_NAMES)}" for what in ("resent", "resent-teacher"))
        client.create_head(self.head, hidden_size=D, vocab_size=V, compute_dtype="fp32", **spec)
        client.create_head(self.teacher, hidden_size=TAUGHT, vocab_size=V, compute_dtype="fp32", frozen=True)
        self.taught_weight = torch.randn(V, TAUGHT) / 3
        client.write_tensor(self.teacher, "weight", self.taught_weight.numpy())
        self.weight = torch.from_numpy(client.read_tensor(self.head)).double().requires_grad_()
        self.hidden, self.taught = torch.randn(B, T, D), torch.randn(B, T, TAUGHT)
        self.targets = torch.randint(0, V, (B, T))
        self.targets[torch.rand(B, T) < 0.2] = -100
        self.valid = self.targets != -100
        self.weights = torch.rand(B, T)
        self.weights[torch.rand(B, T) < 0.2] = 0.0
        logp = torch.log_softmax(self.hidden.double() @ self.weight.detach().T, -1)
        logp = logp.gather(-1, self.targets.clamp(min=0)[..., None])[..., 0]
        # The ratios 0.5, 0.95, 1.1 and 2: rounding decides of no row whether it is clipped.
        log_ratio = torch.tensor([0.5, 0.95, 1.1, 2.0]).log()[torch.randint(0, 4, (B, T))]
        self.numbers = {"advantages": torch.randn(B, T), "old_logprobs": (logp - log_ratio).float(),
                        "ref_logprobs": (logp + torch.randn(B, T) * 0.3).float()}

    def loss(self, head: LossHead, hidden: Any, **options: Any) -> Any:
        """By lossd."""
        if isinstance(self.kind, dict):
            options.setdefault("targets", self.targets)
            return head.distill(hidden, self.taught.to(hidden.dtype), lossd.Distillation(self.teacher, **self.kind), **options)
        numbers = {name: self.numbers[name] for name in self.kind.numbers}
        return head.policy_loss(hidden, options.pop("targets", self.targets), **numbers, objective=self.kind, **options)

    def rows(self, hidden: Any, weights: Any = None) -> Any:
        """[B, T], by torch; 0 for ignored rows. `hidden`: double."""
        z = logits(hidden, self.weight).reshape(B * T, V)
        flat = self.targets.reshape(-1)
        if isinstance(self.kind, dict):
            d = lossd.Distillation(self.teacher, **self.kind)
            rows = d.weight * divergence(d, z, logits(self.taught, self.taught_weight.double()).reshape(B * T, V))
            rows = rows + d.target_weight * torch.nn.functional.cross_entropy(z, flat, reduction="none")
        else:
            numbers = {name: self.numbers[name].double().reshape(-1) for name in self.kind.numbers}
            rows = row_losses(self.kind, z, flat, numbers)["loss"]
        rows = torch.where(self.valid, rows.reshape(B, T), 0.0 * rows.reshape(B, T).detach())
        return rows if weights is None else rows * weights.double()

    def gradient(self) -> Any:
        return torch.from_numpy(self.client.read_tensor(self.head, "weight", "gradient")).double()


@pytest.fixture
def make_problem(client, seed):
    torch.manual_seed(seed % 2**31)
    yield lambda kind, **spec: Problem(client, kind, **spec)
    for head in client.list_heads():
        if head.spec.name.startswith("resent-"):
            client.delete_head(head.spec.name)


def close(got, expected, rtol=1e-4):
    """Compares tensors by their norms."""
    got, expected = got.detach().double(), expected.detach().double()
    assert got.shape == expected.shape
    assert float((got - expected).norm()) <= rtol * float(expected.norm()) + 1e-7


ONE_OF_EACH = pytest.mark.parametrize("kind", ["mixture", "ppo"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_torch(client, make_problem, kind, mode):
    """With upstream gradients of both signs, and of 0."""
    problem = make_problem(kind)
    head = LossHead(client, problem.head, **MODES[mode])
    optimizer = HeadOptimizer(head, lr=0.0)
    hidden, exact = problem.hidden.clone().requires_grad_(), problem.hidden.double().requires_grad_()
    upstream = torch.randn(2, B, T) if mode == "none" else torch.tensor([-1.7, 0.3])
    if mode == "none":
        upstream[torch.rand(2, B, T) < 0.2] = 0.0
    normalizer = float(problem.valid.sum()) if mode == "mean" else 1.0
    for factor in upstream:  # two microbatches
        loss = problem.loss(head, hidden, row_weights=problem.weights)
        want = problem.rows(exact, problem.weights)
        want = want if mode == "none" else want.sum() / normalizer
        close(loss, want, 1e-5)
        (loss * factor).sum().backward()
        (want * factor.double()).sum().backward()
    close(hidden.grad, exact.grad)
    close(problem.gradient(), problem.weight.grad)
    assert client.describe_head(problem.head).retained_microbatches == 0
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (2 * int(problem.valid.sum()), 2)


@ONE_OF_EACH
@pytest.mark.parametrize("dtype, rtol", [(torch.float16, 5e-3), (torch.bfloat16, 3e-2)])
def test_sixteen_bit_hidden_states(client, make_problem, kind, dtype, rtol):
    problem = make_problem(kind)
    problem.taught = problem.taught.to(dtype).float()
    hidden = problem.hidden.to(dtype).requires_grad_()
    exact = hidden.detach().double().requires_grad_()
    problem.loss(LossHead(client, problem.head, reduction="none"), hidden).sum().backward()
    problem.rows(exact).sum().backward()
    assert hidden.grad.dtype is dtype
    # The ratios of rounded hidden states may be clipped otherwise; a divergence has no such steps.
    if kind == "mixture":
        close(hidden.grad, exact.grad, rtol)
        close(problem.gradient(), problem.weight.grad, rtol)


@ONE_OF_EACH
def test_extras_are_those_of_a_loss_at_once_and_have_no_gradient(client, make_problem, kind):
    problem = make_problem(kind)
    names = ("z_loss", "accuracy", "dropped_mass", "gradient_error", "ratio", "clipped", "old_kl", "ref_kl", "lse", "entropy",
             "logprob", "argmax")
    options = {"extras": names, "gradients": "sampled", "sample_threshold": 0.05, "z_loss": 1e-3}
    hidden = problem.hidden.clone().requires_grad_()
    _, at_once = problem.loss(LossHead(client, problem.head, train_head=False, **options), hidden)
    loss, extras = problem.loss(LossHead(client, problem.head, deferred=True, **options), hidden)
    assert extras.gradient_error.isnan() and extras.dropped_mass.isnan()
    for name in names:
        value = getattr(extras, name)
        assert not value.requires_grad
        if name not in ("gradient_error", "dropped_mass"):
            torch.testing.assert_close(value, getattr(at_once, name), msg=name)
    loss.backward()
    assert 0 < extras.gradient_error < 10 and extras.dropped_mass == 0


@pytest.mark.parametrize("kind, gradients", [
    ("mixture", "sampled"), ("jensen_shannon", "sampled"), ("ppo", "sampled"), ("ppo", "filtered"), ("cispo", "auto")])
def test_the_sign_of_the_upstream_gradient_is_that_of_the_result(client, make_problem, kind, gradients):
    """Gradients that leave classes out leave the same ones out."""
    problem = make_problem(kind)
    found = []
    for factor in (1.0, -2.0):  # a new module gives the rows the same random numbers
        head = LossHead(client, problem.head, reduction="none", train_head=False, gradients=gradients, filter_epsilon=0.01,
                        sample_threshold=0.05, max_gradient_error=10.0)
        hidden = problem.hidden.clone().requires_grad_()
        (problem.loss(head, hidden) * factor).sum().backward()
        found.append(hidden.grad)
    close(found[1], -2 * found[0], 1e-6)


@ONE_OF_EACH
@pytest.mark.parametrize("spec, options", [({"frozen": True}, {}), ({}, {"train_head": False})])
def test_a_frozen_head_gives_gradients_of_hidden_states(client, make_problem, kind, spec, options):
    problem = make_problem(kind, **spec)
    head = LossHead(client, problem.head, reduction="none", **options)
    hidden, exact = problem.hidden.clone().requires_grad_(), problem.hidden.double().requires_grad_()
    for mode in (head.train, head.eval):
        mode()
        hidden.grad = None
        problem.loss(head, hidden).sum().backward()
        if exact.grad is None:
            problem.rows(exact).sum().backward()
        close(hidden.grad, exact.grad)
    assert client.describe_head(problem.head).step_rows == 0
    assert not problem.loss(head, problem.hidden).requires_grad


@ONE_OF_EACH
def test_hidden_states_without_gradient_train_the_head(client, make_problem, kind):
    problem = make_problem(kind)
    problem.loss(LossHead(client, problem.head, reduction="none"), problem.hidden).sum().backward()
    problem.rows(problem.hidden.double()).sum().backward()
    close(problem.gradient(), problem.weight.grad)


@ONE_OF_EACH
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_has_the_losses_alone(client, make_problem, kind, context, mode):
    problem = make_problem(kind)
    head = LossHead(client, problem.head, **MODES[mode]).eval()
    with context():
        loss = problem.loss(head, problem.hidden.clone())
    want = problem.rows(problem.hidden.double())
    close(loss, want if mode == "none" else want.sum() / (problem.valid.sum() if mode == "mean" else 1))
    if context is torch.enable_grad:
        with pytest.raises(RuntimeError, match=r"computed in evaluation mode.*call \.train\(\)"):
            loss.sum().backward()
    assert client.describe_head(problem.head).step_rows == 0


@ONE_OF_EACH
def test_rows_that_do_not_count_may_hold_anything(client, make_problem, kind):
    """Hidden states of padding are not finite, and a mean over no rows has brought NaN into the upstream gradient."""
    problem = make_problem(kind)
    padding = ~problem.valid | (problem.weights == 0)
    hidden = torch.where(padding[..., None], math.nan, problem.hidden).requires_grad_()
    loss = problem.loss(LossHead(client, problem.head, reduction="none"), hidden, row_weights=problem.weights)
    assert not loss[padding].any()
    loss.backward(torch.where(padding, math.nan, 1.0))
    exact = problem.hidden.double().requires_grad_()
    problem.rows(exact, problem.weights).sum().backward()
    close(hidden.grad, exact.grad)
    close(problem.gradient(), problem.weight.grad)


@ONE_OF_EACH
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["no rows", "ignored rows"])
def test_a_microbatch_without_valid_rows(client, make_problem, kind, mode, what):
    problem = make_problem(kind)
    head = LossHead(client, problem.head, extras=("lse",), **MODES[mode])
    optimizer = HeadOptimizer(head, lr=0.1)
    if what == "no rows":
        problem.hidden, problem.taught, problem.targets = problem.hidden[:0], problem.taught[:0], problem.targets[:0]
        problem.numbers = {name: values[:0] for name, values in problem.numbers.items()}
    hidden = problem.hidden.clone().requires_grad_()
    loss, _ = problem.loss(head, hidden, targets=torch.full_like(problem.targets, -100))
    (loss.sum() / torch.tensor(0.0)).backward()
    assert hidden.grad.shape == hidden.shape and not hidden.grad.any()
    optimizer.step()
    assert optimizer.last is None or optimizer.last.rows == 0


def test_a_head_that_shifts(client, make_problem):
    problem = make_problem("mixture")
    head = LossHead(client, problem.head, reduction="none", shift=True)
    hidden, exact = problem.hidden.clone().requires_grad_(), problem.hidden.double().requires_grad_()
    loss = problem.loss(head, hidden)
    assert loss.shape == (B, T - 1)
    problem.targets = torch.nn.functional.pad(problem.targets[:, 1:], (0, 1), value=-100)
    problem.valid = problem.targets != -100
    want = problem.rows(exact)[:, :-1]
    close(loss, want)
    upstream = torch.randn(B, T - 1)
    loss.backward(upstream)
    want.backward(upstream.double())
    close(hidden.grad, exact.grad)


def test_distill_without_targets(client, make_problem):
    problem = make_problem("forward_kl")
    hidden, exact = problem.hidden.clone().requires_grad_(), problem.hidden.double().requires_grad_()
    problem.targets, problem.valid = torch.zeros(B, T, dtype=torch.long), torch.ones(B, T, dtype=torch.bool)
    loss, want = problem.loss(LossHead(client, problem.head, reduction="none"), hidden, targets=None), problem.rows(exact)
    close(loss, want)
    (loss ** 2).sum().backward()
    (want ** 2).sum().backward()
    close(hidden.grad, exact.grad)
    close(problem.gradient(), problem.weight.grad)


def test_start_policy(client, make_problem):
    problem = make_problem("ppo")
    head = LossHead(client, problem.head, reduction="none")
    numbers = {name: problem.numbers[name] for name in problem.kind.numbers}
    pending = head.start_policy(problem.hidden, problem.targets, **numbers, objective=problem.kind)
    with pytest.raises(RuntimeError, match="use wait"):
        pending.lazy()
    close(pending.wait(), problem.rows(problem.hidden.double()))
    pending.cancel()  # it is done
    pending.wait().sum().backward()
    assert client.describe_head(problem.head).step_microbatches == 1


@ONE_OF_EACH
def test_one_backward_within_the_step(client, make_problem, kind):
    problem = make_problem(kind)
    head = LossHead(client, problem.head, deferred=True)
    optimizer = HeadOptimizer(head, lr=0.1)
    hidden = problem.hidden.clone().requires_grad_()
    loss = problem.loss(head, hidden)
    gradient, = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward()
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()
    late = problem.loss(head, hidden)
    optimizer.step()
    with pytest.raises(RuntimeError, match="step 0, but step 1 is open: the head has changed"):
        late.backward()
    discarded = problem.loss(head, hidden)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="between forward and backward of this loss, and discarded its microbatch"):
        discarded.backward()
    problem.loss(head, hidden).backward()
    optimizer.step()
    assert optimizer.last.microbatches == 1


@ONE_OF_EACH
def test_a_loss_that_is_only_looked_at_holds_nothing_up(client, make_problem, kind):
    problem = make_problem(kind)
    head = LossHead(client, problem.head, reduction="none")
    optimizer = HeadOptimizer(head, lr=0.1)
    problem.loss(head, problem.hidden)
    problem.loss(head, problem.hidden).sum().backward()
    optimizer.step()
    assert optimizer.last.microbatches == 1


@ONE_OF_EACH
def test_weights_that_change_between_forward_and_backward(client, make_problem, kind):
    """The gradient would not be that of the loss."""
    problem = make_problem(kind)
    head = LossHead(client, problem.head, reduction="none")
    optimizer = HeadOptimizer(head, lr=0.1)
    loss = problem.loss(head, problem.hidden)
    client.write_tensor(problem.head, "weight", client.read_tensor(problem.head))
    with pytest.raises(RuntimeError, match="weights .* changed between forward and backward of this loss"):
        loss.sum().backward()
    with pytest.raises(RuntimeError, match="microbatch 0 of step 0 failed"):
        optimizer.step()
    optimizer.discard()
    problem.loss(head, problem.hidden).sum().backward()
    optimizer.step()


@ONE_OF_EACH
def test_what_the_trainer_changes_between_forward_and_backward(client, make_problem, kind):
    """Numbers of rows are copied. Hidden states are not, but torch notices it."""
    problem = make_problem(kind)
    exact, weights = problem.hidden.double().requires_grad_(), problem.weights.clone()
    problem.rows(exact, problem.weights).sum().backward()
    head = LossHead(client, problem.head, reduction="none", train_head=False)
    targets = problem.targets.int()
    hidden = problem.hidden.clone().requires_grad_()
    loss = problem.loss(head, hidden, row_weights=weights, targets=targets)
    weights.zero_()
    targets.zero_()
    for values in problem.numbers.values():
        values.zero_()
    loss.sum().backward()
    close(hidden.grad, exact.grad)
    for changed in (problem.hidden, problem.taught) if kind == "mixture" else (problem.hidden,):
        loss = problem.loss(head, problem.hidden.requires_grad_())
        with torch.no_grad():
            changed.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()


def test_a_teacher_in_inference_mode(client, make_problem):
    problem = make_problem("forward_kl")
    with torch.inference_mode():
        problem.taught = problem.taught.clone()
    problem.loss(LossHead(client, problem.head, reduction="none"), problem.hidden).sum().backward()
    problem.taught = problem.taught.clone()
    problem.rows(problem.hidden.double()).sum().backward()
    close(problem.gradient(), problem.weight.grad)


@ONE_OF_EACH
def test_an_upstream_gradient_that_is_not_finite_is_named(client, make_problem, kind):
    problem = make_problem(kind)
    head = LossHead(client, problem.head, reduction="none", streams=1)
    loss = problem.loss(head, problem.hidden)
    row = int(problem.valid.reshape(-1).nonzero()[3])
    upstream = torch.ones(B * T)
    upstream[row] = math.inf
    with pytest.raises(lossd.InvalidArgument, match=f"gradient of the loss of row {row} is inf"):
        loss.backward(upstream.reshape(B, T))
    with pytest.raises(RuntimeError, match="microbatch 0 of step 0 failed"):
        HeadOptimizer(head, lr=0.1).step()
    problem.loss(head, problem.hidden, microbatch=0).sum().backward()
    assert client.describe_head(problem.head).step_microbatches == 1


@ONE_OF_EACH
def test_a_failed_backward_is_sent_again_once(server, make_problem, kind, monkeypatch):
    """The answer is lost after the server has added the gradient."""
    problem = make_problem(kind)
    with lossd.Client(server.target) as client:
        head = LossHead(client, problem.head, reduction="none")
        optimizer = HeadOptimizer(head, lr=0.1)
        loss = problem.loss(head, problem.hidden)
        compute = client.compute_loss_async

        def lose_the_answer(*arguments: Any, **options: Any) -> Any:
            pending = compute(*arguments, **options)
            pending.wait()

            def fail() -> None:
                raise lossd.Unavailable("lost")

            monkeypatch.setattr(pending, "wait", fail)
            return pending

        monkeypatch.setattr(client, "compute_loss_async", lose_the_answer)
        with pytest.raises(lossd.Unavailable, match="lost"):
            loss.sum().backward()
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="microbatch 0 of step 0 failed"):
            optimizer.step()
        problem.loss(head, problem.hidden, microbatch=0).sum().backward()
        problem.rows(problem.hidden.double()).sum().backward()
        close(problem.gradient(), problem.weight.grad)
        optimizer.step()
        assert (optimizer.last.rows, optimizer.last.microbatches) == (int(problem.valid.sum()), 1)


@ONE_OF_EACH
def test_a_server_that_goes_before_backward(kind, seed):
    torch.manual_seed(seed % 2**31)
    server = ServerProcess()
    try:
        with lossd.Client(server.target, retry=lossd.RetryOptions(max_attempts=2, initial_backoff=0.01)) as client:
            problem = Problem(client, kind)
            loss = problem.loss(LossHead(client, problem.head, deferred=True), problem.hidden)
            server.kill()
            with pytest.raises(lossd.Unavailable, match=server.target):
                loss.backward()
    finally:
        server.stop()


@ONE_OF_EACH
def test_a_restart_before_backward_loses_the_step(kind, seed):
    torch.manual_seed(seed % 2**31)
    server = ServerProcess()
    try:
        with lossd.Client(server.target, retry=lossd.RetryOptions(max_attempts=30, initial_backoff=0.05)) as client:
            problem = Problem(client, kind)
            head = LossHead(client, problem.head, reduction="none")
            optimizer = HeadOptimizer(head, lr=0.1)
            problem.loss(head, problem.hidden).sum().backward()
            loss = problem.loss(head, problem.hidden)
            saved = [client.save_checkpoint(name).checkpoint for name in (problem.head, problem.teacher)]
            server.kill()
            server.start()
            with lossd.Client(server.target) as other:
                for checkpoint_ in saved:
                    other.load_checkpoint(checkpoint_)
            with pytest.raises(lossd.Restarted):
                loss.sum().backward()
            with pytest.raises(RuntimeError, match="step 0 is lost"):
                optimizer.step()
            optimizer.zero_grad()
            problem.loss(head, problem.hidden).sum().backward()
            optimizer.step()
            assert optimizer.last.microbatches == 1
    finally:
        server.stop()


def test_a_deterministic_server_has_policy_losses(deterministic_server, seed):
    """Its microbatches come in the order of their numbers. Distillation is refused there, by backward."""
    torch.manual_seed(seed % 2**31)
    with lossd.Client(deterministic_server.target) as client:
        problem = Problem(client, "ppo")
        head = LossHead(client, problem.head, reduction="none", timeout=60)
        exact = problem.hidden.double().requires_grad_()
        hidden = problem.hidden.clone().requires_grad_()
        for _ in range(2):
            problem.loss(head, hidden).sum().backward()
            problem.rows(exact).sum().backward()
        close(hidden.grad, exact.grad)
        close(problem.gradient(), problem.weight.grad)
        problem = Problem(client, "forward_kl")
        head = LossHead(client, problem.head, reduction="none", timeout=60)
        loss = problem.loss(head, problem.hidden)
        close(loss, problem.rows(problem.hidden.double()))
        with pytest.raises(lossd.LossdError, match="distillation"):
            loss.sum().backward()


@ONE_OF_EACH
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_trunk_and_head(client, make_problem, kind, reentrant):
    problem = make_problem(kind)
    head = LossHead(client, problem.head, reduction="none")
    trunk = torch.nn.Linear(D, D)
    trunk.weight.data.copy_(torch.eye(D))
    trunk.bias.data.zero_()
    hidden, exact = problem.hidden.clone().requires_grad_(), problem.hidden.double().requires_grad_()
    upstream = torch.randn(B, T)
    loss = checkpoint(lambda x: problem.loss(head, trunk(x)), hidden, use_reentrant=reentrant)
    want = problem.rows(exact)
    close(loss, want)
    (loss.exp() * upstream).sum().backward()
    (want.exp() * upstream.double()).sum().backward()
    close(hidden.grad, exact.grad)
    close(problem.gradient(), problem.weight.grad)
    assert client.describe_head(problem.head).step_microbatches == 1


def test_a_policy_of_losses_that_the_loop_averages(client, make_problem):
    """As loops of reinforcement learning do it: a mask, a mean for each sequence, and a step of the head."""
    problem = make_problem("ppo")
    head = LossHead(client, problem.head, reduction="none", extras=("ratio", "clipped"))
    optimizer = HeadOptimizer(head, lr=0.5, algorithm="sgd")
    mask = problem.valid.float()
    loss, extras = problem.loss(head, problem.hidden)
    assert 0.4 < extras.ratio < 2.1 and 0 < extras.clipped < 1
    ((loss * mask).sum(1) / mask.sum(1)).mean().backward()
    want = problem.rows(problem.hidden.double())
    (want.sum(1) / mask.double().sum(1)).mean().backward()
    optimizer.step()
    with torch.no_grad():
        close(torch.from_numpy(client.read_tensor(problem.head)), problem.weight - 0.5 * problem.weight.grad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@ONE_OF_EACH
def test_cuda_tensors(client, make_problem, kind):
    problem = make_problem(kind)
    head = LossHead(client, problem.head, reduction="none", train_head=False)
    here = problem.hidden.clone().requires_grad_()
    problem.loss(head, here).sum().backward()
    problem.taught = problem.taught.cuda()
    there = problem.hidden.cuda().requires_grad_()
    loss = problem.loss(head, there)
    loss.sum().backward()
    assert loss.is_cuda and there.grad.is_cuda
    close(there.grad.cpu(), here.grad)
