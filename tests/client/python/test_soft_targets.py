# SPDX-License-Identifier: Apache-2.0
"""Rows with soft targets, against torch in double precision: lossd.Client and LossHead.soft_target_loss."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead  # noqa: E402
from servers import ServerProcess  # noqa: E402

D, V, B, T, K = 20, 130, 3, 40, 9
RESTS = ["none", "renormalized", "one_class"]


def row_losses(z: torch.Tensor, classes: torch.Tensor, weights: torch.Tensor, rest: str) -> torch.Tensor:
    """The formulas of docs/math.md with torch's autograd; z [N, V] double, classes and weights [N, K]."""
    logp = torch.log_softmax(z, -1)
    q = torch.zeros_like(z).scatter_add(1, classes.clamp(min=0), weights.double() * (classes >= 0))
    named = torch.zeros_like(z).scatter_add(1, classes.clamp(min=0), (classes >= 0).double()) > 0
    if rest == "renormalized":
        q = q / q.sum(-1, keepdim=True)
    loss = -(q * logp).sum(-1)
    if rest == "one_class":
        left = 1 - q.sum(-1)
        loss = loss - left * torch.where(named, -torch.inf, logp).logsumexp(-1)
    return loss


@pytest.fixture
def rows(client, make_head, seed):
    torch.manual_seed(seed % 2**31)
    head = make_head(hidden_size=D, vocab_size=V)
    weight = torch.from_numpy(client.read_tensor(head, "weight")).double()
    hidden = torch.randn(B, T, D)
    weights, classes = (torch.randn(B, T, V) * 3).softmax(-1).topk(K)
    classes[..., 1] = classes[..., 0]  # named twice
    classes[..., 2], weights[..., 2] = -1, 0.0  # none
    targets = classes[..., 0].clone()
    targets[torch.rand(B, T) < 0.2] = -100
    return head, weight, hidden, classes, weights, targets


@pytest.mark.parametrize("rest", RESTS)
def test_soft_target_loss_is_torch_s(client, rows, rest):
    head, weight, hidden, classes, weights, targets = rows
    module = LossHead(client, head, extras=("logprob",))
    optimizer = HeadOptimizer(module, lr=0.0)
    row_weights = torch.rand(B, T)
    theirs, w = hidden.double().requires_grad_(), weight.clone().requires_grad_()
    z = theirs.reshape(-1, D) @ w.T
    valid = targets.reshape(-1) != -100
    losses = row_losses(z, classes.reshape(-1, K), weights.reshape(-1, K), rest)
    want = (losses * row_weights.double().reshape(-1))[valid].sum() / 57
    want.backward()
    ours = hidden.clone().requires_grad_()
    got, extras = module.soft_target_loss(ours, classes, weights, targets, rest=rest, row_weights=row_weights, normalizer=57.0)
    got.backward()
    torch.testing.assert_close(got.detach().double(), want.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-7)
    gradient = torch.from_numpy(client.read_tensor(head, "weight", "gradient")).double()
    torch.testing.assert_close(gradient, w.grad, rtol=1e-4, atol=1e-6)
    logp = torch.log_softmax(z.detach(), -1).gather(1, targets.reshape(-1).clamp(min=0)[:, None])[:, 0]
    torch.testing.assert_close(extras.logprob.reshape(-1).double(), torch.where(valid, logp, 0.0), rtol=1e-4, atol=1e-5)
    optimizer.zero_grad()


@pytest.mark.parametrize("rest", RESTS)
def test_deferred_rows_keep_their_targets(client, rows, rest):
    head, weight, hidden, classes, weights, targets = rows
    module = LossHead(client, head, reduction="none")
    optimizer = HeadOptimizer(module, lr=0.0)
    upstream = torch.randn(B, T)
    theirs = hidden.double().requires_grad_()
    losses = row_losses(theirs.reshape(-1, D) @ weight.T, classes.reshape(-1, K), weights.reshape(-1, K), rest)
    losses = torch.where(targets.reshape(-1) == -100, 0.0, losses)
    (losses * upstream.double().reshape(-1)).sum().backward()
    ours = hidden.clone().requires_grad_()
    got = module.soft_target_loss(ours, classes, weights, targets, rest=rest)
    (got * upstream).sum().backward()
    torch.testing.assert_close(got.detach().double().reshape(-1), losses.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)
    optimizer.zero_grad()


def test_targets_that_are_not_given_are_the_heaviest_classes(client, rows):
    head, _, hidden, classes, weights, _ = rows
    classes, weights = classes.clone(), weights.clone()
    classes[0, 0], weights[0, 0] = -1, 0.0  # a row that names no class
    result = LossHead(client, head, extras=("logprob",)).eval().soft_target_loss(hidden, classes, weights)
    assert result[1].logprob[0, 0] == 0
    assert (result[1].logprob.reshape(-1)[1:] < 0).all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("rest", ["none", "one_class"])
