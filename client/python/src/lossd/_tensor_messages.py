# SPDX-License-Identifier: Apache-2.0
"""The messages of tensor transfers, apart from gRPC: rows on their way to the server, and rows that come from it.

client/cpp/tensor_transfer.h does the same; tests/client/golden/wire.json and tensor_answers.json hold both to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message

from lossd import _wire, errors, types
from lossd._shown import exact_bytes
from lossd.v1 import head_pb2, types_pb2

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
