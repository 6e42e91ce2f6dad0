# SPDX-License-Identifier: Apache-2.0
"""lossd.Client against a server process: numbers, input, administration, and how a client begins and ends."""

from __future__ import annotations

import dataclasses
import gc
import math
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from servers import ServerProcess
from softmax_rules import clear_rows, epsilon_among, filtered, row_numbers, sampled

import lossd
from lossd import _native
from lossd._arrays import as_targets
from lossd.v1 import loss_pb2, server_pb2, types_pb2


# lossd.Client against a server process: numbers against NumPy in double precision, and administration.

D, V, N = 24, 310, 800


def logits(client, head, hidden):
    return hidden.astype(float) @ client.read_tensor(head).astype(float).T


def cross_entropy(z, targets, ignore_index=-100):
    """Row losses, lse and the gradient of their sum with respect to the logits."""
    valid = targets != ignore_index
    lse = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1)
    rows = np.arange(len(z))
    picked = np.where(valid, targets, 0)
    gradient = np.exp(z - lse[:, None])
    gradient[rows, picked] -= 1
    return np.where(valid, lse - z[rows, picked], 0), np.where(valid, lse, 0), gradient * valid[:, None]


@pytest.fixture
def problem(rng):
    hidden = rng.standard_normal((N, D)).astype(np.float32)
    targets = rng.integers(0, V, N)
    targets[rng.random(N) < 0.2] = -100
    targets[100:230] = -100
    return hidden, targets


def test_loss_and_all_gradients(client, make_head, problem):
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V, seed=3)
    result = client.compute_loss(
        head, hidden, targets, step=0, id=9, accumulate=True, grad_hidden=True, slice_bytes=2048, streams=3,
        rows=("loss", "lse", "entropy", "logprob", "argmax"))
    z = logits(client, head, hidden)
    loss, lse, dz = cross_entropy(z, targets)
    valid = targets != -100
    dz /= valid.sum()
    assert result.loss == pytest.approx(loss.sum() / valid.sum(), rel=1e-6)
    assert (result.valid_rows, result.accumulated_rows, result.repeated_rows) == (valid.sum(), valid.sum(), 0)
    np.testing.assert_allclose(result.rows["loss"], loss, atol=2e-6)
    np.testing.assert_allclose(result.rows["lse"], lse, atol=2e-6)
    np.testing.assert_allclose(result.rows["logprob"], -loss, atol=2e-6)
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    np.testing.assert_allclose(result.rows["entropy"], -(p * np.log(p)).sum(1) * valid, atol=1e-5)
    np.testing.assert_array_equal(result.rows["argmax"], np.where(valid, z.argmax(1), -1))
    weight = client.read_tensor(head).astype(float)
    np.testing.assert_allclose(result.grad_hidden, dz @ weight, atol=1e-8)
    gradient = client.read_tensor(head, "weight", "gradient")
    np.testing.assert_allclose(gradient, dz.T @ hidden, atol=1e-7)
    assert client.grad_norm(head) == pytest.approx(np.linalg.norm(dz.T @ hidden), rel=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [("fp16", 2e-6), ("bf16", 1e-5)])
def test_sixteen_bits_travel_as_they_are(client, make_head, problem, dtype, tolerance):
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V)
    if dtype == "fp16":
        sent = hidden.astype(np.float16)
        exact = sent.astype(float)
    else:
        sent = (hidden.view(np.uint32) >> 16).astype(np.uint16)
        exact = (sent.astype(np.uint32) << 16).view(np.float32).astype(float)
    result = client.compute_loss(head, sent, targets, dtype=dtype, grad_hidden=True)
    loss, _, dz = cross_entropy(logits(client, head, exact), targets)
    count = (targets != -100).sum()
    assert result.loss == pytest.approx(loss.sum() / count, rel=1e-5)
    received = result.grad_hidden
    assert received.dtype == sent.dtype
    if dtype == "bf16":
        received = (received.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(received, dz @ client.read_tensor(head).astype(float) / count, atol=tolerance)


def test_row_weights_sum_and_grad_output(client, make_head, problem, rng):
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V)
    weights = rng.random(N).astype(np.float32)
    out = np.empty_like(hidden)
    result = client.compute_loss(head, hidden, targets, reduction="sum", row_weights=weights, grad_output=-2.5,
                                 grad_hidden=out)
    loss, _, dz = cross_entropy(logits(client, head, hidden), targets)
    assert result.loss == pytest.approx((loss * weights).sum(), rel=1e-6)
    assert result.grad_hidden is out
    dz *= -2.5 * weights[:, None]
    np.testing.assert_allclose(out, dz @ client.read_tensor(head).astype(float), atol=2e-6)


def test_filtered_gradients(client, make_head, problem):
    """In forward and in backward() against the formula; small probabilities of targets among them."""
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V)
    smoothing, z_loss = 0.1, 1e-2
    z = logits(client, head, hidden)
    _, lse, exact = cross_entropy(z, targets)
    valid = targets != -100
    onehot = np.arange(V) == targets[:, None]
    p = (exact + onehot) * valid[:, None]
    epsilon = epsilon_among(p[valid])
    q = filtered(p, targets, epsilon)
    assert 0 < (p[onehot] < epsilon).sum() < valid.sum()
    dz = (q - (1 - smoothing) * onehot - smoothing / V + 2 * z_loss * lse[:, None] * q) * valid[:, None]
    options = lossd.LossOptions(
        label_smoothing=smoothing, z_loss=z_loss, gradients="filtered", filter_epsilon=epsilon)

    forward = client.compute_loss(head, hidden, targets, reduction="sum", options=options, streams=3, slice_bytes=2048,
                                  step=0, id=1, accumulate=True, grad_hidden=True)
    plain = client.compute_loss(head, hidden, targets, reduction="sum",
                                options=lossd.LossOptions(label_smoothing=smoothing, z_loss=z_loss))
    assert forward.loss == pytest.approx(plain.loss, rel=1e-6) and plain.dropped_mass == 0
    gradient = client.read_tensor(head, "weight", "gradient")
    client.zero_gradients(head, 0)
    client.compute_loss(head, hidden, targets, step=0, id=2, reduction="none", options=options, retain=True)
    backward = client.backward(head, 2, np.ones(N), hidden_size=D, step=0, accumulate=True, grad_hidden=True)
    for result, weight_gradient in ((forward, gradient), (backward, client.read_tensor(head, "weight", "gradient"))):
        assert result.dropped_mass == pytest.approx((p - q).sum(), rel=1e-4)
        np.testing.assert_allclose(result.grad_hidden, dz @ client.read_tensor(head).astype(float), atol=2e-6)
        np.testing.assert_allclose(weight_gradient, dz.T @ hidden, atol=5e-5)


