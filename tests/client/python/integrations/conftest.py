# SPDX-License-Identifier: Apache-2.0
"""What these tests share besides what ../conftest.py has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def head_name(client: Any, seed: int) -> Iterator[str]:
    """The name of a head that the test makes; the head goes when the test ends."""
    name = f"hf-{seed}"
    yield name
    if name in [each.spec.name for each in client.list_heads()]:
        client.delete_head(name)
