# SPDX-License-Identifier: Apache-2.0
"""Heads' tensors as streams of bytes. Stateless."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

from lossd._cancellation import Cancellation
from lossd._connections import Connections, Deadline
from lossd._interrupts import run_apart
from lossd._regions import SharedRegion
from lossd._tensor_messages import TensorReader, encode_rows, one_answer
from lossd.types import PARAMS
from lossd.v1 import head_pb2

M = TypeVar("M", bound=Message)

_READ = "/lossd.v1.HeadService/ReadTensor"
_WRITE = "/lossd.v1.HeadService/WriteTensor"
_ADD = "/lossd.v1.HeadService/AddGradient"

_LEAST_SHARED = 1 << 20  # bytes of a tensor that is worth a region
_PIECE_BYTES = 16 << 20  # for larger pieces no larger region is asked for
_PIECES_PER_REGION = 4  # so that loss computations find room beside it


def tensor_shape(spec: head_pb2.HeadSpec, param: head_pb2.Param) -> tuple[int, ...]:
    if param == PARAMS["weight"]:
        return spec.vocab_size, spec.hidden_size
    by_class = param in (PARAMS["bias"], PARAMS["class_weights"])
    return (spec.vocab_size if by_class else spec.hidden_size,)


def read_tensor(connections: Connections, request: head_pb2.ReadTensorRequest, row_bytes: int, out: memoryview,
                deadline: Deadline, tensor_rows: int) -> None:
    """Reads the rows that `request` names into `out`, bytes of whole rows; in shared memory if they are worth it.

    Aborted if the tensor has not `tensor_rows` rows of `row_bytes`.
    """
    reader = TensorReader(request, row_bytes, out, tensor_rows)
    ending = Cancellation()

    def read() -> None:
        region = connections.regions.get(min(out.nbytes, _PIECE_BYTES)) if out.nbytes >= _LEAST_SHARED else None
        if region is None or not region.begin():
            return _read_rows(connections, request, reader, deadline, ending)
        try:
            _read_through(region, connections, request, row_bytes, reader, deadline, ending)
        finally:
            region.leave()

    run_apart(read, ending.cancel)
    reader.end()


def _read_rows(connections: Connections, request: head_pb2.ReadTensorRequest, reader: TensorReader, deadline: Deadline,
               ending: Cancellation, in_region: memoryview = memoryview(b"")) -> None:
    """What one ReadTensor call answers. `in_region`: where its rows may lie."""
    connections.exchange(_READ, iter([request.SerializeToString()]),
                         lambda data: reader.handle(data, in_region, request.rows.begin), deadline, ending)


def _read_through(region: SharedRegion, connections: Connections, request: head_pb2.ReadTensorRequest, row_bytes: int,
                  reader: TensorReader, deadline: Deadline, ending: Cancellation) -> None:
    """Reads the rows piece by piece, each by a call of its own, for which there is room in the region.

    What finds none comes in messages.
    """
    most = max(1, region.size // _PIECES_PER_REGION // row_bytes)
    row = request.rows.begin
    while row < request.rows.end:
        count = min(most, request.rows.end - row)
        offset = region.take(count * row_bytes)
        piece = head_pb2.ReadTensorRequest()
        piece.CopyFrom(request)
        piece.rows.begin, piece.rows.end = row, request.rows.end if offset is None else row + count
        if offset is None:
            return _read_rows(connections, piece, reader, deadline, ending)
        piece.region = region.id
        piece.in_region.offset, piece.in_region.bytes = offset, count * row_bytes
        try:
            _read_rows(connections, piece, reader, deadline, ending, region.memory[offset:offset + count * row_bytes].data)
        except BaseException as error:
            region.after_failure(error, holds=True)
            raise
        region.give(offset)
        row += count


def write_tensor(connections: Connections, open_: head_pb2.OpenTensor, row_bytes: int, payload: memoryview,
                 deadline: Deadline) -> head_pb2.WriteTensorResponse:
    """Replaces whole rows."""
    first = head_pb2.WriteTensorRequest(open=open_)
    return _send_rows(connections, _WRITE, first, head_pb2.WriteTensorResponse, row_bytes, payload, deadline)


def add_gradient(connections: Connections, open_: head_pb2.OpenGradient, row_bytes: int, payload: memoryview,
                 deadline: Deadline) -> head_pb2.AddGradientResponse:
    """Adds whole rows to a gradient."""
    first = head_pb2.AddGradientRequest(open=open_)
    return _send_rows(connections, _ADD, first, head_pb2.AddGradientResponse, row_bytes, payload, deadline)


def _send_rows(connections: Connections, method: str, first: Message, answer: type[M], row_bytes: int,
               payload: memoryview, deadline: Deadline) -> M:
    """Sends the payload in messages of whole rows behind `first`'s fields; returns the one answer."""
    answers: list[bytes] = []
    connections.exchange(method, encode_rows(first, row_bytes, payload), answers.append, deadline, Cancellation())
    return one_answer(answer, answers)
