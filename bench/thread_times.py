#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures how many cores the threads of a running program use, by the names of the threads.

    bench/thread_times.py $(pgrep -x lossd) --seconds 20

ARCHITECTURE.md explains the threads of lossd. A thread without a name of its own has the name of the program.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of CPU time that a thread has used since it began."""

    name: str
    user: float
    system: float


def parse_stat(text: str, ticks: int) -> Times:
    """Parses the text of /proc/<process>/task/<thread>/stat. `ticks`: clock ticks per second. The name of the thread may contain
    any characters, also parentheses."""
    name = text[text.index("(") + 1:text.rindex(")")]
    fields = text[text.rindex(")") + 1:].split()
    # utime and stime, fields 14 and 15 of proc(5); fields[0] is field 3, the state
    return Times(name, int(fields[11]) / ticks, int(fields[12]) / ticks)


def read_threads(process: int) -> dict[int, Times]:
    """The times of all threads of a process, by thread id. Threads that end during the call are missing. FileNotFoundError if
    there is no such process."""
    found = {}
    for task in pathlib.Path(f"/proc/{process}/task").iterdir():
        try:
            found[int(task.name)] = parse_stat((task / "stat").read_text(), os.sysconf("SC_CLK_TCK"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def cores_by_name(before: Mapping[int, Times], after: Mapping[int, Times], seconds: float) -> list[dict[str, object]]:
    """The cores that threads of each name used between two calls of read_threads(): {"name", "threads": their number, "user",
    "system", "busiest": the cores of the busiest of these threads}. The names that used the most cores come first."""
    threads: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for thread, now in after.items():
        then = before.get(thread, Times(now.name, 0.0, 0.0))
        threads[now.name].append(((now.user - then.user) / seconds, (now.system - then.system) / seconds))
    rows = [{"name": name, "threads": len(each), "user": sum(user for user, _ in each),
             "system": sum(system for _, system in each), "busiest": max(user + system for user, system in each)}
            for name, each in threads.items()]
    return sorted(rows, key=lambda row: -(row["user"] + row["system"]))  # type: ignore[operator]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("process", type=int)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=pathlib.Path, help="also write the rows there")
    arguments = parser.parse_args()
    before, begin = read_threads(arguments.process), time.monotonic()
    time.sleep(arguments.seconds)
    after, seconds = read_threads(arguments.process), time.monotonic() - begin
    rows = cores_by_name(before, after, seconds)
    print(f"{'thread':16} {'number':>6} {'user':>7} {'system':>7} {'busiest':>7}   cores over {seconds:.1f} s")
    for row in rows:
        print(f"{row['name']:16} {row['threads']:6} {row['user']:7.3f} {row['system']:7.3f} {row['busiest']:7.3f}")
    print(f"{'all':16} {len(after):6} {sum(row['user'] for row in rows):7.3f} "  # type: ignore[misc]
          f"{sum(row['system'] for row in rows):7.3f}")  # type: ignore[misc]
    if arguments.json:
        arguments.json.write_text(json.dumps({"seconds": seconds, "threads": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
