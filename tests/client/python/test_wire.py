# SPDX-License-Identifier: Apache-2.0
"""Framing of tensors, against protobuf's own encoding."""

import grpc
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
    last = loss_pb2.OpenMicrobatch(retain=True, incarnation=7)
    encoded = _wire.encode_opening("open", open_, {"targets": targets, "row_weights": weights}, last)
    whole = loss_pb2.OpenMicrobatch(head="a", step=3, targets=targets, row_weights=weights, retain=True, incarnation=7)
    assert encoded == loss_pb2.ComputeLossRequest(open=whole).SerializeToString()


def test_the_payload_has_one_number_everywhere():
    messages = [kind for file in (loss_pb2, head_pb2) for kind in file.DESCRIPTOR.message_types_by_name.values()
                if "payload" in kind.fields_by_name]
    assert len(messages) == 5
    assert {kind.fields_by_name["payload"].number for kind in messages} == {_wire._PAYLOAD_FIELD}


@pytest.mark.parametrize("data", [b"\xc2\x3e\x05abc", b"\x12", b"\xff" * 12, b"\x13", b"\x12\x02\xff\xff"])
def test_garbage_is_the_servers_fault(data):
    with pytest.raises(errors.Internal, match="unreadable message"):
        _wire.decode(head_pb2.TensorSlice, data)


class EndedCall(grpc.RpcError):
    """An error as gRPC raises it, with these bytes as its details."""

    def __init__(self, details: bytes) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INVALID_ARGUMENT

    def details(self) -> str:
        return "spec.name must be short"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return (("grpc-status-details-bin", self._details),)


@pytest.mark.parametrize("broken", ["a message", "a string"])
def test_details_that_cannot_be_read_do_not_hide_the_error(broken):
    details = types_pb2.StatusDetails(code=3)
    details.details.add().Pack(types_pb2.ErrorDetail(field="spec.name", value="caf!"))
    good = details.SerializeToString()
    assert errors.from_rpc(EndedCall(good), "here").field == "spec.name"
    bad = good[:-3] if broken == "a message" else good.replace(b"caf!", b"caf\xc3")
    error = errors.from_rpc(EndedCall(bad), "here")
    assert isinstance(error, errors.InvalidArgument)
    assert error.message == "spec.name must be short" and error.field == ""
