# SPDX-License-Identifier: Apache-2.0
"""Distillation from a frozen head, through the client and LossHead.distill(), against torch in double precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch  # noqa: E402
from conftest import EPS  # noqa: E402
from servers import ServerProcess  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead  # noqa: E402

Tensor = torch.Tensor
_NAMES = itertools.count()


def divergence(d: lossd.Distillation, student: Tensor, teacher: Tensor) -> Tensor:
    """[N], of logits [N, V] in double precision, written with torch alone."""
    p = torch.log_softmax(teacher / d.temperature, -1)
    q = torch.log_softmax(student / d.temperature, -1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.kl_div(b, a, log_target=True, reduction="none").sum(-1)

    if d.divergence == "forward_kl":
        return kl(p, q)
    if d.divergence == "reverse_kl":
        return kl(q, p)
    if d.divergence == "total_variation":
        return (p.exp() - q.exp()).abs().sum(-1) / 2
    # TRL's generalized_jsd_loss of 0 < beta < 1.
    m = torch.logsumexp(torch.stack([q + math.log1p(-d.beta), p + math.log(d.beta)]), 0)
    return d.beta * kl(p, m) + (1 - d.beta) * kl(q, m)


def logits(hidden: Tensor, weight: Tensor, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
    z = scale * hidden.double() @ weight.T
    return softcap * torch.tanh(z / softcap) if softcap else z


@pytest.fixture(autouse=True)
def heads_go(client: lossd.Client) -> Iterator[None]:
    """Other tests of the same server look at all heads."""
    yield
    for head in client.list_heads():
        if head.spec.name.startswith(("student-", "teacher-")):
            client.delete_head(head.spec.name)


class Heads:
    """A student and a teacher on the server, and their weights in double precision."""

    def __init__(self, client: lossd.Client, hidden: int = 24, taught: int = 40, vocab: int = 61) -> None:
        self.student, self.teacher = f"student-{next(_NAMES)}", f"teacher-{next(_NAMES)}"
        client.create_head(self.student, hidden_size=hidden, vocab_size=vocab)
        client.create_head(self.teacher, hidden_size=taught, vocab_size=vocab, frozen=True)
        rng = np.random.default_rng(next(_NAMES))
        self.weights = {}
        for name, width in ((self.student, hidden), (self.teacher, taught)):
            values = rng.normal(size=(vocab, width), scale=2 / math.sqrt(width)).astype(np.float32)
            client.write_tensor(name, "weight", values)
            self.weights[name] = torch.from_numpy(values).double()
        self.hidden = torch.from_numpy(rng.normal(size=(37, hidden)).astype(np.float32))
        self.taught = torch.from_numpy(rng.normal(size=(37, taught)).astype(np.float32))
        self.targets = torch.from_numpy(rng.integers(0, vocab, 37))


CASES: list[dict[str, Any]] = [
    {"divergence": "forward_kl"},
    {"divergence": "forward_kl", "temperature": 0.1},
    {"divergence": "reverse_kl", "temperature": 10.0, "weight": 100.0},
    {"divergence": "jensen_shannon", "beta": 0.1},
    {"divergence": "jensen_shannon", "beta": 0.9, "temperature": 2.0, "target_weight": 0.5},
    {"divergence": "total_variation", "target_weight": 0.25},
    {"divergence": "reverse_kl", "teacher_softcap": 5.0, "teacher_logit_scale": 0.5},
]


@pytest.mark.parametrize("transport", ["grpc", "auto"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_torch(server: ServerProcess, transport: str, case: dict[str, Any]) -> None:
    with lossd.Client(server.target, transport=transport) as client:
        heads = Heads(client)
        d = lossd.Distillation(heads.teacher, **case)
        targets = heads.targets.clone()
        targets[5:9] = -100
        hidden, weight = heads.hidden.double().requires_grad_(), heads.weights[heads.student].requires_grad_()
        z = logits(hidden, weight, 0.7, 8.0)
        per_row = d.weight * divergence(d, z, logits(heads.taught, heads.weights[heads.teacher], d.teacher_logit_scale,
                                                     d.teacher_softcap))
        if d.target_weight:
            per_row = per_row + d.target_weight * torch.nn.functional.cross_entropy(z, targets, reduction="none")
        want = (per_row * (targets != -100)).sum() / 33
        want.backward()
        result = client.compute_loss(
            heads.student, heads.hidden.numpy(), targets.numpy(), step=0, id=1, accumulate=True, grad_hidden=True,
            rows=["loss"], slice_bytes=1000, teacher_hidden=heads.taught.numpy(),
            options=lossd.LossOptions(softcap=8.0, logit_scale=0.7, distillation=d))
        assert result.loss == pytest.approx(want.item(), rel=2e-5)
        parts = d.weight * result.divergence_sum + d.target_weight * result.target_loss_sum
        assert result.loss_sum == pytest.approx(parts, rel=1e-6)
        if d.target_weight:
            with_targets = torch.nn.functional.cross_entropy(z, targets, reduction="sum")
            assert result.target_loss_sum == pytest.approx(with_targets.item(), rel=2e-5)
        else:
            assert result.target_loss_sum == 0
        np.testing.assert_allclose(result.rows["loss"], (per_row * (targets != -100)).detach(), rtol=1e-4, atol=1e-4)
        scale = float(hidden.grad.norm())
        assert float((torch.from_numpy(result.grad_hidden) - hidden.grad).norm()) < 2e-5 * scale
        dw = torch.from_numpy(client.read_tensor(heads.student, "weight", "gradient"))
        assert float((dw - weight.grad).norm()) < 2e-5 * float(weight.grad.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autograd_goes_through_the_student_alone(client: lossd.Client, dtype: torch.dtype) -> None:
    heads = Heads(client)
    head = LossHead(client, heads.student)
    d = lossd.Distillation(heads.teacher, "reverse_kl", temperature=2.0)
    hidden = heads.hidden.to(dtype).requires_grad_()
    taught = heads.taught.to(dtype)
    loss = head.distill(hidden.reshape(1, 37, -1), taught.reshape(1, 37, -1), d)
    (3 * loss).backward()
    own = hidden.detach().double().requires_grad_()
    want = divergence(d, logits(own, heads.weights[heads.student]),
                      logits(taught, heads.weights[heads.teacher])).mean()
    (3 * want).backward()
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    assert loss.item() == pytest.approx(want.item(), rel=2e-5)
    assert float((hidden.grad - own.grad).norm()) < tolerance * float(own.grad.norm())


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_sampled_gradients_are_exact_on_average(client: lossd.Client, kind: Any) -> None:
    heads = Heads(client, vocab=500)
    d = lossd.Distillation(heads.teacher, kind)
    arrays = heads.hidden.numpy(), heads.taught.numpy()
    exact = client.distill(heads.student, *arrays, d, grad_hidden=True)
    sampling = lossd.LossOptions(gradients="sampled", sample_threshold=0.02)
    mean, predicted, runs = np.zeros_like(exact.grad_hidden, dtype=np.float64), 0.0, 48
    for number in range(runs):  # the microbatch chooses the random numbers
        result = client.distill(heads.student, *arrays, d, id=number, grad_hidden=True, options=sampling)
        assert result.loss == pytest.approx(exact.loss, rel=1e-6)
        assert 0.01 < result.gradient_error < 1
        mean += result.grad_hidden / runs
        predicted += result.gradient_error / runs
    error = float(np.linalg.norm(mean - exact.grad_hidden) / np.linalg.norm(exact.grad_hidden))
    assert error < 2.5 * predicted / math.sqrt(runs)
    auto = lossd.LossOptions(gradients="auto", sample_threshold=0.02, max_gradient_error=1e-6)
    assert client.distill(heads.student, *arrays, d, grad_hidden=True, options=auto).gradient_error == 0


def test_single_classes_are_the_students(client: lossd.Client) -> None:
    heads = Heads(client)
    want = torch.log_softmax(logits(heads.hidden, heads.weights[heads.student]), -1)
    result = client.compute_loss(
        heads.student, heads.hidden.numpy(), heads.targets.numpy(), classes=[3, 60], top_k=4, grad_hidden=True,
        teacher_hidden=heads.taught.numpy(), options=lossd.LossOptions(distillation=lossd.Distillation(heads.teacher)))
    assert result.class_logprobs is not None and result.top_logprobs is not None and result.top_classes is not None
    np.testing.assert_allclose(result.class_logprobs, want[:, [3, 60]], atol=1e-4)
    top = want.topk(4)
    np.testing.assert_allclose(result.top_logprobs, top.values, atol=1e-4)
    np.testing.assert_array_equal(result.top_classes, top.indices)


def test_distill_without_targets_takes_all_rows(client: lossd.Client) -> None:
    heads = Heads(client)
    d = lossd.Distillation(heads.teacher)
    result = client.distill(heads.student, heads.hidden.numpy(), heads.taught.numpy(), d)
    want = divergence(d, logits(heads.hidden, heads.weights[heads.student]),
                      logits(heads.taught, heads.weights[heads.teacher])).mean()
    assert result.loss == pytest.approx(want.item(), rel=2e-5)
    assert result.valid_rows == 37 and result.correct_rows == 0
    rows = client.distill(heads.student, heads.hidden.numpy(), heads.taught.numpy(), d, reduction="none", rows=["loss"])
    assert rows.rows["loss"].mean() == pytest.approx(want.item(), rel=2e-5)
    nothing = client.distill(heads.student, heads.hidden.numpy(), heads.taught.numpy(), d, np.full(37, -100))
    assert nothing.loss == 0 and nothing.valid_rows == 0


@pytest.mark.parametrize("targets", ["none", "given"])
@pytest.mark.parametrize("first_weight", [0.25, 0.0])
def test_class_weights_do_not_enter_a_mean_of_divergences(client: lossd.Client, targets: str, first_weight: float) -> None:
    """They weigh the cross-entropy with targets; without it a mean is that of the rows."""
    heads = Heads(client)
    weighted = f"student-{next(_NAMES)}"
    client.create_head(weighted, hidden_size=24, vocab_size=61, class_weights=True)
    client.write_tensor(weighted, "weight", heads.weights[heads.student].float().numpy())
    u = torch.linspace(0.5, 1.5, 61)
    u[0] = first_weight
    client.write_tensor(weighted, "class_weights", u.numpy())
    head = LossHead(client, weighted, class_weights=True)
    given = None if targets == "none" else heads.targets.clone()
    counted = torch.ones(37, dtype=torch.bool)
    if given is not None:
        given[3:6], counted[3:6] = -100, False
    hidden = heads.hidden.clone().requires_grad_()
    loss = head.distill(hidden, heads.taught, lossd.Distillation(heads.teacher), given)
    loss.backward()
    own = heads.hidden.double().requires_grad_()
    z, taught = logits(own, heads.weights[heads.student]), logits(heads.taught, heads.weights[heads.teacher])
    want = divergence(lossd.Distillation(heads.teacher), z, taught)[counted].mean()
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=2e-5)
    assert float((hidden.grad - own.grad).norm()) < 2e-5 * float(own.grad.norm())

    if given is not None:  # with a cross-entropy the mean is torch's: it divides by the targets' weights
        mixed = lossd.Distillation(heads.teacher, target_weight=0.5)
        with torch.no_grad():
            got = head.eval().distill(heads.hidden, heads.taught, mixed, given)
            total = u.double()[given[counted]].sum()
            want = divergence(mixed, z, taught)[counted].sum() / total
            want = want + 0.5 * torch.nn.functional.cross_entropy(z, given, weight=u.double())
        assert got.item() == pytest.approx(want.item(), rel=2e-5)


@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_without_targets_a_head_that_shifts_takes_all_rows(client: lossd.Client, ignore_index: int) -> None:
    heads = Heads(client)
    d = lossd.Distillation(heads.teacher)
    hidden, taught = heads.hidden[:36].reshape(4, 9, -1).requires_grad_(), heads.taught[:36].reshape(4, 9, -1)
    head = LossHead(client, heads.student, shift=True, ignore_index=ignore_index, extras=("entropy",))
    loss, extras = head.distill(hidden, taught, d)
    loss.backward()
    own = hidden.detach().double().requires_grad_()
    z = logits(own, heads.weights[heads.student])
    want = divergence(d, z, logits(taught, heads.weights[heads.teacher])).mean()
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=2e-5)
    assert float((hidden.grad - own.grad).norm()) < 2e-5 * float(own.grad.norm())
    entropy = torch.distributions.Categorical(logits=z).entropy().detach()
    torch.testing.assert_close(extras.entropy.double(), entropy, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        targets = torch.ones(4, 9, dtype=torch.int64)
        given, extras = head.eval().distill(hidden, taught, d, targets)  # the last positions predict no target
        want = divergence(d, z, logits(taught, heads.weights[heads.teacher]))[:, :-1].mean()
    assert given.item() == pytest.approx(want.item(), rel=2e-5)
    assert extras.entropy.shape == (4, 8)


def test_what_does_not_fit_is_refused_by_name(client: lossd.Client) -> None:
    heads = Heads(client)
    hidden, taught = heads.hidden.numpy(), heads.taught.numpy()
    d = lossd.Distillation(heads.teacher)
    with pytest.raises(lossd.InvalidArgument, match=r"distillation.beta must be in \(0, 1\), got 1"):
        lossd.Distillation(heads.teacher, beta=1)
    with pytest.raises(lossd.InvalidArgument, match="distillation.divergence is 'kl'"):
        lossd.Distillation(heads.teacher, "kl")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="distillation.temperature is 'hot'"):
        lossd.Distillation(heads.teacher, temperature="hot")  # type: ignore[arg-type]
    with pytest.raises(lossd.InvalidArgument, match="gradients must be exact, sampled or auto with distillation, got filtered"):
        lossd.LossOptions(gradients="filtered", distillation=d)
    with pytest.raises(lossd.InvalidArgument, match="teacher_hidden has 36 rows; hidden has 37"):
        client.distill(heads.student, hidden, taught[:36], d)
    with pytest.raises(lossd.InvalidArgument, match="teacher_hidden is fp16; hidden is fp32"):
        client.distill(heads.student, hidden, taught.astype(np.float16), d)
    with pytest.raises(lossd.InvalidArgument, match="teacher_hidden is given; it goes with options.distillation only"):
        client.compute_loss(heads.student, hidden, heads.targets.numpy(), teacher_hidden=taught)
    with pytest.raises(lossd.InvalidArgument, match="target_weight is 0.5, and needs them"):
        client.distill(heads.student, hidden, taught, lossd.Distillation(heads.teacher, target_weight=0.5))
    with pytest.raises(lossd.InvalidArgument, match="targets is None; rows is logprob, and needs them"):
        client.distill(heads.student, hidden, taught, d, rows=iter(["loss", "logprob"]))
    with pytest.raises(ValueError, match="targets is None; extras has 'accuracy', and needs them"):
        LossHead(client, heads.student, extras=("entropy", "accuracy")).distill(heads.hidden, heads.taught, d)
    with pytest.raises(lossd.InvalidArgument, match="40 of the teacher"):
        client.distill(heads.student, hidden, taught[:, :39], d)
    with pytest.raises(lossd.NotFound, match="open.options.distillation.teacher"):
        client.distill(heads.student, hidden, taught, lossd.Distillation("nobody"))
    with pytest.raises(lossd.InvalidArgument, match="must be a frozen head"):
        client.distill(heads.teacher, taught, hidden, lossd.Distillation(heads.student))
    for name, given in (("grad_hidden", {"grad_hidden": True}), ("accumulate", {"accumulate": True, "step": 0, "id": 1})):
        with pytest.raises(lossd.InvalidArgument, match=f"{name} is .*; with reduction 'none' gradients come by backward"):
            client.distill(heads.student, hidden, taught, d, reduction="none", rows=["loss"], **given)
    with pytest.raises(lossd.InvalidArgument, match="retain is true; hidden states of a teacher are not retained"):
        client.compute_loss(heads.student, hidden, heads.targets.numpy(), teacher_hidden=taught, reduction="none", retain=True,
                            step=0, id=1, rows=["loss"], options=lossd.LossOptions(distillation=d))
    with pytest.raises(ValueError, match="teacher_hidden has shape"):
        LossHead(client, heads.student).distill(heads.hidden, heads.taught[:3], d)


def test_a_student_distilled_through_the_server_is_the_one_distilled_locally(client: lossd.Client) -> None:
    """A small trunk and its head, taught by a fixed trunk and head, for sixty steps of Adam."""
    heads = Heads(client, hidden=16, taught=24, vocab=50)
    d = lossd.Distillation(heads.teacher, "jensen_shannon", temperature=1.5, target_weight=0.01)

    def trunk() -> torch.nn.Module:
        torch.manual_seed(7)
        return torch.nn.Sequential(torch.nn.Embedding(50, 32), torch.nn.Linear(32, 16), torch.nn.Tanh())

    torch.manual_seed(8)
    taught = torch.randn(50, 24)  # of each token
    tokens = [torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(step)) for step in range(60)]

    remote, losses = trunk(), []
    head = LossHead(client, heads.student)
    optimizers = [torch.optim.Adam(remote.parameters(), lr=0.01, eps=EPS), HeadOptimizer(head, lr=0.01, eps=EPS, weight_decay=0.0)]
    for batch in tokens:
        loss = head.distill(remote(batch), taught[batch], d, batch.roll(-1))
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    local, weight = trunk(), torch.nn.Parameter(heads.weights[heads.student].float())
    optimizer = torch.optim.Adam([*local.parameters(), weight], lr=0.01, eps=EPS)
    teacher = heads.weights[heads.teacher].float()
    for batch, got in zip(tokens, losses):
        z = local(batch) @ weight.T
        loss = divergence(d, z, taught[batch] @ teacher.T).mean()
        loss = loss + d.target_weight * torch.nn.functional.cross_entropy(z, batch.roll(-1))
        assert got == pytest.approx(loss.item(), rel=5e-3, abs=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0], "it learns"
    trained = torch.from_numpy(client.read_tensor(heads.student, "weight"))
    assert float((trained - weight).norm()) < 1e-2 * float(weight.norm())


def test_a_student_learns_as_much_with_sampled_gradients(client: lossd.Client) -> None:
    """The same student twice, taught by hidden states of each token for a hundred steps of Adam; what is left of the divergence."""
    vocab, taught = 1000, 32
    torch.manual_seed(next(_NAMES))
    of_token = torch.randn(vocab, taught) / 3
    left, start = {}, torch.nn.Embedding(vocab, 16).state_dict()
    weights: tuple[Tensor, Tensor] | None = None
    tokens = [torch.randint(0, vocab, (256,)) for _ in range(100)]
    for gradients in ("exact", "sampled"):
        heads = Heads(client, hidden=16, taught=taught, vocab=vocab)
        weights = weights or (heads.weights[heads.student], heads.weights[heads.teacher])
        for name, weight in zip((heads.student, heads.teacher), weights):
            client.write_tensor(name, "weight", weight.float().numpy())
        trunk = torch.nn.Embedding(vocab, 16)
        trunk.load_state_dict(start)
        head = LossHead(client, heads.student, gradients=gradients, sample_threshold=2**-10)
        optimizers = [torch.optim.Adam(trunk.parameters(), lr=0.02), HeadOptimizer(head, lr=0.02, weight_decay=0.0)]
        d = lossd.Distillation(heads.teacher, "forward_kl")
        for batch in tokens:
            head.distill(trunk(batch), of_token[batch], d).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        result = client.distill(heads.student, trunk.weight.detach().numpy(), of_token.numpy(), d, accumulate=False,
                                options=lossd.LossOptions(gradients=gradients, sample_threshold=2**-10), grad_hidden=True)
        assert (result.gradient_error > 1e-3) == (gradients == "sampled")
        left[gradients] = result.loss
    assert left["sampled"] == pytest.approx(left["exact"], rel=0.1), left
    with torch.no_grad():
        first = divergence(d, logits(start["weight"], weights[0]), logits(of_token, weights[1])).mean()
    assert left["exact"] < 0.7 * float(first), (left, first)