@pytest.mark.parametrize("ignore_index", [-100, 0, 3])
def test_without_targets_only_rows_that_name_no_class_are_left_out(client, make_head, seed, ignore_index, rest, reduction):
    torch.manual_seed(seed % 2**31)
    head = make_head(hidden_size=D, vocab_size=V)
    weight = torch.from_numpy(client.read_tensor(head, "weight")).double()
    classes = torch.tensor([[0, 1, -1], [2, 0, 3], [-1, 3, -1], [3, -1, -1], [-1, -1, -1], [-1, 0, 5], [0, -1, -1]])
    weights = torch.tensor([[0.6, 0.3, 0], [0.7, 0.3, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0.2, 0.3], [1.0, 0, 0]])
    counted = (classes >= 0).any(-1)
    hidden = torch.randn(7, D)
    theirs = hidden.double().requires_grad_()
    z = theirs @ weight.T
    losses = torch.where(counted, row_losses(z, classes, weights, rest), 0.0)
    want = losses if reduction == "none" else losses.sum() / 6
    want.sum().backward()
    module = LossHead(client, head, ignore_index=ignore_index, reduction=reduction, extras=("logprob",))
    optimizer = HeadOptimizer(module, lr=0.0)
    ours = hidden.clone().requires_grad_()
    got, extras = module.soft_target_loss(ours, classes, weights, rest=rest)
    got.sum().backward()
    torch.testing.assert_close(got.detach().double(), want.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)
    heaviest = torch.tensor([0, 2, 3, 3, 0, 5, 0])
    logprobs = torch.log_softmax(z.detach(), -1).gather(1, heaviest[:, None])[:, 0]
    torch.testing.assert_close(extras.logprob.double(), torch.where(counted, logprobs, 0.0), rtol=1e-4, atol=1e-5)
    optimizer.zero_grad()


@pytest.mark.parametrize("gradients", ["filtered", "sampled", "auto"])
def test_gradients_of_other_kinds(client, rows, gradients):
    """With thresholds that keep every class they are the exact ones."""
    head, weight, hidden, classes, weights, targets = rows
    module = LossHead(client, head, gradients=gradients, filter_epsilon=0.0, sample_threshold=1e-30)
    optimizer = HeadOptimizer(module, lr=0.0)
    theirs = hidden.double().requires_grad_()
    losses = row_losses(theirs.reshape(-1, D) @ weight.T, classes.reshape(-1, K), weights.reshape(-1, K), "none")
    valid = targets.reshape(-1) != -100
    losses[valid].mean().backward()
    ours = hidden.clone().requires_grad_()
    module.soft_target_loss(ours, classes, weights, targets).backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-7)
    optimizer.zero_grad()


def test_label_smoothing_is_a_special_case(client, make_head):
    head = make_head(hidden_size=D, vocab_size=30)
    hidden, targets = torch.randn(50, D), torch.randint(0, 30, (50,))
    smooth = LossHead(client, head, label_smoothing=0.1).eval()(hidden, targets)
    weights = torch.full((50, 30), 0.1 / 30)
    weights[torch.arange(50), targets] += 0.9
    classes = torch.arange(30).expand(50, 30)
    soft = LossHead(client, head).eval().soft_target_loss(hidden, classes, weights, targets)
    torch.testing.assert_close(soft, smooth)


def test_a_repeat_with_other_weights_is_another_request(client, make_head):
    head = make_head(hidden_size=D, vocab_size=V)
    hidden = np.ones((4, D), np.float32)
    options = lossd.LossOptions(rest="none")

    def send(weight: float, place: int = 3) -> lossd.LossResult:
        return client.compute_loss(
            head, hidden, np.zeros(4, int), step=0, id=7, accumulate=True, options=options, reduction="sum",
            target_classes=np.full((4, 2), place), target_weights=np.full((4, 2), weight))

    assert send(0.5).valid_rows == 4
    before = client.read_tensor(head, "weight", "gradient")
    send(0.5)
    np.testing.assert_array_equal(client.read_tensor(head, "weight", "gradient"), before)
    for weight, place in ((0.25, 3), (0.5, 4)):
        with pytest.raises(lossd.FailedPrecondition):
            send(weight, place)
    np.testing.assert_array_equal(client.read_tensor(head, "weight", "gradient"), before)


