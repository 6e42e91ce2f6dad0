# SPDX-License-Identifier: Apache-2.0
"""lossd.embedded(): a server in the process of its client."""

from __future__ import annotations

import _thread
import functools
import gc
import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from servers import ServerProcess

import lossd
from lossd import _embedded, _native

D, V, N = 16, 60, 24


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sockets of servers are, and nothing else."""
    path = tmp_path / "sockets"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    return path


@pytest.fixture
def here(folder: Path, tmp_path: Path) -> Iterator[lossd.EmbeddedClient]:
    with lossd.embedded(threads=1, checkpoint_dir=tmp_path / "checkpoints", deterministic=True) as made:
        yield made
    assert list(folder.iterdir()) == []


def rows(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal((N, D)).astype(np.float32), rng.integers(0, V, N)


def train(client: lossd.Client, steps: range, seed: int = 5) -> list[bytes]:
    """Makes steps with rows of a seed; every bit of losses, gradients and weights."""
    seen = []
    for step in steps:
        hidden, targets = rows(np.random.default_rng([seed, step]))
        result = client.compute_loss("lm", hidden, targets, step=step, accumulate=True, grad_hidden=True)
        client.apply_step("lm", step, lossd.AdamW(lr=0.01), expected_microbatches=[0])
        assert result.grad_hidden is not None
        seen += [np.float64(result.loss).tobytes(), result.grad_hidden.tobytes(), client.read_tensor("lm").tobytes()]
    return seen


def make(client: lossd.Client) -> None:
    client.create_head("lm", hidden_size=D, vocab_size=V, seed=3, compute_dtype="fp32")


def test_it_computes_what_a_server_does(here: lossd.EmbeddedClient) -> None:
    server = ServerProcess("--deterministic")
    try:
        with lossd.Client(server.target) as client:
            make(client)
            make(here)
            assert train(here, range(3)) == train(client, range(3))
    finally:
        server.stop()


def test_a_run_that_outgrows_the_process(here: lossd.EmbeddedClient, tmp_path: Path) -> None:
    make(here)
    train(here, range(2))
    saved = here.save_checkpoint("lm").checkpoint
    expected = train(here, range(2, 4))
    server = ServerProcess("--deterministic", f"--checkpoint_dir={tmp_path / 'checkpoints'}")
    try:
        with lossd.Client(server.target) as client:
            client.load_checkpoint(saved, "lm")
            assert train(client, range(2, 4)) == expected
            back = client.save_checkpoint("lm").checkpoint
            ahead = train(client, range(4, 5))
    finally:
        server.stop()
    here.delete_head("lm")
    here.load_checkpoint(back, "lm")
    assert train(here, range(4, 5)) == ahead


def test_restore_brings_the_newest_checkpoint(folder: Path, tmp_path: Path) -> None:
    with lossd.embedded(threads=1, checkpoint_dir=tmp_path / "checkpoints") as client:
        make(client)
        train(client, range(2))
        client.save_checkpoint("lm")
        weight = client.read_tensor("lm")
    with lossd.embedded(threads=1, checkpoint_dir=tmp_path / "checkpoints", restore="latest") as client:
        assert client.describe_head("lm").state.step == 2
        np.testing.assert_array_equal(client.read_tensor("lm"), weight)


def test_rows_lie_in_memory_of_the_process(here: lossd.EmbeddedClient) -> None:
    make(here)
    train(here, range(1))
    assert here.transport[0] == "shared_memory", here.transport


def test_loss_computations_need_no_connection(here: lossd.EmbeddedClient) -> None:
    make(here)
    with lossd.Client(here.target) as another:  # of the same process
        for client in (here, another):
            train(client, range(here.describe_head("lm").state.step, here.describe_head("lm").state.step + 1))
            assert client.connections == (1, "loss computations need none, as the server is in this process")


def test_a_server_that_asks_who_calls_asks_its_own_process_too(folder: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("trainer:p1:a-token-of-the-trainer\nreader:watch:a-token-of-the-reader\nadmin:ops:a-token-of-the-admin\n")
    tokens.chmod(0o600)
    flags = {"listen": "127.0.0.1:0", "token_file": str(tokens)}
    with lossd.embedded(threads=1, flags=flags, client={"token": "a-token-of-the-admin"}) as here:
        make(here)
        train(here, range(1))
        assert here.connections == (1, "little was sent in messages so far")
        with lossd.Client(here.target, token="a-token-of-the-reader") as reader:
            with pytest.raises(lossd.PermissionDenied, match="ComputeLoss"):
                train(reader, range(1, 2))


def test_several_servers_in_a_process(here: lossd.EmbeddedClient, folder: Path) -> None:
    make(here)
    with lossd.embedded(threads=1, http="127.0.0.1:0") as other:
        assert other.http_address.startswith("127.0.0.1:") and here.http_address == ""
        assert other.list_heads() == []
        assert len(list(folder.iterdir())) == 2
    assert [head.spec.name for head in here.list_heads()] == ["lm"]


def test_the_folder_is_the_users_alone(here: lossd.EmbeddedClient, folder: Path) -> None:
    socket = Path(here.target.removeprefix("unix:"))
    assert socket.parent.parent == folder
    assert socket.parent.stat().st_mode & 0o777 == 0o700 and socket.stat().st_mode & 0o777 == 0o600


def test_another_process_may_look(here: lossd.EmbeddedClient) -> None:
    make(here)
    code = f"import lossd; print([head.spec.name for head in lossd.Client({here.target!r}).list_heads()])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told == "['lm']\n"


# ---- Its end ----

def test_close_stops_the_server(folder: Path) -> None:
    client = lossd.embedded(threads=1)
    make(client)
    target = client.target
    client.close()
    client.close()
    assert client.closed and list(folder.iterdir()) == []
    with pytest.raises(lossd.ClientClosed):
        client.list_heads()
    with pytest.raises(lossd.Unavailable):
        lossd.Client(target)


def test_a_client_that_nobody_has_any_more_takes_its_server_along(folder: Path) -> None:
    client = lossd.embedded(threads=1)
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None and list(folder.iterdir()) == []


@pytest.mark.parametrize("ending", ["", "client.close()", "sys.exit(0)", "raise KeyboardInterrupt",
                                    "threading.Thread(target=time.sleep, args=(0.2,), daemon=True).start()",
                                    "client.compute_loss_async('lm', hidden, targets)"])
def test_the_end_of_the_process_stops_the_server(folder: Path, ending: str) -> None:
    code = f"""
