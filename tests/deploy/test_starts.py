# SPDX-License-Identifier: Apache-2.0
"""What operators start: a server with each file of flags of deploy/kubernetes, and the job of deploy/slurm.sbatch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lossd


# A server starts with each file of flags of deploy/kubernetes, becomes ready for the probes, and lets in whom the file says.

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


# deploy/slurm.sbatch with srun and scontrol played: the job is queued again where starting again can help, and nowhere else.

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm.sbatch"

# Runs its command as two tasks, or ends as $PLAYED_STATUS says; its status is the largest of theirs.
SRUN = """#!/usr/bin/env bash
[[ -z ${PLAYED_STATUS:-} ]] || exit "$PLAYED_STATUS"
while [[ $1 == -* ]]; do shift; done
largest=0
for rank in 0 1; do SLURM_PROCID=$rank SLURM_NTASKS=2 SLURM_LOCALID=$rank SLURM_JOB_NODELIST=localhost "$@" & tasks[rank]=$!; done
for task in "${tasks[@]}"; do
  status=0
  wait "$task" || status=$?
  ((status <= largest)) || largest=$status
done
exit "$largest"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >>"$PLAYED_CALLS"
"""


class Slurm:
    """The script as Slurm runs it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def run(self, *flags: str, **environment: str) -> tuple[int, list[str], str]:
        """The status, the calls of scontrol, and what the tasks said. `flags` follow the script's name."""
        calls = self._folder / "calls"
        calls.write_text("")
        ended = subprocess.run(
            [SCRIPT, *flags], capture_output=True, text=True, timeout=240,
            env={"PATH": f"{self._folder}:{PROGRAMS}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "PLAYED_CALLS": str(calls), **environment})
        return ended.returncode, calls.read_text().splitlines(), ended.stdout + ended.stderr


@pytest.fixture()
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


REQUEUED = ["requeue 17"]


@pytest.mark.parametrize("status", [3, 128 + signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGSEGV])
def test_what_may_go_better_the_next_time_is_queued_again(slurm: Slurm, status: int) -> None:
    assert slurm.run(PLAYED_STATUS=str(status))[:2] == (status, REQUEUED)


@pytest.mark.parametrize("status", [0, 1, 2, 127])
def test_the_end_and_what_stays_wrong_are_not(slurm: Slurm, status: int) -> None:
    assert slurm.run(PLAYED_STATUS=str(status))[:2] == (status, [])


def test_not_for_ever(slurm: Slurm) -> None:
    assert slurm.run(PLAYED_STATUS="3", SLURM_RESTART_COUNT="99")[:2] == (3, REQUEUED)
    assert slurm.run(PLAYED_STATUS="3", SLURM_RESTART_COUNT="100")[:2] == (3, [])
    assert slurm.run(PLAYED_STATUS="3", SLURM_RESTART_COUNT="2", LOSSD_RESTARTS="2")[:2] == (3, [])


def test_tasks_that_refuse_their_flags_end_the_job(slurm: Slurm, tmp_path: Path) -> None:
    status, calls, said = slurm.run(LOSSD_ACCESS=str(tmp_path / "nothing"), LOSSD_CHECKPOINTS=str(tmp_path))
    assert (status, calls) == (2, []), said
    assert str(tmp_path / "nothing") in said


def test_flags_that_follow_the_script_are_those_of_all_tasks(slurm: Slurm, tmp_path: Path) -> None:
    status, calls, said = slurm.run("--cpu_devices=0", LOSSD_CHECKPOINTS=str(tmp_path))
    assert (status, calls) == (2, []), said
    assert said.count("cpu_devices must be at least 1, got 0") >= 2
