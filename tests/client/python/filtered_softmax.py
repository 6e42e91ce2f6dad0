# SPDX-License-Identifier: Apache-2.0
"""The softmax of filtered gradients, in double precision ("Filtered gradients" in docs/math.md)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


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
