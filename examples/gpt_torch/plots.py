# SPDX-License-Identifier: Apache-2.0
"""The figures of the examples: loss curves of train.py, memory and step times of pipeline.py.

Each function returns a matplotlib figure, which the caller saves. bench/figures.py draws recorded runs with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pyplot() -> Any:
    """matplotlib.pyplot, which draws to files. It is imported here, because training works without matplotlib."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def loss_curves(curves: Mapping[str, Sequence[float]]) -> Any:
    """Losses by step, in nats a token, and below them their distance from the first curve."""
    figure, (above, below) = pyplot().subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(2, 1),
                                               constrained_layout=True)
    first = next(iter(curves))
    for (name, values), style in zip(curves.items(), itertools.cycle(("-", "--", "-.", ":"))):
        above.plot(values, style, label=f"{name} head", linewidth=1.2)
        below.plot([value - base for value, base in zip(values, curves[first])], style, linewidth=0.8)
    above.set(ylabel="loss, nats a token")
    below.set(xlabel="step", ylabel=f"minus {first} head")
    above.legend()
    return figure


def pipeline_stages(measured: Sequence[Mapping[str, Any]]) -> Any:
    """Peak memory and step time of each stage, as pipeline.json has them."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 3.8), constrained_layout=True)
    names = [f"stage {m['stage']}\n{m['head']} head\n" + m["schedule"].replace(" ", "\n") for m in measured]
    colors = ["tab:blue" if m["head"] == "local" else "tab:orange" for m in measured]
    left.bar(names, [m["peak_bytes"] / 2**20 for m in measured], color=colors)
    left.set_ylabel("peak memory, MiB")
    right.bar(names, [m["step_seconds"] * 1e3 for m in measured], color=colors)
    right.set_ylabel("step time, ms")
    for axes in (left, right):
        axes.tick_params(axis="x", labelsize=8)
    return figure
