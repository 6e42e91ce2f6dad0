# SPDX-License-Identifier: Apache-2.0
"""The weight of a head as an embedding: Client.embed and Client.add_row_gradients, against NumPy in double precision."""

from __future__ import annotations

import numpy as np
import pytest
from servers import CutProxy, ServerProcess

import lossd
from lossd.v1 import loss_pb2, types_pb2

D, V, N = 24, 90, 700


def in_bf16(values):
    """The bits of the nearest bf16, ties to even, of finite float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


AS = {"fp32": lambda x: x, "fp16": lambda x: x.astype(np.float16), "bf16": in_bf16}


def summed(ids, gradients, scale=1.0, padding_idx=None, into=None):
    """The gradient of the weight [V, D], float64."""
    total = np.zeros((V, D)) if into is None else into
    counts = np.ones(len(ids), bool) if padding_idx is None else ids != padding_idx
    np.add.at(total, ids[counts], scale * gradients[counts].astype(np.float64))
    return total


@pytest.fixture
def head(make_head):
    return make_head(hidden_size=D, vocab_size=V)


@pytest.fixture
def ids(rng):
    return rng.integers(0, V, N)


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_rows(server, client, head, ids, dtype, transport):
    weight = client.read_tensor(head)
    with lossd.Client(server.target, transport=transport) as other:
        result = other.embed(head, ids, dtype=dtype, streams=2)
        np.testing.assert_array_equal(result.rows, AS[dtype](weight)[ids])
        out = np.zeros((N, D), lossd.types.NUMPY_DTYPES[dtype])
        assert other.embed(head, ids, dtype=dtype, out=out).rows is out
        np.testing.assert_array_equal(out, result.rows)
    state = client.describe_head(head).state
    assert (result.step, result.incarnation, result.weights_version) == (0, state.incarnation, state.weights_version)
    assert result.weights_version > 0 and result.received_bytes == out.nbytes


def test_rows_of_no_ids(client, head):
    assert client.embed(head, []).rows.shape == (0, D)


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_gradients(server, client, head, ids, rng, dtype, transport):
    gradients = AS[dtype](rng.standard_normal((N, D)).astype(np.float32))
    exact = gradients.astype(np.float32) if dtype != "bf16" else (gradients.astype(np.uint32) << 16).view(np.float32)
    with lossd.Client(server.target, transport=transport) as other:
        result = other.add_row_gradients(head, ids, gradients, step=0, id=5, scale=-0.75, padding_idx=3, streams=2,
                                         dtype="bf16" if dtype == "bf16" else None)
    valid = int((ids != 3).sum())
    assert (result.valid_rows, result.accumulated_rows, result.loss) == (valid, valid, 0.0)
    assert result.sent_bytes >= valid * D * gradients.itemsize and result.grad_hidden is None
    wanted = summed(ids, exact, -0.75, 3)
    np.testing.assert_allclose(client.read_tensor(head, role="gradient"), wanted, atol=1e-5)
    assert not client.read_tensor(head, role="gradient")[3].any()


def test_gradients_count_once_under_their_id(client, head, ids, rng):
    gradients = rng.standard_normal((N, D)).astype(np.float32)
    first = client.add_row_gradients(head, ids, gradients, step=0, id=1)
    again = client.add_row_gradients(head, ids, gradients, step=0, id=1)
    assert (first.accumulated_rows, again.accumulated_rows, again.repeated_rows) == (N, 0, N)
    np.testing.assert_allclose(client.read_tensor(head, role="gradient"), summed(ids, gradients), atol=1e-5)
    with pytest.raises(lossd.FailedPrecondition):  # the same id with other ids of rows
        client.add_row_gradients(head, (ids + 1) % V, gradients, step=0, id=1)
    with pytest.raises(lossd.FailedPrecondition):  # or with a loss
        client.compute_loss(head, gradients, ids, step=0, id=1, accumulate=True)
    np.testing.assert_allclose(client.read_tensor(head, role="gradient"), summed(ids, gradients), atol=1e-5)


def test_both_kinds_of_gradients_make_one_step(client, head, ids, rng):
    """A tied matrix: the gradient of the loss and that of the rows are added, and the step waits for both."""
    weight = client.read_tensor(head).astype(np.float64)
    hidden, gradients = rng.standard_normal((2, N, D)).astype(np.float32)
    targets = rng.integers(0, V, N)
    logits = hidden.astype(np.float64) @ weight.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(N), targets] -= 1
    wanted = summed(ids, gradients, 0.5, into=p.T @ hidden.astype(np.float64))
    client.compute_loss(head, hidden, targets, step=0, id=0, accumulate=True, reduction="sum")
    with pytest.raises(lossd.FailedPrecondition):
        client.apply_step(head, 0, lossd.SGD(lr=0.01), expected_microbatches=[0, 1])
    client.add_row_gradients(head, ids, gradients, step=0, id=1, scale=0.5)
    before = client.embed(head, ids)
    client.apply_step(head, 0, lossd.SGD(lr=0.01), expected_microbatches=[0, 1])
    np.testing.assert_allclose(client.read_tensor(head), weight - 0.01 * wanted, atol=2e-5)
    after = client.embed(head, ids, step=1)
    assert after.step == 1 and after.weights_version != before.weights_version
    with pytest.raises(lossd.FailedPrecondition, match="step"):
        client.embed(head, ids, step=0)


def test_what_is_refused(client, make_head, head, ids, rng):
    gradients = rng.standard_normal((N, D)).astype(np.float32)

    def refused(match, call, *arguments, kind=lossd.InvalidArgument, **options):
        with pytest.raises(kind, match=match):
            call(*arguments, **options)

    wrong = ids.copy()
    wrong[17] = -4
    refused(r"ids\[17\] is -4", client.embed, head, wrong)
    refused(r"ids\[17\] is -4", client.add_row_gradients, head, wrong, gradients, step=0, id=0)
    wrong[17] = -100  # what an ignored target would be
    refused(r"ids\[17\] is -100", client.embed, head, wrong)
    wrong[17] = ids[17]
    wrong[600] = V  # of the last stream's rows
    for streams in (1, 4):
        refused(rf"^ids\[600\] must be in \[0, {V}\), got {V}$", client.embed, head, wrong, streams=streams)
        refused(rf"^ids\[600\] must be in \[0, {V}\), got {V}$", client.add_row_gradients, head, wrong, gradients, step=0, id=0,
                streams=streams)
    refused(r"ids has shape \(7, 100\)", client.embed, head, ids.reshape(7, 100))
    refused("ids has .*float64", client.embed, head, ids.astype(np.float64))
    refused("dtype", client.embed, head, ids, dtype="fp64")
    refused(r"out has shape \(700,\)", client.embed, head, ids, out=np.zeros(N, np.uint16))
    refused(r"out has shape \(699, 24\).*\(700, 24\)", client.embed, head, ids, out=np.zeros((N - 1, D), np.uint16))
    refused("out has .* dtype float32", client.embed, head, ids, out=np.zeros((N, D), np.float32))
    refused("out must be C-contiguous", client.embed, head, ids, out=np.zeros((D, N), np.uint16).T)
    refused("ids has 699 entries for 700 rows of gradients", client.add_row_gradients, head, ids[1:], gradients, step=0, id=0)
    refused(r"gradients has shape \(700,\)", client.add_row_gradients, head, ids, gradients[:, 0], step=0, id=0)
    refused("gradients: a row has 23 elements", client.add_row_gradients, head, ids, gradients[:, :23], step=0, id=0)
    refused("out: a row has 23 elements", client.embed, head, ids, out=np.zeros((N, 23), np.uint16))
    refused("scale is nan", client.add_row_gradients, head, ids, gradients, step=0, id=0, scale=float("nan"))
    for padding in (-1, 1.5, True):
        refused("padding_idx is", client.add_row_gradients, head, ids, gradients, step=0, id=0, padding_idx=padding)
    gradients[5, 2] = np.inf
    refused("row 5|rows? .*5", client.add_row_gradients, head, ids, gradients, step=0, id=0, kind=lossd.NonFinite, streams=1)
    refused("nothing", client.embed, "nothing", ids, kind=lossd.NotFound)
    refused("head is empty", client.embed, "", ids)
    draft = make_head(hidden_size=D, vocab_size=4, class_list=[1, 5, 6, 8], full_vocab_size=V)
    refused("embedding", client.embed, draft, ids)
    frozen = make_head(hidden_size=D, vocab_size=V, frozen=True)
    gradients[5, 2] = 0
    assert client.embed(frozen, ids).rows.shape == (N, D)
    refused("frozen", client.add_row_gradients, frozen, ids, gradients, step=0, id=0, kind=lossd.FailedPrecondition)
    description = client.describe_head(head)
    assert (description.step_microbatches, description.step_rows) == (0, 0)
    assert not client.read_tensor(head, role="gradient").any()


def test_a_head_of_another_size_under_the_same_name(server, client, make_head):
    """What was learnt of the first one is said in the error, and does not stay."""
    name = make_head(hidden_size=D, vocab_size=V)
    with lossd.Client(server.target) as other:
        assert other.embed(name, [0]).rows.shape == (1, D)
        client.delete_head(name)
        client.create_head(name, hidden_size=2 * D, vocab_size=V)
        with pytest.raises(lossd.InvalidArgument, match=f"out: a row has {D} elements, but head .* has {2 * D}"):
            other.embed(name, [0])
        assert other.embed(name, [0]).rows.shape == (1, 2 * D)


@pytest.mark.parametrize(("transport", "mean_bytes"), [("grpc", 300_000), ("shared_memory", 15_000)])
def test_rows_and_gradients_through_a_cut_network(server, client, head, ids, rng, seed, transport, mean_bytes):
    ids = np.tile(ids, 5)
    gradients = rng.standard_normal((len(ids), D)).astype(np.float32)
    weight = client.read_tensor(head)
    proxy = CutProxy(server.target, mean_bytes=mean_bytes, seed=seed)
    retry = lossd.RetryOptions(max_attempts=200, initial_backoff=0.01, max_backoff=0.05)
    repeats = 0
    with lossd.Client(proxy.target, channels=2, retry=retry, transport=transport) as shaky:
        for id in range(6):
            found = shaky.embed(head, ids, dtype="fp32")
            np.testing.assert_array_equal(found.rows, weight[ids])
            result = shaky.add_row_gradients(head, ids, gradients, step=0, id=id)
            assert result.accumulated_rows + result.repeated_rows == len(ids)
            repeats += found.repeats + result.repeats
        shaky.apply_step(head, 0, lossd.SGD(lr=1e-3), expected_microbatches=range(6))
    proxy.close()
    assert proxy.cuts > 0 and repeats > 0
    np.testing.assert_allclose(client.read_tensor(head), weight - 1e-3 * summed(ids, gradients, 6.0), atol=1e-4)


def test_rows_are_of_one_version(server, client, head, ids, rng):
    """While another client steps the head, each call's rows are those of one moment."""
    with lossd.Client(server.target, transport="grpc") as other:
        for step in range(20):
            client.add_row_gradients(head, np.arange(V), np.ones((V, D), np.float32), step=step, id=0)
            pending = [other.embed_async(head, ids, dtype="fp32") for _ in range(4)]
            client.apply_step(head, step, lossd.SGD(lr=1.0))
            first = client.read_tensor(head) + 1.0
            for result in (each.wait() for each in pending):
                change = first[ids] - result.rows  # the same in all elements
                assert np.ptp(change) < 1e-4


