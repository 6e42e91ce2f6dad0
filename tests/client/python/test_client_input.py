# SPDX-License-Identifier: Apache-2.0
"""lossd.Client refuses bad input before or after the server sees it, and says which field has which value."""

import dataclasses

import numpy as np
import pytest

import lossd
from lossd._arrays import as_targets
from lossd.v1 import loss_pb2

D, V, N = 24, 310, 800


@pytest.fixture
def problem(rng):
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
    ({"normalizer": 3.0, "reduction": "sum"}, lossd.InvalidArgument, "normalizer is for"),
    ({"reduction": "median"}, lossd.InvalidArgument, "sum, mean, none"),
    ({"grad_output": float("nan")}, lossd.InvalidArgument, "grad_output is nan"),
    ({"targets": np.full(N, 2**32 - 100, np.uint32)}, lossd.InvalidArgument, r"targets\[0\] is 4294967196"),
    ({"accumulate": True}, lossd.InvalidArgument, "step is None"),
    ({"step": -1}, lossd.InvalidArgument, "step is -1"),
    ({"id": 2**64}, lossd.InvalidArgument, "id is 18446744073709551616"),
    ({"retain": True}, lossd.InvalidArgument, "retain"),
    ({"reduction": "none", "grad_hidden": True}, lossd.InvalidArgument, "backward"),
    ({"rows": ("loss", "perplexity")}, lossd.InvalidArgument, "perplexity"),
    ({"grad_hidden": np.zeros((N, D), np.float16)}, lossd.InvalidArgument, "float16.*float32"),
    ({"streams": 0}, lossd.InvalidArgument, "streams is 0"),
    ({"slice_bytes": 0}, lossd.InvalidArgument, "slice_bytes is 0"),
    ({"timeout": 0.0}, lossd.InvalidArgument, "timeout is 0"),
    ({"options": lossd.LossOptions(use_class_weights=True)}, lossd.InvalidArgument, "normalizer is None"),
    ({"step": 3, "accumulate": True}, lossd.FailedPrecondition, "step"),
    ({"head": "missing"}, lossd.NotFound, "missing"),
    ({"head": ""}, lossd.InvalidArgument, "head is empty"),
])
def test_bad_input_is_named_and_changes_nothing(client, make_head, problem, change, error, text):
    arguments = {"head": make_head(hidden_size=D, vocab_size=V), "hidden": problem[0], "targets": problem[1]} | change
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
    ("ignore_index", 2**31), ("ignore_index", -2**31 - 1),
    ("label_smoothing", 2.0), ("label_smoothing", -0.1), ("z_loss", -1.0), ("z_loss", float("inf")), ("softcap", -1.0),
    ("softcap", float("nan")), ("softcap", 1e-39), ("logit_scale", 0.0), ("logit_scale", float("inf")),
    ("gradients", "approximate"),
    ("filter_epsilon", 1.0), ("filter_epsilon", -0.5), ("filter_epsilon", float("nan")), ("sample_threshold", 0.0),
    ("sample_threshold", 1.5), ("sample_threshold", float("nan")), ("max_gradient_error", -0.5),
    ("max_gradient_error", float("inf")), ("max_gradient_error", float("nan"))])
def test_bad_loss_options(option, value):
    with pytest.raises(lossd.InvalidArgument, match=f"{option} is {value!r}; it must be"):
        lossd.LossOptions(**{option: value})


def test_every_loss_option_of_the_protocol_is_there():
    fields = {field.name for field in dataclasses.fields(lossd.LossOptions)}
    assert fields == {field.name for field in loss_pb2.LossOptions.DESCRIPTOR.fields}


@pytest.mark.parametrize("options, text", [
    ({"channels": 0}, "channels is 0"), ({"target": ""}, "target is ''"),
    ({"connect_timeout": 0.0}, "connect_timeout"), ({"max_message_bytes": 1}, "max_message_bytes"),
    ({"retry": lossd.RetryOptions(max_attempts=0)}, "max_attempts"), ({"max_pending": 0}, "max_pending is 0")])
def test_bad_options(options, text):
    with pytest.raises(lossd.InvalidArgument, match=text):
        lossd.Client(**options)


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
