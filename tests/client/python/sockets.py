# SPDX-License-Identifier: Apache-2.0
"""Servers of a test's own on plain sockets."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def listener(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that gives each connection to `answer`, in a thread of its own, and closes it."""
    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=one, args=(connection,), daemon=True).start()

    def one(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def speak(connection: socket.socket, words: bytes | None) -> None:
    """Says the words and hangs up; None: says nothing until the other side goes."""
    if words is not None:
        connection.sendall(words)
        if isinstance(connection, ssl.SSLSocket):
            connection = connection.unwrap()
        connection.shutdown(socket.SHUT_WR)
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass


def pump(source: socket.socket, sink: socket.socket) -> None:
    """Passes on what comes until one side ends, and tells the other."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
