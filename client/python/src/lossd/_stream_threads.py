# SPDX-License-Identifier: Apache-2.0
"""The threads that a client's streams run on. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager


class StreamThreads:
    """One thread for each loss computation under way, and spare ones that are lent to those with several streams.

    So all streams of all computations are open at once. On a deterministic server they may all have to be: the first
    microbatch may come last, and a row may wait for any other one.
    """

    def __init__(self, computations: int, spare: int) -> None:
        self._pool = ThreadPoolExecutor(computations + spare, thread_name_prefix="lossd")
        self._lock = threading.Lock()
        self._spare = spare  # not lent; guarded by _lock

    def start(self, body: Callable[[], None]) -> None:
        """Runs the body of a computation. RuntimeError after close()."""
        self._pool.submit(body)

    @contextmanager
    def lend(self, wanted: int) -> Iterator[int]:
        """How many spare threads the block may use: at most `wanted`, fewer if there are fewer."""
        with self._lock:
            count = min(wanted, self._spare)
            self._spare -= count
        try:
            yield count
        finally:
            with self._lock:
                self._spare += count

    def run_all(self, bodies: list[Callable[[], None]], lent: int) -> None:
        """Runs bodies, which must not raise, at the same time, the first one on this thread. RuntimeError after close().

        `lent` is what the caller has of lend(). Threads that lack beyond them are made for the occasion.
        """
        first, *others = bodies
        with ThreadPoolExecutor(max(1, len(others) - lent), thread_name_prefix="lossd") as more:  # starts none yet
            futures = [more.submit(body) for body in others[lent:]]
            try:
                futures += [self._pool.submit(body) for body in others[:lent]]
                first()
            finally:
                wait(futures)

    def close(self) -> None:
        """Waits until everything has ended."""
        self._pool.shutdown(wait=True)
