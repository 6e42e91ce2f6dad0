# SPDX-License-Identifier: Apache-2.0
"""lossd.Client against a server process: numbers against NumPy in double precision, and administration."""

import gc
import time
import weakref

import numpy as np
import pytest
from filtered_softmax import epsilon_among, filtered

import lossd

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


def test_rows_go_over_the_connections_that_are_idle(server, make_head, problem):
    head = make_head(hidden_size=D, vocab_size=V)
    with lossd.Client(server.target, channels=3) as client:
        def streams(**options):
            return client.compute_loss(head, *problem, **options).streams

        assert streams() == 3
        with client._connections.lend() as first:
            assert streams() == 2
            with client._connections.lend() as second, client._connections.lend() as third:
                assert len({id(first), id(second), id(third)}) == 3
                assert streams() == 1 and streams(streams=2) == 2
        assert streams() == 3


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
    for changes, what in (({"vocab_size": 31}, "vocab_size 30 instead of 31"), ({"bias": True}, "bias False instead of True"),
                          ({"norm": "rmsnorm"}, "norm")):
        with pytest.raises(lossd.AlreadyExists, match=what):
            client.create_head(name, **{"hidden_size": 8, "vocab_size": 30, **changes}, if_exists="keep")
