# SPDX-License-Identifier: Apache-2.0
"""What the tests share: a server of today's build that several histories use one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stage import ServerProcess


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess()
    yield process
    process.stop()
