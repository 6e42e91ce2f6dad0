# SPDX-License-Identifier: Apache-2.0
"""Deleting checkpoints, and heads whose values come from files that hold numbers that are none."""

import json
import struct
import threading

import numpy as np
import pytest

import lossd

D, V = 8, 50


def write_safetensors(path, **tensors):
    header, data = {}, b""
    for name, values in tensors.items():
        values = np.asarray(values, np.float32)
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def folder(server):
    return server.folder / "checkpoints"


@pytest.fixture
def weight(rng):
    return rng.standard_normal((V, D)).astype(np.float32)


def create(client, make_head_name, **file):
    client.create_head(make_head_name, hidden_size=D, vocab_size=V, bias="bias" in file,
                       tensor_file=lossd.TensorFile(**{"weight": "w", **file}))
    try:
        return client.read_tensor(make_head_name)
    finally:
        client.delete_head(make_head_name)


def test_a_checkpoint_is_deleted(client, make_head):
    head = make_head(hidden_size=D, vocab_size=V)
    saved = client.save_checkpoint(head, "best")
    client.save_checkpoint(head, "last")
    assert client.delete_checkpoint(saved.checkpoint) == saved.bytes > 0
    assert [each.checkpoint for each in client.list_checkpoints(head)] == [f"{head}/last"]
    with pytest.raises(lossd.NotFound, match="best") as error:
        client.delete_checkpoint(saved.checkpoint)
    assert error.value.field == "checkpoint"
    for name in ("", head, f"{head}/", f"../{head}/last", f"{head}/../{head}/last"):
        with pytest.raises(lossd.InvalidArgument):
            client.delete_checkpoint(name)
    client.load_checkpoint(f"{head}/last")
    client.delete_checkpoint(f"{head}/last")
    assert client.list_checkpoints(head) == []


def test_a_load_keeps_what_is_deleted_under_it(client, make_head, rng):
    head = make_head(hidden_size=256, vocab_size=20_000)
    weight = rng.standard_normal((20_000, 256)).astype(np.float32)
    client.write_tensor(head, "weight", weight)
    for round in range(5):
        client.save_checkpoint(head, f"x{round}")
        outcome = []

        def load(name=f"{head}/x{round}"):
            try:
                outcome.append(client.load_checkpoint(name, head))
            except lossd.NotFound as error:
                outcome.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        client.delete_checkpoint(f"{head}/x{round}")
        thread.join()
        assert isinstance(outcome[0], (lossd.HeadDescription, lossd.NotFound))
        np.testing.assert_array_equal(client.read_tensor(head), weight)
    assert client.list_checkpoints(head) == []


def test_an_index_with_shards_in_subfolders(client, folder, weight):
    write_safetensors(folder / "sharded/shards/model-00001.safetensors", w=weight)
    (folder / "sharded/model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "shards/model-00001.safetensors"}}))
    np.testing.assert_array_equal(create(client, "from-shards", path="sharded"), weight)


def test_links_that_lead_astray(client, folder, weight, tmp_path):
    write_safetensors(tmp_path / "model.safetensors", w=weight)
    (folder / "linked").mkdir(parents=True)
    link = folder / "linked/model.safetensors"
    link.symlink_to(tmp_path / "model.safetensors")
    with pytest.raises(lossd.InvalidArgument, match="linked/model.safetensors' leads outside .* symbolic link; copy"):
        create(client, "linked", path="linked")
    link.unlink()
    link.symlink_to("nothing")
    with pytest.raises(lossd.NotFound, match="symbolic link to something that is not there"):
        create(client, "linked", path="linked")
    link.unlink()
    link.symlink_to("model.safetensors")
    with pytest.raises(lossd.InvalidArgument, match="loop of links"):
        create(client, "linked", path="linked")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(client, folder, weight, bad):
    bias = np.zeros(V, np.float32)
    weight[7, 3] = weight[9, 0] = bad
    write_safetensors(folder / "bad.safetensors", w=weight, b=bias)
    with pytest.raises(lossd.InvalidArgument, match=r"allow_non_finite is set, got -?(nan|inf) at \[7, 3\] of 'w'") as error:
        create(client, "bad", path="bad.safetensors")
    assert error.value.field == "tensor_file.weight"
    with pytest.raises(lossd.NotFound):
        client.describe_head("bad")
    taken = create(client, "bad", path="bad.safetensors", allow_non_finite=True)
    np.testing.assert_array_equal(taken, weight)


def test_a_bias_may_mask_classes(client, folder, weight):
    bias = np.zeros(V, np.float32)
    bias[10:] = -np.inf
    write_safetensors(folder / "masked.safetensors", w=weight, b=bias)
    np.testing.assert_array_equal(create(client, "masked", path="masked.safetensors", bias="b"), weight)


def test_a_reset_from_a_file_that_is_refused_changes_nothing(client, make_head, folder, weight):
    head = make_head(hidden_size=D, vocab_size=V)
    client.compute_loss(head, np.ones((3, D), np.float32), [1, 2, 3], step=0, id=0, accumulate=True)
    client.apply_step(head, 0, lossd.AdamW(lr=0.1))
    before = {role: client.read_tensor(head, role=role) for role in ("value", "moment1", "moment2")}
    weight[V - 1, D - 1] = np.nan  # the last one
    write_safetensors(folder / "late.safetensors", w=weight)
    file = lossd.TensorFile(path="late.safetensors", weight="w")
    with pytest.raises(lossd.InvalidArgument, match=rf"nan at \[{V - 1}, {D - 1}\] of 'w'"):
        client.reset_head(head, "all", tensor_file=file)
    assert client.describe_head(head).state.step == 1
    for role, values in before.items():
        np.testing.assert_array_equal(client.read_tensor(head, role=role), values)
    client.reset_head(head, "all", tensor_file=lossd.TensorFile(path="late.safetensors", weight="w", allow_non_finite=True))
    np.testing.assert_array_equal(client.read_tensor(head), weight)
