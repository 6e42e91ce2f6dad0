# SPDX-License-Identifier: Apache-2.0
"""Waits that a signal handler may end with an exception, as Ctrl-C does with KeyboardInterrupt.

Python runs handlers on the main thread, after any call of a function there. Code in Python that takes a lock, such as that
of Condition, Semaphore and Future, loses it if the exception comes just after: other threads wait for it for ever. So the main
thread takes only locks of `with threading.Lock()`, and runs such code on another thread (run_apart). It also runs functions of
the library there that take long, because no handler runs while the main thread is in one.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from lossd import errors

SIGNAL_SECONDS = 0.5  # how late a wait may notice a signal that another thread has got
_INTERRUPT_SECONDS = 0.05  # how late a wait of the main thread in the library may notice a signal of its own

T = TypeVar("T")


def run_apart(body: Callable[[], T], cancel: Callable[[], None] | None = None, meanwhile: Callable[[], None] | None = None) -> T:
    """What `body` returns or raises; on the main thread it is run on another one, and so it is if there is a `meanwhile`, which
    this thread calls a few times a second, and once after the end.

    An exception of a signal handler or of `meanwhile` is passed on once `body` has ended, early because of `cancel`; without
    `cancel`, and when a second one comes, at once, and `body` goes on alone.
    """
    if meanwhile is None and threading.current_thread() is not threading.main_thread():
        return body()
    begins, under_way = threading.Lock(), threading.Lock()  # whoever takes the first decides whether `body` is run
    under_way.acquire()
    values: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        if begins.acquire(blocking=False):
            try:
                values.append(body())
            except BaseException as error:
                raised.append(error)
            under_way.release()

    try:
        try:
            _thread.start_new_thread(work, ())  # Thread.start() takes a lock of the kind above
        except RuntimeError:  # the interpreter is ending
            work()
        ended = False
        while not ended:  # an interrupt may keep the lock taken: then a wait takes all of its time
            under_way.acquire(timeout=SIGNAL_SECONDS if meanwhile is None else 0.1)
            ended = bool(values or raised)
            if meanwhile is not None:
                meanwhile()
    except BaseException:
        if not begins.acquire(blocking=False) and cancel is not None:  # it has begun
            _thread.start_new_thread(cancel, ())
            while not values and not raised:
                under_way.acquire(timeout=SIGNAL_SECONDS)
        raise
    if raised:
        raise raised[0]
    return values[0]


class Clock:
    """What is left of a limit; None: there is none."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def rest(self) -> float | None:
        """The timeout of a further call. DeadlineExceeded if there is no time left: 0 would mean that call's default."""
        left = self.left()
        if left == 0.0:
            raise errors.DeadlineExceeded("the timeout passed between the requests of this call")
        return left


def await_end(wait: Callable[[float], int], timeout: float | None) -> bool:
    """Whether `wait`, which waits for a number of seconds in the library, says so within the timeout; None: there is none. Signal
    handlers run between two waits."""
    most = _INTERRUPT_SECONDS if threading.current_thread() is threading.main_thread() else SIGNAL_SECONDS
    clock = Clock(timeout)
    while True:
        left = clock.left()
        if wait(most if left is None else min(left, most)):
            return True
        if left == 0.0:
            return False
