# SPDX-License-Identifier: Apache-2.0
"""Waits that a signal handler may end with an exception, as Ctrl-C does with KeyboardInterrupt.

Python runs handlers on the main thread, after any call of a function there. Code in Python that takes a lock, such as that
of Condition, Semaphore and Future, loses it if the exception comes just after: other threads wait for it for ever. So the main
thread takes only locks of `with threading.Lock()`, and runs such code on another thread (run_apart). It also runs functions of
the library there that take long, because no handler runs while the main thread is in one.
"""

from __future__ import annotations

import _thread
import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

SIGNAL_SECONDS = 0.5  # how late a wait may notice a signal that another thread has got

T = TypeVar("T")


class Outcome(Generic[T]):
    """What one thread computes and others wait for. Thread-safe."""

    def __init__(self) -> None:
        self._gate = threading.Lock()  # taken until the outcome is there
        self._gate.acquire()
        self._done = False
        self._value: list[T] = []
        self.error: BaseException | None = None  # that `body` raised

    def run(self, body: Callable[[], T]) -> None:
        """Takes what `body` returns or raises. Once."""
        try:
            self._value.append(body())
        except BaseException as error:
            self.error = error
        self._done = True
        self._gate.release()

    def done(self) -> bool:
        return self._done

    def await_end(self, timeout: float | None = None) -> bool:
        """Whether it is there within `timeout` seconds; None: waits without a limit."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self._done:
            left = end - time.monotonic()
            if left <= 0:
                return False
            # An interrupt may keep the lock from being released: then others notice the end SIGNAL_SECONDS later.
            if self._gate.acquire(timeout=min(left, SIGNAL_SECONDS)):
                self._gate.release()
        return True

    def result(self) -> T:
        """What `body` returned, or raises what it raised; only when it is done."""
        if self.error is not None:
            raise self.error
        return self._value[0]


def run_apart(body: Callable[[], T], cancel: Callable[[], None] | None = None, meanwhile: Callable[[], None] | None = None) -> T:
    """What `body` returns or raises; on the main thread it is run on another one, and so it is if there is a `meanwhile`, which
    this thread calls a few times a second, and once after the end.

    An exception of a signal handler or of `meanwhile` is passed on once `body` has ended, early because of `cancel`; without
    `cancel`, and when a second one comes, at once, and `body` goes on alone.
    """
    if meanwhile is None and threading.current_thread() is not threading.main_thread():
        return body()
    outcome: Outcome[T] = Outcome()
    begins = threading.Lock()  # whoever takes it decides whether `body` is run

    def work() -> None:
        if begins.acquire(blocking=False):
            outcome.run(body)

    try:
        try:
            _thread.start_new_thread(work, ())  # Thread.start() takes a lock of the kind above
        except RuntimeError:  # the interpreter is ending
            work()
        ended = False
        while not ended:
            ended = outcome.await_end(None if meanwhile is None else 0.1)
            if meanwhile is not None:
                meanwhile()
    except BaseException:
        runs = not begins.acquire(blocking=False)
        if runs and cancel is not None:
            _thread.start_new_thread(cancel, ())
            outcome.await_end()
        raise
    return outcome.result()
