# SPDX-License-Identifier: Apache-2.0
"""How results and descriptions look in a terminal and in a notebook: short, and without what is as it usually is."""

from __future__ import annotations

import dataclasses
import html
from typing import Any

import numpy as np


class Shown:
    """A dataclass that is shown by the fields with repr=True whose values are not their defaults."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in self._facts())})"

    def _repr_html_(self) -> str:
        """A table, which Jupyter shows. Text of the server's is escaped."""
        rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in self._facts())
        return f'<table><tr><th colspan="2">{type(self).__name__}</th></tr>{rows}</table>'

    def _facts(self) -> list[tuple[str, str]]:
        facts = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.repr and _is_unusual(value, field):
                facts.append((field.name, text_of(value)))
        return facts


def _is_unusual(value: Any, field: dataclasses.Field[Any]) -> bool:
    if isinstance(value, np.ndarray):
        return True
    if field.default_factory is not dataclasses.MISSING:
        return bool(value != field.default_factory())
    return field.default is dataclasses.MISSING or bool(value != field.default)


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
    size, units = count / 1024, ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {units[0]}"
