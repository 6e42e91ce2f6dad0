#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes small changes to lossd's code, one at a time, and says which of them no test notices.

    make mutants                                   # 30 in each folder
    tests/mutants/mutants.py --count=100 --seed=7 server/engine

The code is copied to build/mutants/tree; the changes drawn there are compiled all at once, each with a switch
(mutant.h). A first run without any change says which tests reach which change; then each change
is switched on alone, and these tests run until one fails, or takes far longer than before. build/mutants/results.txt has
a line for each change; one that is there, or in tests/mutants/equivalent.txt, is not tried again. The exit status is 1
if a change was neither noticed nor is named there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutate import Mutation, mutations, switched

HOME = Path(__file__).resolve().parents[2]
WORK = HOME / "build" / "mutants"
TREE, RESULTS = WORK / "tree", WORK / "results.txt"
BUILD = TREE / "build" / "cpu-only"  # as in any checkout, so that ccache has what is not changed
EQUIVALENT = Path(__file__).with_name("equivalent.txt")

# The folders, and those of their tests. A test runs for a change that it reaches.
FOLDERS = {
    "server/engine": ("tests/server/engine",),
    "server/rpc": ("tests/server/rpc", "tests/server/service", "tests/server/app", "tests/server/limits"),
    "server/head": ("tests/server/head", "tests/server/admin"),
    "proto/wire": ("tests/proto",),
    "kernels/cpu": ("tests/kernels/cpu", "tests/kernels"),
    "client/cpp": ("tests/client", "tests/server/app"),
}
SMALL = {"LOSSD_SIMULATION_SCHEDULES": "1500"}  # of what takes long otherwise


@dataclass(frozen=True)
class Mutant:
    number: int
    folder: str
    file: str
    what: Mutation

    @property
    def key(self) -> str:
        return f"{self.file} | {self.what.before} | {self.what.after}"


@dataclass(frozen=True)
class Test:
    name: str
    command: list[str]
    folder: str


# ---- Drawing ----


