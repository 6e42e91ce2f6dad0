# SPDX-License-Identifier: Apache-2.0
"""Every message that docs/troubleshooting.md has of the server is printed by one: brought about here, or by the test or the source that
BY_OTHERS names. LOSSD_BINARY: the server; lossctl is beside it. LOSSD_HAVE_CUDA: ON if its build has the CUDA backend."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

import lossd
from lossd.v1 import loss_pb2, types_pb2

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "client" / "python"))

from servers import ServerProcess  # noqa: E402

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Errors of the server\n")[2]
MESSAGES = [re.findall(r"`([^`]+)`", line.split(" | ")[0]) for line in PAGE.splitlines() if line.startswith("| `")]
PATIENCE = 120.0  # seconds
HAVE_CUDA = os.environ["LOSSD_HAVE_CUDA"] == "ON"
NO_DRIVER, NO_BACKEND = "no NVIDIA driver is installed", "this build has no CUDA backend"

# What needs a device that fails, the other kind of build, or half a minute and more.
BY_OTHERS = {
    **({NO_BACKEND: ("kernels/gpu_backend_none.cc", NO_BACKEND)} if HAVE_CUDA else {NO_DRIVER: ("kernels/cuda/device/device.cc", NO_DRIVER)}),
    "other programs use the GPU, and it runs them in turns without MPS": ("server/app/server_parts.cc", "without MPS"),
    "cuBLASLt cannot be loaded": ("kernels/cuda/device/gemm.cc", "cuBLASLt cannot be loaded"),  # a machine with a GPU and without cuBLAS
    "device lost": ("tests/server/app/liveness_test.cc", 'HttpGet(server_->http(), "/livez"), HasSubstr("device lost")'),
    "no progress on the device for …": ("tests/server/app/process_test.cc", "no progress on the device for "),
    "no answer of gRPC's threads for …": ("server/app/server.cc", '{"gRPC\'s threads", pulse_->Silence()}'),
    "the drain does not end: leaving at once": ("server/app/main.cc", 'status, "the drain")'),
    "the client certificate has expired": ("tests/server/limits/certificates_test.cc", 'HasSubstr("the client certificate has expired")'),
}


def start(*flags: object) -> str:
    """What a server prints that cannot start."""
    done = subprocess.run([os.environ["LOSSD_BINARY"], "--listen=127.0.0.1:0", "--http=", *map(str, flags)], capture_output=True, text=True,
                          timeout=PATIENCE, check=False)
    assert done.returncode in (1, 2), done.stderr
    return done.stderr


def pair(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1", "-subj", "/CN=a",
                    "-keyout", key, "-out", certificate], check=True, capture_output=True)
    key.chmod(0o600)
    return certificate, key


def refused(*flags: str, hidden: int = 64, vocab: int = 4096, save: bool = False, in_host_memory: bool = False) -> str:
    """What a client of a server with these flags is told that creates a head, and saves it."""
    server = ServerProcess("--backend=cpu", *flags)
    try:
        with lossd.Client(server.target) as client, pytest.raises(lossd.LossdError) as caught:
            client.create_head("lm", hidden_size=hidden, vocab_size=vocab, frozen=in_host_memory,
                               residency="host" if in_host_memory else "device")
            if save:
                client.save_checkpoint("lm")
        return str(caught.value)
    finally:
        server.stop()


def taken(flag: str) -> str:
    with socket.create_server(("127.0.0.1", 0)) as other:
        return start("--backend=cpu", f"{flag}=127.0.0.1:{other.getsockname()[1]}")


def disagreeing(folder: Path) -> str:
    """What two ranks print that are given another --split each."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    logs = [folder / "leader", folder / "worker"]
    ranks = []
    try:
        for rank, split in enumerate(("rows", "vocabulary")):
            with logs[rank].open("wb") as log:
                ranks.append(subprocess.Popen(
                    [os.environ["LOSSD_BINARY"], "--backend=cpu", "--listen=127.0.0.1:0", "--http=", f"--rank={rank}", "--ranks=2", "--leader=127.0.0.1",
                     f"--rank_port={port}", f"--split={split}", f"--rank_timeout={PATIENCE:.0f}s"], stdout=log, stderr=log))
        assert ranks[1].wait(PATIENCE) == 2, logs[1].read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(PATIENCE)
    return "".join(log.read_text() for log in logs)


def no_gpu(_: Path) -> str:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU")
    return start("--backend=cuda")


def tls_of_others(folder: Path) -> str:
    certificate, key = pair(folder, "mine")
    key.chmod(0o644)
    return start("--backend=cpu", f"--tls_cert={certificate}", f"--tls_key={key}")


def tls_mixed_up(folder: Path) -> str:
    return start("--backend=cpu", f"--tls_cert={pair(folder, 'a')[0]}", f"--tls_key={pair(folder, 'b')[1]}")


