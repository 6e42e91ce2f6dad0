"""Framing of tensors, against protobuf's own encoding."""

import numpy as np
import pytest

from lossd import _wire, errors
from lossd.v1 import head_pb2, loss_pb2, types_pb2


def slice_request(payload: bytes = b"") -> loss_pb2.ComputeLossRequest:
    header = loss_pb2.SliceHeader(rows=types_pb2.RowRange(begin=3, end=300))
    return loss_pb2.ComputeLossRequest(slice=header, payload=payload)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 70000])
def test_encoding_is_that_of_protobuf(rng, size):
    payload = rng.bytes(size)
    assert _wire.encode(slice_request(), memoryview(payload)) == slice_request(payload).SerializeToString()


@pytest.mark.parametrize("size", [0, 1, 127, 128, 70000])
def test_decoding_returns_fields_and_a_view(rng, size):
    payload = rng.bytes(size)
    data = slice_request(payload).SerializeToString()
    message, view = _wire.decode(loss_pb2.ComputeLossRequest, data)
    assert message == slice_request() and bytes(view) == payload
    assert size == 0 or view.obj is data


def test_decoding_accepts_any_order_of_fields(rng):
    payload = loss_pb2.ComputeLossRequest(payload=rng.bytes(50))
    data = payload.SerializeToString() + slice_request().SerializeToString()
    message, view = _wire.decode(loss_pb2.ComputeLossRequest, data)
    assert message == slice_request() and bytes(view) == payload.payload


def test_packed_arrays_are_those_of_protobuf(rng):
    targets = rng.integers(-100, 1000, 77).astype(np.int32)
    weights = rng.random(77).astype(np.float32)
    open_ = loss_pb2.OpenMicrobatch(head="a", step=3)
    encoded = _wire.encode_nested(1, open_, {18: targets, 19: weights})
    message = loss_pb2.ComputeLossRequest.FromString(encoded)
    assert list(message.open.targets) == targets.tolist()
    assert np.array_equal(np.array(message.open.row_weights, np.float32), weights)
    assert message.open.head == "a" and message.open.step == 3


@pytest.mark.parametrize("data", [b"\xc2\x3e\x05abc", b"\x12", b"\xff" * 12, b"\x13", b"\x12\x02\xff\xff"])
def test_garbage_is_the_servers_fault(data):
    with pytest.raises(errors.Internal, match="unreadable message"):
        _wire.decode(head_pb2.TensorSlice, data)
