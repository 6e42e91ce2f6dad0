# SPDX-License-Identifier: Apache-2.0
"""The text that the examples learn: the manual pages of Perl (Debian package perl-doc), or a file, as tokens."""

from __future__ import annotations

import glob
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizer import Tokenizer

_MANUAL = "/usr/share/perl/*/pod/*.pod"
_FORMATTING_CODE = re.compile(r"[A-Z]<{1,3}\s?([^<>]*?)\s?>{1,3}")


def strip_pod(pod: str) -> str:
    """Plain text of a page in Perl's POD format: commands and formatting codes go, the words stay."""
    lines = [re.sub(r"^=\w+ ?", "", line) for line in pod.splitlines()]
    text = "\n".join(lines)
    for _ in range(3):  # codes nest
        text = _FORMATTING_CODE.sub(r"\1", text)
    return text


def load_text(path: str | None) -> str:
    if path is not None:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    pages = sorted({Path(page).resolve() for page in glob.glob(_MANUAL)})
    if not pages:
        raise SystemExit(f"no text at {_MANUAL}: install the package perl-doc, or name a text with --text")
    return "\n".join(strip_pod(page.read_text(encoding="utf-8", errors="replace")) for page in pages)


def load_tokens(folder: Path, text_path: str | None, vocab_size: int) -> NDArray[np.int64]:
    """The text in tokens of a vocabulary learnt from it; kept in `folder` for the next time."""
    cache = folder / f"tokens-{vocab_size}.npy"
    if not cache.exists():
        text = load_text(text_path)
        print(f"learning {vocab_size} tokens from {len(text) / 1e6:.1f} MB of text", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        tokens = Tokenizer.learn(text, vocab_size).encode(text)
        np.save(cache, tokens.astype(np.uint16 if vocab_size <= 2**16 else np.uint32))
    return np.load(cache).astype(np.int64)
