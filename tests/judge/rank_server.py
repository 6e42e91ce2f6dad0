# SPDX-License-Identifier: Apache-2.0
"""A server of several processes (docs/scaling.md), as one: whatever rank dies, all end and start again."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "client" / "python"))

from server_process import ServerProcess  # noqa: E402

_DEVICE_LOST = 3


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RankServerProcess(ServerProcess):
    """Rank 0 is the process of the base class. `seed`: which ranks are killed."""

    def __init__(self, ranks: int, seed: str = "") -> None:
        self._random = random.Random(seed)
        self._ranks = ranks
        self._workers: list[subprocess.Popen[bytes]] = []
        self._group = [f"--ranks={ranks}", "--leader=127.0.0.1", f"--rank_port={_free_port()}", "--backend=cpu",
                       "--rank_timeout=2m"]
        self._more = os.environ.get("LOSSD_TEST_FLAGS", "").split()  # which the base class gives to rank 0
        super().__init__(*self._group, "--rank=0")

    def start(self) -> None:
        with open(self.folder / "worker-log", "ab") as log:
            self._workers = [
                subprocess.Popen([os.environ["LOSSD_BINARY"], *self._group, f"--rank={rank}", "--threads=2", *self._more],
                                 stdout=log, stderr=subprocess.STDOUT) for rank in range(1, self._ranks)]
        super().start()

    def kill(self) -> None:
        """kill -9 of any rank: as from then on a launcher sees it, all of them have ended."""
        assert self._process is not None
        processes = [self._process, *self._workers]
        victim = self._random.randrange(self._ranks)
        processes[victim].send_signal(signal.SIGKILL)
        ends = [process.wait(timeout=120) for process in processes]
        wanted = [-signal.SIGKILL if rank == victim else _DEVICE_LOST for rank in range(self._ranks)]
        if ends != wanted:
            logs = [(self.folder / name).read_text() for name in ("log", "worker-log")]
            raise RuntimeError(f"rank {victim} of {self._ranks} was killed: the ranks ended with {ends}\n" + "\n".join(logs))

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        for process in (self._process, *self._workers):
            process.wait(timeout=120)
        self._folder.cleanup()


def server_of(ranks: int, seed: str = "") -> ServerProcess:
    return ServerProcess() if ranks == 1 else RankServerProcess(ranks, seed)
