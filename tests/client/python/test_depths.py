# SPDX-License-Identifier: Apache-2.0
"""Microbatches that are divided into depths: lossd.Client and LossHead.depth_losses, against torch in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch  # noqa: E402

from torch.utils.checkpoint import checkpoint  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead  # noqa: E402

D, V = 24, 90
WEIGHTS = (1.0, 0.3, 0.0, 2.5)


@torch.enable_grad()
def in_double(weight, hidden, targets, factors, normalizers=None, row_weights=None):
    """The loss of each depth, and the gradients of their weighted sum: of each hidden state, and of the weight."""
    w = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
    xs = [x.detach().double().requires_grad_(True) for x in hidden]
    losses = []
    for k, (x, y) in enumerate(zip(xs, targets)):
        rows = torch.nn.functional.cross_entropy(x @ w.T, y, reduction="none")
        if row_weights is not None:
            rows = rows * row_weights[k].double()
        count = (y != -100).sum() if normalizers is None else normalizers[k]
        losses.append(rows.sum() / count if count else rows.sum() * 0)
    sum(factor * loss for factor, loss in zip(factors, losses)).backward()
    return [loss.item() for loss in losses], [x.grad for x in xs], w.grad


def rows(rng, count=len(WEIGHTS), n=150):
    hidden = [torch.tensor(rng.standard_normal((n, D)), dtype=torch.float32) for _ in range(count)]
    targets = torch.tensor(rng.integers(0, V, (count, n)))
    targets[torch.tensor(rng.random((count, n)) < 0.2)] = -100
    return hidden, targets


@pytest.fixture
def rng():
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.mark.parametrize("apart", [False, True])
def test_client(client, make_head, rng, apart):
    name = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = rows(rng)
    arrays = [x.numpy() for x in hidden]
    depths = [lossd.Depth(150, factor) for factor in WEIGHTS]
    result = client.compute_loss(name, arrays if apart else np.concatenate(arrays), targets.flatten(), step=0, id=3,
                                 accumulate=True, grad_hidden=True, depths=depths, streams=2, slice_bytes=2000)
    losses, gradients, of_weight = in_double(client.read_tensor(name), hidden, targets, WEIGHTS)
    assert result.loss == pytest.approx(sum(f * x for f, x in zip(WEIGHTS, losses)), rel=1e-6)
    assert (result.grad_hidden is None) == apart
    for k, depth in enumerate(result.depths):
        assert depth.loss == pytest.approx(losses[k], rel=1e-6)
        assert depth.normalizer == depth.valid_rows == depth.accumulated_rows == int((targets[k] != -100).sum())
        best = (hidden[k].double() @ torch.tensor(client.read_tensor(name)).double().T).argmax(-1)
        assert depth.correct_rows == int((best == targets[k]).sum())
        np.testing.assert_allclose(depth.grad_hidden, gradients[k].numpy(), atol=1e-7)
        if not apart:
            np.testing.assert_array_equal(depth.grad_hidden, result.grad_hidden[150 * k:150 * (k + 1)])
    np.testing.assert_allclose(client.read_tensor(name, role="gradient"), of_weight.numpy(), atol=1e-6)
    again = client.compute_loss(name, arrays, targets.flatten(), step=0, id=3, accumulate=True, depths=depths)
    assert [depth.repeated_rows for depth in again.depths] == [depth.accumulated_rows for depth in result.depths]
    with pytest.raises(lossd.FailedPrecondition, match="depths"):
        client.compute_loss(name, arrays, targets.flatten(), step=0, id=3, accumulate=True, depths=depths[::-1])


def test_gradients_are_written_where_the_caller_says(client, make_head, rng):
    name = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = rows(rng, 2)
    depths = [lossd.Depth(150), lossd.Depth(150)]
    places = [np.full((150, D), 7, np.float32) for _ in depths]
    result = client.compute_loss(name, tuple(x.numpy() for x in hidden), targets.flatten(), grad_hidden=places, depths=depths)
    assert all(depth.grad_hidden is place for depth, place in zip(result.depths, places))
    for place, row_targets in zip(places, targets):
        assert np.all(place[row_targets.numpy() == -100] == 0) and np.any(place != 0)


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_transports(server, make_head, rng, transport):
    name = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = rows(rng, 2)
    with lossd.Client(server.target, transport=transport) as client:
        result = client.compute_loss(name, [x.numpy() for x in hidden], targets.flatten(), grad_hidden=True,
                                     depths=[lossd.Depth(150), lossd.Depth(150, 0.5)])
        _, gradients, _ = in_double(client.read_tensor(name), hidden, targets, (1.0, 0.5))
    for depth, expected in zip(result.depths, gradients):
        np.testing.assert_allclose(depth.grad_hidden, expected.numpy(), atol=1e-7)


def test_what_the_client_refuses(client, make_head, rng):
    name = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = rows(rng, 2)
    arrays, labels = [x.numpy() for x in hidden], targets.flatten()
    two = [lossd.Depth(150), lossd.Depth(150)]

    def refused(match, depths=two, given=arrays, **options):
        with pytest.raises(lossd.InvalidArgument, match=match):
            client.compute_loss(name, given, labels, depths=depths, **options)

    refused("depths have 299 rows; targets has 300", [lossd.Depth(150), lossd.Depth(149)], np.concatenate(arrays))
    refused(r"hidden\[1\] has shape \(150, 24\)", [lossd.Depth(150), lossd.Depth(149)])
    refused("hidden has 2 arrays for 1 depths", [lossd.Depth(300)])
    refused(r"hidden\[1\] .* fp16; depths\[1\] needs .* fp32", given=[arrays[0], arrays[1].astype(np.float16)])
    refused("grad_hidden must be a bool or a list of 2 arrays", grad_hidden=[True, True])
    refused("depths is given; it does not go with reduction 'none'", reduction="none")
    refused("normalizer is 3; depths have normalizers of their own", normalizer=3.0)
    refused(r"depths\[1\].normalizer is 2; it is for the mean only", [lossd.Depth(150), lossd.Depth(150, normalizer=2.0)],
            reduction="sum")
    refused(r"depths\[0\].normalizer is absent; with class weights", options=lossd.LossOptions(use_class_weights=True))
    refused("depths has 65 entries; the most is 64", [lossd.Depth(300), *[lossd.Depth(0)] * 64], np.concatenate(arrays))
    for wrong, match in (({"rows": -1}, "depth.rows is -1"), ({"rows": 1.5}, "depth.rows is 1.5"),
                         ({"rows": 1, "weight": -1.0}, "depth.weight is -1.0"),
                         ({"rows": 1, "weight": math.nan}, "depth.weight is nan"),
                         ({"rows": 1, "normalizer": math.inf}, "depth.normalizer is inf")):
        with pytest.raises(lossd.InvalidArgument, match=match):
            lossd.Depth(**wrong)
    assert client.describe_head(name).step_microbatches == 0


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_head(client, make_head, rng, apart, reduction):
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name, reduction=reduction, extras=("accuracy", "lse"))
    hidden, targets = rows(rng)
    masks = torch.tensor(rng.random((len(WEIGHTS), 150)), dtype=torch.float32)
    leaves = [x.clone().requires_grad_(True) for x in hidden]
    given = leaves if apart else torch.stack(leaves)
    shape = (5, 30)  # sequences
    given = [x.reshape(*shape, D) for x in given] if apart else given.reshape(-1, *shape, D)
    found = head.depth_losses(given, targets.reshape(-1, *shape), weights=WEIGHTS, row_weights=masks.reshape(-1, *shape))
    found.loss.backward()
    normalizers = [1.0] * len(WEIGHTS) if reduction == "sum" else None
    losses, gradients, of_weight = in_double(client.read_tensor(name), hidden, targets, WEIGHTS, normalizers, masks)
    assert found.loss.item() == pytest.approx(sum(f * x for f, x in zip(WEIGHTS, losses)), rel=1e-6)
    torch.testing.assert_close(found.losses.double(), torch.tensor(losses, dtype=torch.float64), rtol=1e-6, atol=0)
    assert found.valid_rows.tolist() == (targets != -100).sum(1).tolist()
    assert not found.losses.requires_grad and found.accuracy.shape == (len(WEIGHTS),)
    assert found.extras.lse.shape == (len(WEIGHTS), *shape)
    scale = 1.0 if reduction == "mean" else 100.0
    for leaf, expected in zip(leaves, gradients):
        torch.testing.assert_close(leaf.grad.double(), expected, atol=1e-6 * scale, rtol=1e-5)
    got = torch.tensor(client.read_tensor(name, role="gradient")) * head.gradient_scale
    torch.testing.assert_close(got.double(), of_weight, atol=1e-6 * scale, rtol=1e-5)
    HeadOptimizer(head, lr=0.1).step()
    assert head.step == 1


def test_targets_of_one_sequence_are_shifted(client, make_head, rng):
    name = make_head(hidden_size=D, vocab_size=V)
    head, shifting = LossHead(client, name, train_head=False), LossHead(client, name, train_head=False, shift=True)
    hidden = torch.tensor(rng.standard_normal((3, 4, 7, D)), dtype=torch.float32)
    tokens = torch.tensor(rng.integers(0, V, (4, 7)))
    by_hand = torch.full((3, 4, 7), -100)
    for depth in range(3):
        by_hand[depth, :, :7 - depth] = tokens[:, depth:]
    with torch.no_grad():
        expected = head.depth_losses(hidden, by_hand)
        torch.testing.assert_close(head.depth_losses(hidden, tokens).losses, expected.losses, rtol=0, atol=0)
        assert expected.valid_rows.tolist() == [28, 24, 20]
        assert shifting.depth_losses(hidden, tokens).valid_rows.tolist() == [24, 20, 16]
        of_depths = shifting.depth_losses(hidden, torch.stack([tokens] * 3))
        assert of_depths.valid_rows.tolist() == [24, 24, 24]
        # Of sequences that are shorter than the depth nothing is left.
        assert head.depth_losses(hidden[:, :, :2], tokens[:, :2]).losses[2] == 0


def test_normalizers(client, make_head, rng):
    name = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = rows(rng, 2)
    weight = client.read_tensor(name)
    head = LossHead(client, name, normalizer=100.0, train_head=False)
    with torch.no_grad():
        for normalizers in (None, [30.0, 40.0]):
            expected, _, _ = in_double(weight, hidden, targets, (1.0, 1.0), normalizers or [100.0, 100.0])
            assert head.depth_losses(hidden, targets, normalizers=normalizers).losses.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_checkpoint_computes_the_losses_once(client, make_head, rng, monkeypatch):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    begun = []
    begin = client.compute_loss_async
    monkeypatch.setattr(client, "compute_loss_async", lambda *given, **named: begun.append(1) or begin(*given, **named))
    hidden, targets = rows(rng)
    factor = torch.nn.Parameter(torch.tensor(0.5))  # its gradient needs the loss, so the second pass comes as far as that
    loss = checkpoint(lambda *parts: head.depth_losses(list(parts), targets, weights=WEIGHTS).loss * factor,
                      *(part.requires_grad_() for part in hidden), use_reentrant=False)
    loss.backward()
    torch.testing.assert_close(factor.grad, (loss / factor).detach())
    assert len(begun) == 1


def test_parts_that_need_no_gradient(client, make_head, rng):
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name)
    hidden, targets = rows(rng, 2)
    hidden[1].requires_grad_(True)
    head.depth_losses(hidden, targets, weights=[1.0, 0.5]).loss.backward()
    assert hidden[0].grad is None and hidden[1].grad.abs().sum() > 0
    head.eval()
    with torch.no_grad():
        assert not head.depth_losses(hidden, targets).loss.requires_grad
    HeadOptimizer(head, lr=0.1).discard()


def test_what_the_head_refuses(client, make_head, rng):
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name)
    hidden, targets = rows(rng, 2)
    joined = torch.stack(hidden)
    with pytest.raises(RuntimeError, match="depth_losses.. computes gradients at once"):
        LossHead(client, name, reduction="none").depth_losses(joined, targets)
    for match, arguments, options in (
            ("hidden must be a tensor", ("x", targets), {}),
            (r"hidden\[1\] has shape \(3, 24\)", ([hidden[0], hidden[1][:3]], targets), {}),
            (r"targets has shape \(3, 150\); 2 depths need \(2, ...\)", (joined, targets.new_zeros(3, 150)), {}),
            ("hidden has shape", (joined[..., :5], targets), {}),
            (r"weights has 3 numbers for 2 depths", (joined, targets), {"weights": [1, 1, 1]}),
            (r"weights\[1\] is -1.0; it must be finite and not negative", (joined, targets), {"weights": [1, -1]}),
            (r"normalizers has 1 numbers for 2 depths", (joined, targets), {"normalizers": [1.0]}),
            (r"hidden has 65 depths; it must have 1 to 64", (torch.zeros(65, 1, D), torch.zeros(65, 1).long()), {})):
        with pytest.raises((TypeError, ValueError), match=match):
            head.depth_losses(*arguments, **options)
    with pytest.raises(lossd.InvalidArgument, match="targets"):
        head.depth_losses(joined, targets + V)
    assert client.describe_head(name).step_microbatches == 0
