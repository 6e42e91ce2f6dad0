# SPDX-License-Identifier: Apache-2.0
"""Clients that die or misbehave during a call (test_client_deaths.py).

A program that forks one client for each line of its input, "TARGET MEMORY MOMENT DEED", and says "pid N" when that has begun,
"ready" when it has computed a few times, "child N" of a child of its own, and "ended STATUS" (as os.waitpid has it). MEMORY is
host, gpu or second_gpu, which are played. MOMENT says when in the next computation something happens: which part of the time
that one takes has gone by, in percent. DEED is what the client does then:
  kill   nothing more: SIGKILL
  fork   makes a child, which stays, and goes on; then SIGKILL
  close  closes the session of its region, so that the server takes the memory back when the call ends, and goes on to its end;
         results of that call may be wrong, later ones are right
  unmap  unmaps its region, and goes on, as far as that goes
  none   computes until it is killed from outside
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import stat
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
from fake_cuda import FakeArray

import lossd

N, D, V = 300, 24, 97


def rows() -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    return rng.standard_normal((N, D)).astype(np.float32), rng.integers(0, V, N).astype(np.int32)


class Computation:
    """Of the gradients of rows(), which are on the host (None) or on a GPU; under way once it is made."""

    def __init__(self, client: lossd.Client, gpu: int | None = None) -> None:
        hidden, targets = rows()
        self._gradient: Any = np.full_like(hidden, np.nan)
        if gpu is not None:
            hidden, self._gradient = FakeArray(hidden, gpu), FakeArray(self._gradient, gpu)
        self._pending = client.compute_loss_async("lm", hidden, targets, grad_hidden=self._gradient, slice_bytes=40 * D * 4)

    def wait(self) -> Any:
        self._pending.wait()
        return self._gradient if isinstance(self._gradient, np.ndarray) else self._gradient.values


def compute(client: lossd.Client, gpu: int | None = None) -> Any:
    return Computation(client, gpu).wait()


def _say(*words: Any) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # one write, as several processes say things


def _sessions() -> Iterator[socket.socket]:
    """Those of regions: nothing else here has sockets of packets."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                found = socket.socket(fileno=os.dup(descriptor))
                if found.type == socket.SOCK_SEQPACKET:
                    yield found
        except OSError:  # that of the listing itself
            continue


def _unmap_regions() -> None:
    """Whoever touches a place of one of them ends: nothing else comes there."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    with open("/proc/self/maps") as maps:
        regions = [line.split()[0].split("-") for line in maps if "/memfd:" in line]
    assert regions
    for begin, end in regions:
        address = int(begin, 16)
        libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(int(end, 16) - address), 0,
                  mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10, -1, ctypes.c_long(0))  # MAP_FIXED


def _act(deed: str) -> None:
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
        sessions = list(_sessions())
        assert sessions
        for session in sessions:
            session.shutdown(socket.SHUT_RDWR)
            session.close()
    elif deed == "unmap":
        _unmap_regions()


def _live(target: str, memory: str, moment: int, deed: str) -> None:
    gpu = {"host": None, "gpu": 0, "second_gpu": 1}[memory]
    _say("pid", os.getpid())
    with lossd.Client(target, transport="shared_memory" if gpu is None else "cuda_ipc", channels=1) as client:
        wanted = compute(client, gpu)
        seconds = []
        for _ in range(5):
            begin = time.monotonic()
            compute(client, gpu)
            seconds.append(time.monotonic() - begin)
        _say("ready")
        while deed == "none":
            np.testing.assert_allclose(compute(client, gpu), wanted, atol=1e-6)
        end = time.monotonic() + min(seconds) * moment / 100
        computation = Computation(client, gpu)
        while time.monotonic() < end:
            pass
        _act(deed)
        got = [computation.wait(), compute(client, gpu), compute(client, gpu)]
        for each in got[1:] if deed == "close" else got:
            np.testing.assert_allclose(each, wanted, atol=1e-6)
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
