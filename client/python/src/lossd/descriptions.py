# SPDX-License-Identifier: Apache-2.0
"""Shown: the base class of all results and descriptions; and read(), which makes a description from a message of the protocol.

The classes of descriptions are in lossd.v1.descriptions, which describe.py makes from the .proto files; the classes of results are in
lossd.types. Descriptions are immutable, comparable, hashable and can be pickled. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import dataclasses
import html
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message

T = TypeVar("T", bound="Shown")

_kinds: dict[str, type[Shown]] = {}  # by class name


class Shown:
    """A dataclass whose text, in a terminal and in a notebook, has the fields with repr=True whose values are not their defaults."""

    def __init_subclass__(cls) -> None:
        _kinds[cls.__name__] = cls

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in self._facts())})"

    def _repr_html_(self) -> str:
        """A table for Jupyter. Text from the server is escaped."""
        rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in self._facts())
        return f'<table><tr><th colspan="2">{type(self).__name__}</th></tr>{rows}</table>'

    def _facts(self: Any) -> list[tuple[str, str]]:
        return [(each.name, text_of(value)) for each in dataclasses.fields(self)
                if each.repr and _is_unusual(value := getattr(self, each.name), each)]


class ShownMemory(Shown):
    """The base class of MemoryUsage, whose fields are numbers of bytes."""

    @property
    def total(self: Any) -> int:
        return sum(dataclasses.astuple(self))

    def _facts(self: Any) -> list[tuple[str, str]]:
        return [(name, text_of_bytes(value)) for name, value in dataclasses.asdict(self).items() if value]


class ShownChoice(Shown):
    """The base class of Choice, whose text is one line."""

    def __str__(self: Any) -> str:
        return f"{self.what}: {self.choice}{f' ({self.reason})' if self.reason else ''}"


class ShownHead(Shown):
    """The base class of HeadDescription. Its repr() shows what distinguishes heads."""

    def __repr__(self: Any) -> str:
        facts = ", ".join([f"{self.compute_dtype}, {self.spec.optimizer_state}", *self._special(), *self._progress()])
        return (f"HeadDescription({self.spec.name!r}, D={self.spec.hidden_size}, V={self.spec.vocab_size}, {facts}, "
                f"{text_of_bytes(self.memory.total)})")

    def _special(self: Any) -> list[str]:
        spec = self.spec
        words = ((spec.norm, "none"), (spec.gradients, "exact"), (spec.logits, "stored"), (f"by {spec.split}", "by any"),
                 (f"in {spec.residency} memory", "in device memory"))
        return [word for word, usual in words if word != usual] + [
            name.replace("_", " ") for name in ("bias", "class_weights", "frozen") if getattr(spec, name)]

    def _progress(self: Any) -> list[str]:
        numbers = {"microbatches": self.step_microbatches, "rows": self.step_rows, "streams": self.open_streams}
        return [f"step={self.state.step}", *(f"{name}={number}" for name, number in numbers.items() if number)]

    def _facts(self: Any) -> list[tuple[str, str]]:
        return [("head", self.spec.name), ("shape", f"D={self.spec.hidden_size}, V={self.spec.vocab_size}"),
                ("kind", ", ".join([str(self.compute_dtype), self.spec.optimizer_state, *self._special()])),
                ("progress", ", ".join(self._progress())), ("memory", text_of_bytes(self.memory.total)),
                *((choice.what, str(choice).partition(": ")[2]) for choice in self.choices)]


def _is_unusual(value: Any, field: dataclasses.Field[Any]) -> bool:
    usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return isinstance(value, np.ndarray) or usual is dataclasses.MISSING or bool(value != usual)


def text_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{list(value.shape)} {value.dtype}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, dict)):
        return f"({', '.join(text_of(each) for each in value)})"
    return str(value)


def text_of_bytes(count: int) -> str:
    """In binary units with three digits: "512 bytes", "12.3 MiB"."""
    if count < 1024:
        return f"{count} bytes"
    power = min((count.bit_length() - 1) // 10, 6)
    size = count / 1024**power
    return f"{size:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f} {'KMGTPE'[power - 1]}iB"


def read(kind: type[T], message: Message) -> T:
    """The description that a message contains. An enumerator that this client does not know is given as its number."""
    values = {each.name: _value(each, message, message.DESCRIPTOR.fields_by_name[each.name])
              for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**values)


def _value(of: dataclasses.Field[Any], message: Message, described: Any) -> Any:
    value = getattr(message, of.name)
    if described.enum_type is not None:
        if not value:
            return of.default
        names = described.enum_type.values_by_number
        return names[value].name.removeprefix(names[0].name.removesuffix("UNSPECIFIED")).lower() if value in names else str(value)
    if of.default == ():
        return tuple(value) if described.message_type is None else tuple(read(_kinds[described.message_type.name], each) for each in value)
    if described.message_type is not None:
        return read(_kinds[described.message_type.name], value)
    return None if of.default is None and not message.HasField(of.name) else value
