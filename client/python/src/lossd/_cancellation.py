# SPDX-License-Identifier: Apache-2.0
"""Ends what is under way, from another thread. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Cancellation:
    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._actions: dict[object, Callable[[], None]] = {}  # guarded by _lock

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        """May be repeated."""
        self._event.set()
        with self._lock:
            actions = list(self._actions.values())
        for action in actions:
            action()

    def wait(self, seconds: float) -> None:
        """Sleeps, but not longer than until cancel()."""
        self._event.wait(seconds)

    @contextmanager
    def ends(self, action: Callable[[], None]) -> Iterator[None]:
        """cancel() runs `action` while the block runs; at once if it came before.

        The action may run twice, or just after the block.
        """
        key = object()
        with self._lock:
            self._actions[key] = action
        try:
            if self.cancelled:
                action()
            yield
        finally:
            with self._lock:
                del self._actions[key]