def sources(folder: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", f"{folder}/*.cc"], cwd=HOME, check=True, capture_output=True, text=True)
    return listed.stdout.split()


def drawn(folders: list[str], count: int, seed: int, known: set[str]) -> list[Mutant]:
    """`count` of each folder, at most one of a line; those that are known are left out."""
    mutants: list[Mutant] = []
    for folder in folders:
        found = [(file, each) for file in sources(folder) for each in mutations((HOME / file).read_text())]
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
            for each in mutations((HOME / file).read_text()):
                mutant = Mutant(len(mutants) + 1, folder, file, each)
                if wanted(mutant.key) and all((file, each.line) != (other.file, other.what.line) for other in mutants):
                    mutants.append(mutant)
    return mutants


def keys(path: Path) -> dict[str, str]:
    """Of each change in the file its result or reason: the last column."""
    if not path.exists():
        return {}
    lines = [line.split(" | ") for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return {" | ".join(columns[:3]): columns[-1] for columns in lines}


# ---- Building ----


def copy_tree() -> None:
    """Only what has changed is written, so that it alone is compiled again."""
    listed = subprocess.run(["git", "ls-files"], cwd=HOME, check=True, capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, listed):
        if (HOME / name).is_file():
            put(TREE / name, (HOME / name).read_bytes())
            shutil.copymode(HOME / name, TREE / name)


def put(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def instrument(mutants: list[Mutant]) -> None:
    """The code is in a file beside it that counts as a system's header: warnings do not matter there."""
    for file in {mutant.file for mutant in mutants} | {str(path.relative_to(TREE)).removesuffix(".mutants")
                                                      for path in TREE.rglob("*.cc.mutants")}:
        chosen = [(mutant.number, mutant.what) for mutant in mutants if mutant.file == file]
        text = (HOME / file).read_text()
        if not chosen:
            put(TREE / file, text.encode())
            continue
        header = f'#pragma GCC system_header\n#include "{HOME / "tests/mutants/mutant.h"}"\n#line 1\n'
        put(TREE / f"{file}.mutants", (header + switched(text, chosen)).encode())
        put(TREE / file, f'#include "{Path(file).name}.mutants"\n// {hash(str(chosen))}\n'.encode())


def compiled(mutants: list[Mutant], targets: list[str], jobs: int) -> list[Mutant]:
    """Those with which the code compiles."""
    while True:
        instrument(mutants)
        done = subprocess.run(["ninja", "-C", str(BUILD), "-k", "0", f"-j{jobs}", *targets], capture_output=True, text=True)
        if done.returncode == 0:
            return mutants
        bad = wrong(mutants, done.stdout)
        if not bad:
            sys.exit(done.stdout[-3000:] + "\nthe code does not compile, and no change is to blame")
        mutants = [mutant for mutant in mutants if mutant not in bad]


def wrong(mutants: list[Mutant], output: str) -> set[Mutant]:
    """The changes at, or next before, the places of errors."""
    bad: set[Mutant] = set()
    for file, line in set(re.findall(r"([\w/.\-]+\.cc)\.mutants:(\d+):", "\n".join(
            line for line in output.splitlines() if "error:" in line or "required from here" in line))):
        before = [mutant for mutant in mutants if file.endswith(mutant.file) and mutant.what.line <= int(line)]
        if before:
            last = max(mutant.what.line for mutant in before)
            bad |= {mutant for mutant in before if mutant.what.line == last}
    return bad


def tests_of(folders: list[str]) -> list[Test]:
    wanted = {folder for each in folders for folder in FOLDERS[each]}
    told = json.loads(subprocess.run(["ctest", "--test-dir", str(BUILD), "--show-only=json-v1"], check=True,
                                     capture_output=True, text=True).stdout)
    programs = subprocess.run(["ninja", "-C", str(BUILD), "-t", "targets", "all"], check=True, capture_output=True,
                              text=True).stdout
    files, nodes = told["backtraceGraph"]["files"], told["backtraceGraph"]["nodes"]
    found = []
    for test in told["tests"]:
        node = nodes[test["backtrace"]]
        while "parent" in node:
            node = nodes[node["parent"]]
        folder = str(Path(files[node["file"]]).parent.relative_to(TREE))
        labels = next((each["value"] for each in test["properties"] if each["name"] == "LABELS"), [])
        name = test["name"]  # of the program, too (lossd_test)
        if folder in wanted and "gpu" not in labels and f"\nbin/{name}: CXX_EXECUTABLE" in programs:
            found.append(Test(name, [str(BUILD / "bin" / name)], folder))
    return found


# ---- Running ----


class Runner:
    def __init__(self, mutants: list[Mutant], tests: list[Test], jobs: int) -> None:
        self._mutants, self._tests, self._jobs = mutants, tests, jobs
        self._seconds: dict[str, float] = {}
        self._reached: dict[str, bytes] = {}

    def first(self) -> None:
        """Every test without a change: which places it reaches, and how long it takes."""
        with ThreadPoolExecutor(self._jobs) as pool:
            for test, problem in zip(self._tests, pool.map(self._first, self._tests)):
                if problem:
                    sys.exit(f"{test.name} fails without any change:\n{problem}")

    def _first(self, test: Test) -> str:
        record = WORK / f"reached-{test.name}"
        record.write_bytes(bytes(max(mutant.number for mutant in self._mutants) + 1))
        begin = time.monotonic()
        done = subprocess.run(test.command, cwd=BUILD, env={**os.environ, **SMALL, "LOSSD_MUTANT_REACHED": str(record)},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        self._seconds[test.name] = time.monotonic() - begin
        self._reached[test.name] = record.read_bytes()
        record.unlink()
        return done.stdout[-3000:] if done.returncode else ""

    def tried(self, mutant: Mutant) -> str:
        reaching = [test for test in self._tests if self._reached[test.name][mutant.number]
                    and test.folder in FOLDERS[mutant.folder]]
        if not reaching:
            return "survived: no test comes there"
        for test in sorted(reaching, key=lambda test: self._seconds[test.name]):
            if not self._passes(test, mutant.number):
                return f"noticed by {test.name}"
        return f"survived {', '.join(test.name for test in reaching)}"

    def _passes(self, test: Test, number: int) -> bool:
        process = subprocess.Popen(test.command, cwd=BUILD, env={**os.environ, **SMALL, "LOSSD_MUTANT": str(number)},
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            return process.wait(timeout=30 + 5 * self._seconds[test.name]) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            try:
                os.killpg(process.pid, 9)  # with what it started
            except ProcessLookupError:
                pass
            process.wait()

    def run(self) -> None:
        with ThreadPoolExecutor(self._jobs) as pool, RESULTS.open("a") as results:
            for mutant, result in zip(self._mutants, pool.map(self.tried, self._mutants)):
                results.write(f"{mutant.key} | line {mutant.what.line} | {result}\n")
                results.flush()
                if result.startswith("survived"):
                    print(f"{mutant.file}:{mutant.what.line}: {result}\n    {mutant.what.before}\n    {mutant.what.after}",
                          flush=True)


def summary(folders: list[str]) -> int:
    """The share of noticed changes; the number of those that survived and have no reason."""
    results, reasons = keys(RESULTS), keys(EQUIVALENT)
    counts: Counter[tuple[str, str]] = Counter()
    for key, result in results.items():
        folder = next((each for each in folders if key.startswith(each + "/")), None)
        kind = "equivalent" if key in reasons else result.split(":")[0].split()[0]
        if folder:
            counts[folder, kind] += 1
    for folder in folders:
        noticed, survived, same = (counts[folder, kind] for kind in ("noticed", "survived", "equivalent"))
        print(f"{folder}: {noticed} noticed, {survived} survived, {same} equivalent or of no matter")
    total = Counter({kind: sum(counts[folder, kind] for folder in folders) for kind in ("noticed", "survived")})
    print(f"{total['noticed']} of {total['noticed'] + total['survived']} that matter were noticed")
    return total["survived"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Says which small changes of the code no test notices.")
    parser.add_argument("folders", nargs="*", default=[], help=f"of {', '.join(FOLDERS)}; default: all")
    parser.add_argument("--count", type=int, default=30, help="changes of each folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true", help="try those that survived before, and no others")
    parser.add_argument("--match", help="try those whose line of results.txt this regular expression finds, and no others")
    options = parser.parse_args()
    folders = options.folders or list(FOLDERS)
    results, reasons = keys(RESULTS), keys(EQUIVALENT)
    if options.again:
        wanted = {key for key, result in results.items() if result.startswith("survived") and key not in reasons}
        mutants = chosen(folders, wanted.__contains__)
    elif options.match:
        mutants = chosen(folders, lambda key: re.search(options.match, key) is not None and key not in {**results, **reasons})
    else:
        mutants = drawn(folders, options.count, options.seed, set(results) | set(reasons))
    WORK.mkdir(parents=True, exist_ok=True)
    copy_tree()
    if not (BUILD / "build.ninja").exists():
        subprocess.run(["cmake", "--preset", "cpu-only", "-DLOSSD_TESTS=ON"], cwd=TREE, check=True,
                       stdout=subprocess.DEVNULL)
    tests = tests_of(folders)
    mutants = compiled(mutants, sorted(test.name for test in tests), options.jobs)
    print(f"{len(mutants)} changes, {len(tests)} tests", flush=True)
    if mutants:
        runner = Runner(mutants, tests, options.jobs)
        runner.first()
        runner.run()
    return 1 if summary(folders) else 0


if __name__ == "__main__":
    sys.exit(main())
