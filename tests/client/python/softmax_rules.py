# SPDX-License-Identifier: Apache-2.0
"""The softmax of filtered and of sampled gradients, as docs/math.md states them, in NumPy and double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


# The softmax of filtered gradients, in double precision ("Filtered gradients" in docs/math.md).


def filtered(p: NDArray[Any], targets: NDArray[Any], epsilon: float) -> NDArray[Any]:
    """q of [N, V] probabilities: those below epsilon are 0, save the target's. Targets outside [0, V) save none."""
    return np.where((p >= epsilon) | (np.arange(p.shape[1]) == targets[:, None]), p, 0)


def epsilon_among(p: NDArray[Any]) -> float:
    """A value that about a fifth of the probabilities reach, in the widest gap there is.

    So rounding to fp32 moves none over it, and a GPU has room for what is kept.
    """
    ordered = np.sort(p, axis=None)
    part = ordered[len(ordered) * 3 // 4:len(ordered) * 17 // 20]
    gap = int(np.argmax(part[1:] / part[:-1]))
    assert part[gap + 1] / part[gap] > 1 + 2e-5, "no gap is wide enough for fp32"
    return float(np.sqrt(part[gap] * part[gap + 1]))


# The softmax of sampled gradients and its random numbers ("Sampled gradients" in docs/math.md), written anew from
# kernels/decision.h and server/engine/schedule.h: what they say may not change from one version to the next.

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


def row_numbers(head: str, step: int, microbatch: int, rows: int) -> NDArray[np.float64]:
    """omega [N] of the rows of a microbatch."""
    seed = _mix(_mix(_xxh64(head.encode()) + step & _MASK) + microbatch & _MASK)
    mixed = (_mix(_mix(seed) + (row + 1) * 0x9E3779B97F4A7C15 & _MASK) for row in range(rows))
    return np.array([(each >> 40) * 2.0**-24 for each in mixed])


def _ends(p: NDArray[Any], targets: NDArray[Any], threshold: float, omega: NDArray[Any]) -> NDArray[Any]:
    """Where the interval of each class ends, relative to the first point."""
    widths = np.where(np.arange(p.shape[1]) == targets[:, None], 0, np.minimum(p / threshold, 1))
    return widths.cumsum(1) - omega[:, None]


def sampled(p: NDArray[Any], targets: NDArray[Any], threshold: float, omega: NDArray[Any]) -> NDArray[Any]:
    """What counts instead of [N, V] probabilities: the target's and those from the threshold on as they are."""
    ends = _ends(p, targets, threshold, omega)
    passed = np.floor(ends)  # points that are passed at the end of the class, but for one
    taken = np.diff(passed, axis=1, prepend=np.where(omega == 0, 0.0, -1.0)[:, None]) > 0
    keep = (p >= threshold) | (np.arange(p.shape[1]) == targets[:, None])
    return np.where(keep, p, np.where(taken, threshold, 0))


def clear_rows(p: NDArray[Any], targets: NDArray[Any], threshold: float, omega: NDArray[Any]) -> NDArray[np.bool_]:
    """[N]: the rows in which rounding to fp32 takes no other class."""
    ends = _ends(p, targets, threshold, omega)
    return np.asarray((np.abs(ends - np.round(ends)) > 4e-6 * (ends + 2)).all(1))
