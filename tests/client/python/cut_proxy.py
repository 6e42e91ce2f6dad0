# SPDX-License-Identifier: Apache-2.0
"""A proxy that cuts its connections: for tests of what survives that.

It listens on a port of the loopback, or on a Unix socket if the server does.
"""

from __future__ import annotations

import random
import socket
import tempfile
import threading
import time


class CutProxy:
    def __init__(self, target: str, mean_bytes: int, seed: int, *, piece_bytes: int = 1 << 16,
                 piece_seconds: float = 0.0) -> None:
        """Each connection is cut after a random number of bytes, both directions together, of this mean; 0: never.

        What clients send is passed on in pieces of at most `piece_bytes`, with a pause of `piece_seconds` before each.
        """
        self._server = target
        self._mean_bytes = mean_bytes
        self._piece_bytes = piece_bytes
        self._piece_seconds = piece_seconds
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.cuts = 0
        self.cut_times: list[int] = []  # of time.monotonic_ns(), just before each cut
        self.accept_times: list[int] = []  # and just before each connection to the server
        self._sockets: list[socket.socket] = []
        self._folder = tempfile.TemporaryDirectory(prefix="lossd-proxy.") if target.startswith("unix:") else None
        if self._folder is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.target = "127.0.0.1:%d" % self._listener.getsockname()[1]
        else:
            self._listener = socket.create_server(f"{self._folder.name}/proxy", family=socket.AF_UNIX)
            self.target = f"unix:{self._folder.name}/proxy"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        _shut(self._listener)
        with self._lock:
            for each in self._sockets:
                _shut(each)
        if self._folder is not None:
            self._folder.cleanup()

    def cut_all(self) -> None:
        """Cuts every connection there is."""
        with self._lock:
            open_now, self._sockets = self._sockets, []
            self.cuts += len(open_now) // 2
            self.cut_times += [time.monotonic_ns()] * (len(open_now) // 2)
        for each in open_now:
            _shut(each)

    def cut_one(self, number: int) -> None:
        """Cuts one of the connections that there are, in the order of their coming, and lets no further ones through."""
        self._server = "127.0.0.1:1"
        with self._lock:
            cut = self._sockets[2 * number:2 * number + 2]
        for each in cut:
            _shut(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accept_times.append(time.monotonic_ns())
            try:
                server = _connect(self._server)
            except OSError:  # no server at the moment
                _shut(client)
                continue
            for each in (client, server):
                if each.family != socket.AF_UNIX:
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets += (client, server)
                share = self._mean_bytes * self._random.uniform(0.1, 1.9) if self._mean_bytes else float("inf")
            budget = [share]
            ways = ((client, server, self._piece_bytes, self._piece_seconds), (server, client, 1 << 16, 0.0))
            for source, sink, piece_bytes, piece_seconds in ways:
                threading.Thread(target=self._copy, args=(source, sink, budget, piece_bytes, piece_seconds),
                                 daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, budget: list[float], piece_bytes: int,
              piece_seconds: float) -> None:
        try:
            while data := source.recv(piece_bytes):
                time.sleep(piece_seconds)
                with self._lock:
                    before, budget[0] = budget[0], budget[0] - len(data)
                    cut = before > 0 >= budget[0]
                    self.cuts += cut
                    if cut:
                        self.cut_times.append(time.monotonic_ns())
                if budget[0] <= 0:
                    break
                sink.sendall(data)
        except OSError:
            pass
        _shut(source)
        _shut(sink)


def _connect(target: str) -> socket.socket:
    """To "unix:PATH" or "host:port"."""
    if not target.startswith("unix:"):
        host, port = target.split(":")
        return socket.create_connection((host, int(port)))
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(target.removeprefix("unix:"))
    except OSError:
        connection.close()
        raise
    return connection


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    sock.close()
