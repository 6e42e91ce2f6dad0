# SPDX-License-Identifier: Apache-2.0
"""Runs golden cases (tests/client/golden/README.md) of addresses, and of what is found there."""

from __future__ import annotations

import functools
import socket
import ssl
import subprocess
import tempfile
import time
from pathlib import Path

from golden_cases import Case, check_members, expect
from sockets import listener, speak

import lossd
from lossd import _target


def run_targets(case: Case) -> None:
    if "fails" in case:
        check_members(case, ("target", "fails"))
        return expect(case, lambda: _target.check(case["target"]))
    check_members(case, ("target", "host", "port", "socket", "local"))
    target = case["target"]
    _target.check(target)
    assert _target.host_and_port(target) == (case["host"], case["port"])
    assert _target.socket_path(target) == case["socket"]
    assert _target.is_local(target) == case["local"]


@functools.lru_cache
def _certificate(name: str) -> tuple[str, str]:
    """Paths of one for 127.0.0.1 that signs itself, and of its key."""
    folder = Path(tempfile.mkdtemp())
    paths = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
                    "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
    return paths


def _connect(target: str, client: str, seconds: float) -> None:
    ca = {"plain": "", "trusts": _certificate("server")[0], "distrusts": _certificate("other")[0]}[client]
    lossd.Client(target, ca=ca, connect_timeout=seconds).close()


def run_listeners(case: Case) -> None:
    patience = 2.0 if "has not answered" in case["fails"]["says"] else 240.0
    start = time.monotonic()
    if "listens" in case:
        check_members(case, ("listens", "client", "fails"))
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            expect(case, lambda: _connect(f"127.0.0.1:{held.getsockname()[1]}", case["client"], patience))
    else:
        check_members(case, ("words", "tls", "client", "fails"))
        words = None if case["words"] is None else bytes.fromhex(case["words"])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*_certificate("server"))
        context.set_alpn_protocols(["h2"])

        def answer(connection: socket.socket) -> None:
            if not case["tls"]:
                return speak(connection, words)
            with context.wrap_socket(connection, server_side=True) as secure:
                speak(secure, words)

        with listener(answer) as target:
            expect(case, lambda: _connect(target, case["client"], patience))
    assert time.monotonic() - start < 120.0, "it waited for its timeout"
