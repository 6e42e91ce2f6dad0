# SPDX-License-Identifier: Apache-2.0
"""Byte-pair encoding: 256 bytes, and tokens that are two earlier tokens side by side within a word."""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict

import numpy as np
from numpy.typing import NDArray

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
