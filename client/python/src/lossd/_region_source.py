# SPDX-License-Identifier: Apache-2.0
"""Where the loss calls of a client get their region of shared memory from."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from lossd import _plan, errors
from lossd._regions import SharedRegion, no_region

TRANSPORTS = ("auto", "grpc", "shared_memory", "cuda_ipc")

_FIRST_PAUSE = 2.0  # seconds without after an attempt that failed; twice as long each time
_LONGEST_PAUSE = 64.0
_LONGEST_GROWTH_PAUSE = 3600.0


def given_or_environment(transport: str | None) -> str:
    """The transport that was given, else that of LOSSD_TRANSPORT, else "auto"."""
    chosen = (os.environ.get("LOSSD_TRANSPORT") or "auto") if transport is None else transport
    if chosen not in TRANSPORTS:
        raise errors.InvalidArgument(f"transport is {chosen!r}; it must be auto, grpc, shared_memory or cuda_ipc")
    return chosen


class RegionSource:
    """Opens a region with the first loss call of a client, a larger one in its place when calls need it, and another one
    when that cannot be used any more.

    An attempt that fails is repeated by calls that begin later, after pauses that grow. Thread-safe.
    """

    def __init__(self, transport: str, sizes: _plan.RegionSizes, name: str, ask: Callable[[], str], device: str = "") -> None:
        """`name`: the region socket, as the server has told it; `ask` asks for it again. `device` as in SharedRegion."""
        self._transport = transport
        self._sizes = sizes
        self._ask = ask
        self._device = device
        self._changed = threading.Condition()  # guards what follows
        self._name = name
        self._region: SharedRegion | None = None
        self._next_growth = 0.0
        self._growth_pause = _LONGEST_PAUSE  # after the next attempt that brings less than it asked for
        self._opening = self._tried = self._closed = False
        self._refused = False  # the server did not know the region before
        self._pause = _FIRST_PAUSE  # after the next attempt that fails
        self._next_try = 0.0
        self._problem: errors.LossdError | None = None

    def check(self) -> None:
        """Raises if there is no region to be had."""
        if self.get() is None and self._problem is not None:
            raise self._problem

    def get(self, call_bytes: int = 0) -> SharedRegion | None:
        """The region for a call that begins, whose rows have so many bytes; None: it is to send its slices in messages.

        All calls wait for the first attempt to open one, and none for a later one of another call: they use the region that
        is there, if there is one.
        """
        if self._transport == "grpc":
            return None
        with self._changed:
            while self._opening and not self._tried:
                self._changed.wait()
            usable = self._region is not None and self._region.usable()
            if not usable:
                self._drop()
            size = self._wanted(call_bytes)
            before = self._region.size if self._region is not None else 0
            next_try = self._next_growth if usable else self._next_try
            if self._closed or self._opening or size <= before or time.monotonic() < next_try:
                return self._region
            self._opening = True
            if self._region is not None:  # the server may have no room for both
                self._region.retire_unused()
        try:
            region, problem = self._open(size, ask=self._tried and not usable)  # it may be another process by now
        except BaseException:  # an interrupt: the next call is to try
            with self._changed:
                self._opening = False
                self._changed.notify_all()
            raise
        with self._changed:
            self._opening, self._tried = False, True
            self._changed.notify_all()
            self._take(region, size, problem)
            return self._region

    def _wanted(self, call_bytes: int) -> int:
        """What to ask the server for."""
        wanted = self._sizes.wanted(call_bytes)
        if self._region is None or not self._region.crowded:
            return wanted
        return max(wanted, min(self._sizes.most, _plan.REGION_GROWTH * self._region.size))

    def _take(self, region: SharedRegion | None, size: int, problem: errors.LossdError | None) -> None:
        """Takes what an attempt to get so many bytes has brought."""
        if self._closed:
            if region is not None:
                region.retire()
            return
        if region is None or region.size < size:  # a server is not asked with each call for what it has not given
            self._next_growth = time.monotonic() + self._growth_pause
            self._growth_pause = min(2 * self._growth_pause, _LONGEST_GROWTH_PAUSE)
        else:
            self._growth_pause = _LONGEST_PAUSE
        if self._region is not None and self._region.usable():  # calls use it, for which a larger one was wanted
            if region is not None and region.size > self._region.size:
                self._region.retire()  # they keep it
                self._region = region
            elif region is not None:
                region.retire()
            return
        self._drop()
        self._region, self._problem = region, problem
        if region is None:
            self._wait_longer()
        elif not self._refused:
            self._pause = _FIRST_PAUSE

    def _drop(self) -> None:
        """Of a region that cannot be used any more."""
        if self._region is None:
            return
        refused = self._region.refused
        # Once it is a server that has been restarted. If it does not know the next one either, the socket leads to
        # another server.
        if refused and self._refused:
            self._problem = no_region("the server does not know the regions of its socket")
            self._wait_longer()
        self._refused = refused
        self._region = None

    def _wait_longer(self) -> None:
        self._next_try = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _open(self, size: int, ask: bool) -> tuple[SharedRegion | None, errors.LossdError | None]:
        """One attempt, by the one thread that has set _opening."""
        try:
            if ask:
                self._name = self._ask()
            if not self._name:
                raise no_region("the server offers none")
            return SharedRegion(self._name, size, self._device), None
        except errors.LossdError as error:
            return None, error

    def choice(self) -> tuple[str, str]:
        """How rows travel, "cuda_ipc", "shared_memory" or "grpc", and why."""
        if self._transport == "grpc":
            return "grpc", "the client was told so"
        with self._changed:
            if self._region is not None and self._device:
                return "cuda_ipc", f"the server's GPU is of this host; {self._region.size >> 20} MiB of {self._device}"
            if self._region is not None:
                problem = self._region.pin_problem
                return "shared_memory", f"the server is on this host; {self._region.size >> 20} MiB" + (
                    "" if problem is None else f"; GPUs copy to it by a detour: {problem.message}")
            if self._opening:
                return "grpc", "the shared memory is being opened"
            if not self._tried:
                return "grpc", "nothing was sent yet"
            if self._problem is None:
                return "grpc", "the shared memory was given up after a call that failed; later ones get other"
            return "grpc", f"{self._problem.message}; tried again from time to time"

    def close(self) -> None:
        """Gives the region back; nothing is opened any more."""
        with self._changed:
            if self._region is not None:
                self._region.retire()
            self._region = None
            self._closed = True
