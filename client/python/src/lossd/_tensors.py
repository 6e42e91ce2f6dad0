# SPDX-License-Identifier: Apache-2.0
"""Heads' tensors as streams of bytes. Stateless."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message

from lossd import _wire, errors, types
from lossd._connections import Connections, Deadline
from lossd._interrupts import Cancellation, run_apart
from lossd._regions import SharedRegion
from lossd._shown import exact_bytes
from lossd.types import PARAMS
from lossd.v1 import head_pb2, types_pb2


# The messages of tensor transfers, apart from gRPC: rows on their way to the server, and rows that come from it.
#
# client/cpp/tensor_transfer.h does the same; tests/client/golden/messages.json and tensor_answers.json hold both to it.

M = TypeVar("M", bound=Message)

_WRITE_BYTES = 1 << 20  # of payload per message
OTHER_SHAPE = "tensor_rows, tensor_cols"  # the field of the error of a tensor that is not the one that was described
_ELEMENT_BYTES = {types.DTYPES[name]: dtype.itemsize for name, dtype in types.NUMPY_DTYPES.items()}


def encode_rows(first: Message, row_bytes: int, payload: memoryview) -> Iterator[bytes]:
    """The payload in messages of whole rows, about 1 MiB each, behind the fields of `first`."""
    size = max(1, _WRITE_BYTES // row_bytes) * row_bytes
    for begin in range(0, max(payload.nbytes, 1), size):
        yield _wire.encode(first if begin == 0 else type(first)(), payload[begin:begin + size])


def one_answer(kind: type[M], answers: Sequence[bytes]) -> M:
    """The one answer to a tensor that was sent; Internal if there is another number of them."""
    if len(answers) != 1:
        raise errors.server_sent(f"{len(answers)} answers to one tensor")
    return _wire.decode(kind, answers[0])[0]


class TensorReader:
    """Puts the slices of ReadTensor calls where they belong: `out`, bytes of the rows that are read.

    Of one call, or of several that read the rows piece by piece. Used by one thread. Internal says what the server sent,
    Aborted that the tensor has changed under the calls; then the contents of `out` are unspecified.
    """

    def __init__(self, request: head_pb2.ReadTensorRequest, row_bytes: int, out: memoryview,
                 tensor_rows: int | None = None) -> None:
        """The rows that `request` names are those of `out`; `tensor_rows`: how many the tensor has, if that is known."""
        first_row = request.rows.begin
        self._head = request.head
        self._dtype = request.dtype
        self._of_gradient = request.role == head_pb2.ROLE_GRADIENT
        self._version: tuple[int, ...] | None = None  # of the first slice
        self._first_row = self._next_row = first_row
        self._end_row = first_row + out.nbytes // row_bytes
        self._row_bytes = row_bytes
        self._out = out
        self._tensor_rows = tensor_rows
        self._begun = False

    def handle(self, data: bytes, in_region: memoryview = memoryview(b""), first_row: int = 0) -> None:
        """`in_region`: the rows of the call that begin with `first_row` lie there if the message says so."""
        tensor_slice, payload = _wire.decode(head_pb2.TensorSlice, data)
        begin, end = tensor_slice.rows.begin, tensor_slice.rows.end
        if self._tensor_rows is not None:
            self._check_shape(tensor_slice, self._tensor_rows)
        if not self._begun and (self._end_row > tensor_slice.tensor_rows or tensor_slice.tensor_cols == 0):
            raise errors.server_sent(
                f"a tensor of {tensor_slice.tensor_rows} x {tensor_slice.tensor_cols} for rows up to {self._end_row}")
        self._begun = True
        self._check_version(tensor_slice.state)
        if begin != self._next_row or not begin <= end <= self._end_row:
            raise errors.server_sent(f"tensor rows [{begin}, {end}); row {self._next_row} was expected next, of rows "
                                     f"up to {self._end_row}")
        expected = (end - begin) * self._row_bytes
        if tensor_slice.in_region:
            before = (begin - first_row) * self._row_bytes
            if payload.nbytes or before < 0 or expected > in_region.nbytes - before:
                raise errors.server_sent(f"rows in a region for tensor rows [{begin}, {end}), which are not in one")
            payload = in_region[before:before + expected]
        if payload.nbytes != expected:
            raise errors.server_sent(f"{exact_bytes(payload.nbytes)} of tensor; {expected} were expected")
        at = (begin - self._first_row) * self._row_bytes
        # NumPy copies without the interpreter's lock.
        np.frombuffer(self._out, np.uint8)[at:at + expected] = np.frombuffer(payload, np.uint8)
        self._next_row = end

    def _check_shape(self, tensor_slice: head_pb2.TensorSlice, rows: int) -> None:
        """Aborted if the tensor is not the one that was described before the call."""
        row_bytes = tensor_slice.tensor_cols * _ELEMENT_BYTES[self._dtype]
        if tensor_slice.tensor_rows != rows or row_bytes != self._row_bytes:
            shape = f"{tensor_slice.tensor_rows} x {tensor_slice.tensor_cols}"
            raise errors.Aborted(f'head "{self._head}" was made again during the call: its tensor has {shape} values, which is '
                                 "not what it had", types_pb2.ErrorDetail(field=OTHER_SHAPE, value=shape))

    def _check_version(self, state: types_pb2.HeadState) -> None:
        """All slices are of one version: of the gradients or of the weights; of the step, if the server says neither."""
        number = state.generation if self._of_gradient else state.weights_version
        version = state.incarnation, number, 0 if number else state.step
        if self._version is None:
            self._version = version
        elif self._version != version:
            raise errors.Aborted(f'the tensor of head "{self._head}" changed while it was read')

    def end(self) -> None:
        """The server has ended the last call with OK."""
        if not self._begun and self._out.nbytes:
            raise errors.server_sent(f"no tensor rows; {exact_bytes(self._out.nbytes)} were expected")
        if self._next_row != self._end_row:
            raise errors.server_sent(
                f"tensor rows up to {self._next_row}; rows up to {self._end_row} were expected")


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
