"""Heads' tensors as streams of bytes. Stateless."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message

from lossd._connections import Connections, Deadline
from lossd._tensor_messages import TensorReader, encode_rows, one_answer
from lossd.types import PARAMS
from lossd.v1 import head_pb2

M = TypeVar("M", bound=Message)

_READ = "/lossd.v1.HeadService/ReadTensor"
_WRITE = "/lossd.v1.HeadService/WriteTensor"
_ADD = "/lossd.v1.HeadService/AddGradient"


def tensor_shape(spec: head_pb2.HeadSpec, param: head_pb2.Param) -> tuple[int, ...]:
    if param == PARAMS["weight"]:
        return spec.vocab_size, spec.hidden_size
    by_class = param in (PARAMS["bias"], PARAMS["class_weights"])
    return (spec.vocab_size if by_class else spec.hidden_size,)


def read_tensor(connections: Connections, request: head_pb2.ReadTensorRequest, row_bytes: int, out: memoryview,
                deadline: Deadline) -> None:
    """Reads the rows that `request` names into `out`, bytes of whole rows."""
    reader = TensorReader(request, row_bytes, out)

    def exchange() -> None:
        call = connections.stream(0, _READ)(iter([request.SerializeToString()]), timeout=deadline.left())
        try:
            for data in call:
                reader.handle(data)
        finally:
            call.cancel()

    connections.run(exchange)
    reader.end()


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
    def exchange() -> list[bytes]:
        call: Any = connections.stream(0, method)(encode_rows(first, row_bytes, payload), timeout=deadline.left())
        try:
            return list(call)
        finally:
            call.cancel()

    return one_answer(answer, connections.run(exchange))
