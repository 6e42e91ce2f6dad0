# SPDX-License-Identifier: Apache-2.0
"""draw(): a curve of losses made of characters, for a terminal."""

from __future__ import annotations

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def draw(losses: list[float], width: int = 80, height: int = 12) -> str:
    """A chart of losses over steps, as text. Each column is the mean of the losses that fall on it. "" if there are no
    losses."""
    if not losses:
        return ""
    label = 9
    columns = _means(losses, max(1, min(width - label, len(losses))))
    low, high = min(columns), max(columns)
    span = (high - low) or 1.0
    lines = []
    for row in range(height, 0, -1):
        cells = ""
        for value in columns:
            eighths = round((value - low) / span * (8 * height - 1)) + 1 - 8 * (row - 1)
            cells += _EIGHTHS[max(0, min(8, eighths))]
        value = low + span * (row - 1) / max(1, height - 1)
        lines.append(f"{value:7.3f} {'|'}{cells}")
    lines.append(" " * label + f"1 to {len(losses):,} steps")
    return "loss [nats]\n" + "\n".join(lines)


def _means(losses: list[float], count: int) -> list[float]:
    edges = [len(losses) * i // count for i in range(count + 1)]
    return [sum(losses[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
