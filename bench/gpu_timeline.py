#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what one GPU does for several programs at the same time, from the traces that gpu_trace.cc has recorded of each program.

    mkdir traces
    export LOSSD_GPU_TRACE=$PWD/traces CUDA_INJECTION64_PATH=$PWD/liblossd_gpu_trace.so    # of server and trainers
    ...
    bench/gpu_timeline.py --lane "stage 3=traces/python3.812.csv:0" --lane "head=traces/lossd.790.csv:3" out.svg

A lane is a program on one GPU: NAME=FILE:DEVICE, where DEVICE is the GPU's number in that program. Without --begin, the figure
shows the middle of the time that all lanes have recorded. Also prints, and writes to --json, how long each lane used the GPU.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples" / "gpt_torch"))

import plots  # noqa: E402

# The purposes of kernels: name, a pattern for the kernel's name, and a color of matplotlib. The first pattern that fits counts.
CLASSES = (
    ("exchange", r"nccl", "tab:red"),
    ("dW", r"(?i)filtered_?weight|AddKept|ColumnSum", "tab:brown"),
    ("logits and loss", r"LogitPass|MergeTiles|Finish|PrepareRows|RowLoss|FoldBlock|GradientBlock|RecordRows|MergeRows|"
                        r"TargetDot|Guard", "tab:orange"),
    ("gradient", r"GradientGemm|Sample|Hot|Entries", "goldenrod"),
    ("attention", r"(?i)flash|fmha|attention|sdpa", "tab:cyan"),
    ("product", r"(?i)gemm|cutlass|nvjet|matmul|cublas", "tab:blue"),
    ("optimizer", r"(?i)adam|multi_tensor|optimizer", "tab:purple"),
    ("copy", r"^copy$", "tab:green"),
    ("other", r"", "lightgray"))

GAP_SECONDS = 1e-3  # a lane that does nothing for longer than this is taken to be between two microbatches


@dataclasses.dataclass(frozen=True)
class Span:
    """A kernel or a copy that ran on a stream. `begin` and `end` are seconds since 1970."""

    begin: float
    end: float
    stream: int
    name: str


def class_of(name: str) -> str:
    return next(kind for kind, pattern, _ in CLASSES if re.search(pattern, name))


def parse_trace(lines: Iterable[str], device: int) -> list[Span]:
    """The spans of one GPU in a trace, ordered by begin. ValueError if the trace has no line that relates CUPTI's clock to the time
    of day."""
    clocks: list[tuple[int, int]] = []
    raw: list[tuple[int, int, int, str]] = []
    for line in lines:
        fields = line.rstrip("\n").split(",", 5)
        if fields[0] == "clock" and len(fields) == 3:
            clocks.append((int(fields[1]), int(fields[2])))
        elif fields[0] in ("kernel", "copy") and len(fields) == 6 and int(fields[1]) == device:
            name = fields[5] if fields[0] == "kernel" else "copy"
            raw.append((int(fields[3]), int(fields[4]), int(fields[2]), name))
    if not clocks:
        raise ValueError("the trace has no clock")
    clocks.sort()
    marks = [clock for clock, _ in clocks]

    def seconds(time: int) -> float:
        clock, day = clocks[max(0, bisect.bisect_right(marks, time) - 1)]
        return (day + time - clock) * 1e-9

    return sorted((Span(seconds(begin), seconds(end), stream, name) for begin, end, stream, name in raw),
                  key=lambda span: span.begin)


