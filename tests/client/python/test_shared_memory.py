# SPDX-License-Identifier: Apache-2.0
"""Slices in memory that client and server share, and Unix sockets."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import select
import signal
import socket
import stat
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
import numpy as np
import pytest
from servers import ServerProcess

import lossd
from lossd.v1 import region_pb2, server_pb2


# Slices in memory that client and server share, and Unix sockets: the same results, whatever ends when.

N, D, V = 300, 24, 97


def rows(seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, V, N).astype(np.int32)
    targets[::10] = -100
    return rng.standard_normal((N, D)).astype(np.float32), targets


def compute(server: ServerProcess, transport: str, size: int, head: str, **arguments: Any) -> Any:
    hidden, targets = rows()
    with lossd.Client(server.target, transport=transport, shared_memory_bytes=size) as client:
        result = client.compute_loss(head, hidden, targets, grad_hidden=True, rows=("loss",), slice_bytes=7 * D * 4, **arguments)
        assert client.transport[0] == transport
        return result.grad_hidden, result.rows["loss"]


@pytest.mark.parametrize("size", [1 << 20, 16 << 10, 2 << 10])
def test_results_are_those_of_messages(server: ServerProcess, make_head: Any, size: int) -> None:
    head = make_head(hidden_size=D, vocab_size=V)
    for one, other in zip(compute(server, "grpc", size, head), compute(server, "shared_memory", size, head)):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_deterministic_server_gives_the_same_bits(deterministic_server: ServerProcess) -> None:
    with lossd.Client(deterministic_server.target) as client:
        client.create_head("lm", hidden_size=D, vocab_size=V, compute_dtype="fp32")
    in_messages = compute(deterministic_server, "grpc", 1, "lm", step=0, id=0, accumulate=True, streams=2)
    for size in (1 << 20, 8 << 10):
        shared = compute(deterministic_server, "shared_memory", size, "lm", step=0, id=0, accumulate=True, streams=2)
        for one, other in zip(in_messages, shared):
            np.testing.assert_array_equal(one, other)


def test_many_computations_share_a_little_region(server: ServerProcess, make_head: Any) -> None:
    head = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = rows()
    with lossd.Client(server.target, transport="shared_memory", shared_memory_bytes=16 << 10) as client:
        want = client.compute_loss(head, hidden, targets, grad_hidden=True).grad_hidden
        pending = [client.compute_loss_async(head, hidden, targets, grad_hidden=True, slice_bytes=D * 40)
                   for _ in range(12)]
        for one in pending:
            np.testing.assert_allclose(one.wait(120).grad_hidden, want, atol=1e-5)


def test_cancelled_computations_spoil_nothing(server: ServerProcess, make_head: Any) -> None:
    head = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = rows()
    other, _ = rows(1)
    with lossd.Client(server.target, transport="shared_memory", shared_memory_bytes=64 << 10) as client:
        want = client.compute_loss(head, hidden, targets, grad_hidden=True).grad_hidden
        for i in range(20):
            given_up = client.compute_loss_async(head, other, targets, grad_hidden=True, slice_bytes=D * 20)
            time.sleep(0.0003 * i)
            given_up.cancel()
            got = client.compute_loss(head, hidden, targets, grad_hidden=True, slice_bytes=D * 20).grad_hidden
            np.testing.assert_allclose(got, want, atol=1e-5)


def test_gradients_of_retained_rows_come_in_the_region(server: ServerProcess, make_head: Any) -> None:
    """A client that takes no message with so many rows gets what lies in the region alone."""
    head = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = rows()
    with lossd.Client(server.target, transport="grpc") as client:
        want = client.compute_loss(head, hidden, targets, reduction="sum", grad_hidden=True).grad_hidden
        client.compute_loss(head, hidden, targets, id=7, reduction="none", retain=True, rows=("loss",))
    ones = np.ones(N, np.float32)

    def backward(transport: str, size: int = 1 << 20, **options: Any) -> Any:
        with lossd.Client(server.target, transport=transport, shared_memory_bytes=size, **options) as client:
            results = [client.backward(head, 7, ones, hidden_size=D, grad_hidden=True) for _ in range(5)]
            assert client.transport[0] == transport
            return [result.grad_hidden for result in results]

    small = {"max_message_bytes": 4096, "retry": lossd.RetryOptions(max_attempts=1)}
    for gradients in (backward("shared_memory", **small), backward("shared_memory", 16 << 10), backward("shared_memory", 256)):
        for got in gradients:
            np.testing.assert_allclose(got, want, atol=1e-4)
    with pytest.raises(lossd.ResourceExhausted):
        backward("grpc", **small)


def test_tensors_are_read_through_the_region(server: ServerProcess, make_head: Any) -> None:
    head = make_head(hidden_size=D, vocab_size=20001)
    with lossd.Client(server.target, transport="grpc") as client:
        want = client.read_tensor(head)
    with lossd.Client(server.target, transport="shared_memory", max_message_bytes=4096) as client:
        np.testing.assert_array_equal(client.read_tensor(head), want)
    for size in (4 << 20, 100 << 10, 256):  # one call, several, and messages
        with lossd.Client(server.target, transport="shared_memory", shared_memory_bytes=size) as client:
            for _ in range(3):
                np.testing.assert_array_equal(client.read_tensor(head), want)
            np.testing.assert_array_equal(client.read_tensor(head, rows=(17, 20000)), want[17:20000])
            assert client.transport[0] == "shared_memory"


def test_says_what_it_took_and_why(server: ServerProcess, make_head: Any) -> None:
    head = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = rows()
    with lossd.Client(server.target, transport="auto") as client:
        assert client.transport == ("grpc", "nothing was sent yet")
        client.compute_loss(head, hidden, targets)
        assert client.transport[0] == "shared_memory"
    with lossd.Client(server.target, transport="grpc") as client:
        client.compute_loss(head, hidden, targets)
        assert client.transport == ("grpc", "the client was told so")
    with pytest.raises(lossd.InvalidArgument, match="auto, grpc, shared_memory or cuda_ipc"):
        lossd.Client(server.target, transport="pigeon")


def test_the_environment_says_how(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSSD_TRANSPORT", "grpc")
    with lossd.Client(server.target) as client:
        assert client.transport == ("grpc", "the client was told so")
    monkeypatch.setenv("LOSSD_TRANSPORT", "pigeon")
    with pytest.raises(lossd.InvalidArgument, match="pigeon"):
        lossd.Client(server.target)


def test_a_server_without_shared_memory() -> None:
    process = ServerProcess("--shared_memory_bytes=0")
    try:
        with pytest.raises(lossd.Unavailable, match="the server offers none"):
            lossd.Client(process.target, transport="shared_memory")
        hidden, targets = rows()
        with lossd.Client(process.target, transport="auto") as client:
            client.create_head("lm", hidden_size=D, vocab_size=V)
            client.compute_loss("lm", hidden, targets)
            assert client.transport[0] == "grpc"
    finally:
        process.stop()


def test_a_unix_socket(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/grpc"
    process = ServerProcess(f"--listen={target}")
    try:
        hidden, targets = rows()
        for transport in ("grpc", "shared_memory"):
            with lossd.Client(target, transport=transport) as client:
                if transport == "grpc":
                    client.create_head("lm", hidden_size=D, vocab_size=V)
                assert client.compute_loss("lm", hidden, targets).valid_rows > 0
        assert (tmp_path / "grpc.regions").is_socket()
    finally:
        process.stop()
    assert not (tmp_path / "grpc.regions").exists()


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_killed_client_leaves_nothing_behind() -> None:
    process = ServerProcess()
    try:
        hidden, targets = rows()
        with lossd.Client(process.target, transport="grpc") as client:
            client.create_head("lm", hidden_size=D, vocab_size=V)
            before = client.get_server().memory.staging
            descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))
            code = (f"import lossd, numpy as np\nc = lossd.Client({process.target!r}, transport='shared_memory')\n"
                    f"x = np.zeros(({N}, {D}), np.float32)\nprint('ready', flush=True)\n"
                    f"while True: c.compute_loss('lm', x, np.zeros({N}, np.int32), grad_hidden=True)")
            for delay in (0.0, 0.003, 0.02):
                with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as trainer:
                    assert trainer.stdout is not None and trainer.stdout.readline() == b"ready\n"
                    assert client.get_server().memory.staging > before
                    time.sleep(delay)
                    trainer.send_signal(signal.SIGKILL)
                wait_until(lambda: client.get_server().memory.staging == before)
            wait_until(lambda: len(os.listdir(f"/proc/{process.pid}/fd")) <= descriptors)
            assert client.compute_loss("lm", hidden, targets).valid_rows > 0
    finally:
        process.stop()


def test_goes_on_with_another_server_at_the_same_address(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/grpc"
    hidden, targets = rows()
    process = ServerProcess(f"--listen={target}")
    try:
        with lossd.Client(target, transport="auto") as client:
            client.create_head("lm", hidden_size=D, vocab_size=V)
            client.compute_loss("lm", hidden, targets)
            assert client.transport[0] == "shared_memory"
            process.stop()
            process = ServerProcess(f"--listen={target}")
            with lossd.Client(target, transport="grpc") as other:
                other.create_head("lm", hidden_size=D, vocab_size=V)
            deadline = time.monotonic() + 120
            while True:
                client.compute_loss("lm", hidden, targets)
                if client.transport[0] == "shared_memory":
                    break
                assert time.monotonic() < deadline, client.transport
                time.sleep(0.02)
    finally:
        process.stop()


def test_an_interrupt_while_a_region_is_opened_leaves_it_to_others(server: ServerProcess, make_head: Any) -> None:
    head = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = rows()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = 0
    try:
        for i in range(40):
            with lossd.Client(server.target, transport="auto") as client:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0001 * (i + 1))
                    client.compute_loss(head, hidden, targets)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
                with ThreadPoolExecutor(3) as threads:
                    assert all(threads.map(lambda _: client.compute_loss(head, hidden, targets).valid_rows > 0, range(3)))
                assert client.transport[0] == "shared_memory", client.transport
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 0


@contextlib.contextmanager
def played_server(folder: Path, answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that describes itself; `answer` gets the sessions of its region socket, one after the other."""
    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                session, _ = sessions.accept()
                with session:
                    answer(session)

    described = server_pb2.ServerDescription(version=lossd.__version__, incarnation=1, region_socket=f"{folder}/regions")
    methods = {"GetServer": grpc.unary_unary_rpc_method_handler(lambda request, context: described.SerializeToString())}
    server = grpc.server(ThreadPoolExecutor(4), handlers=[grpc.method_handlers_generic_handler("lossd.v1.ServerService", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sessions:
        sessions.bind(f"{folder}/regions")
        sessions.listen()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{port}"
        sessions.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    server.stop(None).wait()


def test_memory_that_a_server_could_shrink_is_not_taken(tmp_path: Path) -> None:
    """An access to what is gone would end the process."""
    offers = []

    def answer(session: socket.socket) -> None:
        descriptor, size = offers.pop()
        session.recv(4096)
        opened = region_pb2.RegionAnswer(opened={"id": b"0123456789abcdef", "bytes": size})
        socket.send_fds(session, [opened.SerializeToString()], [descriptor])
        session.recv(1)  # until the client lets go of it

    with played_server(tmp_path, answer) as target, open(tmp_path / "file", "w+b") as file:
        memory = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
        for each in (memory, sealed, file.fileno()):
            os.ftruncate(each, 8192)
        fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        for descriptor, size, is_taken in ((memory, 8192, False), (file.fileno(), 8192, False), (sealed, 8193, False),
                                           (sealed, 1 << 63, False), (sealed, 8192, True)):
            offers.append((descriptor, size))
            if is_taken:
                with lossd.Client(target, transport="shared_memory", shared_memory_bytes=8192) as client:
                    assert client.transport[0] == "shared_memory"
            else:
                with pytest.raises(lossd.Unavailable, match="not sealed memory of the size it says"):
                    lossd.Client(target, transport="shared_memory", shared_memory_bytes=8192)
        os.close(memory)
        os.close(sealed)


def test_a_broken_call_gives_its_region_back_at_once() -> None:
    """Also while its error, and so its frames, are kept."""
    process = ServerProcess()
    try:
        hidden, targets = rows()
        hidden[151] = np.inf
        with lossd.Client(process.target, transport="grpc") as other:
            other.create_head("lm", hidden_size=D, vocab_size=V)
            before = other.get_server().memory.staging
            with lossd.Client(process.target, transport="shared_memory") as client:
                assert other.get_server().memory.staging > before
                with pytest.raises(lossd.NonFinite) as kept:
                    client.compute_loss("lm", hidden, targets, slice_bytes=7 * D * 4)
                assert kept.value.__traceback__ is not None
                wait_until(lambda: other.get_server().memory.staging == before)
    finally:
        process.stop()


@pytest.mark.parametrize("request_comes_first", [False, True])
def test_a_refusal_arrives_whatever_was_unread(tmp_path: Path, request_comes_first: bool) -> None:
    """A server that refuses a connection closes it before the request comes, or without reading it."""
    refusal = region_pb2.RegionAnswer(refused={"reason": "too many programs"}).SerializeToString()

    def refuse(session: socket.socket) -> None:
        if request_comes_first:
            select.select([session], [], [], 60)
        session.send(refusal)

    with played_server(tmp_path, refuse) as target:
        for _ in range(100):
            with pytest.raises(lossd.Unavailable, match="too many programs"):
                lossd.Client(target, transport="shared_memory")


# How much shared memory a client asks for, and when: as much as its calls need. tests/server/service/shared_memory_test.cc asks more of
# the same; what is asked for which calls is in the golden cases.

WIDTH, CLASSES = 16, 23
MIB = 1 << 20


def large_rows(mib: int) -> tuple[Any, Any]:
    count = mib * MIB // (WIDTH * 4)
    rng = np.random.default_rng(count)
    return rng.standard_normal((count, WIDTH), dtype=np.float32), rng.integers(0, CLASSES, count).astype(np.int32)


def test_it_grows_with_the_calls_and_gives_back_what_was_outgrown(server: ServerProcess, make_head: Any) -> None:
    head = make_head(hidden_size=WIDTH, vocab_size=CLASSES)
    with lossd.Client(server.target, transport="grpc") as other:
        def staging() -> int:
            return other.get_server().memory.staging

        before = staging()
        with lossd.Client(server.target, transport="shared_memory") as client:
            assert staging() - before == 4 * MIB
            client.compute_loss(head, *large_rows(1))
            assert staging() - before == 4 * MIB, "nothing larger is needed"
            pending = [client.compute_loss_async(head, *large_rows(mib), grad_hidden=True) for mib in (1, 1, 8)]
            for each in pending:
                each.wait(120)
            # A session ends with the last call that uses it; the server sees that at its next look.
            wait_until(lambda: staging() - before == 32 * MIB)
            client.compute_loss(head, *large_rows(1))
            assert staging() - before == 32 * MIB, "smaller calls use what is there"
        wait_until(lambda: staging() == before)


def test_a_region_goes_back_although_a_child_has_inherited_it(server: ServerProcess) -> None:
    """As the workers of a DataLoader do."""
    with lossd.Client(server.target, transport="grpc") as other:
        before = other.get_server().memory.staging
        with lossd.Client(server.target, transport="shared_memory"):
            assert other.get_server().memory.staging > before
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
        try:
            wait_until(lambda: other.get_server().memory.staging == before)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_it_grows_while_other_threads_begin_and_end_calls(server: ServerProcess) -> None:
    rng = np.random.default_rng(5)
    rows = [(rng.standard_normal((n, WIDTH), dtype=np.float32), rng.integers(0, CLASSES, n).astype(np.int32)) for n in (10, 3000, 60000)]
    failures: list[BaseException] = []
    with lossd.Client(server.target, transport="shared_memory") as client:
        name = f"growing-{id(client)}"
        client.create_head(name, hidden_size=WIDTH, vocab_size=CLASSES)
        wanted = [client.compute_loss(name, hidden, targets).loss for hidden, targets in rows]

        def train(seed: int) -> None:
            order = np.random.default_rng(seed)
            try:
                for _ in range(12):
                    i = int(order.integers(0, len(rows)))
                    assert client.compute_loss(name, *rows[i]).loss == pytest.approx(wanted[i], rel=1e-5)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.delete_head(name)
        assert not failures
        assert client.transport[0] == "shared_memory"


def test_many_clients_of_small_microbatches_share_what_there_is() -> None:
    """They had a quarter of what the server gives each, whatever they sent."""
    process = ServerProcess(f"--shared_memory_bytes={256 * MIB}")
    rng = np.random.default_rng(12)
    hidden: Any = rng.standard_normal((50, WIDTH), dtype=np.float32)
    targets = rng.integers(0, CLASSES, 50).astype(np.int32)
    try:
        with contextlib.ExitStack() as clients:
            for i in range(12):
                client = clients.enter_context(lossd.Client(process.target, transport="shared_memory"))
                if i == 0:
                    client.create_head("lm", hidden_size=WIDTH, vocab_size=CLASSES)
                client.compute_loss("lm", hidden, targets)
                assert client.transport[0] == "shared_memory", client.transport
    finally:
        process.stop()


# Clients in another network namespace and of another user, as in containers: they share memory through a folder that
# both see, and say what is missing otherwise.

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
