# SPDX-License-Identifier: Apache-2.0
"""Whether a server's memory, descriptors, threads and latency stayed level over a long run.

The first third of the run is left out: it has the restarts of the server, in its first fifth, and what the last process takes
once, for which it needs some minutes. Over the rest,

- memory, descriptors and threads: the slope of the least-squares line through the samples, with an intercept of its own for
  each process of the server, times the length of that time, is at most LIMITS;
- memory also in two ways of which one has to be below STEADY_MEMORY, because what grows with traffic grows by both. The line alone
  cannot be held so low. One is the median of the slopes of SLICES equal parts of that time: when many large messages are under way
  at once, resident memory rises by some MiB and stays there, which is bounded by what is planned, and which no slope within a part
  sees. What is under way at the moment comes and goes, so a slope is that of the lowest samples of BINS pieces of its part, and a
  part shorter than LEAST_PART says nothing: its lowest samples are still those of a call or two. The other is the median of the slopes between the lowest samples of any two parts: memory that rises until the allocator gives it
  back, again and again, does not lift them;
- latency, divided by what a fixed piece of work took another process at the same moment (Control in soak.py): the medians of the first
  and the last third of that time. More than LATENCY_FACTOR times as long fails.

Pure functions of samples.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MEBIBYTE = 1 << 20
LIMITS = {"memory": 64 * MEBIBYTE, "descriptors": 8.0, "threads": 4.0}  # growth over the time that counts
SLICES = 20
BINS = 10
LEAST_PART = 10.0  # seconds
STEADY_MEMORY = 8 * MEBIBYTE
LATENCY_FACTOR = 3.0
LEAST_SAMPLES = 20


@dataclass(frozen=True)
class Sample:
    time: float  # seconds since the run began
    process: int  # the server's
    memory: int  # resident, bytes
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Latency:
    time: float
    seconds: float
    control: float  # seconds that the other work took


@dataclass(frozen=True)
class Finding:
    """One measure: what it says, and whether it passes."""

    what: str
    figures: str
    passed: bool


def slope(points: Iterable[tuple[int, float, float]]) -> float:
    """Of y over x for (group, x, y), least squares, each group with an intercept of its own; 0 without any spread of x."""
    groups: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for group, x, y in points:
        groups[group].append((x, y))
    above = below = 0.0
    for members in groups.values():
        mean_x = statistics.fmean(x for x, _ in members)
        mean_y = statistics.fmean(y for _, y in members)
        above += sum((x - mean_x) * (y - mean_y) for x, y in members)
        below += sum((x - mean_x) ** 2 for x, _ in members)
    return above / below if below else 0.0


def _growth(what: str, samples: Sequence[Sample], seconds: float) -> Finding:
    values = [float(getattr(sample, what)) for sample in samples]
    grown = seconds * slope((sample.process, sample.time, value) for sample, value in zip(samples, values))
    unit, name = (MEBIBYTE, " MiB") if what == "memory" else (1, "")
    figures = (f"grows by {grown / unit:.2f}{name} in {seconds:.0f} s (at most {LIMITS[what] / unit:g}{name}); "
               f"median {statistics.median(values) / unit:.1f}, highest {max(values) / unit:.1f}")
    return Finding(what, figures, grown <= LIMITS[what])


def _lowest_memory(samples: Sequence[Sample], begin: float, end: float) -> list[list[tuple[int, float, float]]]:
    """For each of SLICES parts of the time the (process, time, memory) of the lowest sample of each process in each of its BINS."""
    lowest: dict[tuple[int, int], Sample] = {}
    for sample in samples:
        bin_ = min(SLICES * BINS - 1, int(SLICES * BINS * (sample.time - begin) / (end - begin)))
        known = lowest.setdefault((bin_, sample.process), sample)
        if sample.memory < known.memory:
            lowest[bin_, sample.process] = sample
    slices: list[list[tuple[int, float, float]]] = [[] for _ in range(SLICES)]
    for (bin_, process), sample in lowest.items():
        slices[bin_ // BINS].append((process, sample.time, float(sample.memory)))
    return slices


def _slope_between(slices: Sequence[Sequence[tuple[int, float, float]]]) -> float:
    """The median slope between the lowest samples of two parts, of all pairs of the same process; infinite without any."""
    lowest: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for points in slices:
        for process in {process for process, _, _ in points}:
            memory, time = min((memory, time) for of, time, memory in points if of == process)
            lowest[process].append((time, memory))
    slopes = [(later[1] - earlier[1]) / (later[0] - earlier[0])
              for points in lowest.values() for earlier, later in itertools.combinations(points, 2) if later[0] > earlier[0]]
    return statistics.median(slopes) if slopes else math.inf


def _steady_memory(samples: Sequence[Sample], begin: float, end: float) -> Finding:
    slices = _lowest_memory(samples, begin, end)
    long = end - begin >= SLICES * LEAST_PART
    within = (end - begin) * statistics.median(map(slope, slices)) if long else math.inf
    between = (end - begin) * _slope_between(slices)
    grown = min(within, between)
    figures = (f"grows steadily by {grown / MEBIBYTE:.2f} MiB in {end - begin:.0f} s (at most {STEADY_MEMORY / MEBIBYTE:g} MiB; "
               f"{within / MEBIBYTE:.2f} by the slopes within {SLICES} parts, {between / MEBIBYTE:.2f} by the lowest of each)")
    return Finding("steady memory", figures, grown <= STEADY_MEMORY)


def _latency(latencies: Sequence[Latency], begin: float, end: float) -> Finding:
    third = (end - begin) / 3
    first = [each for each in latencies if begin <= each.time < begin + third]
    last = [each for each in latencies if end - third <= each.time <= end]
    if min(len(first), len(last)) < LEAST_SAMPLES:
        return Finding("latency", f"only {len(first)} and {len(last)} samples in the first and the last third", False)
    before, after = (statistics.median(each.seconds / each.control for each in part) for part in (first, last))
    milliseconds = [1e3 * statistics.median(each.seconds for each in part) for part in (first, last)]
    figures = (f"median {before:.2f} times the other work in the first third ({milliseconds[0]:.1f} ms), {after:.2f} times in the "
               f"last ({milliseconds[1]:.1f} ms); at most {LATENCY_FACTOR:g} times as much")
    return Finding("latency", figures, after <= LATENCY_FACTOR * before)


def judge(samples: Sequence[Sample], latencies: Sequence[Latency], run_seconds: float) -> list[Finding]:
    """All measures of a run of `run_seconds`."""
    begin = run_seconds / 3
    counted = [sample for sample in samples if begin <= sample.time <= run_seconds]
    if len(counted) < LEAST_SAMPLES:
        return [Finding("samples", f"only {len(counted)} after the first third", False)]
    findings = [_growth(what, counted, run_seconds - begin) for what in LIMITS]
    return [*findings, _steady_memory(counted, begin, run_seconds), _latency(latencies, begin, run_seconds)]
