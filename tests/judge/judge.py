# SPDX-License-Identifier: Apache-2.0
"""Runs random histories for a while and judges them.

    LOSSD_BINARY=build/cpu-only/bin/lossd python3 tests/judge/judge.py --minutes=5 --seed=1 --mix=all,cuts,kills

Prints counts of histories, calls, outcomes, undecided histories and violations, and of each kind of violation one
counter-example. Exit status 1 if there was a violation, 2 if there was none and a history is undecided.
`judge.py FILE` judges a history that was kept.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from pathlib import Path

import checker
import workload
from checker import Least, Limits, Verdict, check, minimise
from history import History
from model import Model
from stage import ServerProcess, Stage, server_of
from moments import DEVIATIONS


def kind_of(least: Least) -> str:
    """What a violation is about, without its numbers: the same for the same fault, mostly."""
    refused = least.stuck.refused if least.stuck else []  # not minimised if it could not be decided again
    reasons = {f"{moment.event.call} {moment.what}: " + re.sub(r"-?[0-9][0-9.a-f]*(, -?[0-9.]+)*", "#", why)
               for moment, why in refused if moment.event.number in least.visible}
    return "; ".join(sorted(reasons))


class Tally:
    def __init__(self, model: Model, keep: Path | None) -> None:
        self._model = model
        self._keep = keep
        self.histories: Counter[str] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.kinds: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def judge(self, history: History, name: str) -> Verdict:
        result = check(history, self._model, Limits(nodes=300_000, seconds=120.0))
        self.histories[result.verdict.value] += 1
        self.calls.update((event.call, event.outcome) for event in history.events)
        if result.verdict is not Verdict.POSSIBLE and self._keep is not None:
            self._keep.mkdir(parents=True, exist_ok=True)
            history.save(self._keep / f"{name}.jsonl")
        if result.verdict is Verdict.IMPOSSIBLE:
            self._explain(history, name)
        return result.verdict

    def _explain(self, history: History, name: str) -> None:
        least = minimise(history, self._model, seconds=4.0)
        kind = kind_of(least)
        self.kinds[kind] += 1
        text = f"{name}: {checker.counter_example(least)}"
        if kind not in self.examples or len(text) < len(self.examples[kind]):
            self.examples[kind] = text

    def print(self) -> None:
        for kind, count in self.kinds.most_common():
            print(f"\n==== {count} x {kind}\n{self.examples[kind]}")
        print("\nhistories: " + ", ".join(f"{count} {verdict}" for verdict, count in self.histories.items()))
        by_call: dict[str, list[str]] = {}
        for (call, outcome), count in sorted(self.calls.items()):
            by_call.setdefault(call, []).append(f"{count} {outcome}")
        for call, outcomes in by_call.items():
            print(f"  {call}: {', '.join(outcomes)}")


def _run(tally: Tally, mixes: list[str], seed: int, minutes: float) -> None:
    servers: dict[int, ServerProcess] = {}  # by number of ranks
    try:
        end = time.monotonic() + 60 * minutes
        number = 0
        while time.monotonic() < end:
            mix = mixes[number % len(mixes)]
            ranks = workload.MIXES[mix].ranks
            if ranks not in servers:
                servers[ranks] = server_of(ranks, f"{seed}")
            with Stage(servers[ranks]) as stage:
                history = workload.run(stage, workload.MIXES[mix], f"{seed}-{number}")
            verdict = tally.judge(history, f"{mix}-{seed}-{number}")
            if verdict is not Verdict.POSSIBLE:
                print(f"{mix} {seed}-{number}: {verdict.value}", flush=True)
            number += 1
    finally:
        for server in servers.values():
            server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description="Judges what clients of lossd see against docs/consistency.md.")
    parser.add_argument("histories", nargs="*", type=Path, help="judge these instead of running anything")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--mix", default="all,cuts,kills", help=f"of {', '.join(workload.MIXES)}; in turn")
    parser.add_argument("--tolerate", default="", help=f"rules not to judge, of {', '.join(DEVIATIONS)}")
    parser.add_argument("--keep", type=Path, help="folder for histories that are not possible")
    options = parser.parse_args()
    tally = Tally(Model(frozenset(filter(None, options.tolerate.split(",")))), options.keep)
    if options.histories:
        for path in options.histories:
            tally.judge(History.load(path), path.name)
    else:
        print(f"seed {options.seed}", flush=True)
        try:
            _run(tally, options.mix.split(","), options.seed, options.minutes)
        except BaseException:
            tally.print()
            raise
    tally.print()
    if tally.histories["impossible"]:
        return 1
    return 2 if tally.histories["undecided"] else 0


if __name__ == "__main__":
    sys.exit(main())
