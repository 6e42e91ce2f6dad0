#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the golden cases of slices in a region, tests/client/golden/region_plan.json, to standard output.

The expected slices come from the rule in plain loops over rows, which shares no code with either client: those that
are named by hand, and random ones. The seed is fixed, so the file is the same each time.
"""

from __future__ import annotations

import json
import random
from typing import Any

SEED = 21
RANDOM_CASES = 48
IGNORED = -100
SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
MIB = 1 << 20

Case = dict[str, Any]
Slice = tuple[int, int]


def most_rows(case: Case, rows: int) -> tuple[int, int]:
    """Of a slice in a message, and of one that may lie in the region."""
    limits, row_bytes = case["limits"], case["hidden_size"] * SIZES[case["dtype"]]
    in_messages = limits["max_bytes"] // row_bytes
    if case["slice_bytes"] is not None:
        in_messages = min(in_messages, max(1, case["slice_bytes"] // row_bytes))
    in_messages = min(in_messages, limits.get("max_rows", in_messages))
    allowed = 0 if case["slice_bytes"] is not None else limits.get("max_bytes_in_region", 0) // row_bytes
    allowed = min(allowed, limits.get("max_rows", allowed))
    share = case["region"]["bytes"] // 4
    wanted = (share if case["region"]["of_gpu"] else min(share, 4 * MIB)) // row_bytes
    most = max(in_messages, min(allowed, wanted))
    if rows <= most:
        return in_messages, most
    parts = 1
    while parts * most < rows:
        parts += 1
    equal = 1
    while parts * equal < rows:
        equal += 1
    return in_messages, equal


def slices_of(valid: list[bool], begin: int, end: int, most: int, grid: int) -> list[Slice]:
    slices: list[Slice] = []
    first = last = -1  # valid rows of the slice that is being made
    for row in range(begin, end):
        if not valid[row]:
            continue
        ignored = row - last - 1
        fits = (first >= 0 and row - first < most and ignored <= max(1, most // 8)
                and (grid == 0 or row // grid == first // grid))
        if not fits:
            if first >= 0:
                slices.append((first, last + 1))
            first = row
        last = row
    return slices + ([(first, last + 1)] if first >= 0 else [])


def parts_of(slices: list[Slice], most: int, grid: int) -> list[Slice]:
    """What is sent if no slice finds room in the region."""
    parts: list[Slice] = []
    for begin, end in slices:
        first = begin
        for row in range(begin + 1, end + 1):
            if row == end or row - first == most or (grid > 0 and row % grid == 0):
                parts.append((first, row))
                first = row
    return parts


def finish(case: Case) -> Case:
    begin, end = case["rows"]
    valid = [target != IGNORED for count, target in case["targets"] for _ in range(count)]
    grid, row_bytes = case["limits"].get("row_grid", 0), case["hidden_size"] * SIZES[case["dtype"]]
    in_messages, in_region = most_rows(case, end - begin)
    slices = slices_of(valid, begin, end, in_region, grid)
    case["slices"] = [[first, last, (last - first) * row_bytes] for first, last in slices]
    case["in_messages"] = [[first, last, (last - first) * row_bytes] for first, last in parts_of(slices, in_messages, grid)]
    return case


def case_of(name: str, targets: list[list[int]], **members: Any) -> Case:
    rows = sum(count for count, _ in targets)
    case: Case = {"name": name, "targets": targets, "rows": [0, rows], "hidden_size": 8, "dtype": "fp32",
                  "limits": {"max_bytes": 3200, "max_bytes_in_region": 32 * 400}, "slice_bytes": None,
                  "region": {"bytes": MIB, "of_gpu": False}}
    return finish(case | members)


def named() -> list[Case]:
    limits = {"max_bytes": 3200, "max_bytes_in_region": 32 * 400}  # 100 rows in messages, 400 in a region
    return [
        case_of("no rows", []),
        case_of("all rows are ignored", [[900, IGNORED]]),
        case_of("fewer rows than a message may have", [[60, 3]]),
        case_of("more rows than a message may have, in one slice", [[390, 3]]),
        case_of("as many as the server allows in a region", [[400, 3]]),
        case_of("one more: two equal parts", [[401, 3]]),
        case_of("a multiple of what is allowed", [[1200, 3]]),
        case_of("parts that are not equal: the last one is shorter", [[1202, 3]]),
        case_of("max_rows bounds slices in a region too", [[300, 3]], limits=limits | {"max_rows": 150}),
        case_of("max_rows bounds both", [[300, 3]], limits=limits | {"max_rows": 70}),
        case_of("a server that says nothing of regions", [[300, 3]], limits={"max_bytes": 3200}),
        case_of("slice_bytes is for both", [[300, 3]], slice_bytes=2048),
        case_of("slice_bytes above what messages may have", [[300, 3]], slice_bytes=1 << 20),
        case_of("a quarter of the region is less than the server allows", [[800, 3]], region={"bytes": 32 * 4 * 150, "of_gpu": False}),
        case_of("a quarter of the region is less than a message", [[800, 3]], region={"bytes": 32 * 4 * 40, "of_gpu": False}),
        case_of("a region that is smaller than a row", [[250, 3]], region={"bytes": 64, "of_gpu": True}),
        case_of("no more than 4 MiB of the host", [[1000, 3]], hidden_size=2048,
                limits={"max_bytes": 256 << 10, "max_bytes_in_region": 64 * MIB}, region={"bytes": 64 * MIB, "of_gpu": False}),
        case_of("all that a quarter holds of a GPU", [[4000, 3]], hidden_size=2048,
                limits={"max_bytes": 256 << 10, "max_bytes_in_region": 64 * MIB}, region={"bytes": 64 * MIB, "of_gpu": True}),
        case_of("bf16: twice as many rows", [[801, 3]], dtype="bf16"),
        case_of("bytes in a region that no row divides", [[500, 3]], hidden_size=5, dtype="bf16",
                limits={"max_bytes": 1001, "max_bytes_in_region": 2009}),
        case_of("row_grid below what messages may have", [[200, 3]], limits=limits | {"row_grid": 64}),
        case_of("row_grid between messages and the region", [[700, 3]], limits=limits | {"row_grid": 256}),
        case_of("row_grid and max_rows of a deterministic server", [[700, 3]],
                limits=limits | {"row_grid": 250, "max_rows": 250}),
        case_of("a stream that begins beside the grid", [[700, 3]], rows=[130, 690],
                limits=limits | {"row_grid": 256, "max_rows": 256}),
        case_of("padding between sequences is sent along", [[180, 3], [20, IGNORED], [180, 3], [20, IGNORED]]),
        case_of("a gap of an eighth of the slice", [[100, 3], [50, IGNORED], [250, 3]]),
        case_of("a longer gap is not sent", [[100, 3], [51, IGNORED], [249, 3]]),
        case_of("an ignored prompt", [[300, IGNORED], [500, 3]], rows=[0, 800]),
    ]


def random_runs(draw: random.Random, rows: int) -> list[list[int]]:
    """Runs of rows with a target and without, long and short ones, in turns."""
    runs: list[list[int]] = []
    longest = draw.choice([3, 30, 300, 3000])
    kind = draw.randrange(2)
    while rows > 0:
        run = min(rows, draw.randint(1, longest if kind else draw.choice([1, 4, 60, longest])))
        runs.append([run, 3 if kind else IGNORED])
        rows -= run
        kind = 1 - kind
    return runs


def random_case(draw: random.Random, number: int) -> Case:
    hidden_size, dtype = draw.choice([1, 5, 8, 24, 100]), draw.choice(list(SIZES))
    row_bytes = hidden_size * SIZES[dtype]
    rows = draw.randint(1, 1500)
    begin = draw.choice([0, draw.randrange(rows)])
    in_messages = draw.randint(20, 200)
    limits = {"max_bytes": in_messages * row_bytes + draw.randrange(row_bytes)}
    in_region = in_messages + draw.choice([0, draw.randint(0, 1000)])
    if draw.random() < 0.85:
        limits["max_bytes_in_region"] = in_region * row_bytes + draw.randrange(row_bytes)
    if draw.random() < 0.4:
        limits["max_rows"] = draw.randint(20, 600)
    if draw.random() < 0.4:
        limits["row_grid"] = draw.choice([limits.get("max_rows", 64), draw.randint(20, 400)])
    region = {"bytes": 4 * row_bytes * draw.randint(0, 800) + draw.randrange(1, 4 * row_bytes), "of_gpu": draw.random() < 0.5}
    slice_bytes = draw.randint(1, 2 * in_messages * row_bytes) if draw.random() < 0.15 else None
    if slice_bytes is not None:
        slice_bytes = max(slice_bytes, 20 * row_bytes)
    return case_of(f"random {number}", random_runs(draw, rows), rows=[begin, draw.randint(begin, rows)],
                   hidden_size=hidden_size, dtype=dtype, limits=limits, slice_bytes=slice_bytes, region=region)


def to_text(case: Case) -> str:
    return "    {\n" + ",\n".join(f"      {json.dumps(name)}: {json.dumps(value)}" for name, value in case.items()) + "\n    }"


def main() -> None:
    draw = random.Random(SEED)
    cases = named() + [random_case(draw, number) for number in range(RANDOM_CASES)]
    print('{\n  "kind": "plan in a region",\n  "cases": [\n' + ",\n".join(to_text(case) for case in cases) + "\n  ]\n}")


if __name__ == "__main__":
    main()
