# SPDX-License-Identifier: Apache-2.0
"""One head on one server, which may be of several processes, and the clients of one history."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "client" / "python"))

from clients import RawClient, TrainerClient  # noqa: E402
from history import Event, History, Recorder  # noqa: E402
from servers import CutProxy, ServerProcess, free_port  # noqa: E402

import lossd  # noqa: E402


# A server of several processes (docs/scaling.md), as one: whatever rank dies, all end and start again.

_DEVICE_LOST = 3


class RankServerProcess(ServerProcess):
    """Rank 0 is the process of the base class. `seed`: which ranks are killed."""

    def __init__(self, ranks: int, seed: str = "") -> None:
        self._random = random.Random(seed)
        self._ranks = ranks
        self._workers: list[subprocess.Popen[bytes]] = []
        self._group = [f"--ranks={ranks}", "--leader=127.0.0.1", f"--rank_port={free_port()}", "--backend=cpu",
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


_numbers = itertools.count()


class Stage:
    """Makes clients of a new head, runs calls side by side, and gives the history of them all.

    `large`: hidden states of 1 MiB, so that a tensor of 16 rows takes several messages.
    """

    def __init__(self, server: ServerProcess, *, vocab: int = 8, large: bool = False) -> None:
        self.server = server
        self.vocab = vocab
        self.head = f"judged-{next(_numbers)}"
        self.recorder = Recorder(self.head, vocab, incarnation_of(server))
        self._hidden_size = 262144 if large else 4
        self._closing: list[Any] = []
        self._pool = ThreadPoolExecutor(16)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for each in self._closing:
            each.close()
        self._pool.shutdown()
        with _client(self.server) as client:
            with contextlib.suppress(lossd.NotFound):
                client.delete_head(self.head)

    def raw(self, name: str) -> RawClient:
        return self._keep(RawClient(name, self.server.target, self.recorder, self.head, self._hidden_size))

    def trainer(self, name: str, proxy: CutProxy | None = None, **options: Any) -> TrainerClient:
        target = proxy.target if proxy else self.server.target
        times = {"cut_times": proxy.cut_times, "accept_times": proxy.accept_times} if proxy else {}
        return self._keep(TrainerClient(name, target, self.recorder, self.head, self._hidden_size, **times, **options))

    def proxy(self, mean_bytes: int, seed: int, **options: Any) -> CutProxy:
        return self._keep(CutProxy(self.server.target, mean_bytes, seed, **options))

    def start(self, call: Callable[..., Event], *args: Any, **options: Any) -> Future[Event]:
        return self._pool.submit(call, *args, **options)

    def restart(self) -> Event:
        """Kills the server, as a crash does, and starts it again."""
        with self.recorder.call("admin", "Restart", {}) as event:
            self.server.kill()
            self.server.start()
            event.result["incarnation"] = incarnation_of(self.server)
        return event

    def history(self) -> History:
        history = self.recorder.history()
        if isinstance(self.server, RankServerProcess):
            history.mark_lost_devices()
        return history

    def _keep(self, made: Any) -> Any:
        self._closing.append(made)
        return made


def _client(server: ServerProcess) -> lossd.Client:
    """A busy machine may take long; that is no matter of consistency."""
    return lossd.Client(server.target, channels=1, transport="grpc", connect_timeout=120.0, wait_for_server=True)


def incarnation_of(server: ServerProcess) -> int:
    with _client(server) as client:
        return int(client.get_server().incarnation)
