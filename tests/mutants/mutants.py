#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes small changes to lossd's code, one at a time, and says which of them no test notices.

    make mutants                                   # 30 in each folder
    tests/mutants/mutants.py --count=100 --seed=7 --suite=all server/engine

The code is copied to build/mutants/tree (tree.py). The changes drawn there are compiled all at once, each with a switch
(mutate.py and mutant.h; mutate_python.py and mutant.py). A first run without any change says which tests reach which change
(runner.py). Then each change is switched on alone, and these tests run until one fails, or takes far longer than before. With
--suite=all, what the entries of `make test` (runner.py) do not notice is tried with the nightly ones. build/mutants/results.txt
has a line for each change; one that is there, or in tests/mutants/equivalent.txt, is not tried again. The exit status is 1 if a
change was neither noticed nor is named there.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import runner
import tree
from runner import NIGHTLY, TEST, Runner, Test, environment
from tree import BUILD, HOME, WORK, Mutant

RESULTS, EQUIVALENT = WORK / "results.txt", Path(__file__).with_name("equivalent.txt")

# The folders, and the groups of tests (runner.py) that reach them: test programs, and folders of tests in Python. A test runs for
# a change that it reaches.
FOLDERS = {
    "server/engine": ("engine_tests", "simulation_tests", "service_tests", "faults_tests", "tests/judge"),
    "server/rpc": ("rpc_tests", "service_tests", "app_tests", "limits_tests", "faults_tests", "tests/judge"),
    "server/head": ("head_tests", "admin_tests", "service_tests", "faults_tests"),
    "proto/wire": ("proto_tests",),
    "kernels/cpu": ("kernels_tests", "kernels_conformance_tests"),
    "client/cpp": ("client_tests", "client_cuda_ipc_tests", "cli_tests", "app_tests", "faults_tests"),
    "client/python": ("tests/client/python", "tests/judge"),
}
# Their tests need packages of PyPI (make test-integrations).
LEFT_OUT = ("client/python/src/lossd/transformers/",)


# ---- Drawing ----


def sources(folder: str) -> list[str]:
    return [file for file in tree.listed(f"{folder}/*.cc", f"{folder}/src/*.py") if not file.startswith(LEFT_OUT)]


def drawn(folders: list[str], count: int, seed: int, known: set[str]) -> list[Mutant]:
    """`count` of each folder, at most one of a line; those that are known are left out."""
    mutants: list[Mutant] = []
    for folder in folders:
        found = [(file, each) for file in sources(folder) for each in tree.mutations(file)]
        random.Random(f"{seed} {folder}").shuffle(found)
        taken: set[tuple[str, int]] = set()
        for file, each in found:
            mutant = Mutant(len(mutants) + 1, folder, file, each)
            if len(taken) < count and (file, each.line) not in taken:
                taken.add((file, each.line))
                if mutant.key not in known:
                    mutants.append(mutant)
    return mutants


def chosen(folders: list[str], wanted: Callable[[str], bool]) -> list[Mutant]:
    """Of each statement one whose key is wanted."""
    mutants: list[Mutant] = []
    for folder in folders:
        for file in sources(folder):
            for each in tree.mutations(file):
                mutant = Mutant(len(mutants) + 1, folder, file, each)
                if wanted(mutant.key) and all((file, each.line) != (other.file, other.what.line) for other in mutants):
                    mutants.append(mutant)
    return mutants


# ---- Results ----


