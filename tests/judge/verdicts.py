# SPDX-License-Identifier: Apache-2.0
"""What the checker should say of a history made by hand."""

from __future__ import annotations

import report
from checker import Verdict, check
from made import Made
from minimise import minimise
from model import Model


def possible(made: Made) -> None:
    result = check(made.history(), Model())
    assert result.verdict is Verdict.POSSIBLE, result.stuck and result.stuck.refused


def impossible(made: Made, why: str) -> None:
    """The reason is among those that the counter-example gives."""
    history = made.history()
    assert check(history, Model()).verdict is Verdict.IMPOSSIBLE
    text = report.counter_example(minimise(history, Model()))
    assert why in text, text


def begun(c: int = 5) -> Made:
    """A head of weights c, from 3 on."""
    made = Made().create()
    made.write(c, (2, 3))
    return made