import os, sys, threading, time, numpy as np, lossd
client = lossd.embedded(threads=1)
client.create_head("lm", hidden_size={D}, vocab_size={V})
hidden, targets = np.ones(({N}, {D}), np.float32), np.zeros({N}, int)
client.compute_loss("lm", hidden, targets)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in ((-2, 130) if ending == "raise KeyboardInterrupt" else (0,)), done.stderr
    assert "Fatal" not in done.stderr and "terminate called" not in done.stderr, done.stderr
    assert list(folder.iterdir()) == []


def test_a_fork_has_neither_client_nor_server(here: lossd.EmbeddedClient) -> None:
    make(here)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            here.list_heads()
            told = "it answers"
        except lossd.ForkedClient:
            told = "ForkedClient"
        here.close()
        gc.collect()
        os.write(write, told.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"ForkedClient"
    assert [head.spec.name for head in here.list_heads()] == ["lm"]
    train(here, range(2))


def in_child(client: lossd.EmbeddedClient) -> None:
    gc.collect()  # and then the child ends as a process does


def test_children_that_end_as_processes_do(here: lossd.EmbeddedClient) -> None:
    """As the workers of a DataLoader, which are forks."""
    make(here)
    children = [multiprocessing.get_context("fork").Process(target=in_child, args=(here,)) for _ in range(3)]
    for child in children:
        child.start()
    train(here, range(2))
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    train(here, range(2, 4))


def test_the_process_may_change_its_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", "sockets")
    with lossd.embedded(threads=1, checkpoint_dir="relative") as client:
        make(client)
        os.chdir("other")
        saved = client.save_checkpoint("lm").checkpoint
        assert (tmp_path / "relative" / saved).is_dir()
        client.load_checkpoint(saved)
    assert list(folder.iterdir()) == [] and list((tmp_path / "other").iterdir()) == []


def test_a_long_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with lossd.embedded(threads=1) as client:
        make(client)
        train(client, range(1))
        assert client.target.startswith("unix:/tmp/lossd-") and client.transport[0] == "shared_memory"


def test_the_environment_is_about_other_servers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVER", "CONTEXT", "CA", "CERT", "KEY", "TOKEN"):
        monkeypatch.setenv(f"LOSSD_{name}", "/no/such")
    monkeypatch.setenv("LOSSD_TRANSPORT", "cuda_ipc")
    with lossd.embedded(threads=1) as client:
        make(client)
        train(client, range(1))


def test_threads_share_it(here: lossd.EmbeddedClient) -> None:
    make(here)
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            hidden, targets = rows(np.random.default_rng(number))
            for _ in range(20):
                here.compute_loss("lm", hidden, targets)
        except BaseException as error:
            problems.append(error)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_an_interrupted_start_leaves_nothing(folder: Path) -> None:
    code = """
import signal, threading, time, os, lossd
lossd.embedded(threads=1).close()
delay = float(os.environ["DELAY"])
try:
    threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()
    while True:
        lossd.embedded(threads=1).close()
except KeyboardInterrupt:
    print("interrupted")
"""
    for delay in np.random.default_rng().uniform(0.0, 0.1, 5):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True,
                              env={**os.environ, "DELAY": str(delay)})
        assert done.stdout == "interrupted\n", delay
        assert list(folder.iterdir()) == [], delay


