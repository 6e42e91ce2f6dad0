# SPDX-License-Identifier: Apache-2.0
"""One head on one server, and the clients of one history."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "client" / "python"))

from cut_proxy import CutProxy  # noqa: E402
from fake_cuda import FakeDriver  # noqa: E402
from history import Event, History, Recorder  # noqa: E402
from rank_server import RankServerProcess  # noqa: E402
from raw_client import RawClient  # noqa: E402
from server_process import ServerProcess  # noqa: E402
from trainer_client import TrainerClient  # noqa: E402

import lossd  # noqa: E402
from lossd import _cuda  # noqa: E402

__all__ = ["ServerProcess", "Stage", "incarnation_of"]

_numbers = itertools.count()

if os.environ.get("LOSSD_TRANSPORT") == "cuda_ipc":  # trainers' rows are on a GPU, which is played
    _gpus = FakeDriver(devices=2)
    _cuda.driver = lambda: _gpus


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
