# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin (-p no_skips) under which a skipped test, or a skipped module, has failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def _fail_if_skipped(report: Any) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"A skip is a failure here. {reason}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    _fail_if_skipped((yield).get_result())  # type: ignore[misc, attr-defined]


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    _fail_if_skipped((yield).get_result())  # type: ignore[misc, attr-defined]
