# SPDX-License-Identifier: Apache-2.0
"""Whether answers tell versions apart."""

from __future__ import annotations

import encoding
import pytest
from encoding import family


@pytest.mark.parametrize("vocab", [8, 16])
def test_neighbouring_versions_can_be_told_apart(vocab: int) -> None:
    for c in range(0, 400):
        for other in (c - 1, c + 1):
            assert not encoding.near(encoding.lse(family(c, vocab), 1.0), encoding.lse(family(other, vocab), 1.0))
            assert not encoding.near(encoding.lse_gradient(family(c, vocab), 1.0),
                                     encoding.lse_gradient(family(other, vocab), 1.0))
        assert encoding.decode_lse(encoding.lse(family(c, vocab), 1.0), vocab) == f"c={c}"