def test_deferred_gradients(client, make_head, problem, rng):
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V)
    client.compute_loss(head, hidden, targets, step=0, id=4, reduction="none", retain=True, rows=("loss",))
    upstream = rng.standard_normal(N)
    result = client.backward(head, 4, upstream, hidden_size=D, step=0, accumulate=True, grad_hidden=True)
    _, _, dz = cross_entropy(logits(client, head, hidden), targets)
    dz *= upstream[:, None]
    np.testing.assert_allclose(result.grad_hidden, dz @ client.read_tensor(head).astype(float), atol=2e-6)
    np.testing.assert_allclose(client.read_tensor(head, "weight", "gradient"), dz.T @ hidden, atol=5e-5)
    assert client.release_microbatch(head, 4) and not client.release_microbatch(head, 4)
    with pytest.raises(lossd.NotFound):
        client.backward(head, 4, upstream, hidden_size=D)


def test_no_rows_and_no_valid_rows(client, make_head, problem):
    head = make_head(hidden_size=D, vocab_size=V)
    empty = client.compute_loss(head, np.empty((0, D), np.float32), [], grad_hidden=True, rows=("loss",))
    assert (empty.loss, empty.valid_rows, empty.grad_hidden.shape) == (0, 0, (0, D))
    ignored = client.compute_loss(head, problem[0], np.full(N, -100), grad_hidden=True, rows=("loss", "argmax"))
    assert ignored.loss == 0 and not ignored.grad_hidden.any() and not ignored.rows["loss"].any()
    assert (ignored.rows["argmax"] == -1).all() and ignored.sent_bytes == 0


def test_many_microbatches_at_once(client, make_head, problem):
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V)
    pending = [client.compute_loss_async(head, hidden, targets, step=0, id=i, accumulate=True, grad_hidden=True,
                                         reduction="sum") for i in range(20)]
    results = [each.wait() for each in pending]
    assert all(each.done() for each in pending)  # rounding depends on which rows were computed together
    assert [r.loss for r in results] == pytest.approx([results[0].loss] * len(results), rel=1e-6)
    _, _, dz = cross_entropy(logits(client, head, hidden), targets)
    np.testing.assert_allclose(client.read_tensor(head, "weight", "gradient"), 20 * dz.T @ hidden, atol=2e-3)
    answer = client.apply_step(head, 0, lossd.SGD(lr=0.1), expected_microbatches=range(20))
    assert (answer.microbatches, answer.state.step) == (20, 1)


def test_rows_go_over_all_connections(server, make_head, problem):
    head = make_head(hidden_size=D, vocab_size=V)
    with lossd.Client(server.target, channels=3, transport="grpc") as client:
        assert client.compute_loss(head, *problem).streams == 3
        assert client.compute_loss(head, *problem, streams=2).streams == 2
        assert client.connections == (3, "the client was told so")


def test_streams_beyond_the_first_are_lent(server, make_head, problem):
    """However many computations there are, each has a stream, and all together not many more."""
    head = make_head(hidden_size=D, vocab_size=V)
    with lossd.Client(server.target) as client:
        pending = [client.compute_loss_async(head, *problem, streams=4) for _ in range(60)]
        found = [each.wait().streams for each in pending]
        assert min(found) >= 1 and max(found) <= 4
        assert client.compute_loss(head, *problem, streams=4).streams == 4, "they were given back"


def test_memory_is_free_when_a_call_has_ended(client, make_head, problem):
    """At once, not when the garbage collector comes: it is pinned memory, or as large as a microbatch."""
    head = make_head(hidden_size=D, vocab_size=V)
    hidden, gradient = problem[0].copy(), np.empty((N, D), np.float32)
    arrays = [weakref.ref(hidden), weakref.ref(gradient)]
    gc.disable()
    try:
        client.compute_loss(head, hidden, problem[1], grad_hidden=gradient)
        del hidden, gradient
        deadline = time.monotonic() + 20  # the thread that ended the call may still be on its way out
        while any(array() is not None for array in arrays):
            assert time.monotonic() < deadline, "somebody still has the arrays"
            time.sleep(0.01)
    finally:
        gc.enable()


def test_step_says_what_is_missing(client, make_head, problem):
    head = make_head(hidden_size=D, vocab_size=V)
    client.compute_loss(head, *problem, step=0, id=1, accumulate=True)
    with pytest.raises(lossd.FailedPrecondition, match="microbatch 2") as caught:
        client.apply_step(head, 0, lossd.AdamW(lr=0.1), expected_microbatches=[1, 2])
    assert caught.value.missing and "microbatch 2" in caught.value.missing[0]
    assert caught.value.current_step == 0 and caught.value.incarnation == client.get_server().incarnation
    first = client.apply_step(head, 0, lossd.AdamW(lr=0.1), expected_microbatches=[1])
    again = client.apply_step(head, 0, lossd.AdamW(lr=0.1), expected_microbatches=[1])
    assert again.repeated_call and again.grad_norm == first.grad_norm
    with pytest.raises(lossd.FailedPrecondition) as caught:
        client.compute_loss(head, *problem, step=0, id=1, accumulate=True)
    assert caught.value.current_step == 1


def test_optimizers_follow_their_formulas(client, make_head, problem):
    head = make_head(hidden_size=D, vocab_size=V)
    client.compute_loss(head, *problem, step=0, id=1, accumulate=True)
    before, gradient = client.read_tensor(head), client.read_tensor(head, "weight", "gradient")
    client.apply_step(head, 0, lossd.SGD(lr=0.5, weight_decay=0.1), grad_multiplier=2.0)
    np.testing.assert_allclose(
        client.read_tensor(head), before - 0.5 * (2 * gradient + 0.1 * before), rtol=1e-5, atol=1e-8)


def test_zeroed_gradients_are_gone(client, make_head, problem):
    head = make_head(hidden_size=D, vocab_size=V)
    client.compute_loss(head, *problem, step=0, id=1, accumulate=True)
    assert client.zero_gradients(head, 0).step == 0
    assert client.grad_norm(head, 0) == 0