def test_a_restarted_server_is_noticed(rng):
    server = ServerProcess()
    try:
        with lossd.Client(server.target, retry=lossd.RetryOptions(max_attempts=30, initial_backoff=0.05)) as client:
            client.create_head("e", hidden_size=D, vocab_size=V)
            gradients = rng.standard_normal((N, D)).astype(np.float32)
            ids = rng.integers(0, V, N)
            client.save_checkpoint("e", "saved")
            client.add_row_gradients("e", ids, gradients, step=0, id=0)
            server.kill()
            server.start()
            with lossd.Client(server.target) as second:
                second.load_checkpoint("e/saved")
            with pytest.raises(lossd.Restarted, match="gradients of step 0 are lost"):
                client.add_row_gradients("e", ids, gradients, step=0, id=1)
            assert client.describe_head("e").step_microbatches == 0
            assert client.embed("e", ids).rows.shape == (N, D)
    finally:
        server.stop()


def test_a_deterministic_server_gives_the_same_bits_in_any_order(deterministic_server, seed):
    """Losses and gradients of rows in one step, sent in any order."""
    parts = 6

    def gradient(name, order):
        rng = np.random.default_rng(seed)
        hidden = rng.standard_normal((parts, N, D)).astype(np.float32)
        targets = rng.integers(0, V, (parts, N))
        with lossd.Client(deterministic_server.target) as client:
            client.create_head(name, hidden_size=D, vocab_size=V, seed=1)
            pending = []
            for id in order:
                if id % 2:
                    pending.append(client.add_row_gradients_async(name, targets[id], hidden[id], step=0, id=id, streams=2))
                else:
                    pending.append(client.compute_loss_async(name, hidden[id], targets[id], step=0, id=id, accumulate=True))
            for each in pending:
                each.wait()
            found = client.read_tensor(name, role="gradient")
            client.delete_head(name)
        return found.view(np.uint32)

    first = gradient("one", range(parts))
    shuffled = np.random.default_rng(seed + 1).permutation(parts).tolist()
    np.testing.assert_array_equal(gradient("two", shuffled), first)


def test_pending_rows(client, head, ids):
    pending = client.embed_async(head, ids)
    assert isinstance(pending, lossd.PendingRows) and pending.wait() is not None and pending.done()
    assert repr(pending) == "<lossd.PendingRows, done>"
    with pytest.raises(TypeError, match="rows that are on their way cannot be copied"):
        pending.__reduce__()
    assert "EmbedResult(" in repr(pending.wait()) and "[700, 24] uint16" in repr(pending.wait())
