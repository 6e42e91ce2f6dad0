# SPDX-License-Identifier: Apache-2.0
"""The text that the examples learn: the manual pages of Perl (Debian package perl-doc), or a file, as tokens."""

from __future__ import annotations

import glob
import heapq
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


# Byte-pair encoding: 256 bytes, and tokens that are two earlier tokens side by side within a word.

Pair = tuple[int, int]

_WORD = re.compile(rb" ?[A-Za-z_]+| ?[0-9]+| ?[^\sA-Za-z_0-9]+|\s+(?=\s)|\s+")


class Tokenizer:
    def __init__(self, merges: list[Pair]) -> None:
        """`merges[i]` is the pair that token 256 + i stands for."""
        self.merges = merges
        self._rank = {pair: i for i, pair in enumerate(merges)}

    @property
    def vocab_size(self) -> int:
        return 256 + len(self.merges)

    @staticmethod
    def learn(text: str, vocab_size: int) -> Tokenizer:
        """Merges the most frequent pair, again and again; among equals the one of smaller tokens."""
        words = [(list(word), count) for word, count in Counter(_WORD.findall(text.encode())).items()]
        counts: Counter[Pair] = Counter()
        places: defaultdict[Pair, set[int]] = defaultdict(set)
        for i, (word, count) in enumerate(words):
            for pair in zip(word, word[1:]):
                counts[pair] += count
                places[pair].add(i)
        heap = [(-count, pair) for pair, count in counts.items()]
        heapq.heapify(heap)
        merges: list[Pair] = []
        while len(merges) < vocab_size - 256 and heap:
            count, pair = heapq.heappop(heap)
            if counts[pair] != -count:
                continue  # the pair's count has changed since; it is in the heap again
            if count >= -1:
                break
            token = 256 + len(merges)
            merges.append(pair)
            touched: set[Pair] = set()
            for i in places.pop(pair):
                word, repeats = words[i]
                merged = _merge(word, pair, token)
                for old in zip(word, word[1:]):
                    counts[old] -= repeats
                    touched.add(old)
                for new in zip(merged, merged[1:]):
                    counts[new] += repeats
                    places[new].add(i)
                    touched.add(new)
                words[i] = (merged, repeats)
            for changed in touched:
                if counts[changed] > 0:
                    heapq.heappush(heap, (-counts[changed], changed))
        return Tokenizer(merges)

    def encode(self, text: str) -> NDArray[np.int64]:
        known: dict[bytes, list[int]] = {}
        tokens: list[int] = []
        for word in _WORD.findall(text.encode()):
            if word not in known:
                known[word] = self._encode_word(word)
            tokens += known[word]
        return np.array(tokens, np.int64)

    def decode(self, tokens: NDArray[np.int64]) -> str:
        spelled = [bytes([i]) for i in range(256)]
        for left, right in self.merges:
            spelled.append(spelled[left] + spelled[right])
        return b"".join(spelled[t] for t in tokens).decode(errors="replace")

    def _encode_word(self, word: bytes) -> list[int]:
        tokens = list(word)
        while len(tokens) > 1:
            rank, pair = min((self._rank.get(pair, len(self.merges)), pair) for pair in zip(tokens, tokens[1:]))
            if rank == len(self.merges):
                break
            tokens = _merge(tokens, pair, 256 + rank)
        return tokens


def _merge(word: list[int], pair: Pair, token: int) -> list[int]:
    merged: list[int] = []
    i = 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            merged.append(token)
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return merged


# Texts, and their tokens.

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
