"""Histories of a real server, judged. What today's server is known to break is marked; the mark goes with the fault."""

from __future__ import annotations

import time

import pytest
from _pytest.mark import ParameterSet
import report
import workload
from checker import Verdict, check
from history import History
from minimise import minimise
from model import Model
from scenarios import FINDINGS, Finding
from stage import ServerProcess, Stage


class Violation(AssertionError):
    """A history that docs/consistency.md does not allow."""


def judge(history: History) -> None:
    verdict = check(history, Model()).verdict
    if verdict is Verdict.IMPOSSIBLE:
        raise Violation(report.counter_example(minimise(history, Model())))
    assert verdict is Verdict.POSSIBLE, "the search was given up"


def _marked(finding: Finding) -> ParameterSet:
    fails = pytest.mark.xfail(reason=finding.sentence, raises=Violation, strict=True)
    return pytest.param(finding, id=finding.scenario.__name__, marks=() if finding.mended else fails)


@pytest.mark.parametrize("finding", map(_marked, FINDINGS))
def test_finding(server: ServerProcess, finding: Finding) -> None:
    with Stage(server, vocab=finding.vocab, large=finding.large) as stage:
        history = finding.scenario(stage)
    judge(history)


# The mixes of calls that today's server and clients answer as the page says.
@pytest.mark.parametrize("mix", ["administration", "ledger", "trainers", "calls", "crashes"])
def test_random_histories(server: ServerProcess, mix: str) -> None:
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    number, end = 0, time.monotonic() + 4
    while time.monotonic() < end or number < 3:
        with Stage(server) as stage:
            judge(workload.run(stage, workload.MIXES[mix], f"{seed}-{number}"))
        number += 1
    print(f"{number} histories of {mix}")