@pytest.mark.parametrize("param, shape", [
    ("weight", (V, D)), ("bias", (V,)), ("class_weights", (V,)), ("norm_gain", (D,)), ("norm_shift", (D,))])
def test_tensors_there_and_back(client, make_head, rng, param, shape):
    head = make_head(hidden_size=D, vocab_size=V, bias=True, class_weights=True, norm="layernorm")
    values = rng.random(shape).astype(np.float32)
    client.write_tensor(head, param, values)
    np.testing.assert_array_equal(client.read_tensor(head, param), values)
    client.write_tensor(head, param, 2 * values[5:9], rows=(5, 9))
    np.testing.assert_array_equal(client.read_tensor(head, param, rows=(4, 9))[1:], 2 * values[5:9])
    bits = client.read_tensor(head, param, dtype="bf16", rows=(0, 3))
    np.testing.assert_allclose((bits.astype(np.uint32) << 16).view(np.float32), values[:3], rtol=0.01)


def test_large_tensor_in_many_messages(client, make_head, rng):
    head = make_head(hidden_size=300, vocab_size=5000)
    values = rng.standard_normal((5000, 300)).astype(np.float32)
    client.write_tensor(head, "weight", values)
    np.testing.assert_array_equal(client.read_tensor(head), values)


def test_checkpoint_there_and_back(client, make_head, problem):
    head = make_head(hidden_size=D, vocab_size=V)
    weight = client.read_tensor(head)
    saved = client.save_checkpoint(head)
    with pytest.raises(lossd.AlreadyExists):
        client.save_checkpoint(head)
    client.compute_loss(head, *problem, step=0, id=1, accumulate=True)
    client.apply_step(head, 0, lossd.AdamW(lr=1.0))
    assert not np.array_equal(client.read_tensor(head), weight)
    assert client.load_checkpoint(saved.checkpoint).state.step == 0
    np.testing.assert_array_equal(client.read_tensor(head), weight)
    with pytest.raises(lossd.NotFound):
        client.load_checkpoint(f"{head}/nothing")


def test_saves_say_how_far_they_are_and_are_listed(client, make_head):
    head = make_head(hidden_size=512, vocab_size=4000)
    seen = []
    saved = client.save_checkpoint(head, "named", on_progress=seen.append)
    for _ in range(3):
        client.apply_step(head, client.describe_head(head).state.step, lossd.SGD(lr=0.1))
        last = client.save_checkpoint(head, keep=2)
    assert saved.checkpoint == f"{head}/named" and seen
    listed = client.list_checkpoints(head)
    assert [each.step for each in listed] == [3, 2, 0] and listed[0].checkpoint == last.checkpoint
    assert [each.automatic for each in listed] == [True, True, False]


def test_gradients_from_elsewhere_are_added_once(client, make_head, problem, rng):
    head = make_head(hidden_size=D, vocab_size=V, bias=True)
    client.compute_loss(head, *problem, step=0, id=1, accumulate=True)
    before = client.read_tensor(head, "weight", "gradient")
    share, part = (rng.standard_normal((rows, D)).astype(np.float32) for rows in (V, 7))
    answer = client.add_gradient(head, "weight", share, step=0, id=2, scale=0.5)
    assert (answer.added_rows, answer.repeated_rows) == (V, 0)
    assert client.add_gradient(head, "weight", share, step=0, id=2, scale=0.5).repeated_rows == V
    client.add_gradient(head, "weight", part, step=0, id=3, rows=(10, 17))
    expected = before + 0.5 * share
    expected[10:17] += part
    np.testing.assert_allclose(client.read_tensor(head, "weight", "gradient"), expected, atol=1e-6)
    with pytest.raises(lossd.FailedPrecondition):
        client.add_gradient(head, "weight", 2 * share, step=0, id=2)
    with pytest.raises(lossd.InvalidArgument, match="shape"):
        client.add_gradient(head, "weight", part, step=0, id=4)
    with pytest.raises(lossd.NonFinite):
        client.add_gradient(head, "bias", np.full(V, np.nan, np.float32), step=0, id=5)
    with pytest.raises(lossd.FailedPrecondition, match="6"):
        client.apply_step(head, 0, lossd.SGD(lr=0.1), expected_microbatches=[1, 2, 3, 6])
    answer = client.apply_step(head, 0, lossd.SGD(lr=0.1), expected_microbatches=[1, 2, 3])
    assert (answer.microbatches, answer.contributions) == (1, 2)  # the refused one is not in it


def test_steps_that_are_not_finite(client, make_head, problem):
    head = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = problem
    client.compute_loss(head, 100 * hidden, targets, step=0, id=1, accumulate=True, reduction="sum", grad_output=3e38)
    weight = client.read_tensor(head)
    with pytest.raises(lossd.FailedPrecondition, match="finite"):
        client.apply_step(head, 0, lossd.SGD(lr=0.1))
    assert client.apply_step(head, 0, lossd.SGD(lr=0.1), skip_non_finite=True).skipped
    np.testing.assert_array_equal(client.read_tensor(head), weight)
    assert client.describe_head(head).updates == 0 and client.describe_head(head).state.step == 1


def test_heads_are_listed_and_deleted(client):
    client.create_head("listed", hidden_size=4, vocab_size=7, norm="rmsnorm", norm_epsilon=1e-6, frozen=True)
    with pytest.raises(lossd.AlreadyExists):
        client.create_head("listed", hidden_size=4, vocab_size=7)
    assert "listed" in [each.spec.name for each in client.list_heads()]
    assert client.describe_head("listed").spec.norm_epsilon == pytest.approx(1e-6)
    client.delete_head("listed")
    with pytest.raises(lossd.NotFound) as caught:
        client.describe_head("listed")
    assert caught.value.value == "listed" and isinstance(caught.value, LookupError)


def test_non_finite_rows_accumulate_nothing(client, make_head, problem):
    head = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = problem
    hidden[3], targets[3] = np.inf, 5
    with pytest.raises(lossd.NonFinite, match="row"):
        client.compute_loss(head, hidden, targets, step=0, id=1, accumulate=True)


