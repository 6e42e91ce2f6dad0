"""Messages whose tensor is no part of them: framing of field 1000 without a copy through protobuf.

A message that carries a tensor has it in `payload`, field 1000, last on the wire. Writing joins the small fields and
the tensor's memory once; reading returns a view of what gRPC delivered.
"""

from __future__ import annotations

import ctypes
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from lossd import errors

M = TypeVar("M", bound=Message)

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_PAYLOAD_FIELD = 1000

_KEPT_BYTES = 31 << 20

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.argtypes, _address_of.restype = (ctypes.py_object,), ctypes.c_void_p


def keep_freed_memory() -> None:
    """Lets messages reuse memory whose pages are there already; page faults cost more than the copies.

    glibc returns freed memory to the system when more is free than twice the largest block that it ever gave back by
    itself, of up to 32 MiB: so it is shown one, which nobody touches. With other allocators this does nothing.
    """
    bytes(_KEPT_BYTES)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _head(field: int, size: int) -> bytes:
    return _varint(field << 3 | _LENGTH_DELIMITED) + _varint(size)


def encode(message: Message, payload: memoryview | None = None) -> bytes:
    """The message with the tensor as its last field; `payload` is bytes, one-dimensional."""
    fields = message.SerializeToString()
    if payload is None or payload.nbytes == 0:
        return fields
    return _join(fields + _head(_PAYLOAD_FIELD, payload.nbytes), payload)


def _join(head: bytes, payload: memoryview) -> bytes:
    """b"".join((head, payload)), but copies without the interpreter's lock, as memmove of ctypes does.

    A bytes object made without contents may be filled as long as nobody else has seen it, says Python's C API.
    """
    joined: bytes = _new_bytes(None, len(head) + payload.nbytes)
    address = _address_of(joined)
    (ctypes.c_char * len(head)).from_address(address).raw = head  # too little to let go of the lock for
    ctypes.memmove(address + len(head), np.frombuffer(payload, np.uint8).ctypes.data, payload.nbytes)
    return joined


def encode_nested(field: int, message: Message, arrays: dict[int, NDArray[np.generic]]) -> bytes:
    """A message whose only field is `message`, which gets packed arrays of four-byte elements beside its own fields."""
    parts: list[bytes | memoryview] = [message.SerializeToString()]
    for number, array in arrays.items():
        if array.size:
            parts += (_head(number, array.nbytes), np.ascontiguousarray(array).view(np.uint8).data)
    return b"".join((_head(field, sum(len(part) for part in parts)), *parts))


def decode(kind: type[M], data: bytes) -> tuple[M, memoryview]:
    """The message's small fields, and a view of its tensor (empty if it has none). Fields may come in any order."""
    try:
        begin, start, end = _find_payload(data)
        view = memoryview(data)
        if begin == end:
            return kind.FromString(data), view[:0]
        return kind.FromString(data[:begin] + data[end:]), view[start:end]
    except (DecodeError, IndexError) as error:
        raise errors.server_sent(f"an unreadable message: {error}") from None


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise DecodeError("a varint of more than ten bytes")


def _find_payload(data: bytes) -> tuple[int, int, int]:
    """Where the payload's field begins, its bytes start and end; three times len(data) if there is none."""
    at = 0
    while at < len(data):
        begin = at
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            size, start = _read_varint(data, at)
            at = start + size
            if at > len(data):
                raise DecodeError(f"field {tag >> 3} of {size} bytes goes beyond the message")
            if tag >> 3 == _PAYLOAD_FIELD:
                return begin, start, at
        elif kind == _VARINT:
            _, at = _read_varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise DecodeError(f"field {tag >> 3} has wire type {kind}")
    return len(data), len(data), len(data)
