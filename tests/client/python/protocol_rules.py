# SPDX-License-Identifier: Apache-2.0
"""What may change of a protocol while clients and servers of the version before are in use (docs/compatibility.md).

faults(before, now) compares two FileDescriptorSets of one package and says, one line each, what breaks the other side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2

_KINDS = descriptor_pb2.FieldDescriptorProto.Type
_LABELS = descriptor_pb2.FieldDescriptorProto.Label
_PAYLOAD = "payload"


def faults(before: descriptor_pb2.FileDescriptorSet, now: descriptor_pb2.FileDescriptorSet, package: str) -> list[str]:
    old, new = _named(before, package), _named(now, package)
    found = [f"{name} is gone" for name in old if name not in new]
    for name in old.keys() & new.keys():
        if type(old[name]) is not type(new[name]):
            found.append(f"{name} has become something else")
        else:
            found += [f"{name}{fault}" for fault in _CHECKS[type(old[name])](old[name], new[name])]
    return sorted([*found, *(f"{name}{fault}" for name, each in new.items() for fault in _payload_is_last(each))])


def _named(files: descriptor_pb2.FileDescriptorSet, package: str) -> dict[str, Any]:
    """Messages, enumerations and services by full name."""
    named: dict[str, Any] = {}

    def add(scope: str, holder: Any) -> None:
        for each in [*getattr(holder, "message_type", []), *getattr(holder, "nested_type", []), *holder.enum_type,
                     *getattr(holder, "service", [])]:
            named[f"{scope}.{each.name}"] = each
            if isinstance(each, descriptor_pb2.DescriptorProto):
                add(f"{scope}.{each.name}", each)

    for file in files.file:
        if file.package == package:
            add(package, file)
    return named


def _is_reserved(message: Any, number: int, name: str) -> bool:
    # The end of a range is not part of it in messages, and part of it in enumerations.
    last = 0 if isinstance(message, descriptor_pb2.EnumDescriptorProto) else 1
    return name in message.reserved_name and any(each.start <= number <= each.end - last for each in message.reserved_range)


def _stays_reserved(old: Any, new: Any) -> Iterator[str]:
    for name in old.reserved_name:
        if name not in new.reserved_name:
            yield f": the name {name} is no longer reserved"
    kept = [(each.start, each.end) for each in new.reserved_range]
    for each in old.reserved_range:
        if not any(start <= each.start and each.end <= end for start, end in kept):
            yield f": the numbers from {each.start} are no longer reserved"


def _shape(message: Any, field: Any) -> dict[str, object]:
    """What a peer relies on."""
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") and not field.proto3_optional else ""
    return {"name": field.name, "type": _KINDS.Name(field.type), "type name": field.type_name, "label": _LABELS.Name(field.label),
            "oneof": oneof, "optional": field.proto3_optional, "packed": field.options.packed, "default": field.default_value}


def _message(old: Any, new: Any) -> Iterator[str]:
    by_number = {field.number: field for field in new.field}
    for field in old.field:
        if field.number not in by_number:
            if not _is_reserved(new, field.number, field.name):
                yield f".{field.name} = {field.number} is gone, and number and name are not reserved"
            continue
        was, is_now = _shape(old, field), _shape(new, by_number[field.number])
        for what in was:
            if was[what] != is_now[what]:
                yield f".{field.name} = {field.number}: its {what} was {was[what]!r} and is {is_now[what]!r}"
    numbers = {field.number for field in old.field}
    for field in new.field:
        if field.number not in numbers and (_is_reserved(old, field.number, field.name) or field.name in {each.name for each in old.field}):
            yield f".{field.name} = {field.number} uses a number or name that was in use before"
    yield from _stays_reserved(old, new)


def _enum(old: Any, new: Any) -> Iterator[str]:
    by_number = {value.number: value.name for value in new.value}
    for value in old.value:
        if value.number not in by_number:
            if not _is_reserved(new, value.number, value.name):
                yield f".{value.name} = {value.number} is gone, and number and name are not reserved"
        elif by_number[value.number] != value.name:
            yield f".{value.name} = {value.number}: its name is {by_number[value.number]} now"
    yield from _stays_reserved(old, new)


def _service(old: Any, new: Any) -> Iterator[str]:
    by_name = {method.name: method for method in new.method}
    for method in old.method:
        if method.name not in by_name:
            yield f".{method.name} is gone"
            continue
        for what in ("input_type", "output_type", "client_streaming", "server_streaming"):
            was, is_now = getattr(method, what), getattr(by_name[method.name], what)
            if was != is_now:
                yield f".{method.name}: its {what} was {was!r} and is {is_now!r}"


def _payload_is_last(message: Any) -> Iterator[str]:
    """docs/protocol.md: the tensor is the last field, so that it is sent and read without a copy."""
    if isinstance(message, descriptor_pb2.DescriptorProto):
        for field in message.field:
            if field.name == _PAYLOAD and field.number != max(each.number for each in message.field):
                yield f".{_PAYLOAD} = {field.number} has a field behind it"


_CHECKS: dict[type, Any] = {descriptor_pb2.DescriptorProto: _message, descriptor_pb2.EnumDescriptorProto: _enum,
                            descriptor_pb2.ServiceDescriptorProto: _service}