def test_a_head_may_exist_already(client, make_head):
    name = make_head(hidden_size=8, vocab_size=30, seed=5)
    weight = client.read_tensor(name)
    with pytest.raises(lossd.AlreadyExists):
        client.create_head(name, hidden_size=8, vocab_size=30)
    assert client.create_head(name, hidden_size=8, vocab_size=30, if_exists="keep").spec.name == name
    np.testing.assert_array_equal(client.read_tensor(name), weight)
    for changes, what in (({"vocab_size": 31}, "vocab_size 30 instead of 31"), ({"bias": True}, "bias false instead of true"),
                          ({"norm": "rmsnorm"}, "norm")):
        with pytest.raises(lossd.AlreadyExists, match=what):
            client.create_head(name, **{"hidden_size": 8, "vocab_size": 30, **changes}, if_exists="keep")


# Sampled gradients through lossd.Client, against the rule written down in Python; and those of auto.


def test_sampled_gradients(client, make_head, problem):
    """In forward and in backward() against the rule with the same random numbers, which are written down in Python."""
    hidden, all_targets = problem
    head = make_head(hidden_size=D, vocab_size=V)
    threshold, smoothing, z_loss = 0.02, 0.1, 1e-2
    z = logits(client, head, hidden)
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    weight = client.read_tensor(head).astype(float)
    options = lossd.LossOptions(
        label_smoothing=smoothing, z_loss=z_loss, gradients="sampled", sample_threshold=threshold)

    def targets_of(omega):  # of rows in which rounding changes nothing
        clear = clear_rows(p, all_targets, threshold, omega)
        assert clear.mean() > 0.5
        return np.where(clear, all_targets, -100)

    def check(result, omega, gradient):
        targets = targets_of(omega)
        valid = targets != -100
        onehot = np.arange(V) == targets[:, None]
        _, lse, _ = cross_entropy(z, targets)
        slope = (1 + 2 * z_loss * lse)[:, None]
        dz = slope * sampled(p, targets, threshold, omega) - (1 - smoothing) * onehot - smoothing / V
        dz *= valid[:, None]
        np.testing.assert_allclose(result.grad_hidden, dz @ weight, atol=5e-6)
        np.testing.assert_allclose(gradient, dz.T @ hidden, atol=1e-4)
        below = (p < threshold) & ~onehot & valid[:, None]
        variance = (slope**2 * p * (threshold - p))[below].sum()
        square = ((slope * p - onehot * (1 - smoothing))**2)[valid].sum()
        assert result.gradient_error == pytest.approx(np.sqrt(variance / square), rel=0.05)

    omega = row_numbers(head, 0, 1, N)
    targets = targets_of(omega)
    forward = client.compute_loss(head, hidden, targets, reduction="sum", options=options, streams=3, slice_bytes=2048,
                                  step=0, id=1, accumulate=True, grad_hidden=True)
    check(forward, omega, client.read_tensor(head, "weight", "gradient"))
    again = client.compute_loss(head, hidden, targets, reduction="sum", options=options, streams=1, step=0, id=1,
                                accumulate=True, grad_hidden=True)
    assert again.repeated_rows == (targets != -100).sum()
    np.testing.assert_allclose(again.grad_hidden, forward.grad_hidden, atol=2e-6)
    client.zero_gradients(head, 0)
    omega = row_numbers(head, 0, 1000, N)
    client.compute_loss(head, hidden, targets_of(omega), step=0, id=1000, reduction="none", options=options, retain=True)
    backward = client.backward(head, 1000, np.ones(N), hidden_size=D, step=0, accumulate=True, grad_hidden=True)
    check(backward, omega, client.read_tensor(head, "weight", "gradient"))