def covered(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of the spans (begin, end): disjoint spans in order, in which at least one of the given spans runs."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def common(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """Seconds in which spans of both `a` and `b` run. Both must be as covered() returns them."""
    seconds, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        seconds += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return seconds


def bursts(spans: Sequence[Span], gap: float = GAP_SECONDS) -> list[tuple[float, float, float]]:
    """Groups spans with no gap longer than `gap` between them: (begin, end, seconds in which something ran) for each group. A group
    is a microbatch if there are gaps between microbatches."""
    found: list[tuple[float, float, float]] = []
    for begin, end in covered((span.begin, span.end) for span in spans):
        if found and begin - found[-1][1] <= gap:
            found[-1] = (found[-1][0], end, found[-1][2] + end - begin)
        else:
            found.append((begin, end, end - begin))
    return found


def summarize(lanes: dict[str, list[Span]], begin: float, end: float) -> dict[str, Any]:
    """For each lane: how much of [begin, end) it used the GPU, how much of that at the same time as each other lane, the seconds by
    purpose of kernels, and its bursts()."""
    cut = {name: [dataclasses.replace(span, begin=max(span.begin, begin), end=min(span.end, end)) for span in spans
                  if span.begin < end and span.end > begin] for name, spans in lanes.items()}
    busy = {name: covered((span.begin, span.end) for span in spans) for name, spans in cut.items()}
    result: dict[str, Any] = {"seconds": end - begin, "lanes": {}}
    for name, spans in cut.items():
        classes: dict[str, float] = {}
        for span in spans:
            classes[class_of(span.name)] = classes.get(class_of(span.name), 0.0) + span.end - span.begin
        whole = [burst for burst in bursts(spans) if burst[0] > begin and burst[1] < end]
        result["lanes"][name] = {
            "busy_share": length(busy[name]) / (end - begin),
            "beside": {other: common(busy[name], busy[other]) / (end - begin) for other in cut if other != name},
            "kernel_seconds": dict(sorted(classes.items(), key=lambda each: -each[1])),
            "bursts": len(whole),
            "median_burst_seconds": median([burst[1] - burst[0] for burst in whole]),
            "median_burst_busy_seconds": median([burst[2] for burst in whole])}
    return result


def median(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def draw(lanes: dict[str, list[Span]], begin: float, end: float) -> Any:
    """Draws a figure with a row for each stream of each lane."""
    rows = [(name, stream) for name, spans in lanes.items()
            for stream in sorted({span.stream for span in spans if span.begin < end and span.end > begin})]
    figure, axes = plots.pyplot().subplots(figsize=(14, 1.2 + 0.45 * len(rows)), constrained_layout=True)
    used = set()
    for y, (name, stream) in enumerate(rows):
        for kind, _, color in CLASSES:
            bars = [((span.begin - begin) * 1e3, (span.end - span.begin) * 1e3) for span in lanes[name]
                    if span.stream == stream and span.begin < end and span.end > begin and class_of(span.name) == kind]
            label = kind if bars and kind not in used else None
            used.update({kind} if bars else ())
            axes.broken_barh(bars, (y - 0.4, 0.8), facecolors=color, label=label)
    axes.set_yticks(range(len(rows)), [f"{name}, stream {stream}" for name, stream in rows])
    axes.set(xlim=(0, (end - begin) * 1e3), xlabel="ms")
    axes.invert_yaxis()
    if rows:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=len(CLASSES), fontsize="small")
    return figure


def window(lanes: dict[str, list[Span]], begin: float | None, seconds: float) -> tuple[float, float]:
    """Begin and end of the time to draw. `begin`: seconds after the first moment that all lanes have recorded; None: the middle.
    ValueError if the lanes have no time in common."""
    first = max(spans[0].begin for spans in lanes.values())
    last = min(max(span.end for span in spans) for spans in lanes.values())
    if last <= first:
        raise ValueError("the lanes have no time in common")
    start = first + begin if begin is not None else max(first, (first + last - seconds) / 2)
    return start, start + seconds


def read_lane(text: str) -> tuple[str, list[Span]]:
    """Reads the lane NAME=FILE:DEVICE: its name and its spans. ValueError if `text` has another form, or the GPU did nothing."""
    match = re.fullmatch(r"([^=]+)=(.+):(\d+)", text)
    if match is None:
        raise ValueError(f"a lane is NAME=FILE:DEVICE, got {text!r}")
    with open(match[2], encoding="utf-8") as file:
        spans = parse_trace(file, int(match[3]))
    if not spans:
        raise ValueError(f"{match[2]} has nothing of GPU {match[3]}")
    return match[1], spans


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", type=pathlib.Path, help=".svg or .png")
    parser.add_argument("--lane", action="append", required=True, metavar="NAME=FILE:DEVICE")
    parser.add_argument("--begin", type=float, help="seconds after the first moment that all lanes have recorded")
    parser.add_argument("--seconds", type=float, default=0.12, help="that are drawn")
    parser.add_argument("--summary-seconds", type=float, default=2.0, help="that are added up, from the same beginning")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    try:
        lanes = dict(map(read_lane, arguments.lane))
        begin, end = window(lanes, arguments.begin, arguments.seconds)
    except (OSError, ValueError) as error:
        print(f"gpu_timeline: {error}", file=sys.stderr)
        return 1
    summary = summarize(lanes, begin, begin + arguments.summary_seconds)
    print(json.dumps(summary, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n")
    draw(lanes, begin, end).savefig(arguments.figure, metadata={"Date": None} if arguments.figure.suffix == ".svg" else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
