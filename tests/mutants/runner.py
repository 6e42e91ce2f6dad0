# SPDX-License-Identifier: Apache-2.0
"""The entries of ctest, what has to be built for them, and how they run without and with a change."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tree import Mutant


# The entries of ctest: their commands, and what has to be built for them.

TEST, NIGHTLY = "make test", "the nightly suite"  # which have the entries without and with the label "nightly"
SUITES = {"test": (TEST,), "nightly": (NIGHTLY,), "all": (TEST, NIGHTLY)}
_SKIPPED = "SKIP_RETURN_CODE"
_LEFT_OUT = ("python_types_test",)  # mypy reads the package, and the switches are not typed


@dataclass(frozen=True)
class Test:
    """An entry; of one that gives several files to pytest, one of the files."""

    name: str
    suite: str
    group: str  # the program in bin/; of other commands the folder of tests, such as tests/judge
    command: tuple[str, ...]
    folder: str  # where it runs
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    skipped: int | None = None  # exit status
    fixtures: tuple[str, ...] = ()


def of(build: Path, groups: Iterable[str], suites: Iterable[str]) -> list[Test]:
    """Those of the groups and suites that need no GPU. The programs have to be built: ctest tells no command without."""
    wanted = set(groups)
    tests = [test for each in _told(build) if "gpu" not in _properties(each).get("LABELS", ()) for test in _tests(build, each)]
    return [test for test in tests if test.group in wanted and test.suite in suites and test.name not in _LEFT_OUT]


def fixtures(build: Path, tests: list[Test]) -> list[Test]:
    """The entries that prepare something for these."""
    needed = {name for test in tests for name in test.fixtures}
    return [_test(build, each) for each in _told(build) if needed & set(_properties(each).get("FIXTURES_SETUP", ()))]


def targets(build: Path, groups: Iterable[str]) -> list[str]:
    """What has to be built: the programs among the groups, and what the entries of the other groups name."""
    made = subprocess.run(["ninja", "-C", str(build), "-t", "targets", "all"], check=True, capture_output=True, text=True).stdout
    outputs = {line.partition(": ")[0] for line in made.splitlines()}
    tests = [test for test in of(build, groups, (TEST, NIGHTLY)) if test.group not in _programs(outputs)]
    words = {word for test in tests for word in (*test.command, *test.environment.values())}
    named = {word.removeprefix(f"{build}/") for word in words if word.startswith(f"{build}/")} & outputs
    beside_lossd = {"bin/lossctl"} if named else set()  # test_skew.py looks for it there
    return sorted(named | beside_lossd | {f"bin/{group}" for group in set(groups) & _programs(outputs)})


def _programs(outputs: set[str]) -> set[str]:
    return {output.removeprefix("bin/") for output in outputs if output.startswith("bin/")}


def _told(build: Path) -> list[dict[str, Any]]:
    done = subprocess.run(["ctest", "--test-dir", str(build), "--show-only=json-v1"], check=True, capture_output=True, text=True)
    tests: list[dict[str, Any]] = json.loads(done.stdout)["tests"]
    return tests


def _properties(told: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each["value"] for each in told["properties"]}


def _test(build: Path, told: dict[str, Any]) -> Test:
    properties, command = _properties(told), told["command"]
    folder = properties["WORKING_DIRECTORY"]
    built = Path(command[0]).parent == build / "bin"
    group = Path(command[0]).name if built else Path(folder).relative_to(build).as_posix()
    environment = dict(each.split("=", 1) for each in properties.get("ENVIRONMENT", ()))
    return Test(told["name"], NIGHTLY if "nightly" in properties.get("LABELS", ()) else TEST, group, tuple(command), folder,
                environment, properties.get(_SKIPPED), tuple(properties.get("FIXTURES_REQUIRED", ())))


def _tests(build: Path, told: dict[str, Any]) -> Iterator[Test]:
    """The entry, or a test for each of its files of pytest: most changes are reached from few of them."""
    if "command" not in told or "FIXTURES_SETUP" in _properties(told):
        return
    whole = _test(build, told)
    files = [word for word in whole.command if word.endswith(".py") and Path(word).name.startswith("test_")]
    if len(files) < 2:
        yield whole
        return
    for file in files:
        command = tuple(word for word in whole.command if word not in files or word == file)
        yield Test(f"{whole.name} ({Path(file).name})", whole.suite, whole.group, command, whole.folder, whole.environment,
                   whole.skipped, whole.fixtures)


# What the entries of ctest do not say themselves: the variable of CMakePresets.json, and that the first failure is enough.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "PYTEST_ADDOPTS": "-x", "GTEST_FAIL_FAST": "1"}


class Runner:
    """The tests of a suite. `relevant`: whether a test counts for a change."""

    def __init__(self, mutants: list[Mutant], tests: list[Test], jobs: int, work: Path,
                 relevant: Callable[[Mutant, Test], bool]) -> None:
        self._mutants, self._tests, self._jobs, self._work, self._relevant = mutants, tests, jobs, work, relevant
        self._seconds: dict[str, float] = {}
        self._reached: dict[str, bytes] = {}

    def first(self) -> None:
        """Every test without a change: which places it reaches, and how long it takes. One that fails or is skipped is left out."""
        with ThreadPoolExecutor(self._jobs) as pool:
            problems = {test: problem for test, problem in zip(self._tests, pool.map(self._first, self._tests)) if problem}
        for test, problem in problems.items():
            print(f"left out: {test.name} {problem}", flush=True)
        self._tests = [test for test in self._tests if test not in problems]

    def _first(self, test: Test) -> str:
        record = self._work / f"reached-{test.name.replace('/', '-')}"
        record.write_bytes(bytes(max(mutant.number for mutant in self._mutants) + 1))
        begin = time.monotonic()
        done = subprocess.run(test.command, cwd=test.folder, env=environment(test, LOSSD_MUTANT_REACHED=str(record)),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        self._seconds[test.name] = time.monotonic() - begin
        self._reached[test.name] = record.read_bytes()
        record.unlink()
        if test.skipped is not None and done.returncode == test.skipped:
            return "is skipped here"
        return f"fails without any change:\n{done.stdout[-3000:]}" if done.returncode else ""

    def results(self) -> Iterator[tuple[Mutant, str, list[str]]]:
        """Of each change, in order: the test that noticed it, or "", and the tests that reach it."""
        with ThreadPoolExecutor(self._jobs) as pool:
            for mutant, (noticing, reaching) in zip(self._mutants, pool.map(self._tried, self._mutants)):
                yield mutant, noticing, reaching

    def _tried(self, mutant: Mutant) -> tuple[str, list[str]]:
        reaching = [test for test in self._tests if self._reached[test.name][mutant.number] and self._relevant(mutant, test)]
        reaching.sort(key=lambda test: self._seconds[test.name])
        noticing = next((test.name for test in reaching if not self._passes(test, mutant.number)), "")
        return noticing, [test.name for test in reaching]

    def _passes(self, test: Test, number: int) -> bool:
        """It fails, too, if it takes far longer than before."""
        process = subprocess.Popen(test.command, cwd=test.folder, env=environment(test, LOSSD_MUTANT=str(number)),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            return process.wait(timeout=30 + 5 * self._seconds[test.name]) in (0, test.skipped)
        except subprocess.TimeoutExpired:
            return False
        finally:
            try:
                os.killpg(process.pid, 9)  # with what it started
            except ProcessLookupError:
                pass
            process.wait()


def environment(test: Test, **more: str) -> dict[str, str]:
    return {**os.environ, **_ENVIRONMENT, **test.environment, **more}