@pytest.mark.parametrize("logits", ["stored", "recomputed"])
def test_auto_is_exact_where_the_error_would_be_too_large(client, make_head, problem, logits):
    head = make_head(hidden_size=D, vocab_size=V, logits=logits)

    def compute(gradients, **limits):
        options = lossd.LossOptions(gradients=gradients, sample_threshold=0.1, **limits)
        return client.compute_loss(head, *problem, options=options, grad_hidden=True, streams=1, step=0, id=5)

    exact, sampled_ = compute("exact"), compute("sampled")
    strict, lax = compute("auto", max_gradient_error=1e-6), compute("auto", max_gradient_error=10.0)
    assert exact.gradient_error == strict.gradient_error == 0 < sampled_.gradient_error < 1
    assert lax.gradient_error == pytest.approx(sampled_.gradient_error)
    np.testing.assert_allclose(strict.grad_hidden, exact.grad_hidden, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(lax.grad_hidden, sampled_.grad_hidden, rtol=1e-5, atol=1e-9)
    assert not np.allclose(exact.grad_hidden, sampled_.grad_hidden, rtol=1e-3, atol=0)


# lossd.Client refuses bad input before or after the server sees it, and says which field has which value.


@pytest.fixture
def plain_problem(rng):
    return rng.standard_normal((N, D)).astype(np.float32), rng.integers(0, V, N)


@pytest.mark.parametrize("change, error, text", [
    ({"hidden": np.zeros((N, D))}, lossd.InvalidArgument, "float64"),
    ({"hidden": np.zeros((N, D), np.uint16)}, lossd.InvalidArgument, 'dtype="bf16"'),
    ({"hidden": np.zeros(N * D, np.float32)}, lossd.InvalidArgument, r"must be \[N, D\]"),
    ({"hidden": np.zeros((N, D + 1), np.float32)}, lossd.InvalidArgument, f"{D + 1} elements.*has {D}"),
    ({"targets": np.zeros(N - 1, int)}, lossd.InvalidArgument, f"{N - 1} entries for {N} rows"),
    ({"targets": np.zeros(N)}, lossd.InvalidArgument, "integers"),
    ({"targets": np.full(N, 2**40)}, lossd.InvalidArgument, "1099511627776"),
    ({"targets": np.full(N, V)}, lossd.InvalidArgument, rf"open.targets\[0\].*{V}"),
    ({"row_weights": np.ones(3)}, lossd.InvalidArgument, "row_weights has 3"),
    ({"normalizer": -1.0}, lossd.InvalidArgument, "normalizer is -1"),
    ({"normalizer": 3.0, "reduction": "sum"}, lossd.InvalidArgument, "normalizer is 3; it is for the mean only"),
    ({"reduction": "median"}, lossd.InvalidArgument, "sum, mean, none"),
    ({"grad_output": float("nan")}, lossd.InvalidArgument, "grad_output is nan"),
    ({"targets": np.full(N, 2**32 - 100, np.uint32)}, lossd.InvalidArgument, r"targets\[0\] is 4294967196"),
    ({"accumulate": True}, lossd.InvalidArgument, "step is absent; accumulate needs it"),
    ({"step": -1}, lossd.InvalidArgument, "step is -1"),
    ({"id": 2**64}, lossd.InvalidArgument, "id is 18446744073709551616"),
    ({"retain": True}, lossd.InvalidArgument, "retain"),
    ({"reduction": "none", "grad_hidden": True}, lossd.InvalidArgument, "backward"),
    ({"rows": ("loss", "perplexity")}, lossd.InvalidArgument, "perplexity"),
    ({"grad_hidden": np.zeros((N, D), np.float16)}, lossd.InvalidArgument, "float16.*float32"),
    ({"streams": 0}, lossd.InvalidArgument, "streams is 0"),
    ({"slice_bytes": 0}, lossd.InvalidArgument, "slice_bytes is 0"),
    ({"timeout": 0.0}, lossd.InvalidArgument, "timeout is 0"),
    ({"options": lossd.LossOptions(use_class_weights=True)}, lossd.InvalidArgument, "normalizer is absent"),
    ({"step": 3, "accumulate": True}, lossd.FailedPrecondition, "step"),
    ({"head": "missing"}, lossd.NotFound, "missing"),
    ({"head": ""}, lossd.InvalidArgument, "head is empty"),
])
def test_bad_input_is_named_and_changes_nothing(client, make_head, plain_problem, change, error, text):
    arguments = {"head": make_head(hidden_size=D, vocab_size=V), "hidden": plain_problem[0], "targets": plain_problem[1]} | change
    with pytest.raises(error, match=text):
        client.compute_loss(**arguments)
    for head in client.list_heads():
        assert head.step_microbatches == 0


INTEGERS = [np.dtype(kind) for kind in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", ">i8", ">u4")]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_targets_of_every_integer_dtype_are_what_they_are_or_refused(dtype):
    limits = np.iinfo(dtype)
    for value in {limits.min, limits.max, 0, 100, -100, -101, 2**31 - 1, 2**31, 2**32 - 100, 2**32, 2**64 - 100, -2**31 - 1}:
        if not limits.min <= value <= limits.max:
            continue
        targets = np.array([0, value], dtype)
        if -2**31 <= value < 2**31:
            np.testing.assert_array_equal(as_targets(targets), [0, value])
            assert as_targets(targets).dtype == np.dtype("<i4")
        else:
            with pytest.raises(lossd.InvalidArgument, match=rf"targets\[1\] is {value}: not a class"):
                as_targets(targets)


@pytest.mark.parametrize("targets, text", [
    ([0, 2**64], "integers"), ([0, 2**31], r"targets\[1\] is 2147483648"), ([True, False], "integers"), ([0.0, 1.0], "integers"),
    ([[0, 1]], r"\(1, 2\)")])
def test_targets_that_are_none(targets, text):
    with pytest.raises(lossd.InvalidArgument, match=text):
        as_targets(targets)


def test_bad_names_of_any_length_and_script_are_shown(client):
    for length in range(30, 70):  # wherever the server cuts what it shows
        with pytest.raises(lossd.InvalidArgument) as caught:
            client.create_head(f"n{'é' * length}{'€' * 200}", hidden_size=D, vocab_size=V)
        assert caught.value.field == "spec.name"
        assert caught.value.value.startswith("n" + "é" * 30)


@pytest.mark.parametrize("option, value, field", [
    ("shares", (1, -1), "spec.shares[1]"), ("shares", (2**31,), "spec.shares[0]"), ("shares", (0.5,), "spec.shares[0]"),
    ("replicas", -1, "spec.replicas"), ("replicas", 65537, "spec.replicas"), ("replicas", 1.5, "spec.replicas"),
    ("replicas", 2, "spec.replicas")])
def test_heads_that_no_server_makes(client, option, value, field):
    with pytest.raises(lossd.InvalidArgument) as caught:
        client.create_head("no-head", hidden_size=D, vocab_size=V, split="vocabulary", **{option: value})
    assert caught.value.field == field


@pytest.mark.parametrize("option, value", [
    ("label_smoothing", 2.0), ("label_smoothing", -0.1), ("z_loss", -1.0), ("z_loss", float("inf")), ("softcap", -1.0),
    ("softcap", float("nan")), ("softcap", 1e-39), ("logit_scale", 0.0), ("logit_scale", float("inf")),
    ("filter_epsilon", 1.0), ("filter_epsilon", -0.5), ("filter_epsilon", float("nan")), ("sample_threshold", 0.0),
    ("sample_threshold", 1.5), ("sample_threshold", float("nan")), ("max_gradient_error", -0.5),
    ("max_gradient_error", float("inf")), ("max_gradient_error", float("nan"))])
def test_bad_loss_options(option, value):
    with pytest.raises(lossd.InvalidArgument, match=f"^{option} must be .*, got {value:g}$") as caught:
        lossd.LossOptions(**{option: value})
    assert (caught.value.field, caught.value.value) == (option, f"{value:g}")


@pytest.mark.parametrize("option, value", [("ignore_index", 2**31), ("ignore_index", -2**31 - 1), ("gradients", "approximate")])
def test_bad_words_and_numbers_that_no_message_has(option, value):
    with pytest.raises(lossd.InvalidArgument, match=f"{option} is {value!r}; it must be"):
        lossd.LossOptions(**{option: value})


def test_every_loss_option_of_the_protocol_is_there():
    fields = {field.name for field in dataclasses.fields(lossd.LossOptions)}
    assert fields == {field.name for field in loss_pb2.LossOptions.DESCRIPTOR.fields}


@pytest.mark.parametrize("options, text", [
    ({"channels": 0}, "channels is 0"), ({"target": ""}, "target is ''"),
    ({"connect_timeout": 0.0}, "connect_timeout"), ({"max_message_bytes": 1}, "max_message_bytes"),
    ({"retry": lossd.RetryOptions(max_attempts=0)}, "max_attempts"), ({"max_pending": 0}, "max_pending is 0"),
    ({"channels": "many"}, "^channels is many; it must be a whole number of 32 bits$"),
    ({"channels": 1 << 40}, "^channels is 1099511627776; it must be a whole number of 32 bits$"),
    ({"shared_memory_bytes": 0.5}, "^shared_memory_bytes is 0.5; it must be a whole number of 64 bits$"),
    ({"call_timeout": "soon"}, "^call_timeout is soon; it must be a number of seconds$"),
    ({"wait_for_server": "perhaps"}, "^wait_for_server is perhaps; it must be true or false$"),
    ({"run": "a\0b"}, "^run is no text: it has a NUL character$")])
def test_bad_options(options, text):
    with pytest.raises(lossd.InvalidArgument, match=text):
        lossd.Client(**options)


def test_an_option_that_the_library_does_not_know():
    with pytest.raises(lossd.InvalidArgument, match="^chanels is no option of a client$") as caught:
        _native.Call().run("lossd_client_complete", _native.option_texts({"chanels": 3}))
    assert (caught.value.field, caught.value.value) == ("chanels", "3")


# ---- Options ----

@pytest.mark.parametrize("options, what", [
    ({"softcap": "1"}, "softcap is '1'; it must be a number"),
    ({"label_smoothing": None}, "label_smoothing is None; it must be a number"),
    ({"logit_scale": True}, "logit_scale is True; it must be a number"),
    ({"ignore_index": -100.0}, "ignore_index is -100.0; it must be an int"),
    ({"z_loss": [0.1]}, r"z_loss is \[0.1\]; it must be a number"),
    ({"use_class_weights": "yes"}, "use_class_weights is 'yes'; it must be a bool"),
    ({"gradients": 3}, "gradients is 3; it must be a str"),
    ({"filter_epsilon": "small"}, "filter_epsilon is 'small'; it must be a number"),
])
def test_options_of_another_kind(options, what):
    with pytest.raises(TypeError, match=what):
        lossd.LossOptions(**options)


def test_numpy_numbers_are_numbers():
    options = lossd.LossOptions(softcap=np.float32(30.0), ignore_index=np.int64(-1), use_class_weights=np.bool_(True))
    assert options.to_proto().softcap == 30.0 and options.to_proto().ignore_index == -1


# A lossd.Client from its connection to its end: servers that are not there, closing, cancelling, forks, copies.


def test_no_server():
    with pytest.raises(lossd.Unavailable, match="no server at 127.0.0.1:1") as caught:
        lossd.Client("127.0.0.1:1", wait_for_server=False)
    assert isinstance(caught.value, ConnectionError)
    with pytest.raises(lossd.Unavailable, match="no server at"):
        lossd.Client("127.0.0.1:1", connect_timeout=0.3)


def test_closed_client(server, plain_problem):
    with lossd.Client(server.target) as client:
        client.get_server()
    client.close()
    for call in (client.get_server, lambda: client.compute_loss("a", *plain_problem), lambda: client.read_tensor("a")):
        with pytest.raises(lossd.ClientClosed, match="make a new"):
            call()


def test_closing_ends_what_is_under_way(server, make_head, plain_problem):
    head = make_head(hidden_size=D, vocab_size=V)
    client = lossd.Client(server.target)
    block = threading.Event()
    pending = client.compute_loss_async(head, *plain_problem, ready=block.wait)
    threading.Timer(0.2, block.set).start()
    client.close()
    with pytest.raises((lossd.Cancelled, lossd.ClientClosed)):
        pending.wait()


def test_cancel_and_timeout_of_wait(client, make_head, plain_problem):
    head = make_head(hidden_size=D, vocab_size=V)
    block = threading.Event()
    pending = client.compute_loss_async(head, *plain_problem, ready=block.wait)
    with pytest.raises(TimeoutError, match="not there"):
        pending.wait(0.05)
    pending.cancel()
    block.set()
    with pytest.raises(lossd.Cancelled):
        pending.wait()


class Ready:
    def __init__(self, error: BaseException | None = None) -> None:
        self.by_caller = True
        self.error = error
        self.thread: int | None = None

    def __call__(self) -> None:
        self.thread = threading.get_ident()
        if self.error is not None:
            raise self.error


def test_ready_may_run_on_the_calling_thread(client, make_head, plain_problem):
    head = make_head(hidden_size=D, vocab_size=V)
    ready = Ready()
    loss = client.compute_loss(head, *plain_problem, ready=ready).loss
    assert ready.thread == threading.get_ident()
    for error in (KeyboardInterrupt(), ValueError("the GPU is lost")):
        with pytest.raises(type(error)):
            client.compute_loss_async(head, *plain_problem, ready=Ready(error))
    assert client.compute_loss(head, *plain_problem).loss == loss


def test_cancelling_ends_the_question_for_limits(plain_problem):
    """A computation asks for its head first; a server that does not answer does not hold it up."""
    asked, ended = threading.Event(), threading.Event()

    def describe(request, context):
        asked.set()
        context.add_callback(ended.set)
        ended.wait(120)

    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((
        grpc.method_handlers_generic_handler("lossd.v1.ServerService", {"GetServer": grpc.unary_unary_rpc_method_handler(
            lambda request, context: server_pb2.ServerDescription(incarnation=1).SerializeToString())}),
        grpc.method_handlers_generic_handler("lossd.v1.HeadService", {
            "DescribeHead": grpc.unary_unary_rpc_method_handler(describe)})))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with lossd.Client(f"127.0.0.1:{port}") as client:
        pending = client.compute_loss_async("a", *plain_problem)
        assert asked.wait(120)
        pending.cancel()
        with pytest.raises(lossd.Cancelled, match="by the caller"):
            pending.wait()
    assert ended.wait(120)
    server.stop(None)


def _in_a_forked_child(client, connection):
    try:
        client.get_server()
    except lossd.ForkedClient as error:
        connection.send(str(error))
    finally:
        connection.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_noticed(client):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_in_a_forked_child, args=(client, there))
    child.start()
    assert here.poll(20) and f"process {os.getpid()}, before a fork" in here.recv()
    child.join()


def test_the_environment_names_the_server(server, monkeypatch):
    monkeypatch.setenv("LOSSD_SERVER", server.target)
    with lossd.Client() as client:
        assert client.target == server.target
        assert repr(client) == f"lossd.Client('{server.target}')"
    assert repr(client).endswith(", closed)")
    monkeypatch.setenv("LOSSD_SERVER", "127.0.0.1:1")
    with lossd.Client(server.target) as client:
        assert client.target == server.target


def test_the_version_is_the_packages():
    from importlib import metadata
    assert lossd.__version__ == metadata.version("lossd")


def test_a_client_is_not_copied(client):
    import copy
    import pickle
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="holds connections and threads"):
            attempt(client)


