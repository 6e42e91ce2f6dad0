"""A TCP proxy on a loopback port that cuts its connections: for tests of what survives that."""

from __future__ import annotations

import random
import socket
import threading


class CutProxy:
    def __init__(self, target: str, mean_bytes: int, seed: int) -> None:
        """Each connection is cut after a random number of bytes, both directions together, of this mean; 0: never."""
        host, port = target.split(":")
        self._target = (host, int(port))
        self._mean_bytes = mean_bytes
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.cuts = 0
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = "127.0.0.1:%d" % self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        _shut(self._listener)
        with self._lock:
            for each in self._sockets:
                _shut(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets += (client, server)
                share = self._mean_bytes * self._random.uniform(0.1, 1.9) if self._mean_bytes else float("inf")
            budget = [share]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, sink, budget), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, budget: list[float]) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    before, budget[0] = budget[0], budget[0] - len(data)
                    cut = before > 0 >= budget[0]
                    self.cuts += cut
                if budget[0] <= 0:
                    break
                sink.sendall(data)
        except OSError:
            pass
        _shut(source)
        _shut(sink)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    sock.close()