def full_disk(folder: Path) -> str:
    """With a file system of 1 MiB, which only the server sees."""
    disk, ports = folder / "disk", folder / "ports"
    disk.mkdir()
    if subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True,
                      check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" --backend=cpu --listen=127.0.0.1:0 --http= --port_file="$3" --checkpoint_dir="$1"'
    server = subprocess.Popen(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", disk, os.environ["LOSSD_BINARY"], ports],
                              stderr=subprocess.DEVNULL)
    try:
        target = json.loads(awaited(ports))["grpc"]
        with lossd.Client(target) as client, pytest.raises(lossd.LossdError) as caught:
            client.create_head("lm", hidden_size=64, vocab_size=8192)
            client.save_checkpoint("lm")
        return str(caught.value)
    finally:
        server.terminate()
        server.wait(PATIENCE)


def awaited(file: Path) -> str:
    deadline = time.monotonic() + PATIENCE
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline, f"{file} does not come"
        time.sleep(0.05)
    return file.read_text()


def draining(folder: Path) -> str:
    """A call is open when SIGTERM comes."""
    server = ServerProcess("--backend=cpu", "--http=127.0.0.1:0", "--drain_timeout=1m")
    http = json.loads((server.folder / "ports").read_text())["http"]
    try:
        with lossd.Client(server.target) as client:
            client.create_head("lm", hidden_size=4, vocab_size=8)
            with open_call(server.target):
                os.kill(server.pid, signal.SIGTERM)
                deadline = time.monotonic() + PATIENCE
                while time.monotonic() < deadline:
                    try:
                        with urllib.request.urlopen(f"http://{http}/readyz", timeout=PATIENCE):
                            time.sleep(0.05)
                    except urllib.error.HTTPError as error:
                        return f"{error.code} {error.read().decode()}"
        raise AssertionError("it is ready")
    finally:
        server.stop()


class open_call:
    """A ComputeLoss whose rows do not come."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target)
        self._call = self._channel.stream_stream(
            "/lossd.v1.LossService/ComputeLoss", request_serializer=loss_pb2.ComputeLossRequest.SerializeToString,
            response_deserializer=loss_pb2.ComputeLossResponse.FromString)(self._requests())
        assert next(self._call).HasField("accepted")

    def _requests(self) -> Iterator[loss_pb2.ComputeLossRequest]:
        message = loss_pb2.ComputeLossRequest()
        message.open.CopyFrom(loss_pb2.OpenMicrobatch(
            head="lm", microbatch_id=1, microbatch_rows=1, rows=types_pb2.RowRange(begin=0, end=1), hidden_dtype=types_pb2.DTYPE_FP32,
            reduction=loss_pb2.REDUCTION_SUM, targets=[0]))
        yield message
        time.sleep(PATIENCE)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._call.cancel()
        self._channel.close()


SCENARIOS: dict[str, Callable[[Path], str]] = {
    "listen must be a loopback address unless …": lambda _: start("--backend=cpu", "--listen=0.0.0.0:0"),
    "http must be a loopback address unless …": lambda _: start("--backend=cpu", "--http=0.0.0.0:0"),
    "cannot listen on …": lambda _: taken("--listen"),
    "http: cannot listen on …": lambda _: taken("--http"),
    **({NO_DRIVER: no_gpu} if HAVE_CUDA else {NO_BACKEND: lambda _: start("--backend=cuda")}),
    "tls_cert must be a readable file": lambda folder: start("--backend=cpu", f"--tls_cert={folder}/none.pem", f"--tls_key={folder}/none.key"),
    "must be a file that its owner alone can read (chmod 600)": tls_of_others,
    "must be the key of the first certificate of tls_cert": tls_mixed_up,
    "of the limit of … are in use": lambda _: refused("--memory_limit_bytes=2GiB", vocab=10_000_000),
    "the pool of the device for heads in host memory has …": lambda _: refused("--teacher_pool_bytes=64KiB", in_host_memory=True),
    "memory_reserve_bytes keeps … free": lambda _: refused("--workspace_bytes=1GiB", hidden=8192, vocab=50_000_000),
    "No space left on device": full_disk,
    "leave room for the … of the checkpoint": lambda _: refused("--checkpoint_limit_bytes=64KiB", save=True),
    "draining": draining,
    "rank_secret_file must be given where clients are asked who they are": lambda folder: start(
        "--backend=cpu", "--rank=0", "--ranks=2", "--leader=127.0.0.1", f"--token_file={folder}/tokens"),
    "a rank is refused": disagreeing,
}


@pytest.mark.parametrize("messages", MESSAGES, ids=lambda messages: messages[0])
def test_a_server_says_it(messages: list[str], tmp_path: Path) -> None:
    if messages[0] in BY_OTHERS:
        file, text = BY_OTHERS[messages[0]]
        assert text in (ROOT / file).read_text()
        return
    said = SCENARIOS[messages[0]](tmp_path)
    found = [message for message in messages if matches(message, said)]
    # A machine has no driver or no GPU; every other row's messages stand in one line. Paths of HTTP are not printed.
    assert found == [message for message in messages if message[0] not in "/-"] or (SCENARIOS[messages[0]] is no_gpu and found), said


def matches(message: str, said: str) -> bool:
    return re.search(".+".join(re.escape(part.strip()) for part in message.split("…") if part.strip()), said) is not None


def test_the_table_is_read() -> None:
    assert len(MESSAGES) >= 16
    assert {messages[0] for messages in MESSAGES} == SCENARIOS.keys() | BY_OTHERS.keys()
