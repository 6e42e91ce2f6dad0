# SPDX-License-Identifier: Apache-2.0
"""Which LossHead of this program feeds a head. One that is made later succeeds an earlier one, as when a notebook's cell
runs again, and knows what that one left in the open step. Thread-safe; bounded.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from lossd.torch._step_tracker import StepTracker

_MOST = 1024  # heads that are remembered


@dataclass(frozen=True)
class Feeder:
    """A trainer of a head on a server process."""

    incarnation: int
    head: str
    rank: int
    world_size: int


_lock = threading.Lock()
_trackers: OrderedDict[Feeder, StepTracker] = OrderedDict()  # of the last LossHead of each; guarded by _lock


def succeed(feeder: Feeder, tracker: StepTracker) -> StepTracker | None:
    """Notes the tracker of a new LossHead. The one before it, if it has left something in the step that is open."""
    with _lock:
        before = _trackers.pop(feeder, None)
        _trackers[feeder] = tracker
        if len(_trackers) > _MOST:
            _trackers.popitem(last=False)
    return before if before is not None and before.step == tracker.step and before.sent > 0 else None
