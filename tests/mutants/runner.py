# SPDX-License-Identifier: Apache-2.0
"""Runs tests without and with a change."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from entries import Test
from tree import Mutant

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