def test_many_classes_travel_in_several_calls(client, make_head):
    """An opening message is bounded, so a call of many rows is divided."""
    head = make_head(hidden_size=4, vocab_size=300)
    rng = np.random.default_rng()
    hidden = rng.standard_normal((4000, 4)).astype(np.float32)
    weights = rng.random((4000, 256)).astype(np.float32)
    classes = np.argsort(rng.random((4000, 300)), -1)[:, :256]
    options = lossd.LossOptions(rest="renormalized")

    def loss(rows: slice) -> float:
        return client.compute_loss(head, hidden[rows], classes[rows, 0], options=options, reduction="sum", streams=1,
                                   target_classes=classes[rows], target_weights=weights[rows]).loss

    assert loss(slice(0, 4000)) == pytest.approx(loss(slice(0, 1000)) + loss(slice(1000, 4000)), rel=1e-6)


def test_retained_rows_are_bounded_with_their_targets():
    server = ServerProcess("--retained_bytes=1MiB")
    try:
        with lossd.Client(server.target) as client:
            client.create_head("small", hidden_size=8, vocab_size=300, compute_dtype="fp32")
            def retain(id: int, count: int) -> None:
                client.compute_loss(
                    "small", np.ones((1000, 8), np.float32), np.zeros(1000, int), step=0, id=id, reduction="none", retain=True,
                    options=lossd.LossOptions(rest="renormalized"), target_classes=np.zeros((1000, count), int),
                    target_weights=np.ones((1000, count)))

            retain(0, 64)
            with pytest.raises(lossd.ResourceExhausted, match="open.retain"):
                retain(1, 64)
            client.release_microbatch("small", 0)
            retain(1, 64)
    finally:
        server.stop()


def test_arrays_count_alike_however_they_lie_in_memory(client, rows):
    head, _, hidden, classes, weights, targets = rows
    arrays = {"hidden": hidden.reshape(-1, D).numpy(), "targets": targets.reshape(-1).numpy(),
              "options": lossd.LossOptions(rest="none")}
    pairs = classes.reshape(-1, K).numpy(), weights.reshape(-1, K).numpy()
    losses = [client.compute_loss(head, **arrays, target_classes=order(pairs[0]), target_weights=order(pairs[1])).loss
              for order in (np.ascontiguousarray, np.asfortranarray)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_what_is_refused(client, rows):
    head, _, hidden, classes, weights, targets = rows
    module = LossHead(client, head)
    with pytest.raises(TypeError, match="target_classes has dtype torch.float32"):
        module.soft_target_loss(hidden, classes.float(), weights)
    with pytest.raises(ValueError, match="target_weights requires a gradient"):
        module.soft_target_loss(hidden, classes, weights.clone().requires_grad_())
    with pytest.raises(ValueError, match=r"target_weights has shape \(3, 40, 8\); target_classes has \(3, 40, 9\)"):
        module.soft_target_loss(hidden, classes, weights[..., :-1])
    with pytest.raises(ValueError, match="shift=True does not go with soft_target_loss"):
        LossHead(client, head, shift=True).soft_target_loss(hidden, classes, weights)
    with pytest.raises(lossd.InvalidArgument, match="label_smoothing must be 0 with soft targets, got 0.1"):
        LossHead(client, head, label_smoothing=0.1).soft_target_loss(hidden, classes, weights)
    with pytest.raises(lossd.InvalidArgument, match="rest"):
        module.soft_target_loss(hidden, classes, weights, rest="all")  # type: ignore[arg-type]
    flat, values = classes.reshape(-1, K).numpy(), weights.reshape(-1, K).numpy()
    arrays = {"hidden": hidden.reshape(-1, D).numpy(), "targets": targets.reshape(-1).numpy()}
    one_class = lossd.LossOptions(rest="one_class")
    with pytest.raises(lossd.InvalidArgument, match="target_classes is given; it goes with options.rest only"):
        client.compute_loss(head, **arrays, target_classes=flat, target_weights=values)
    with pytest.raises(lossd.InvalidArgument, match="target_classes is not given; options.rest needs it"):
        client.compute_loss(head, **arrays, options=one_class)
    with pytest.raises(lossd.InvalidArgument, match="come together"):
        client.compute_loss(head, **arrays, options=one_class, target_classes=flat)
    with pytest.raises(lossd.InvalidArgument, match=r"target_classes has shape \(120,\)"):
        client.compute_loss(head, **arrays, options=one_class, target_classes=flat[:, 0], target_weights=values[:, 0])
    with pytest.raises(lossd.InvalidArgument, match="open.top_k must be 0 with open.options.rest"):
        client.compute_loss(head, **arrays, options=one_class, target_classes=flat, target_weights=values, top_k=3)
    with pytest.raises(lossd.InvalidArgument, match=r"open.target_weights\[\d+\] begins a row .* at most 1.001 with rest one_class"):
        client.compute_loss(head, **arrays, options=one_class, target_classes=flat, target_weights=values * 3)
