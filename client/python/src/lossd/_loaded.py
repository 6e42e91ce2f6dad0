# SPDX-License-Identifier: Apache-2.0
"""Which heads this program has loaded: lossd.torch asks whether it continues what was loaded. Thread-safe."""

from __future__ import annotations

import threading
from typing import Any

_MOST = 1024
_lock = threading.Lock()
# Name, incarnation of the server and number (creation) of each head; of all clients of this program; guarded by _lock.
_loaded: dict[tuple[str, int, int], None] = {}


def note(head: str, state: Any) -> None:
    """A client of this program has loaded a checkpoint into the head, whose HeadState this is."""
    with _lock:
        _loaded[head, state.incarnation, state.creation] = None
        if len(_loaded) > _MOST:
            _loaded.pop(next(iter(_loaded)))


def has(head: str, state: Any) -> bool:
    """Whether one has, since forget()."""
    with _lock:
        return (head, state.incarnation, state.creation) in _loaded


def forget(head: str, state: Any = None) -> None:
    """`state` None: of all heads of this name."""
    with _lock:
        for key in [key for key in _loaded if key[0] == head]:
            if state is None or key[1:] == (state.incarnation, state.creation):
                del _loaded[key]
