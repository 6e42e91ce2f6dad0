# SPDX-License-Identifier: Apache-2.0
"""Servers for tests: lossd itself, plain sockets, and a proxy that cuts connections."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

# The server as a library lies beside the program.
if program := os.environ.get("LOSSD_BINARY"):
    os.environ.setdefault("LOSSD_LIBRARY", str(Path(program).resolve().parent / "liblossd.so"))


# A lossd of its own for a test: starts the program that LOSSD_BINARY names on a free port of the loopback.
#
# With LOSSD_TEST_SOCKETS=unix it listens on a Unix socket instead. LOSSD_TEST_FLAGS are further flags of every server.


def on_unix_sockets() -> bool:
    return os.environ.get("LOSSD_TEST_SOCKETS") == "unix"


def free_port() -> int:
    """A port of the loopback that nothing listens on. It lies below those that the system gives to sockets without a port of their own:
    until it is used, only another test that draws the same could take it."""
    ports = 20000
    end = max(int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]), 1024 + ports)
    for _ in range(1000):
        port = end - 1 - random.SystemRandom().randrange(ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


class ServerProcess:
    def __init__(self, *flags: str, program: str = "LOSSD_BINARY") -> None:
        """`program`: the environment variable that names it."""
        self._program = os.environ[program]
        self._folder = tempfile.TemporaryDirectory(prefix="lossd-test.")
        self.folder = Path(self._folder.name)
        self._flags = (*flags, *os.environ.get("LOSSD_TEST_FLAGS", "").split())
        self._process: subprocess.Popen[bytes] | None = None
        self.target = f"unix:{self.folder}/grpc" if on_unix_sockets() else "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Starts it, at the address it had before if it had one."""
        ports = self.folder / "ports"
        ports.unlink(missing_ok=True)
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._program, f"--listen={self.target}", "--http=", f"--port_file={ports}",
                 f"--checkpoint_dir={self.folder / 'checkpoints'}", "--threads=2", *self._flags],
                stdout=log, stderr=subprocess.STDOUT)
        for _ in range(2400):  # two minutes, on a machine that does other work too
            if ports.exists() and ports.read_text():
                self.target = json.loads(ports.read_text())["grpc"]
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError("lossd did not come up:\n" + (self.folder / "log").read_text())

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def ended(self) -> int | None:
        """Its exit status if it has ended, by itself or not."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """As a crash ends it."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)
        self._folder.cleanup()

    def _end(self, how: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(timeout=60)


class EmbeddedServer:
    """A lossd in this process, as lossd.embedded() starts it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lossd-test.")
        self.folder = Path(self._folder.name)
        import lossd  # some who start servers have no client

        self._client = lossd.embedded(checkpoint_dir=self.folder / "checkpoints", threads=2)
        self.target = self._client.target

    def stop(self) -> None:
        self._client.close()
        self._folder.cleanup()


# A server of gRPC before another one.


class ForwardingServer:
    """Passes calls on. Derived classes say what becomes of them on the way."""

    def __init__(self, target: str) -> None:
        import grpc  # some who start servers do without

        self._grpc = grpc
        unlimited = [("grpc.max_receive_message_length", -1)]
        self._channel = grpc.insecure_channel(target, options=unlimited)
        self._server = grpc.server(futures.ThreadPoolExecutor(32), handlers=[self], options=unlimited)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()
        self._channel.close()

    def knows(self, method: str) -> bool:
        """Of "/lossd.v1.HeadService/CreateHead" and the like."""
        return True

    def request(self, method: str, data: bytes) -> bytes:
        """What the server gets of a message. ConnectionError: the call ends as if the connection had broken."""
        return data

    def answer(self, method: str, data: bytes) -> bytes:
        """What the client gets of a message. ConnectionError: as above."""
        return data

    def service(self, call: Any) -> Any:
        """What grpc.server asks for a method's handler."""
        if not self.knows(call.method):
            return None  # UNIMPLEMENTED

        def serve(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            broken: list[ConnectionError] = []

            def passed_on() -> Iterator[bytes]:
                try:
                    for each in requests:
                        yield self.request(call.method, each)
                except ConnectionError as error:
                    broken.append(error)
                    forward.cancel()

            metadata = [pair for pair in context.invocation_metadata() if not pair[0].startswith(("user-agent", "grpc-", "te"))]
            forward = self._channel.stream_stream(call.method)(passed_on(), timeout=context.time_remaining(), metadata=metadata)
            context.add_callback(forward.cancel)
            try:
                for each in forward:
                    yield self.answer(call.method, each)
            except ConnectionError as error:
                context.abort(self._grpc.StatusCode.UNAVAILABLE, str(error))
            except self._grpc.RpcError as error:
                if broken:
                    context.abort(self._grpc.StatusCode.UNAVAILABLE, str(broken[0]))
                context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
                context.abort(error.code(), error.details())

        # On the wire a call with one message is a stream of one.
        return self._grpc.stream_stream_rpc_method_handler(serve)


# Servers of a test's own on plain sockets.


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


# A proxy that cuts its connections: for tests of what survives that.
#
# It listens on a port of the loopback, or on a Unix socket if the server does.


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
