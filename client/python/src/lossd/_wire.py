# SPDX-License-Identifier: Apache-2.0
"""Messages whose tensor is no part of them: framing of their payload without a copy through protobuf, and where the slices of a
call lie (SlicePlaces).

A message that carries a tensor has it in the field `payload`, last on the wire. Writing joins the small fields and
the tensor's memory once; reading returns a view of what gRPC delivered.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from lossd import errors
from lossd._arrays import RowMemory
from lossd._plan import Rows
from lossd._regions import SharedRegion
from lossd.v1 import loss_pb2

M = TypeVar("M", bound=Message)

# Wire types.
_VARINT, _FIXED64, _LENGTH_DELIMITED, _GROUP_START, _GROUP_END, _FIXED32 = range(6)
# Most bytes of a tag and of a length, and of any number.
_TAG_BYTES, _NUMBER_BYTES = 5, 10


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _tag(kind: type[Message], field: str) -> bytes:
    """Of a field with bytes, a message or packed numbers."""
    return _varint(kind.DESCRIPTOR.fields_by_name[field].number << 3 | _LENGTH_DELIMITED)


_PAYLOAD_FIELD = loss_pb2.ComputeLossRequest.DESCRIPTOR.fields_by_name["payload"].number
_PAYLOAD_TAG = _tag(loss_pb2.ComputeLossRequest, "payload")

_KEPT_BYTES = 31 << 20

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.argtypes, _address_of.restype = (ctypes.py_object,), ctypes.c_void_p


def keep_freed_memory() -> None:
    """Lets messages reuse memory whose pages are there already; page faults cost more than the copies.

    glibc returns freed memory to the system when more is free than twice the largest block that it ever gave back by
    itself, of up to 32 MiB: so it is shown one, which no code touches. With other allocators this does nothing.
    """
    bytes(_KEPT_BYTES)


def encode(message: Message, payload: memoryview | None = None) -> bytes:
    """The message with the tensor as its last field; `payload` is bytes, one-dimensional."""
    fields = message.SerializeToString()
    if payload is None or payload.nbytes == 0:
        return fields
    return _join(fields + _PAYLOAD_TAG + _varint(payload.nbytes), payload)


def _join(head: bytes, payload: memoryview) -> bytes:
    """b"".join((head, payload)), but copies without the interpreter's lock, as memmove of ctypes does.

    A bytes object made without contents may be filled as long as no other code has seen it, says Python's C API.
    """
    joined: bytes = _new_bytes(None, len(head) + payload.nbytes)
    address = _address_of(joined)
    (ctypes.c_char * len(head)).from_address(address).raw = head  # too little to let go of the lock for
    ctypes.memmove(address + len(head), np.frombuffer(payload, np.uint8).ctypes.data, payload.nbytes)
    return joined


def encode_opening(kind: str, first: M, *more: Mapping[str, NDArray[Any]] | M) -> bytes:
    """A ComputeLossRequest whose field `kind` has the fields of `first`, and those of `more`: messages, and arrays by name.

    They are in the order of their numbers, as protobuf writes them. Elements of arrays have four bytes each.
    """
    parts: list[bytes | memoryview] = [first.SerializeToString()]
    for part in more:
        if isinstance(part, Message):
            parts.append(part.SerializeToString())
            continue
        for name, array in part.items():
            if array.size:
                parts += (_tag(type(first), name) + _varint(array.nbytes),
                          np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    size = sum(len(part) for part in parts)
    return b"".join((_tag(loss_pb2.ComputeLossRequest, kind) + _varint(size), *parts))


def decode(kind: type[M], data: bytes) -> tuple[M, memoryview]:
    """The message's small fields, and a view of its tensor (empty if it has none).

    Fields may come in any order, and of several tensors the last one counts, as in protobuf; where the tensor is not
    simply last, protobuf copies it.
    """
    try:
        last = _find_last_payload(data)
        if last is not None:
            begin, start = last
            return kind.FromString(data[:begin]), memoryview(data)[start:]
        message = kind.FromString(data)
    except (DecodeError, IndexError) as error:
        raise errors.server_sent(f"an unreadable message: {error}") from None
    payload = b""
    if "payload" in kind.DESCRIPTOR.fields_by_name:
        payload = message.payload  # type: ignore[attr-defined]
        message.ClearField("payload")
    return message, memoryview(payload)


def _read_varint(data: bytes, at: int, most: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift == 7 * most:
            raise DecodeError(f"a number of more than {most} bytes")


def _find_last_payload(data: bytes) -> tuple[int, int] | None:
    """Where the payload's field begins and its bytes start, if it is there once and last; twice the end without one.

    None if it lies otherwise. DecodeError or IndexError if the bytes are no sequence of fields.
    """
    at = groups = 0
    end = len(data)
    found: tuple[int, int] | None = (end, end)
    while at < end:
        begin = at
        tag = data[at]
        at += 1
        if tag >= 0x80:
            tag, at = _read_varint(data, begin, _TAG_BYTES)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            size, start = _read_varint(data, at, _TAG_BYTES)
            at = start + size
            if at > end:
                raise DecodeError(f"field {tag >> 3} of {size} bytes goes beyond the message")
            if tag >> 3 == _PAYLOAD_FIELD and groups == 0:
                found = (begin, start) if at == end and found == (end, end) else None
        elif kind == _VARINT:
            _, at = _read_varint(data, at, _NUMBER_BYTES)
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
        elif kind == _GROUP_START:
            groups += 1
        elif kind == _GROUP_END:
            groups -= 1
            if groups < 0:
                raise DecodeError(f"group {tag >> 3} ends and has not begun")
        else:
            raise DecodeError(f"field {tag >> 3} has wire type {kind}")
    return found


# Where the slices of one ComputeLoss call lie: in messages, or in shared memory, where their gradients come back.
#
# Gradients of rows that the server has retained come to a part of the region that is taken when the call begins.

_PATIENCE = 0.1  # seconds; the others may wait for something that this call's caller does only after it


@dataclass(frozen=True)
class Room:
    """The part of the region for gradients of retained rows, `first_row` first."""

    offset: int
    size: int
    first_row: int
    row_bytes: int


class SlicePlaces:
    """One thread puts slices, another one frees them, any may close."""

    def __init__(self, region: SharedRegion | None, may_wait: bool) -> None:
        """`region` None: all slices go in messages. `may_wait`: answers come while further slices are not sent, so a
        slice may wait for the place of one before it."""
        self._region = region if region is not None and region.begin() else None
        self._may_wait = may_wait
        self._changed = threading.Condition()  # guards what follows
        self._taken: dict[int, tuple[int, int]] = {}  # first row to offset and bytes
        self._taken_bytes = 0
        self._closed = False
        self._patient = True  # with other calls; of the thread that puts
        self._room: Room | None = None

    @property
    def region(self) -> SharedRegion | None:
        """The one that the call uses; None if that could not be used any more."""
        return self._region

    def __enter__(self) -> SlicePlaces:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(error)

    def reserve(self, rows: Rows, row_bytes: int) -> Room | None:
        """Takes room for gradients of rows that the server has: of as many as there is room for, from the first one on."""
        if self._region is None:
            return None
        count = min(len(rows), self._region.share // row_bytes)
        while count > 0 and self._room is None:
            offset = self._region.take(count * row_bytes)
            if offset is not None:
                self._room = Room(offset, count * row_bytes, rows.begin, row_bytes)
            count //= 2
        return self._room

    def put(self, row: int, hidden: RowMemory, begin: int, end: int) -> int | None:
        """Copies the slice with this first row, bytes of `hidden`, into the region: its offset there. None: it is to go in
        a message.

        Waits until there is room if an answer of this call will make some, and a moment if one of another call may. Not to
        be called after close().
        """
        size = end - begin
        if self._region is None or size == 0:
            return None
        with self._changed:
            offset = self._take(size)
            while offset is None and self._taken and self._may_wait and not self._closed:
                self._changed.wait()
                offset = self._take(size)
        if offset is None:
            offset = self._take_from_others(size)
        with self._changed:
            if offset is None:
                return None
            if self._closed:
                self._region.give(offset)
                return None
            self._taken[row] = offset, size
            self._taken_bytes += size
            self._region.enter()  # the call may end during the copy
        try:
            hidden.to_region(begin, end, self._region, offset)
        finally:
            self._region.leave()
        return offset

    def _take_from_others(self, size: int) -> int | None:
        """A call that has nothing in the region waits a while, once, for what other calls give back."""
        assert self._region is not None
        if not self._may_wait or not self._patient or self._closed or self._taken:
            return None
        offset = self._region.take(size, _PATIENCE)
        self._patient = offset is not None
        return offset

    def _take(self, size: int) -> int | None:
        assert self._region is not None
        if self._closed or (self._taken and self._taken_bytes + size > self._region.share):
            return None
        return self._region.take(size)

    def find(self, row: int, size: int) -> tuple[SharedRegion, int] | None:
        """Where the slice with this first row and so many bytes lies; None if it is in a message."""
        if self._region is None:
            return None
        with self._changed:
            offset, most = self._taken.get(row, (0, -1))
        if self._room is not None:
            before = (row - self._room.first_row) * self._room.row_bytes
            offset, most = self._room.offset + before, self._room.size - before if before >= 0 else -1
        return None if size > most else (self._region, offset)

    def free(self, row: int) -> None:
        """The slice was answered, and its gradients have been used."""
        with self._changed:
            place = self._taken.pop(row, None)
            if place is None or self._region is None:
                return
            self._region.give(place[0])
            self._taken_bytes -= place[1]
            self._changed.notify_all()

    def close(self, error: BaseException | None) -> None:
        """The call has ended. The region is retired if the server may still write to it, or may have lost it.

        May be repeated; the first one counts.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if self._region is not None:
                if error is not None:
                    self._region.after_failure(error, holds=bool(self._taken) or self._room is not None)
                elif self._room is not None:
                    self._region.give(self._room.offset)
                self._region.leave()
            self._changed.notify_all()