@pytest.mark.parametrize("place", [0, 1])
def test_an_interrupt_of_close_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Just before the client is closed, and just before the server is stopped."""
    client = lossd.embedded(threads=1)
    run, start = _native.Call.run, _thread.start_new_thread
    places = itertools.count()

    def interrupted(go_on: Callable[..., Any], *arguments: Any) -> Any:
        if next(places) == place:
            raise KeyboardInterrupt
        return go_on(*arguments)

    monkeypatch.setattr(_native.Call, "run", lambda *arguments: interrupted(run, *arguments))
    monkeypatch.setattr(_embedded, "_thread", SimpleNamespace(start_new_thread=functools.partial(interrupted, start)))
    with pytest.raises(KeyboardInterrupt):
        client.close()
    assert list(folder.iterdir()) == []


def test_an_interrupt_at_the_end_of_the_process_leaves_nothing(folder: Path) -> None:
    code = """
import atexit, os, signal, threading, time, lossd
client = lossd.embedded(threads=1)
stop = client._server.stop
class Slow:  # so that the interrupt comes while the server stops
    def __init__(self, library): self.library = library
    def __getattr__(self, name): return getattr(self.library, name)
    def lossd_drain(self, *arguments):
        print("drains", flush=True)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        return self.library.lossd_drain(*arguments)
import weakref
_, end, (library, *others), _ = stop.detach()
weakref.finalize(client._server, end, Slow(library), *others)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "drains\n", done
    assert list(folder.iterdir()) == []


# ---- What is wrong is said ----

