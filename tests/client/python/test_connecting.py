# SPDX-License-Identifier: Apache-2.0
"""What a lossd.Client says when no connection comes about, and that it says so well before its timeout."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from servers import ServerProcess, listener

import lossd
from lossd.v1 import head_pb2, server_pb2

PATIENCE = 240.0  # connect_timeout of clients that are expected to give up before


def refusal(target: str, **options: Any) -> lossd.LossdError:
    """How a client ends that has all the time of the world."""
    start = time.monotonic()
    with pytest.raises(lossd.LossdError) as caught:
        lossd.Client(target, connect_timeout=PATIENCE, **options)
    assert time.monotonic() - start < PATIENCE / 2, "it waited for its timeout"
    return caught.value


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port of this machine that refuses connections."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextlib.contextmanager
def grpc_server(**services: dict[str, Callable[[Any, Any], Any]]) -> Iterator[str]:
    """The address of a gRPC server; `services` has the methods of each by name, which answer with messages."""
    def handlers(methods: dict[str, Callable[[Any, Any], Any]]) -> dict[str, Any]:
        return {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}

    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(tuple(
        grpc.method_handlers_generic_handler(f"lossd.v1.{name}", handlers(methods))
        for name, methods in services.items()))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


# ---- Addresses ----

# tests/client/golden/connecting.json has more.
@pytest.mark.parametrize("target, says", [
    ("https://gpu-box:7070/", "without 'https://': 'gpu-box:7070'.*TLS.* ca, or LOSSD_CA"),
    ("gpu-box", "no port.*'gpu-box:7070'"),
    (" gpu-box:7070", "white space"),
    ("", "not empty"),
    (7070, "must be a string"),
    (Path("gpu-box:7070"), "must be a string"),
])
def test_addresses_that_cannot_be_meant(target: Any, says: str) -> None:
    with pytest.raises(lossd.InvalidArgument, match=says) as caught:
        lossd.Client(target)
    assert str(caught.value).startswith(f"target is {target!r}")
    assert (caught.value.field, caught.value.value) == ("target", str(target))


def test_the_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSSD_SERVER", "http://gpu-box:7070")
    with pytest.raises(lossd.InvalidArgument, match=r"LOSSD_SERVER.*without 'http://'"):
        lossd.Client()


# ---- Nobody there, or somebody else ----

def test_nothing_listens() -> None:
    with free_port() as port:
        for host in ("127.0.0.1", "localhost", "ipv4:127.0.0.1"):
            error = refusal(f"{host}:{port}")
            assert isinstance(error, lossd.Unavailable) and isinstance(error, ConnectionError)
            assert f"no server at {host}:{port}: the connection was refused" in str(error)
            assert "--listen" in str(error) and "wait_for_server=True" in str(error)
            assert error.field == "target"


def test_a_unix_socket_that_is_not_there(tmp_path: Path) -> None:
    error = refusal(f"unix:{tmp_path}/none")
    assert isinstance(error, lossd.Unavailable) and "No such file" in str(error)


def test_a_host_that_is_not_known() -> None:
    error = refusal("no-such-host.invalid:7070")
    assert isinstance(error, lossd.Unavailable)
    assert "no server at no-such-host.invalid:7070: the name of the host was not found" in str(error)


def test_a_host_that_does_not_answer() -> None:
    """A firewall that drops what it does not let pass. Its place is taken by a listener whose queue is full: the system drops
    what would come into it."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        with socket.create_connection(full.getsockname()):
            error = refusal(f"127.0.0.1:{full.getsockname()[1]}")
    assert isinstance(error, lossd.Unavailable) and "does not answer" in str(error) and "firewall" in str(error)


