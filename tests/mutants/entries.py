# SPDX-License-Identifier: Apache-2.0
"""The entries of ctest: their commands, and what has to be built for them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