# A server that waits takes no CPU time: with several devices, a head that is divided over them, and a call that sends nothing.

WATCHED = 3.0  # seconds
MOST = 0.25  # cores; the threads of one GPU that asked every 50 us took more


def cpu_seconds(pid: int) -> float:
    fields = open(f"/proc/{pid}/stat", encoding="utf-8").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def no_rows() -> Iterator[loss_pb2.ComputeLossRequest]:
    message = loss_pb2.ComputeLossRequest()
    message.open.CopyFrom(loss_pb2.OpenMicrobatch(
        head="lm", microbatch_id=1, microbatch_rows=2, rows=types_pb2.RowRange(begin=0, end=2), hidden_dtype=types_pb2.DTYPE_FP32,
        reduction=loss_pb2.REDUCTION_SUM, targets=[0, 1]))
    yield message
    time.sleep(60.0)


def test_waiting_takes_no_cpu_time() -> None:
    server = ServerProcess("--backend=cpu", "--cpu_devices=4", "--split=vocabulary", "--threads=4")
    try:
        with lossd.Client(server.target) as client, grpc.insecure_channel(server.target) as channel:
            client.create_head("lm", hidden_size=8, vocab_size=64)
            call = channel.stream_stream(
                "/lossd.v1.LossService/ComputeLoss", request_serializer=loss_pb2.ComputeLossRequest.SerializeToString,
                response_deserializer=loss_pb2.ComputeLossResponse.FromString)(no_rows())
            assert next(call).HasField("accepted")
            before, begin = cpu_seconds(server.pid), time.monotonic()
            time.sleep(WATCHED)
            cores = (cpu_seconds(server.pid) - before) / (time.monotonic() - begin)
            call.cancel()
        assert cores < MOST
    finally:
        server.kill()