def test_the_http_port(tmp_path: Path) -> None:
    ports = tmp_path / "ports"
    with subprocess.Popen([os.environ["LOSSD_BINARY"], "--listen=127.0.0.1:0", "--http=127.0.0.1:0",
                           f"--port_file={ports}"], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as server:
        try:
            deadline = time.monotonic() + 240
            while not (ports.exists() and ports.read_text()) and time.monotonic() < deadline:
                time.sleep(0.05)
            error = refusal(json.loads(ports.read_text())["http"])
        finally:
            server.terminate()
    assert isinstance(error, lossd.FailedPrecondition) and "is an HTTP server" in str(error)
    assert "--http" in str(error) and "--listen" in str(error)


def test_a_server_of_something_else() -> None:
    def banner(connection: socket.socket) -> None:
        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        connection.recv(1000)

    with listener(banner) as target:
        error = refusal(target)
    assert isinstance(error, lossd.FailedPrecondition)
    assert "does not speak gRPC" in str(error) and target in str(error)


def test_a_tunnel_without_a_server_behind_it() -> None:
    with listener(lambda connection: None) as target:
        error = refusal(target)
        assert isinstance(error, lossd.Unavailable) and "closed before a word was said" in str(error)
        with pytest.raises(lossd.Unavailable, match="closed before a word.*waited 500ms"):
            lossd.Client(target, wait_for_server=True, connect_timeout=0.5)


def test_a_server_that_says_nothing() -> None:
    """It may be a lossd that is busy, so the client waits; then it says what it saw."""
    end = threading.Event()
    with listener(lambda connection: end.wait(300) and None) as target:
        with pytest.raises(lossd.Unavailable, match="takes connections but has not answered within 3s"):
            lossd.Client(target, connect_timeout=3.0)
        end.set()


# ---- TLS ----

@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Paths of one that signs itself, and of its key."""
    folder = tmp_path_factory.mktemp("certificate")
    paths = str(folder / "server.pem"), str(folder / "server.key")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "2", "-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1",
                    "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
    return paths


def test_only_one_side_speaks_tls(server: ServerProcess, certificate: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "roles").write_text("admin dns:nobody\n")
    process = ServerProcess(f"--tls_cert={certificate[0]}", f"--tls_key={certificate[1]}",
                            f"--tls_client_ca={certificate[0]}", f"--role_file={tmp_path / 'roles'}")
    try:
        error = refusal(process.target)
        assert isinstance(error, lossd.FailedPrecondition) and "speaks TLS and this client does not" in str(error)
        assert "LOSSD_CA" in str(error)
    finally:
        process.stop()
    error = refusal(server.target, ca=certificate[0])
    assert isinstance(error, lossd.FailedPrecondition) and "does not speak TLS" in str(error)
    assert "LOSSD_CA" in str(error)


def test_a_tls_server_that_says_nothing(certificate: tuple[str, str]) -> None:
    """It may be busy."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.set_alpn_protocols(["h2"])
    end = threading.Event()

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True):
            end.wait(300)

    with listener(answer) as target:
        with pytest.raises(lossd.Unavailable, match="takes connections but has not answered within 3s"):
            lossd.Client(target, ca=certificate[0], connect_timeout=3.0)
        end.set()


def test_a_web_server_with_tls(certificate: tuple[str, str]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(100)
            secure.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with listener(answer) as target:
        error = refusal(target, ca=certificate[0])
    assert isinstance(error, lossd.FailedPrecondition) and "does not speak gRPC" in str(error)


# ---- Versions ----

def test_another_grpc_server() -> None:
    with grpc_server() as target:
        error = refusal(target)
    assert isinstance(error, lossd.Unimplemented) and isinstance(error, NotImplementedError)
    assert f"the gRPC server at {target} does not know lossd.v1" in str(error)
    assert f"lossd {lossd.__version__}" in str(error)


def test_a_description_that_cannot_be_read() -> None:
    with grpc_server(ServerService={"GetServer": lambda request, context: b"\xff\xff"}) as target:
        error = refusal(target)
    assert isinstance(error, lossd.Unimplemented) and "a lossd of another version" in str(error)


@pytest.mark.parametrize("version, says", [
    ("0.0.7", rf"lossd 0\.0\.7.*is older than this client \(lossd {lossd.__version__}\).*update the server"),
    ("99.1.0", rf"lossd 99\.1\.0.*is newer than this client \(lossd {lossd.__version__}\).*update the client"),
    ("", "another version")])
def test_a_server_of_another_version_lacks_a_call(version: str, says: str) -> None:
    """It may be used as far as it goes, and a call that it lacks says why."""
    describe = server_pb2.ServerDescription(version=version, incarnation=1).SerializeToString()
    lists = head_pb2.ListHeadsResponse().SerializeToString()
    with grpc_server(ServerService={"GetServer": lambda request, context: describe},
                     HeadService={"ListHeads": lambda request, context: lists}) as target:
        with lossd.Client(target) as client:
            assert client.list_heads() == []
            with pytest.raises(lossd.Unimplemented, match=says):
                client.delete_head("lm")


# ---- Waiting ----

def test_waiting_for_a_server_that_is_being_started() -> None:
    first = ServerProcess()
    target = first.target
    first.kill()
    threading.Timer(1.0, first.start).start()
    try:
        with lossd.Client(target, wait_for_server=True, connect_timeout=PATIENCE) as client:
            assert client.get_server().incarnation
    finally:
        first.stop()


def test_waiting_ends() -> None:
    with free_port() as port:
        with pytest.raises(lossd.Unavailable, match=rf"no server at 127.0.0.1:{port}.* refused.*waited 300ms"):
            lossd.Client(f"127.0.0.1:{port}", wait_for_server=True, connect_timeout=0.3)


def test_waiting_does_not_wait_for_what_cannot_become_right(server: ServerProcess, certificate: tuple[str, str]) -> None:
    assert isinstance(refusal(server.target, ca=certificate[0], wait_for_server=True), lossd.FailedPrecondition)


def test_an_interrupt_ends_the_wait() -> None:
    program = ("import lossd, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); print(flush=True); "
               "lossd.Client(sys.argv[1], wait_for_server=True, connect_timeout=600)")
    with free_port() as port, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen([sys.executable, "-c", program, f"127.0.0.1:{port}"], stdout=subprocess.PIPE,
                                   stderr=errors)
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            process.wait(240)
        errors.seek(0)
        assert b"KeyboardInterrupt" in errors.read()