def keys(path: Path) -> dict[str, str]:
    """Of each change in the file its result or reason: the last column. The last line of a change counts."""
    if not path.exists():
        return {}
    lines = [line.split(" | ") for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return {" | ".join(columns[:3]): columns[-1] for columns in lines}


def summary(folders: list[str], results: dict[str, str], reasons: dict[str, str]) -> tuple[list[str], int]:
    """What to print: how many changes which suite noticed; the number of those that survived and have no reason."""
    counts: Counter[tuple[str, str]] = Counter()
    for key, result in results.items():
        folder = next((each for each in folders if key.startswith(each + "/")), None)
        if folder:
            counts[folder, "equivalent" if key in reasons else result.partition(":")[0].partition(",")[0]] += 1
    lines, total = [], Counter[str]()
    for folder in folders:
        here = {kind: counts[folder, kind] for kind in (f"noticed by {TEST}", f"noticed by {NIGHTLY}", "survived", "equivalent")}
        test, nightly, survived, same = here.values()
        total.update(here)
        lines.append(f"{folder}: {test} noticed by {TEST}, {nightly} more by {NIGHTLY}, {survived} survived, "
                     f"{same} equivalent or of no matter")
    test, nightly, survived = total[f"noticed by {TEST}"], total[f"noticed by {NIGHTLY}"], total["survived"]
    lines.append(f"of {test + nightly + survived} that matter, {TEST} noticed {test}, and {NIGHTLY} {nightly} more")
    return lines, survived


# ---- Running ----


def relevant(mutant: Mutant, test: Test) -> bool:
    return test.group in FOLDERS[mutant.folder]


def tried(mutants: list[Mutant], tests: list[Test], suites: tuple[str, ...], jobs: int) -> None:
    """Tries them with one suite after the other: with the second only those that survived the first."""
    reached: dict[str, list[str]] = {mutant.key: [] for mutant in mutants}
    for suite in suites:
        of_suite = [test for test in tests if test.suite == suite and any(relevant(mutant, test) for mutant in mutants)]
        print(f"{suite}: {len(mutants)} changes, {len(of_suite)} tests", flush=True)
        if not mutants or not of_suite:
            continue
        runner = Runner(mutants, of_suite, jobs, WORK, relevant)
        runner.first()
        survivors: list[Mutant] = []
        with RESULTS.open("a") as results:
            for mutant, noticing, reaching in runner.results():
                reached[mutant.key] += reaching
                result = f"noticed by {suite}: {noticing}" if noticing else survived(reached[mutant.key])
                results.write(f"{mutant.key} | line {mutant.what.line} | {result}\n")
                results.flush()
                if not noticing:
                    survivors.append(mutant)
                if not noticing or suite == NIGHTLY:
                    print(described(mutant, result), flush=True)
        mutants = survivors


def survived(reaching: list[str]) -> str:
    return f"survived: {', '.join(reaching) or 'no test comes there'}"


def described(mutant: Mutant, result: str) -> str:
    return f"{mutant.file}:{mutant.what.line}: {result}\n    {mutant.what.before}\n    {mutant.what.after}"


def prepare(tests: list[Test]) -> None:
    """The Python client's environment, out of the changed package."""
    for fixture in runner.fixtures(BUILD, tests):
        done = subprocess.run(fixture.command, cwd=fixture.folder, env=environment(fixture), stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
        if done.returncode not in (0, fixture.skipped):
            sys.exit(f"{fixture.name} fails:\n{done.stdout[-3000:]}")


def told(mutants: list[Mutant], groups: set[str], suites: tuple[str, ...]) -> None:
    """--dry-run: with the entries of build/cpu-only."""
    build = HOME / "build" / "cpu-only"
    for mutant in mutants:
        print(described(mutant, f"change {mutant.number}"))
    for test in runner.of(build, groups, suites):
        print(f"{test.suite}: {test.name} [{test.group}]")
    print("to build:", *runner.targets(build, groups))


def main() -> int:
    parser = argparse.ArgumentParser(description="Says which small changes of the code no test notices.")
    parser.add_argument("folders", nargs="*", default=[], help=f"of {', '.join(FOLDERS)}; default: all")
    parser.add_argument("--count", type=int, default=30, help="changes of each folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--suite", choices=runner.SUITES, default="test",
                        help="tests of `make test`, the nightly ones, or the nightly ones for what `make test` does not notice")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true", help="try those that survived before, and no others")
    parser.add_argument("--match", help="try those whose line of results.txt this regular expression finds, and no others")
    parser.add_argument("--dry-run", action="store_true", help="print the changes, tests and programs; build and run nothing")
    options = parser.parse_args()
    folders, suites = options.folders or list(FOLDERS), runner.SUITES[options.suite]
    results, reasons = keys(RESULTS), keys(EQUIVALENT)
    if options.again:
        wanted = {key for key, result in results.items() if result.startswith("survived") and key not in reasons}
        mutants = chosen(folders, wanted.__contains__)
    elif options.match:
        mutants = chosen(folders, lambda key: re.search(options.match, key) is not None and key not in {**results, **reasons})
    else:
        mutants = drawn(folders, options.count, options.seed, set(results) | set(reasons))
    groups = {group for folder in folders for group in FOLDERS[folder]}
    if options.dry_run:
        told(mutants, groups, suites)
        return 0
    if mutants:
        WORK.mkdir(parents=True, exist_ok=True)
        tree.write(mutants)
        tree.configure()
        mutants = tree.compiled(mutants, runner.targets(BUILD, groups), options.jobs)
        tests = runner.of(BUILD, groups, suites)
        prepare(tests)
        tried(mutants, tests, suites, options.jobs)
    lines, count = summary(folders, keys(RESULTS), reasons)
    print("\n".join(lines))
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
