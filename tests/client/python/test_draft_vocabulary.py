# SPDX-License-Identifier: Apache-2.0
"""Heads of some classes of a larger vocabulary: lossd.Client and LossHead, against torch in double precision."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead  # noqa: E402

D, V, FULL, N = 12, 30, 100, 400


@pytest.fixture
def rng():
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def draft(client, make_head, rng):
    """The name of a head, its classes, hidden states, and targets of the larger vocabulary."""
    classes = np.sort(rng.choice(FULL, V, replace=False))
    name = make_head(hidden_size=D, vocab_size=V, class_list=classes, full_vocab_size=FULL)
    targets = rng.integers(0, FULL, N)
    targets[rng.random(N) < 0.1] = -100
    return name, classes, rng.standard_normal((N, D)).astype(np.float32), targets


def of_head(classes, targets):
    """The targets as the head counts its classes; -100 for those that it does not have."""
    places = {int(number): place for place, number in enumerate(classes)}
    return torch.tensor([places.get(int(target), -100) for target in targets])


def test_client(client, draft):
    name, classes, hidden, targets = draft
    result = client.compute_loss(name, hidden, targets, step=0, id=1, accumulate=True, grad_hidden=True, rows=("loss", "argmax"),
                                 classes=classes[[3, 5]], top_k=2, streams=2, slice_bytes=4000)
    w = torch.tensor(client.read_tensor(name), dtype=torch.float64, requires_grad=True)
    x = torch.tensor(hidden, dtype=torch.float64, requires_grad=True)
    own = of_head(classes, targets)
    logits = x @ w.T
    loss = torch.nn.functional.cross_entropy(logits, own)
    loss.backward()
    valid = (own != -100).numpy()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.valid_rows == result.normalizer == valid.sum()
    assert result.unlisted_rows == (targets != -100).sum() - valid.sum() > 0
    np.testing.assert_allclose(result.grad_hidden, x.grad.numpy(), atol=1e-7)
    np.testing.assert_allclose(client.read_tensor(name, role="gradient"), w.grad.numpy(), atol=1e-6)
    order = logits.detach().argsort(-1, descending=True)[:, :2].numpy()
    np.testing.assert_array_equal(result.rows["argmax"], np.where(valid, classes[order[:, 0]], -1))
    np.testing.assert_array_equal(result.top_classes, np.where(valid[:, None], classes[order], -1))
    named = torch.log_softmax(logits.detach(), -1)[:, [3, 5]].numpy()
    np.testing.assert_allclose(result.class_logprobs, np.where(valid[:, None], named, 0), atol=1e-5)
    divided = client.compute_loss(name, hidden, targets, depths=[lossd.Depth(150), lossd.Depth(250)])
    assert [depth.valid_rows for depth in divided.depths] == [valid[:150].sum(), valid[150:].sum()]


def test_refused(client, draft):
    name, classes, hidden, targets = draft
    other = next(each for each in range(FULL) if each not in classes)
    with pytest.raises(lossd.InvalidArgument, match="refuse_unlisted"):
        client.compute_loss(name, hidden, targets, options=lossd.LossOptions(refuse_unlisted=True))
    with pytest.raises(lossd.InvalidArgument, match=r"open.classes\[0\] must be in the head's class_list"):
        client.compute_loss(name, hidden, targets, classes=[other])
    targets[7] = FULL
    with pytest.raises(lossd.InvalidArgument, match=r"open.targets\[7\] must be in \[0, 100\)"):
        client.compute_loss(name, hidden, targets)
    for wrong in ([0.5] * V, [[1]], [-1] * V, np.array([0.5] * V), np.array([[1]])):
        with pytest.raises(lossd.InvalidArgument, match=r"spec.class_list\[0\] is .*; it must be a whole number in \[0, 2\^31\)"):
            client.create_head("wrong", hidden_size=D, vocab_size=V, class_list=wrong, full_vocab_size=FULL)
    with pytest.raises(lossd.InvalidArgument, match="class_list"):
        client.create_head("wrong", hidden_size=D, vocab_size=V, class_list=classes[1:], full_vocab_size=FULL)


def test_descriptions(client, draft):
    name, classes, *_ = draft
    spec = client.describe_head(name).spec
    assert spec.class_list == tuple(classes) and spec.full_vocab_size == FULL
    listed = next(head.spec for head in client.list_heads() if head.spec.name == name)
    assert listed.class_list == () and listed.full_vocab_size == FULL
    kept = client.create_head(name, hidden_size=D, vocab_size=V, class_list=classes, full_vocab_size=FULL, if_exists="keep")
    assert kept.state.creation == client.describe_head(name).state.creation
    shifted = [*classes[:-1], FULL - 1] if classes[-1] != FULL - 1 else [*classes[:-1], FULL]
    with pytest.raises(lossd.AlreadyExists, match="class_list"):
        client.create_head(name, hidden_size=D, vocab_size=V, class_list=shifted, full_vocab_size=FULL + 1, if_exists="keep")


@pytest.mark.parametrize("deferred", [False, True])
def test_loss_head(client, draft, deferred):
    name, classes, hidden, targets = draft
    head = LossHead(client, name, deferred=deferred, extras=("accuracy", "argmax"))
    x = torch.tensor(hidden, requires_grad=True)
    loss, extras = head(x, torch.tensor(targets))
    loss.backward()
    y = torch.tensor(hidden, dtype=torch.float64, requires_grad=True)
    own = of_head(classes, targets)
    logits = y @ torch.tensor(client.read_tensor(name), dtype=torch.float64).T
    expected = torch.nn.functional.cross_entropy(logits, own)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-7, rtol=1e-4)
    valid = own != -100
    assert extras.accuracy.item() == pytest.approx((logits.argmax(-1) == own)[valid].double().mean().item())
    assert set(extras.argmax[valid].tolist()) <= set(classes.tolist())
    HeadOptimizer(head, lr=0.1).step()
    with pytest.raises(lossd.InvalidArgument, match="refuse_unlisted"):
        LossHead(client, name, refuse_unlisted=True)(x, torch.tensor(targets))
    with pytest.raises(lossd.InvalidArgument, match=r"must be in \[0, 100\)"):
        head(x[:1], torch.tensor([FULL]))


def test_distillation_looks_at_no_targets(client, draft, make_head):
    name, classes, hidden, _ = draft
    teacher = make_head(hidden_size=D, vocab_size=V, class_list=classes, full_vocab_size=FULL, frozen=True)
    other = make_head(hidden_size=D, vocab_size=V, frozen=True)
    result = client.distill(name, hidden, hidden, lossd.Distillation(teacher))
    assert result.valid_rows == N and result.unlisted_rows == 0
    with torch.no_grad():
        loss = LossHead(client, name).distill(torch.tensor(hidden), torch.tensor(hidden), lossd.Distillation(teacher))
    assert loss.item() == pytest.approx(result.loss, abs=1e-6)
    with pytest.raises(lossd.InvalidArgument, match="class_list"):
        client.distill(name, hidden, hidden, lossd.Distillation(other))


@pytest.mark.parametrize("target_weight", [0.0, 0.5])
@pytest.mark.parametrize("rows, normalizer", [("all", None), ("none listed", 40), ("none listed", None)])
def test_distilled_rows_count_where_their_targets_are_not_looked_at(client, draft, make_head, rng, rows, normalizer, target_weight):
    """An unlisted target leaves its row out only if the loss has a cross-entropy with it."""
    name, classes, hidden, targets = draft
    teacher = make_head(hidden_size=7, vocab_size=V, class_list=classes, full_vocab_size=FULL, frozen=True)
    client.write_tensor(teacher, "weight", rng.standard_normal((V, 7)).astype(np.float32))
    taught = rng.standard_normal((N, 7)).astype(np.float32)
    if rows != "all":
        unlisted = np.setdiff1d(np.arange(FULL), classes)
        targets = np.where(targets == -100, -100, rng.choice(unlisted, N))
    counted = of_head(classes, targets) != -100 if target_weight else torch.tensor(targets) != -100
    divided = normalizer or max(int(counted.sum()), 1)

    x = torch.tensor(hidden, requires_grad=True)
    head = LossHead(client, name, refuse_unlisted=target_weight == 0)
    loss = head.distill(x, torch.tensor(taught), lossd.Distillation(teacher, target_weight=target_weight), torch.tensor(targets),
                        normalizer=normalizer)
    (0.5 * loss).backward()

    y = torch.tensor(hidden, dtype=torch.float64, requires_grad=True)
    w = torch.tensor(client.read_tensor(name), dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(y @ w.T, -1)
    p = torch.log_softmax(torch.tensor(taught).double() @ torch.tensor(client.read_tensor(teacher)).double().T, -1)
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    if target_weight:
        expected = expected + target_weight * torch.nn.functional.nll_loss(q, of_head(classes, targets), reduction="none")
    expected = (expected * counted).sum() / divided
    (0.5 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-8, rtol=1e-4)
    norm = HeadOptimizer(head, lr=0.1).load_grad_norm()
    assert norm == pytest.approx(w.grad.norm().item(), rel=1e-4)
