# SPDX-License-Identifier: Apache-2.0
"""Clients that are killed at any moment of a call in shared memory, that fork, close their session or unmap their memory:
others see nothing of it, and the server has what it had before they came.

LOSSD_FAULT_SCALE multiplies how much is tried.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from doomed_client import D, V, compute
from servers import ServerProcess

import lossd

SCALE = int(os.environ.get("LOSSD_FAULT_SCALE", "1"))


class Doomed:
    """The program that forks clients (doomed_client.py)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, str(Path(__file__).with_name("doomed_client.py"))],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, *words: object) -> int:
        """A client; its number."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return int(self.wait_for("pid")[0])

    def wait_for(self, what: str) -> list[str]:
        """The words that come after `what`, in the next line that begins with it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            first, *rest = line.split()
            if first == what:
                return rest
            assert first != "ended", f"a client ended with {rest} before it said {what!r}"
        raise AssertionError("the program that forks clients has ended")

    def end(self) -> int:
        """The exit status of the client, or minus the signal that ended it, once it has ended."""
        return os.waitstatus_to_exitcode(int(self.wait_for("ended")[0]))

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def doomed() -> Iterator[Doomed]:
    made = Doomed()
    yield made
    made.stop()


class Watched:
    """A server, a client that computes all the time, and what the server held before others came."""

    def __init__(self, memory: str) -> None:
        self.memory = memory
        if memory == "host":
            self.server = ServerProcess()
        else:  # one GPU, or two, and the rows on the second
            flags = ("--devices=all",) if memory == "second_gpu" else ()
            self.server = ServerProcess("--backend=cuda", *flags, program="LOSSD_WITH_SHARED_DEVICE")
        self._observer = lossd.Client(self.server.target, channels=1, transport="grpc")
        self._observer.create_head("lm", hidden_size=D, vocab_size=V, compute_dtype="fp32")
        self.wanted = compute(self._observer)
        self._before = self._holdings()

    def stop(self) -> None:
        self._observer.close()
        self.server.stop()

    def _holdings(self) -> tuple[int, int, int]:
        """Bytes of staging memory, mappings of memory that is shared, and descriptors."""
        process = Path("/proc") / str(self.server.pid)
        mappings = sum("/memfd:" in line for line in (process / "maps").read_text().splitlines())
        return self._observer.get_server().memory.staging, mappings, len(os.listdir(process / "fd"))

    @contextmanager
    def others_compute(self) -> Iterator[None]:
        """A client with rows in memory of its own, which belongs to what was before."""
        over = threading.Event()
        problems: list[BaseException] = []
        computed = [0]
        transport = "shared_memory" if self.memory == "host" else "grpc"  # its rows are on the host
        with lossd.Client(self.server.target, channels=1, transport=transport, shared_memory_bytes=1 << 20) as client:
            compute(client)
            self._before = self._holdings()

            def run() -> None:
                try:
                    while not over.is_set():
                        np.testing.assert_allclose(compute(client), self.wanted, atol=1e-6)
                        computed[0] += 1
                except BaseException as error:
                    problems.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
        assert not problems, problems
        assert computed[0] > 0

    def assert_nothing_is_left(self, descriptors: int = 0) -> None:
        """But for so many descriptors."""
        staging, mappings, before = self._before
        deadline = time.monotonic() + 120
        while True:
            now = self._holdings()
            if now[:2] == (staging, mappings) and now[2] <= before + descriptors:
                return
            assert time.monotonic() < deadline, (now, self._before)
            time.sleep(0.005)


@pytest.fixture(scope="module", params=["host", "gpu", "second_gpu"])
def watched(request: pytest.FixtureRequest, doomed: Doomed) -> Iterator[Watched]:
    made = Watched(request.param)
    # What the server makes with its first clients, and keeps.
    doomed.start(made.server.target, made.memory, 0, "close")
    assert doomed.end() == 0
    made._before = made._holdings()
    yield made
    made.stop()


def test_killed_at_any_moment(watched: Watched, doomed: Doomed, seed: int) -> None:
    rng = random.Random(seed)
    with watched.others_compute():
        for number in range(8 * SCALE):
            pid = doomed.start(watched.server.target, watched.memory, 0, "none")
            if number % 4:
                doomed.wait_for("ready")
            time.sleep(rng.uniform(0, 0.03))
            os.kill(pid, signal.SIGKILL)
            assert doomed.end() == -signal.SIGKILL
            watched.assert_nothing_is_left()


def test_killed_in_any_part_of_a_call(watched: Watched, doomed: Doomed) -> None:
    with watched.others_compute():
        for moment in range(0, 100, max(1, 2 // SCALE)):
            doomed.start(watched.server.target, watched.memory, moment, "kill")
            assert doomed.end() == -signal.SIGKILL
            watched.assert_nothing_is_left()


@pytest.mark.parametrize("moment", [10, 60])
def test_forks_during_a_call(watched: Watched, doomed: Doomed, moment: int) -> None:
    """The child has the connection, the session and the memory as well."""
    with watched.others_compute():
        doomed.start(watched.server.target, watched.memory, moment, "fork")
        child = int(doomed.wait_for("child")[0])
        assert doomed.end() == -signal.SIGKILL, "its results were right until then"
        watched.assert_nothing_is_left(descriptors=100)  # those of connections that the child holds
        os.kill(child, signal.SIGKILL)
        watched.assert_nothing_is_left()


@pytest.mark.parametrize("moment", [10, 40, 80])
def test_closes_its_session_during_a_call(watched: Watched, doomed: Doomed, moment: int) -> None:
    with watched.others_compute():
        doomed.start(watched.server.target, watched.memory, moment, "close")
        assert doomed.end() == 0, "later results were right"
        watched.assert_nothing_is_left()


@pytest.mark.parametrize("moment", [10, 60])
def test_unmaps_its_memory_during_a_call(watched: Watched, doomed: Doomed, moment: int) -> None:
    with watched.others_compute():
        doomed.start(watched.server.target, watched.memory, moment, "unmap")
        assert doomed.end() == -signal.SIGSEGV, "it follows an address of what is gone"
        watched.assert_nothing_is_left()
