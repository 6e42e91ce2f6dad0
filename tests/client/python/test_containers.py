# SPDX-License-Identifier: Apache-2.0
"""Clients in another network namespace and of another user, as in containers: they share memory through a folder that
both see, and say what is missing otherwise."""

from __future__ import annotations

import functools
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess

import lossd

NOBODY = 65534

# Prints what the client took and why, or the error.
CLIENT = """
import sys, numpy as np, lossd
target, transport = sys.argv[1:]
try:
    with lossd.Client(target, transport=transport) as client:
        client.compute_loss("lm", np.ones((300, 24), np.float32), np.zeros(300, np.int32), grad_hidden=True)
        print(*client.transport, sep=": ")
except lossd.LossdError as error:
    print(f"{type(error).__name__}: {error}")
"""


@functools.cache
def why_no_namespace() -> str:
    """Why this system makes no network namespaces; empty if it does."""
    try:
        tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else ""


@functools.cache
def why_no_other_user() -> str:
    """Why this program cannot start one of another user that can run the client; empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    try:
        tried = subprocess.run(["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", sys.executable, "-c",
                                "import lossd"], cwd="/", capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else ""


def run_client(target: str, transport: str, *, namespace: bool = False, user: int | None = None) -> str:
    if namespace and why_no_namespace():
        pytest.skip(f"no network namespace: {why_no_namespace()}")
    if user is not None and why_no_other_user():
        pytest.skip(f"no other user: {why_no_other_user()}")
    command = [sys.executable, "-c", CLIENT, target, transport]
    if user is not None:
        command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]
    if namespace:
        command = ["unshare", "--net", *command]
    return subprocess.run(command, cwd="/", stdout=subprocess.PIPE, text=True, check=True, timeout=240).stdout


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="lossd-shared.") as path:
        os.chmod(path, 0o755)
        yield Path(path)


def serve(*flags: str) -> ServerProcess:
    process = ServerProcess(*flags)
    with lossd.Client(process.target.split(",")[0], transport="grpc") as client:
        client.create_head("lm", hidden_size=24, vocab_size=97)
    return process


def test_another_network_namespace_shares_memory_through_a_folder(folder: Path) -> None:
    process = serve(f"--listen=127.0.0.1:0,unix:{folder}/grpc")
    try:
        for transport in ("auto", "shared_memory"):
            assert run_client(f"unix:{folder}/grpc", transport, namespace=True).startswith("shared_memory: ")
        assert run_client(f"unix:{folder}/grpc", "grpc", namespace=True).startswith("grpc: ")
    finally:
        process.stop()


def test_another_network_namespace_without_the_folder_says_what_is_missing(folder: Path) -> None:
    process = serve(f"--listen=unix:{folder}/grpc", "--region_socket=@lossd-test-" + folder.name)
    try:
        assert run_client(f"unix:{folder}/grpc", "shared_memory").startswith("shared_memory: ")
        for transport in ("auto", "shared_memory"):
            said = run_client(f"unix:{folder}/grpc", transport, namespace=True)
            assert said.startswith("grpc: " if transport == "auto" else "Unavailable: ")
            assert "in another network namespace (a container)" in said and "a folder that both see" in said
    finally:
        process.stop()


def test_a_folder_that_is_not_mounted_is_named(folder: Path) -> None:
    process = serve(f"--listen=127.0.0.1:0,unix:{folder}/grpc")
    target = process.target.split(",")[0]
    try:
        (folder / "grpc.regions").rename(folder / "elsewhere")
        said = run_client(target, "auto")
        assert said.startswith("grpc: ") and f"{folder}/grpc.regions" in said and "does not have its folder mounted" in said
    finally:
        process.stop()


def test_another_user_shares_memory_if_the_mode_lets_it_in(folder: Path) -> None:
    process = serve(f"--listen=127.0.0.1:0,unix:{folder}/grpc", "--unix_socket_mode=0666")
    try:
        assert stat.S_IMODE((folder / "grpc.regions").stat().st_mode) == 0o666
        assert run_client(f"unix:{folder}/grpc", "shared_memory", user=NOBODY).startswith("shared_memory: ")
        assert run_client(f"unix:{folder}/grpc", "shared_memory", user=NOBODY, namespace=True).startswith("shared_memory: ")
    finally:
        process.stop()


def test_another_user_who_is_not_let_in_says_so(folder: Path) -> None:
    process = serve(f"--listen=127.0.0.1:0,unix:{folder}/grpc")
    try:
        tcp = process.target.split(",")[0]
        for transport in ("auto", "shared_memory"):
            said = run_client(tcp, transport, user=NOBODY)
            assert said.startswith("grpc: " if transport == "auto" else "Unavailable: ")
            assert "Permission denied" in said and "--unix_socket_mode" in said
        assert "ermission denied" in run_client(f"unix:{folder}/grpc", "grpc", user=NOBODY)
    finally:
        process.stop()


def test_an_abstract_socket_is_for_one_user() -> None:
    process = serve("--listen=127.0.0.1:0")
    try:
        said = run_client(process.target, "auto", user=NOBODY)
        assert said.startswith("grpc: ") and "its own user only" in said and "--region_socket" in said
    finally:
        process.stop()