@pytest.mark.parametrize(("options", "kind", "words"), [
    ({"threads": -1}, lossd.InvalidArgument, "threads"),
    ({"backend": "tpu"}, lossd.InvalidArgument, "backend must be auto, cpu or cuda, got tpu"),
    ({"log_level": "loud"}, lossd.InvalidArgument, "log_level is \"loud\"; it must be"),
    ({"flags": {"staging": 1}}, lossd.InvalidArgument, "there is no option staging"),
    ({"flags": {"staging_bytes": "much"}}, lossd.InvalidArgument, "staging_bytes is \"much\"; it must be a number of bytes"),
    ({"threads": 1, "flags": {"threads": 2}}, lossd.InvalidArgument, "threads is an argument, and one of flags too"),
    ({"flags": {"listen": "unix:/no/such/folder/grpc"}}, lossd.Unavailable, "/no/such/folder/grpc"),
    ({"client": {"max_pending": 0}}, lossd.InvalidArgument, "max_pending is 0"),
    ({"client": {"target": "x"}}, lossd.InvalidArgument, "client has target, which is not among the arguments"),
    ({"client": {"patience": 1}}, lossd.InvalidArgument, "client has patience, which is not among the arguments"),
    ({"flags": {"drain_timeout": 30}}, lossd.InvalidArgument, "drain_timeout is \"30\"; it must be a duration such as 30s or 2m"),
])
def test_what_is_wrong_is_named(folder: Path, options: dict[str, object], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        lossd.embedded(**options)  # type: ignore[arg-type]
    gc.collect()
    assert list(folder.iterdir()) == []


def test_libraries_of_other_packages_do_not_come_between(folder: Path, tmp_path: Path) -> None:
    """TensorFlow lets all later libraries find its gRPC and protobuf first; here these are functions that end the process."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    source, other = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("void abort(void);\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in (
        "grpc_init", "grpc_server_create", "grpc_completion_queue_create_for_next", "_ZN6google8protobuf5ArenaD1Ev")))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", other, source], check=True)
    code = f"""
import ctypes
ctypes.CDLL({str(other)!r}, mode=ctypes.RTLD_GLOBAL)
import lossd
with lossd.embedded(threads=1) as client:
    print(client.list_heads())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done


def test_truth_values_and_numbers_are_texts_of_flags() -> None:
    texts = _native.option_texts({"a": True, "b": False, "c": 3, "d": 0.5, "e": "64MiB", "f": None})
    assert list(texts) == [b"a=true", b"b=false", b"c=3", b"d=0.5", b"e=64MiB", None]


@pytest.fixture
def loaded_anew() -> Iterator[None]:
    """The library is looked for again."""
    _native.library.cache_clear()
    yield
    _native.library.cache_clear()


@pytest.mark.parametrize("make", [lossd.embedded, lossd.Client])
def test_the_library_that_is_not_there(loaded_anew: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       make: Callable[[], lossd.Client]) -> None:
    monkeypatch.setenv("LOSSD_LIBRARY", str(tmp_path / "liblossd.so"))
    with pytest.raises(lossd.Unavailable, match="^LOSSD_LIBRARY is .*, and there is no such file$"):
        make()
    (tmp_path / "liblossd.so").write_text("no library")
    with pytest.raises(lossd.Unavailable, match="^lossd needs the library liblossd.so: .*LOSSD_LIBRARY names it .*/liblossd.so: "
                                                "file too short"):
        make()


@pytest.mark.parametrize("make", [lossd.embedded, lossd.Client])
def test_a_library_of_another_version(loaded_anew: None, monkeypatch: pytest.MonkeyPatch,
                                      make: Callable[[], lossd.Client]) -> None:
    monkeypatch.setattr(_native, "VERSION", "0.0.7")
    with pytest.raises(lossd.Unavailable, match="is of lossd .*, and this client of lossd 0.0.7: install both of one release"):
        make()


def test_the_gpu_of_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "current_gpu", lambda: (1, "GPU-1"))
    given: list[dict[str, object]] = []

    class NoServer:
        def __init__(self, options: dict[str, object]) -> None:
            given.append(options)
            raise lossd.Unavailable("none")
    monkeypatch.setattr(_embedded, "Member", NoServer)
    for options in ({}, {"device": 0}, {"backend": "cpu"}, {"flags": {"devices": "all"}}):
        with pytest.raises(lossd.Unavailable):
            lossd.embedded(**options)  # type: ignore[arg-type]
    assert [each.get("device") for each in given] == ["GPU-1", 0, None, None]


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_backward_in_another_dtype_or_width_changes_nothing(transport: str) -> None:
    with lossd.embedded(backend="cpu", threads=1, client={"transport": transport}) as client:
        client.create_head("lm", hidden_size=4, vocab_size=7, compute_dtype="fp32")
        hidden = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float16)
        client.compute_loss("lm", hidden, [0, 1, 2, 3], step=0, id=1, reduction="none", retain=True)
        upstream = np.ones(4, np.float32)
        for dtype in ("fp32", "bf16"):
            with pytest.raises(lossd.InvalidArgument, match="backward.hidden_dtype must be fp16, as the rows were retained"):
                client.backward("lm", 1, upstream, hidden_size=4, step=0, accumulate=True, grad_hidden=True, dtype=dtype)
        fresh = lossd.Client(client.target, transport=transport)
        for width in (2, 8):
            with fresh, pytest.raises(lossd.InvalidArgument, match=f"a row has {width} elements, but head \"lm\" has 4"):
                fresh.backward("lm", 1, upstream, hidden_size=width, grad_hidden=True, dtype="fp16")
            fresh = lossd.Client(client.target, transport=transport)
        fresh.close()
        assert client.describe_head("lm").step_rows == 0 and client.grad_norm("lm") == 0
        assert client.backward("lm", 1, upstream, hidden_size=4, step=0, accumulate=True).accumulated_rows == 4  # no gradient, no dtype


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_rows_of_a_head_that_was_made_again_with_another_width(transport: str) -> None:
    with lossd.embedded(backend="cpu", threads=1, client={"transport": transport}) as other, \
            lossd.Client(other.target, transport=transport) as client:
        other.create_head("e", hidden_size=8, vocab_size=7, compute_dtype="fp32")
        assert client.embed("e", [1], dtype="fp32").rows.shape == (1, 8)
        other.delete_head("e")
        other.create_head("e", hidden_size=4, vocab_size=7, compute_dtype="fp32")
        with pytest.raises(lossd.InvalidArgument, match="open.hidden_size must be the head's, 4|a row has 8 elements, but head"):
            client.embed("e", [1], dtype="fp32")
        assert client.embed("e", [1], dtype="fp32").rows.shape == (1, 4)