# Single classes: log-probabilities of those that are named, and the most probable ones.


def log_softmax(z):
    return z - (np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) + z.max(-1, keepdims=True))


def check_top(result, log_p, valid, k):
    """The classes of the k largest logits; where fp32 exchanges two, they are as probable."""
    order = np.argsort(-log_p, axis=1, kind="stable")[:, :k]
    want = np.take_along_axis(log_p, order, 1)
    assert result.top_classes.dtype == np.int32 and result.top_logprobs.dtype == np.float32
    assert result.top_classes.shape == result.top_logprobs.shape == (len(valid), k)
    np.testing.assert_allclose(result.top_logprobs[valid], want[valid], atol=1e-5)
    named = np.take_along_axis(log_p, np.where(valid[:, None], result.top_classes, 0), 1)
    np.testing.assert_allclose(named[valid], want[valid], atol=1e-5)
    assert (result.top_classes[~valid] == -1).all() and (result.top_logprobs[~valid] == 0).all()


@pytest.mark.parametrize("temperature, softcap", [(1.0, 0.0), (0.1, 0.0), (10.0, 0.0), (1.0, 3.0)])
def test_classes_and_top_k(client, make_head, problem, rng, temperature, softcap):
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V, seed=5)
    classes = rng.integers(0, V, (N, 9))
    classes[:, 4] = classes[:, 3]  # twice
    options = lossd.LossOptions(logit_scale=1 / temperature, softcap=softcap)
    result = client.compute_loss(head, hidden, targets, step=0, accumulate=True, grad_hidden=True, options=options,
                                 classes=classes, top_k=64, rows=("loss",), streams=3, slice_bytes=2048)
    z = logits(client, head, hidden) / temperature
    log_p = log_softmax(softcap * np.tanh(z / softcap) if softcap else z)
    valid = targets != -100
    want = np.where(valid[:, None], np.take_along_axis(log_p, classes, 1), 0)
    assert result.class_logprobs.dtype == np.float32
    np.testing.assert_allclose(result.class_logprobs, want, atol=1e-4 if temperature < 1 else 1e-5)
    check_top(result, log_p, valid, 64)
    alone = client.compute_loss(head, hidden, targets, grad_hidden=True, options=options)
    np.testing.assert_allclose(alone.grad_hidden, result.grad_hidden, atol=1e-8)
    assert alone.class_logprobs is None and alone.top_classes is None and alone.top_logprobs is None


def test_one_list_of_classes_for_all_rows(client, make_head, problem):
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V, seed=5)
    classes = [V - 1, 0, 0, 17]
    result = client.compute_loss(head, hidden, targets, classes=classes)
    log_p = log_softmax(logits(client, head, hidden))
    valid = targets != -100
    np.testing.assert_allclose(result.class_logprobs, np.where(valid[:, None], log_p[:, classes], 0), atol=1e-5)


def test_all_classes_with_ties_and_masked_ones(client, make_head, rng):
    head = make_head(hidden_size=4, vocab_size=6, bias=True)
    client.write_tensor(head, "weight", np.zeros((6, 4), np.float32))
    client.write_tensor(head, "bias", np.array([0, 2, -np.inf, 2, 0, 1], np.float32))
    result = client.compute_loss(head, rng.standard_normal((3, 4)).astype(np.float32), [1, -100, 5], top_k=6, classes=[2, 3])
    np.testing.assert_array_equal(result.top_classes, [[1, 3, 5, 0, 4, 2], [-1] * 6, [1, 3, 5, 0, 4, 2]])
    lse = np.log(2 * np.exp(2) + np.exp(1) + 2)
    np.testing.assert_allclose(result.top_logprobs[0], np.array([2, 2, 1, 0, 0, -np.inf]) - lse, atol=1e-6)
    np.testing.assert_allclose(result.class_logprobs, [[-np.inf, 2 - lse], [0, 0], [-np.inf, 2 - lse]], atol=1e-6)


def test_classes_of_ignored_rows(client, make_head, problem):
    hidden, _ = problem
    head = make_head(hidden_size=D, vocab_size=V)
    ignored = client.compute_loss(head, hidden, np.full(N, -100), classes=[3, 4], top_k=2)
    assert ignored.sent_bytes == 0
    assert (ignored.class_logprobs == 0).all() and ignored.class_logprobs.shape == (N, 2)
    assert (ignored.top_logprobs == 0).all() and (ignored.top_classes == -1).all()


def test_slices_with_many_classes_have_few_rows(client, make_head, problem):
    """A slice of all rows would be an answer of 1.7 MB beside the gradients."""
    hidden, _ = problem
    head = make_head(hidden_size=D, vocab_size=V, seed=5)
    result = client.compute_loss(head, hidden, np.zeros(N, int), classes=np.zeros(256, int), top_k=128, streams=1)
    log_p = log_softmax(logits(client, head, hidden))
    np.testing.assert_allclose(result.class_logprobs, np.repeat(log_p[:, :1], 256, 1), atol=1e-5)
    check_top(result, log_p, np.ones(N, bool), 128)


