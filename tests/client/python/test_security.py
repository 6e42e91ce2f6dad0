# SPDX-License-Identifier: Apache-2.0
"""Which server a client asks and with what credentials: contexts, TLS, client certificates, tokens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers import ServerProcess, listener, pump

import lossd
from lossd import _native


# Servers by name: the file that lossctl keeps, and what a client takes from it. tests/client/cpp/contexts.json has cases of the file.


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("LOSSD_") and name not in ("LOSSD_BINARY", "LOSSD_LIBRARY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LOSSD_CONFIG", str(tmp_path / "contexts.json"))


def write(folder, contexts, **others):
    path = folder / "contexts.json"
    path.write_text(json.dumps({"contexts": contexts, **others}))
    path.chmod(0o600)


def token_file(folder, mode=0o600):
    path = folder / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(mode)


def resolve(target=None, context=None, **credentials):
    """The address of the server, and what it is shown."""
    options = _native.option_texts({"target": target, "context": context, **credentials})
    names = ("target", "ca", "cert", "key", "token", "transport", "run")
    found = dict(zip(names, os.fsdecode(_native.Call().run("lossd_client_complete", options)).split("\0")))
    return found["target"], SimpleNamespace(**found)


def test_a_context_has_a_server_and_its_credentials(tmp_path):
    write(tmp_path, {"lab": {"server": "lab:1", "ca": "ca.pem", "cert": "me.pem", "key": "/k/me.key", "token_file": "token"}})
    token_file(tmp_path)
    target, credentials = resolve(context="lab")
    assert target == "lab:1"
    assert credentials.ca == str(tmp_path / "ca.pem")
    assert (credentials.cert, credentials.key) == (str(tmp_path / "me.pem"), "/k/me.key")
    assert credentials.token == "0123456789abcdef"


def test_arguments_go_before_the_environment_and_that_before_contexts(tmp_path, monkeypatch):
    write(tmp_path, {"lab": {"server": "lab:1", "ca": "ca.pem"}, "other": {"server": "other:1"}}, current="lab")
    assert resolve()[0] == "127.0.0.1:7070", "the current context is lossctl's"
    monkeypatch.setenv("LOSSD_CONTEXT", "other")
    assert resolve()[0] == "other:1"
    monkeypatch.setenv("LOSSD_SERVER", "environment:1")
    assert resolve()[0] == "environment:1"
    assert resolve(context="lab")[0] == "lab:1"
    assert resolve("argument:1")[0] == "argument:1"
    assert resolve("argument:1")[1].ca == "", "what a context has goes to its server only"
    monkeypatch.setenv("LOSSD_CA", "variable.pem")
    assert resolve(context="lab")[1].ca == "variable.pem"
    assert resolve(context="lab", ca="argument.pem")[1].ca == "argument.pem"
    assert resolve(context="lab", ca="")[1].ca == ""
    with pytest.raises(lossd.InvalidArgument, match="give one of them"):
        resolve("argument:1", "lab")


def test_mistakes_name_the_file(tmp_path, monkeypatch):
    write(tmp_path, {"lab": {"server": "lab:1", "token_file": "token"}})
    with pytest.raises(lossd.NotFound, match='there is no context "lob" in .*contexts.json; it has lab'):
        resolve(context="lob")
    with pytest.raises(lossd.NotFound, match="token cannot be read"):
        resolve(context="lab")
    token_file(tmp_path, 0o644)
    with pytest.raises(lossd.PermissionDenied, match="token has the mode 0644, so others can read it; `chmod 600"):
        resolve(context="lab")
    monkeypatch.setenv("LOSSD_TOKEN", "fedcba9876543210")
    assert resolve(context="lab")[1].token == "fedcba9876543210"
    (tmp_path / "contexts.json").chmod(0o666)
    with pytest.raises(lossd.PermissionDenied, match="contexts.json has the mode 0666, so others can change it"):
        resolve(context="lab")
    monkeypatch.delenv("LOSSD_CONFIG")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    with pytest.raises(lossd.NotFound, match="in any file"):
        resolve(context="lab")


def test_a_file_that_is_not_in_order_is_named(tmp_path):
    write(tmp_path, {"lab": {"server": "http://a:1"}})
    with pytest.raises(lossd.InvalidArgument, match=r"contexts.json:1: contexts.lab.server is 'http://a:1'; write") as error:
        lossd.Client(context="lab")
    assert (error.value.field, error.value.value) == ("contexts.lab.server", "http://a:1")


def test_a_client_connects_by_a_context_and_lists_streams(server, tmp_path):
    write(tmp_path, {"here": {"server": server.target}})
    with lossd.Client(context="here") as client:
        assert client.target == server.target
        found = client.list_streams()
        assert found.incarnation == client.get_server().incarnation
        assert found.streams == ()


# TLS, client certificates and tokens against the linked server.

TOKEN = "trainer-token-0123456789"
VARIABLES = ("LOSSD_SERVER", "LOSSD_CA", "LOSSD_CERT", "LOSSD_KEY", "LOSSD_TOKEN")


class Pki:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority("ca")
        self.authority("other-ca")
        self.issue("server", "DNS:localhost,IP:127.0.0.1")
        self.issue("operator", "DNS:operator")
        self.issue("stranger", "DNS:stranger")
        (folder / "roles").write_text("admin dns:operator\n")
        (folder / "tokens").write_text(f"trainer:p1:{TOKEN}\n")
        (folder / "tokens").chmod(0o600)

    def authority(self, name: str) -> None:
        self._request(name, "-subj", f"/CN={name}")

    def issue(self, name: str, names: str) -> None:
        self._request(name, "-CA", self.file("ca.pem"), "-CAkey", self.file("ca.key"), "-subj", f"/CN={name}",
                      "-addext", f"subjectAltName={names}", "-addext", "basicConstraints=critical,CA:FALSE")

    def file(self, name: str) -> str:
        return str(self.folder / name)

    def client(self, name: str) -> dict[str, str]:
        return {"ca": self.file("ca.pem"), "cert": self.file(f"{name}.pem"), "key": self.file(f"{name}.key")}

    def _request(self, name: str, *options: str) -> None:
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                        "-days", "2", *options, "-keyout", self.file(f"{name}.key"), "-out", self.file(f"{name}.pem")],
                       check=True, capture_output=True)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def tls_server(pki: Pki) -> Iterator[ServerProcess]:
    """Takes certificates and tokens."""
    process = ServerProcess(
        f"--tls_cert={pki.file('server.pem')}", f"--tls_key={pki.file('server.key')}",
        f"--tls_client_ca={pki.file('ca.pem')}", f"--role_file={pki.file('roles')}",
        f"--token_file={pki.file('tokens')}")
    yield process
    process.stop()


def connect(server: ServerProcess, **options: Any) -> lossd.Client:
    return lossd.Client(server.target, wait_for_server=False, **options)


def test_certificate(tls_server: ServerProcess, pki: Pki) -> None:
    with connect(tls_server, **pki.client("operator")) as client:
        client.create_head("by-certificate", hidden_size=4, vocab_size=6)
        assert [head.spec.name for head in client.list_heads()] == ["by-certificate"]
        client.delete_head("by-certificate")


def test_token_and_role(tls_server: ServerProcess, pki: Pki) -> None:
    with connect(tls_server, ca=pki.file("ca.pem"), token=TOKEN) as client:
        assert client.list_heads() == []
        with pytest.raises(lossd.PermissionDenied, match="CreateHead needs the role admin; token:p1 has the role trainer"):
            client.create_head("h", hidden_size=4, vocab_size=6)


def test_every_kind_of_call_has_the_token(pki: Pki) -> None:
    (pki.folder / "admin-tokens").write_text(f"admin:ops:{TOKEN}\n")
    (pki.folder / "admin-tokens").chmod(0o600)
    process = ServerProcess(f"--token_file={pki.file('admin-tokens')}")
    try:
        with connect(process, token=TOKEN) as client:
            client.create_head("h", hidden_size=4, vocab_size=6)
            weight = client.read_tensor("h", "weight")
            client.write_tensor("h", "weight", weight)
            hidden = weight[:3, :4].copy()
            result = client.compute_loss("h", hidden, [0, 1, 2], step=0, id=0, accumulate=True)
            assert result.loss > 0
            client.apply_step("h", 0, lossd.SGD(lr=0.1), expected_microbatches=[0])
            client.save_checkpoint("h")
    finally:
        process.stop()


def test_environment(tls_server: ServerProcess, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in zip(VARIABLES, (tls_server.target, *pki.client("operator").values())):
        monkeypatch.setenv(variable, value)
    with lossd.Client(wait_for_server=False) as client:
        assert client.target == tls_server.target
    monkeypatch.setenv("LOSSD_TOKEN", "wrong-token-0123456789")
    with pytest.raises(lossd.Unauthenticated, match="does not know this token"):
        lossd.Client(wait_for_server=False)
    with lossd.Client(wait_for_server=False, token=""):
        pass


def test_refusals_say_what_is_wrong(tls_server: ServerProcess, server: ServerProcess, pki: Pki) -> None:
    with pytest.raises(lossd.FailedPrecondition, match="speaks TLS and this client does not"):
        connect(tls_server)
    with pytest.raises(lossd.FailedPrecondition, match="does not speak TLS"):
        connect(server, **pki.client("operator"))
    with pytest.raises(lossd.Unauthenticated, match="not trusted.*other-ca.pem"):
        connect(tls_server, **{**pki.client("operator"), "ca": pki.file("other-ca.pem")})
    with pytest.raises(lossd.Unauthenticated, match="LOSSD_CERT"):
        connect(tls_server, ca=pki.file("ca.pem"))
    with pytest.raises(lossd.PermissionDenied, match="dns:stranger has no role"):
        connect(tls_server, **pki.client("stranger"))


def test_files_that_hold_something_else(tls_server: ServerProcess, pki: Pki) -> None:
    with pytest.raises(lossd.InvalidArgument, match="key is .*stranger.key.*, which is not that of the certificate"):
        connect(tls_server, **{**pki.client("operator"), "key": pki.file("stranger.key")})
    with pytest.raises(lossd.InvalidArgument, match="ca is .*ca.key.*no certificate"):
        connect(tls_server, ca=pki.file("ca.key"))


def test_a_server_that_takes_its_time(tls_server: ServerProcess, server: ServerProcess, pki: Pki) -> None:
    """It is not taken for one that refuses the certificate, or for another program."""
    def late(connection: socket.socket, target: str) -> None:
        time.sleep(0.7)  # more than a first call has; gRPC itself gives a connection one second
        host, port = target.split(":")
        with socket.create_connection((host, int(port))) as behind:
            back = threading.Thread(target=pump, args=(behind, connection))
            back.start()
            pump(connection, behind)
            back.join()

    for target, options in ((tls_server.target, pki.client("operator")), (server.target, {})):
        with listener(lambda connection: late(connection, target)) as slow:
            with lossd.Client(slow, connect_timeout=240, channels=1, **options) as client:
                assert client.list_heads() == []


def test_a_server_that_requires_certificates(pki: Pki) -> None:
    process = ServerProcess(
        f"--tls_cert={pki.file('server.pem')}", f"--tls_key={pki.file('server.key')}",
        f"--tls_client_ca={pki.file('ca.pem')}", f"--role_file={pki.file('roles')}")
    try:
        with pytest.raises(lossd.Unauthenticated, match="wants a client certificate"):
            connect(process, ca=pki.file("ca.pem"))
        connect(process, **pki.client("operator")).close()
    finally:
        process.stop()


def test_bad_arguments(pki: Pki) -> None:
    good = pki.client("operator")
    for options, message in (
            ({"cert": good["cert"], "ca": good["ca"]}, "key is not given"),
            ({"key": good["key"], "ca": good["ca"]}, "cert is not given"),
            ({"cert": good["cert"], "key": good["key"]}, "ca is not given"),
            ({"ca": pki.file("none.pem")}, "ca is .*none.pem.*cannot be read"),
            ({"ca": str(pki.folder)}, "cannot be read"),
            ({"token": "two words"}, "token must be of visible")):
        with pytest.raises(lossd.InvalidArgument, match=message):
            lossd.Client("127.0.0.1:1", **options)


def test_a_token_stays_on_this_machine_without_tls() -> None:
    for target in ("10.0.0.1:7070", "example.com:7070", "dns:///127.0.0.1.example.com:7070", "[::2]:7070",
                   "ipv4:127.0.0.1:1,10.0.0.1:1"):
        with pytest.raises(lossd.InvalidArgument, match="unencrypted"):
            lossd.Client(target, token=TOKEN)
    for target in ("127.0.0.1:1", "127.3.2.1:1", "localhost:1", "[::1]:1", "dns:///localhost:1", "unix:/run/lossd-none"):
        with pytest.raises(lossd.Unavailable):  # it was let through
            lossd.Client(target, token=TOKEN)
