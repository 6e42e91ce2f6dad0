# SPDX-License-Identifier: Apache-2.0
"""Histories of a real server, judged. A scenario of a fault that is known and not mended is marked."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import checker
import pytest
import workload
from _pytest.mark import ParameterSet
from checker import Verdict, check, minimise
from history import History
from model import Model
from scenarios import FINDINGS, Finding
from stage import ServerProcess, Stage


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess()
    yield process
    process.stop()


class Violation(AssertionError):
    """A history that docs/consistency.md does not allow."""


def decided(history: History) -> bool:
    """False if the search was given up, which says nothing."""
    verdict = check(history, Model()).verdict
    if verdict is Verdict.IMPOSSIBLE:
        raise Violation(checker.counter_example(minimise(history, Model())))
    return verdict is Verdict.POSSIBLE


def run_random_histories(server: ServerProcess, mix: str) -> None:
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    number, undecided, end = 0, 0, time.monotonic() + (4 if os.environ.get("LOSSD_NIGHTLY") == "1" else 1)
    while time.monotonic() < end or number - undecided < 3:
        with Stage(server) as stage:
            history = workload.run(stage, workload.MIXES[mix], f"{seed}-{number}")
        number += 1
        undecided += not decided(history)
        assert undecided < 3, "too many searches were given up"
    print(f"{number} histories of {mix}, {undecided} undecided")


def _marked(finding: Finding) -> ParameterSet:
    fails = pytest.mark.xfail(reason=finding.sentence, raises=Violation, strict=True)
    return pytest.param(finding, id=finding.scenario.__name__, marks=() if finding.mended else fails)


@pytest.mark.parametrize("finding", map(_marked, FINDINGS))
def test_finding(server: ServerProcess, finding: Finding) -> None:
    with Stage(server, vocab=finding.vocab, large=finding.large) as stage:
        history = finding.scenario(stage)
    assert decided(history), "the search was given up"


@pytest.mark.parametrize("asked", ["auto", "grpc"])
def test_rows_of_trainers_travel_as_they_are_to(server: ServerProcess, asked: str) -> None:
    with Stage(server) as stage:
        stage.raw("A").create(stage.vocab)
        trainer = stage.trainer("T", transport=asked)
        trainer.compute_loss(0, 6, step=0)
        automatic = "cuda_ipc" if os.environ.get("LOSSD_TRANSPORT") == "cuda_ipc" else "shared_memory"
        assert trainer.transport[0] == (automatic if asked == "auto" else "grpc"), trainer.transport


@pytest.mark.parametrize("mix", [mix for mix in workload.MIXES if workload.MIXES[mix].ranks == 1])
def test_random_histories(server: ServerProcess, mix: str) -> None:
    run_random_histories(server, mix)