@pytest.mark.parametrize("arguments, says", [
    ({"top_k": V + 1}, rf"top_k .*{V}"), ({"top_k": 129}, r"top_k .*128"), ({"top_k": -1}, "top_k is -1"),
    ({"classes": [0, V]}, rf"classes\[1\] .*{V}"), ({"classes": [-1]}, r"classes\[0\]"),
    ({"classes": np.zeros(257, int)}, "class_count .*256"), ({"classes": [[1]]}, r"classes has shape \(1, 1\)"),
    ({"classes": [0.5]}, "classes has shape .* float64"), ({"classes": [2**31]}, r"classes\[0\] is 2147483648")])
def test_bad_classes_are_refused(client, make_head, problem, arguments, says):
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V)
    with pytest.raises(lossd.InvalidArgument, match=says):
        client.compute_loss(head, hidden, targets, step=0, accumulate=True, **arguments)
    assert client.describe_head(head).step_microbatches == 0


# A value of one row that the server would refuse, among rows that travel in several streams: nothing of the microbatch counts.

K = 3
ROW = 750  # of the last stream

SOFT = {"target_classes": np.tile(np.arange(K, dtype=np.int32), (N, 1)), "target_weights": np.full((N, K), 0.25, np.float32)}
PPO = lossd.LossOptions(objective=lossd.Objective("ppo", kl_coef=0.1))
PPO_NUMBERS = {name: np.full(N, -0.5, np.float32) for name in ("advantages", "old_logprobs", "ref_logprobs")}


def soft(rest: str) -> dict[str, Any]:
    return {**SOFT, "options": lossd.LossOptions(rest=rest)}  # type: ignore[arg-type]


@pytest.mark.parametrize("name, bad, message, given", [
    ("targets", V, rf"^open.targets\[{ROW}\] must be in \[0, {V}\) or ignore_index \(-100\), got {V}$", {}),
    ("targets", -1, rf"open.targets\[{ROW}\] .*, got -1$", {}),
    ("row_weights", math.nan, rf"open.row_weights\[{ROW}\] must be finite, got nan", {"row_weights": np.ones(N, np.float32)}),
    ("classes", V, rf"open.classes\[{ROW * K}\] must be in \[0, {V}\), got {V}", {"classes": SOFT["target_classes"]}),
    ("advantages", math.inf, rf"open.advantages\[{ROW}\] must be finite", {**PPO_NUMBERS, "options": PPO}),
    ("old_logprobs", -math.inf, rf"open.old_logprobs\[{ROW}\] must be finite", {**PPO_NUMBERS, "options": PPO}),
    ("ref_logprobs", math.nan, rf"open.ref_logprobs\[{ROW}\] must be finite", {**PPO_NUMBERS, "options": PPO}),
    ("target_classes", V, rf"open.target_classes\[{ROW * K}\] must be in \[0, {V}\) or -1, got {V}", soft("none")),
    ("target_classes", -1, rf"open.target_weights\[{ROW * K}\] must be 0 where target_classes is -1, got 0.25", soft("none")),
    ("target_weights", -0.5, rf"open.target_weights\[{ROW * K}\] must be finite and >= 0, got -0.5", soft("none")),
    ("target_weights", 1.0, rf"open.target_weights\[{ROW * K}\] begins a row whose weights must add up to at most 1.001 .*, got 1.5",
     soft("one_class")),
])
def test_nothing_of_the_microbatch_counts(client: lossd.Client, make_head: Any, name: str, bad: float, message: str,
                                          given: dict[str, Any]) -> None:
    head = make_head(hidden_size=D, vocab_size=V)
    arguments: dict[str, Any] = {"targets": np.arange(N) % V, **given}
    rows = arguments[name].copy()
    rows.reshape(N, -1)[ROW, 0] = bad
    hidden = np.random.default_rng().standard_normal((N, D), np.float32)
    for streams in (1, 4):
        with pytest.raises(lossd.InvalidArgument, match=message):
            client.compute_loss(head, hidden, **{**arguments, name: rows}, step=0, id=1, accumulate=True, streams=streams)
    assert client.describe_head(head).step_rows == 0
    result = client.compute_loss(head, hidden, **arguments, step=0, id=1, accumulate=True, streams=4)  # mended, under the same id
    assert result.accumulated_rows == N


def test_a_backward_pass_of_which_one_number_is_bad(client: lossd.Client, make_head: Any) -> None:
    head = make_head(hidden_size=D, vocab_size=V)
    hidden = np.random.default_rng().standard_normal((N, D), np.float32)
    client.compute_loss(head, hidden, np.arange(N) % V, step=0, id=1, reduction="none", retain=True)
    upstream = np.ones(N, np.float32)
    upstream[ROW] = math.nan
    for streams in (1, 4):
        with pytest.raises(lossd.InvalidArgument, match=rf"backward.grad_loss\[{ROW}\] must be finite"):
            client.backward(head, 1, upstream, hidden_size=D, step=0, accumulate=True, streams=streams)
    assert client.describe_head(head).step_rows == 0


def test_a_target_that_the_draft_vocabulary_lacks(client: lossd.Client, make_head: Any) -> None:
    """Also in the first row, and if the list was learnt before the head was made again with another one."""
    hidden, listed = np.ones((N, D), np.float32), list(range(10, 30))
    head = make_head(hidden_size=D, vocab_size=len(listed), class_list=listed, full_vocab_size=V)
    refusing = lossd.LossOptions(refuse_unlisted=True)
    for row in (0, ROW):
        targets = np.full(N, 10)
        targets[row] = 40
        with pytest.raises(lossd.InvalidArgument, match=rf"open.targets\[{row}\] must be in the head's class_list with .*, got 40"):
            client.compute_loss(head, hidden, targets, step=0, id=1, accumulate=True, options=refusing, streams=4)
    assert client.compute_loss(head, hidden, targets, streams=4).unlisted_rows == 1
    with lossd.Client(client.target) as other:
        other.delete_head(head)
        other.create_head(head, hidden_size=D, vocab_size=V)
    assert client.compute_loss(head, hidden, targets, options=refusing, streams=4).valid_rows == N
