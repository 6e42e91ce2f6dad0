# SPDX-License-Identifier: Apache-2.0
"""How rows are divided over streams and slices, and how a slice's tensors are framed."""

import grpc
import numpy as np
import pytest

from lossd import _wire, errors
from lossd._plan import (
    MIN_ROWS_PER_STREAM, AnswerTracker, Rows, SliceRule, divide_into_slices, make_slice_rule, split_ranges, unsent, wanted_rows)
from lossd.v1 import head_pb2, loss_pb2, types_pb2


# Splitting rows over streams and slices, against plain loops and stated rules.


@pytest.mark.parametrize("rows, share, streams, max_rows", [
    (0, 1, 4, 100), (1, 1, 4, 100), (1000, 1, 1, 10**6), (1000, 0.7, 4, 10**6), (1000, 0.05, 3, 10**6),
    (1000, 0, 4, 10**6), (1000, 1, 2, 130), (64, 1, 4, 1)])
def test_ranges_cover_all_rows_evenly(rng, rows, share, streams, max_rows):
    valid = rng.random(rows) < share
    ranges = split_ranges(valid, streams, max_rows)
    assert [r.begin for r in ranges] == [0, *(r.end for r in ranges[:-1])]
    assert ranges[-1].end == rows
    assert all(len(r) <= max_rows for r in ranges)
    if max_rows >= rows:
        counts = [np.count_nonzero(valid[r.begin:r.end]) for r in ranges]
        assert len(ranges) <= streams
        assert len(ranges) == 1 or min(counts) >= MIN_ROWS_PER_STREAM - 1
        assert max(counts) - min(counts) <= 1 or len(ranges) == 1


@pytest.mark.parametrize("share", [0, 0.02, 0.3, 0.9, 1])
@pytest.mark.parametrize("row_grid", [0, 1, 40, 1000])
def test_slices_hold_every_valid_row_once(rng, share, row_grid):
    valid = rng.random(700) < share
    rows, max_rows = Rows(13, 650), int(rng.integers(1, 90))
    slices = divide_into_slices(valid, rows, SliceRule(max_rows, row_grid))
    covered = np.zeros(700, int)
    for piece in slices:
        assert 0 < len(piece) <= max_rows and valid[piece.begin] and valid[piece.end - 1]
        assert row_grid == 0 or piece.begin // row_grid == (piece.end - 1) // row_grid
        inside = np.diff(np.flatnonzero(valid[piece.begin:piece.end]))
        assert inside.size == 0 or inside.max() <= max(1, max_rows // 8) + 1
        covered[piece.begin:piece.end] += 1
    assert covered.max(initial=0) <= 1
    assert (covered[13:650][valid[13:650]] == 1).all() and not covered[:13].any() and not covered[650:].any()
    for piece in unsent(rows, slices):
        assert not covered[piece.begin:piece.end].any()
        covered[piece.begin:piece.end] = 1
    assert covered[13:650].all()


def test_slice_size_obeys_every_limit():
    limits = loss_pb2.SliceLimits(max_rows=50, max_bytes=1000, row_grid=7)
    assert make_slice_rule(10, 200, limits) == SliceRule(20, 7)
    assert make_slice_rule(10, 10**6, limits).max_rows == 50
    assert make_slice_rule(100, 10**6, limits).max_rows == 10
    assert make_slice_rule(900, 10, limits).max_rows == 1
    assert make_slice_rule(10, None, limits) == SliceRule(50, 7)
    in_region = loss_pb2.SliceLimits(max_rows=500, max_bytes=1000, max_bytes_in_region=4000)
    assert make_slice_rule(10, None, in_region) == SliceRule(100, 0, 400)
    assert make_slice_rule(4, None, in_region) == SliceRule(250, 0, 500)
    assert make_slice_rule(10, 600, in_region) == SliceRule(60)
    with pytest.raises(errors.InvalidArgument, match="1001 bytes.*1000"):
        make_slice_rule(1001, 10, limits)


def test_answer_tracker_takes_each_slice_once():
    tracker = AnswerTracker(Rows(0, 10), [Rows(0, 4), Rows(5, 10)])
    tracker.take(Rows(5, 10))
    for wrong in (Rows(5, 10), Rows(0, 3), Rows(4, 5), Rows(0, 11), Rows(3, 3)):
        with pytest.raises(errors.Internal, match="server sent results"):
            tracker.take(wrong)
    assert not tracker.complete()
    tracker.take(Rows(0, 4))
    assert tracker.complete() and tracker.answered_rows == 9


def test_answer_tracker_of_slices_that_the_server_cuts():
    tracker = AnswerTracker(Rows(2, 10), None)
    tracker.take(Rows(4, 6))
    for wrong in (Rows(4, 6), Rows(5, 7), Rows(0, 3), Rows(9, 11)):
        with pytest.raises(errors.Internal, match="server sent results"):
            tracker.take(wrong)
    tracker.take(Rows(6, 10))
    assert tracker.answered_rows == 6


def test_slices_in_a_region_are_equal_and_as_large_as_wanted() -> None:
    rule = SliceRule(100, 0, 400)
    assert rule.in_region(1000, 1 << 40) == SliceRule(334)
    assert rule.in_region(800, 1 << 40) == SliceRule(400)
    assert rule.in_region(300, 1 << 40) == SliceRule(400), "ignored rows between valid ones do not cut it"
    assert rule.in_region(300, 200) == SliceRule(150)
    assert rule.in_region(300, 7) == SliceRule(100), "no smaller than those in messages"
    assert rule.in_region(0, 200) == SliceRule(200)
    assert SliceRule(100).in_region(250, 200) == SliceRule(84)


def test_slices_in_memory_of_the_host_are_larger_among_other_calls() -> None:
    mib = 1 << 20
    assert wanted_rows(256 * mib, of_gpu=False, row_bytes=mib) == 4
    assert wanted_rows(256 * mib, of_gpu=False, row_bytes=mib, among_calls=True) == 16
    assert wanted_rows(32 * mib, of_gpu=False, row_bytes=mib, among_calls=True) == 8, "a share of the region"
    for among_calls in (False, True):
        assert wanted_rows(256 * mib, of_gpu=True, row_bytes=mib, among_calls=among_calls) == 64


def test_a_slice_without_room_is_cut_for_messages() -> None:
    assert SliceRule(100).cut(Rows(5, 255)) == [Rows(5, 105), Rows(105, 205), Rows(205, 255)]
    assert SliceRule(100, 40).cut(Rows(5, 85)) == [Rows(5, 40), Rows(40, 80), Rows(80, 85)]


def test_answers_to_the_parts_of_a_slice() -> None:
    tracker = AnswerTracker(Rows(0, 20), [Rows(0, 10), Rows(10, 20)])
    tracker.replace(Rows(10, 20), [Rows(10, 15), Rows(15, 20)])
    tracker.take(Rows(15, 20))
    with pytest.raises(errors.Internal, match="which are no slice of this call"):
        tracker.take(Rows(10, 20))
    tracker.take(Rows(0, 10))
    assert not tracker.complete()
    tracker.take(Rows(10, 15))
    assert tracker.complete() and tracker.answered_rows == 20


# Framing of tensors, against protobuf's own encoding.


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
