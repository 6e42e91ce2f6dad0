# SPDX-License-Identifier: Apache-2.0
"""Which heads this program has loaded: lossd.torch asks whether it continues what was loaded. Thread-safe."""

from __future__ import annotations

import threading

_MOST = 1024
_lock = threading.Lock()
_loaded: dict[tuple[int, str], None] = {}  # incarnation and head; of all clients of this program; guarded by _lock


def note_loaded(head: str, incarnation: int) -> None:
    """A client of this program has loaded a checkpoint into the head of this server process."""
    with _lock:
        _loaded[incarnation, head] = None
        if len(_loaded) > _MOST:
            _loaded.pop(next(iter(_loaded)))


def loaded(head: str, incarnation: int) -> bool:
    """Whether one has, since forget_loaded."""
    with _lock:
        return (incarnation, head) in _loaded


def forget_loaded(head: str, incarnation: int | None = None) -> None:
    """`incarnation` None: whatever process."""
    with _lock:
        for key in [key for key in _loaded if key[1] == head and incarnation in (None, key[0])]:
            del _loaded[key]
