"""Heads' tensors as streams of bytes. Stateless."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf.message import Message

from lossd import _wire, errors
from lossd._connections import Connections, Deadline
from lossd.types import PARAMS
from lossd.v1 import head_pb2

M = TypeVar("M", bound=Message)

_READ = "/lossd.v1.HeadService/ReadTensor"
_WRITE = "/lossd.v1.HeadService/WriteTensor"
_ADD = "/lossd.v1.HeadService/AddGradient"
_WRITE_BYTES = 1 << 20  # of payload per message


def tensor_shape(spec: head_pb2.HeadSpec, param: head_pb2.Param) -> tuple[int, ...]:
    if param == PARAMS["weight"]:
        return spec.vocab_size, spec.hidden_size
    by_class = param in (PARAMS["bias"], PARAMS["class_weights"])
    return (spec.vocab_size if by_class else spec.hidden_size,)


def read_tensor(connections: Connections, request: head_pb2.ReadTensorRequest, row_bytes: int, first_row: int,
                out: memoryview, deadline: Deadline) -> None:
    """Reads rows from `first_row` on into `out`, bytes of whole rows."""
    end_row = first_row + out.nbytes // row_bytes
    next_row = first_row

    def exchange() -> None:
        nonlocal next_row
        call = connections.stream(0, _READ)(iter([request.SerializeToString()]), timeout=deadline.left())
        try:
            for data in call:
                piece, payload = _wire.decode(head_pb2.TensorSlice, data)
                begin, end = piece.rows.begin, piece.rows.end
                if begin != next_row or not begin <= end <= end_row:
                    raise errors.server_sent(f"tensor rows [{begin}, {end}); row {next_row} was expected next, of "
                                             f"rows up to {end_row}")
                if payload.nbytes != (end - begin) * row_bytes:
                    raise errors.server_sent(
                        f"{payload.nbytes} bytes of tensor; {(end - begin) * row_bytes} were expected")
                out[(begin - first_row) * row_bytes:(end - first_row) * row_bytes] = payload
                next_row = end
        finally:
            call.cancel()

    connections.run(exchange)
    if next_row != end_row:
        raise errors.server_sent(f"tensor rows up to {next_row}; rows up to {end_row} were expected")


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
    size = max(1, _WRITE_BYTES // row_bytes) * row_bytes

    def messages() -> Iterator[bytes]:
        for begin in range(0, max(payload.nbytes, 1), size):
            yield _wire.encode(first if begin == 0 else type(first)(), payload[begin:begin + size])

    def exchange() -> list[bytes]:
        call: Any = connections.stream(0, method)(messages(), timeout=deadline.left())
        try:
            return list(call)
        finally:
            call.cancel()

    answers = connections.run(exchange)
    if len(answers) != 1:
        raise errors.server_sent(f"{len(answers)} answers to one tensor")
    return _wire.decode(answer, answers[0])[0]
