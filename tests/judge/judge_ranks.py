# SPDX-License-Identifier: Apache-2.0
"""Histories of a server of several processes, of which any one is killed, judged.

Needs a server with Gloo, so pytest does not collect it by itself: it is named to it.
"""

from __future__ import annotations

import pytest
import workload
from stage import server_of
from test_judge import run_random_histories


@pytest.mark.parametrize("mix", [mix for mix in workload.MIXES if workload.MIXES[mix].ranks > 1])
def test_random_histories_of_ranks(mix: str) -> None:
    server = server_of(workload.MIXES[mix].ranks)
    try:
        run_random_histories(server, mix)
    finally:
        server.stop()
