# SPDX-License-Identifier: Apache-2.0
"""Weights whose version can be read off every answer.

All weights, gradients and moments of a judged head are zero but for column 0, and there row v holds a whole multiple
of GRID: the judge knows a tensor as the tuple of these V whole numbers. The clients write c * v into row v (and add
a * v to its gradient), so that one whole number c names a version; a tensor that mixes versions has other rows.

With hidden state x = (1, 0, 0, ...), the logits of a row are logit_scale * GRID * values, so
  lse = log sum_v exp(logit_scale * GRID * values[v])
says which weights computed the row, and the gradient of lse with respect to x,
  dx[0] = logit_scale * GRID * sum_v p_v values[v],
says which weights and which logit_scale a backward used. Neighbouring c differ by 0.01 or more in both for the c that
the workload draws; fp32 is off by about 1e-6. SGD with learning rate 1 keeps the family, with momentum 0 or 1.
"""

from __future__ import annotations

import math

GRID = 2.0**-8
TOLERANCE = 2e-4

Values = tuple[int, ...]


def family(c: int, vocab: int) -> Values:
    return tuple(c * v for v in range(vocab))


def _exponentials(values: Values, scale: float) -> tuple[float, list[float]]:
    logits = [scale * GRID * value for value in values]
    top = max(logits)
    return top, [math.exp(logit - top) for logit in logits]


def lse(values: Values, scale: float) -> float:
    top, exponentials = _exponentials(values, scale)
    return top + math.log(sum(exponentials))


def lse_gradient(values: Values, scale: float) -> float:
    """d lse / d x[0]."""
    _, exponentials = _exponentials(values, scale)
    weighted = sum(e * value for e, value in zip(exponentials, values))
    return scale * GRID * weighted / sum(exponentials)


def norm(values: Values) -> float:
    return GRID * math.sqrt(sum(value * value for value in values))


def near(seen: float, expected: float) -> bool:
    return abs(seen - expected) <= TOLERANCE * max(1.0, abs(expected))


def describe(values: Values, first_row: int = 0) -> str:
    """c=13, or, of rows of several versions, the c of each run of rows."""
    runs: list[tuple[int, int, str]] = []
    for row, value in enumerate(values, first_row):
        if row == 0:  # is 0 in all versions
            continue
        c = str(value // row) if value % row == 0 else f"{value}/{row}"
        begin = row
        if runs and runs[-1][2] == c:
            begin = runs.pop()[0]
        runs.append((begin, row + 1, c))
    if len(runs) == 1:
        return f"c={runs[0][2]}"
    return ", ".join(f"rows [{begin}, {end}) c={c}" for begin, end, c in runs)


def decode_lse(seen: float, vocab: int, scale: float = 1.0, limit: int = 4096) -> str:
    """The c whose lse was seen, as text; of weights outside the family, the number itself."""
    low, high = -limit, limit
    while low < high:
        middle = (low + high) // 2
        if lse(family(middle, vocab), scale) < seen - TOLERANCE:
            low = middle + 1
        else:
            high = middle
    return f"c={low}" if near(lse(family(low, vocab), scale), seen) else f"lse={seen:.5f}"
