# SPDX-License-Identifier: Apache-2.0
"""A text that every Python installation has: the source of its standard library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Printable ASCII and the end of a line. Any other character counts as a space.
_CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
CLASSES = len(_CHARACTERS)
_BYTES = 1_000_000  # the most text that is used


@dataclass(frozen=True)
class Text:
    codes: NDArray[Any]  # [characters] int32, below CLASSES
    files: int

    @classmethod
    def of_the_standard_library(cls) -> Text:
        parts: list[str] = []
        for file in sorted(Path(os.__file__).parent.glob("*.py")):
            parts.append(file.read_text(encoding="utf-8", errors="replace"))
            if sum(map(len, parts)) > _BYTES:
                break
        return cls.of("".join(parts), len(parts))

    @classmethod
    def of(cls, text: str, files: int = 1) -> Text:
        table = np.full(256, _CHARACTERS.index(" "), dtype=np.int32)
        for code, character in enumerate(_CHARACTERS):
            table[ord(character)] = code
        return cls(table[np.frombuffer(text.encode("latin-1", errors="replace"), dtype=np.uint8)], files)

    def batches(self, context: int, rows: int, seed: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yields batches without end: contexts [rows, context], and the characters that follow them [rows]."""
        random = np.random.default_rng(seed)
        while True:
            at = random.integers(0, len(self.codes) - context, size=rows)
            window = self.codes[at[:, None] + np.arange(context + 1)]
            yield window[:, :context], np.ascontiguousarray(window[:, context])

    def beginning(self, length: int) -> list[int]:
        return [int(code) for code in self.codes[:length]]

    @staticmethod
    def shown(codes: list[int]) -> str:
        return repr("".join(_CHARACTERS[code] for code in codes))
