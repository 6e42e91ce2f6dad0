"""The softmax of sampled gradients and its random numbers ("Sampled gradients" in docs/math.md), written anew from
kernels/sampling.h and server/engine/sample_seed.h: what they say may not change from one version to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1
_PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


def _rotate(x: int, bits: int) -> int:
    return (x << bits | x >> (64 - bits)) & _MASK


def _xxh64(data: bytes) -> int:
    """XXH64 with seed 0 of fewer than 32 bytes."""
    assert len(data) < 32
    first, second, third, fourth, fifth = _PRIMES
    h = (fifth + len(data)) & _MASK
    at = 0
    while at + 8 <= len(data):
        word = _rotate(int.from_bytes(data[at:at + 8], "little") * second & _MASK, 31) * first & _MASK
        h = (_rotate(h ^ word, 27) * first + fourth) & _MASK
        at += 8
    if at + 4 <= len(data):
        h = (_rotate(h ^ (int.from_bytes(data[at:at + 4], "little") * first & _MASK), 23) * second + third) & _MASK
        at += 4
    for byte in data[at:]:
        h = _rotate(h ^ (byte * fifth & _MASK), 11) * first & _MASK
    h = (h ^ h >> 33) * second & _MASK
    h = (h ^ h >> 29) * third & _MASK
    return h ^ h >> 32


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def _bits(low: int, high: int, numbers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    h = numbers * np.uint32(0x9E3779B9) + np.uint32(low)
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x21F0AAAD)
    h = (h ^ h >> np.uint32(15) ^ np.uint32(high)) * np.uint32(0x735A2D97)
    return h ^ h >> np.uint32(15)


def sample_numbers(head: str, step: int, microbatch: int, rows: int, classes: int) -> NDArray[np.float32]:
    """omega [N, V] of the rows of a microbatch."""
    seed = _mix(_mix(_xxh64(head.encode()) + step & _MASK) + microbatch & _MASK)
    columns = np.arange(classes, dtype=np.uint32)
    numbers = np.empty((rows, classes), np.float32)
    for row in range(rows):
        mixed = _mix(_mix(seed) + (row + 1) * 0x9E3779B97F4A7C15 & _MASK)
        low, high = mixed & 0xFFFFFFFF, mixed >> 32
        pairs = _bits(low, high, columns // np.uint32(2))
        coarse = np.where(columns % 2 == 1, pairs >> np.uint32(16), pairs & np.uint32(0xFFFF))
        # In double the sum is exact, and then rounded once, as by a fused multiply-add.
        fine = _bits(low, high, ~columns).astype(np.float32).astype(float) * 2.0**-32
        numbers[row] = (coarse + fine).astype(np.float32) * np.float32(2.0**-16)
    return numbers


def sampled(p: NDArray[Any], targets: NDArray[Any], threshold: float, omega: NDArray[Any]) -> NDArray[Any]:
    """What counts instead of [N, V] probabilities: the target's and those from the threshold on as they are."""
    keep = (p >= threshold) | (np.arange(p.shape[1]) == targets[:, None])
    return np.where(keep, p, np.where(omega * threshold < p, threshold, 0))


def is_clear(p: NDArray[Any], threshold: float, omega: NDArray[Any]) -> bool:
    """Whether no number is so close to what it decides that rounding to fp32 matters."""
    undecided = (np.abs(omega * threshold - p) < 1e-5 * p) & (p < 1.01 * threshold)
    return not undecided.any()
