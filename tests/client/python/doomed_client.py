# SPDX-License-Identifier: Apache-2.0
"""Clients that die or misbehave at a moment that a test names (test_client_deaths.py).

A program that forks one client for each line of its input, "TARGET MEMORY MOMENT DEED", and says "pid N" when that has begun,
"ready" when it has computed once, "child N" of a child of its own, and "ended STATUS" (as os.waitpid has it). MEMORY is host,
gpu or second_gpu, which are played. MOMENT counts places where a call or a region begins, ends, or gives and takes a slice, from the second
computation on; DEED is what the client does there:
  kill   nothing more: SIGKILL
  fork   makes a child, which stays, and goes on; then SIGKILL
  close  closes the session of its region, so that the server takes the memory back when the call ends, and goes on to its end;
         results of that call may be wrong, later ones are right
  unmap  unmaps its region, and goes on, as far as that goes
  none   computes until it is killed from outside
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
from fake_cuda import FakeArray, FakeDriver

import lossd
from lossd import _cuda, _regions, _wire

N, D, V = 300, 24, 97


def rows() -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    return rng.standard_normal((N, D)).astype(np.float32), rng.integers(0, V, N).astype(np.int32)


def compute(client: lossd.Client, gpu: int | None = None) -> Any:
    """The gradients of rows(), which are on the host (None) or on a GPU."""
    hidden, targets = rows()
    gradient = np.full_like(hidden, np.nan)
    if gpu is None:
        client.compute_loss("lm", hidden, targets, grad_hidden=gradient, slice_bytes=40 * D * 4)
        return gradient
    array = FakeArray(gradient, gpu)
    client.compute_loss("lm", FakeArray(hidden, gpu), targets, grad_hidden=array, slice_bytes=40 * D * 4)
    return array.values


def _say(*words: Any) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # one write, as several processes say things


class _Moments:
    def __init__(self, number: int, deed: Callable[[], None]) -> None:
        self.counting = False
        self._left = number
        self._deed = deed

    def wrap(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self._pass()
            try:
                return method(*arguments, **options)
            finally:
                self._pass()

        setattr(owner, name, wrapped)

    def _pass(self) -> None:
        if self.counting:
            self._left -= 1
            if self._left == -1:
                self._deed()


def _live(target: str, memory: str, moment: int, deed: str) -> None:
    gpu = {"host": None, "gpu": 0, "second_gpu": 1}[memory]
    opened: list[_regions.SharedRegion] = []

    def act() -> None:
        if deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif deed == "fork":
            child = os.fork()
            if child == 0:
                signal.alarm(300)
                while True:
                    signal.pause()
            _say("child", child)
        elif deed == "close":
            opened[-1]._socket.close()
        elif deed == "unmap":
            address = opened[-1].address % (1 << 60)  # without the distance of memory of a GPU (fake_cuda.py)
            ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(opened[-1].size))

    _say("pid", os.getpid())
    if gpu is not None:
        driver = FakeDriver(devices=2)
        _cuda.driver = lambda: driver  # type: ignore[assignment]
    moments = _Moments(moment, act)
    for name in ("put", "find", "free", "close"):
        moments.wrap(_wire.SlicePlaces, name)
    open_region = _regions.SharedRegion.__init__

    def remember(self: Any, *arguments: Any, **options: Any) -> None:
        open_region(self, *arguments, **options)
        opened.append(self)

    _regions.SharedRegion.__init__ = remember  # type: ignore[method-assign]
    with lossd.Client(target, transport="shared_memory" if gpu is None else "cuda_ipc", channels=1) as client:
        wanted = compute(client, gpu)
        moments.counting = True
        _say("ready")
        for number in range(3 if deed != "none" else 1 << 30):
            got = compute(client, gpu)
            if number > 0 or deed != "close":
                np.testing.assert_allclose(got, wanted, atol=1e-6)
        if deed == "fork":
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    for line in sys.stdin:
        target, memory, moment, deed = line.split()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _live(target, memory, int(moment), deed)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _say("ended", os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main()
