# SPDX-License-Identifier: Apache-2.0
"""A server starts with each file of flags of deploy/kubernetes, becomes ready for the probes, and lets in whom the file says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lossd

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "kubernetes").rglob("*.flags"))
PROGRAMS = Path(os.environ["LOSSD_BINARY"]).resolve().parent
TOKEN = "a-token-of-a-trainer"  # of this test alone


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the secret lossd-access has."""
    folder = tmp_path_factory.mktemp("access")

    def new(name: str, *arguments: str) -> None:
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                        "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem", *map(str, arguments)], check=True, capture_output=True)

    new("ca", "-subj", "/CN=authority")
    for name, also in (("server", "DNS:localhost,IP:127.0.0.1"), ("trainer-1", "DNS:trainer-1")):
        new(name, "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-subj", f"/CN={name}", "-addext", f"subjectAltName={also}",
            "-addext", "basicConstraints=critical,CA:FALSE")
    (folder / "roles").write_text("trainer dns:trainer-1\n")
    (folder / "tokens").write_text(f"trainer:trainer-1:{TOKEN}\n")
    (folder / "tokens").chmod(0o600)
    return folder


@pytest.fixture(params=FILES, ids=lambda path: path.parent.name)
def server(request: pytest.FixtureRequest, access: Path, tmp_path: Path) -> Iterator[tuple[dict[str, str], str]]:
    """The addresses of a server with these flags, on the loopback and ports of its own, and the text of the file."""
    text = request.param.read_text()
    text = text.replace("/etc/lossd/access", str(access)).replace("/var/lib/lossd", str(tmp_path / "checkpoints"))
    text = re.sub(r"=0\.0\.0\.0:\d+", "=127.0.0.1:0", text)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "lossd.flags").write_text(text)
    ports = tmp_path / "ports"
    process = subprocess.Popen([PROGRAMS / "lossd", f"--flagfile={tmp_path / 'lossd.flags'}", f"--port_file={ports}", "--backend=cpu", "--threads=1"])
    try:
        while not (ports.exists() and ports.read_text()):
            assert process.poll() is None, "it does not start"
            time.sleep(0.02)
        yield json.loads(ports.read_text()), text
    finally:
        process.terminate()
        assert process.wait(120) == 0


def probe(http: str, what: str) -> int:
    return subprocess.run([PROGRAMS / "lossctl", "health", "--probe", what, "--http", http], check=False).returncode


def test_the_probes_pass_and_clients_are_who_the_file_says(server: tuple[dict[str, str], str], access: Path) -> None:
    addresses, text = server
    secure = "--http_tls" in text
    http = ("https://" if secure else "") + addresses["http"]
    assert probe(http, "live") == 0 and probe(http, "ready") == 0
    if secure:
        assert probe(addresses["http"], "live") == 3  # the other scheme
    given = {"ca": str(access / "ca.pem")} if secure else {}
    if "--tls_client_ca" in text:
        given |= {"cert": str(access / "trainer-1.pem"), "key": str(access / "trainer-1.key")}
    elif "--token_file" in text:
        given |= {"token": TOKEN}
    with lossd.Client(addresses["grpc"], **given) as client:
        assert client.list_heads() == []
        if "--insecure" in text:
            client.create_head("head", hidden_size=8, vocab_size=10)
        else:
            with pytest.raises(lossd.PermissionDenied):
                client.create_head("head", hidden_size=8, vocab_size=10)
    if secure:
        with pytest.raises(lossd.Unauthenticated), lossd.Client(addresses["grpc"], ca=given["ca"]) as stranger:
            stranger.list_heads()
