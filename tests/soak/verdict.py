"""Whether a server's memory, descriptors, threads and latency stayed level over a long run.

The first quarter of the run is left out: it has the restarts of the server, and what a process takes once. Over the rest,

- memory, descriptors and threads: the slope of the least-squares line through the samples, with an intercept of its own for
  each process of the server, times the length of that time, is at most LIMITS;
- latency: the medians of the first and the last third of that time. The machine may do other work meanwhile, so only a
  median that is more than LATENCY_FACTOR times as long fails.

Pure functions of samples.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MEBIBYTE = 1 << 20
LIMITS = {"memory": 8 * MEBIBYTE, "descriptors": 8.0, "threads": 4.0}  # growth over the time that counts
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


def _latency(latencies: Sequence[Latency], begin: float, end: float) -> Finding:
    third = (end - begin) / 3
    first = [each.seconds for each in latencies if begin <= each.time < begin + third]
    last = [each.seconds for each in latencies if end - third <= each.time <= end]
    if min(len(first), len(last)) < LEAST_SAMPLES:
        return Finding("latency", f"only {len(first)} and {len(last)} samples in the first and the last third", False)
    before, after = statistics.median(first), statistics.median(last)
    figures = (f"median {1e3 * before:.2f} ms in the first third, {1e3 * after:.2f} ms in the last "
               f"(at most {LATENCY_FACTOR:g} times as long)")
    return Finding("latency", figures, after <= LATENCY_FACTOR * before)


def judge(samples: Sequence[Sample], latencies: Sequence[Latency], run_seconds: float) -> list[Finding]:
    """All measures of a run of `run_seconds`."""
    begin = run_seconds / 4
    counted = [sample for sample in samples if begin <= sample.time <= run_seconds]
    if len(counted) < LEAST_SAMPLES:
        return [Finding("samples", f"only {len(counted)} after the first quarter", False)]
    findings = [_growth(what, counted, run_seconds - begin) for what in LIMITS]
    return [*findings, _latency(latencies, begin, run_seconds)]
