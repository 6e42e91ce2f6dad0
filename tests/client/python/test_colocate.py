# SPDX-License-Identifier: Apache-2.0
"""lossd.torch.colocate(): the processes of a group as one server, and what the others notice when one of them goes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from servers import ServerProcess

import lossd
from lossd import _native

torch = pytest.importorskip("torch")
dist = torch.distributed
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

import lossd.torch  # noqa: E402

D, V, N, RANKS = 12, 97, 24, 3
PATIENCE = 240.0  # seconds, of a busy machine


def in_group(rank: int, size: int, folder: Path, answers: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ["TMPDIR"] = str(folder / "sockets")
    os.environ["http_proxy"] = os.environ["https_proxy"] = "http://127.0.0.1:9"  # nobody is there, and nobody is asked
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=size)
    answers.put((rank, work(rank, folder, *arguments)))
    # Ends torch's threads. A thread that is about to drop Python objects of the last collective when the interpreter ends aborts
    # the process.
    dist.destroy_process_group()


def run(folder: Path, work: Callable[..., Any], *arguments: Any, size: int = RANKS,
        stays: int | None = None) -> tuple[dict[int, Any], list[int | None]]:
    """What work(rank, folder, *arguments) returned in each rank that returned, and the exit codes. Rank `stays` does not end."""
    (folder / "sockets").mkdir()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=in_group, args=(rank, size, folder, answers, work, arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        found: dict[int, Any] = {}
        for rank, process in enumerate(processes):
            if rank != stays:
                process.join(PATIENCE)
                assert process.exitcode is not None, f"rank {rank} does not end"
        while not answers.empty():
            rank, answer = answers.get()
            found[rank] = answer
        return found, [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def member(folder: Path, **options: Any) -> lossd.EmbeddedClient:
    return lossd.torch.colocate(**{"threads": 1, "backend": "cpu", "checkpoint_dir": folder / "checkpoints", **options})


def rows_of(step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, rank])
    return rng.standard_normal((N, D)).astype(np.float32), rng.integers(0, V, N)


def make(client: lossd.Client) -> None:
    client.create_head("lm", hidden_size=D, vocab_size=V, seed=3, compute_dtype="fp32")


def train(rank: int, folder: Path, split: str) -> tuple[list[bytes], list[int]]:
    """Each rank sends rows of its own; rank 0 makes the steps."""
    with member(folder, split=split, deterministic=True) as client:
        if rank == 0:
            make(client)
        dist.barrier()
        seen = []
        for step in range(3):
            hidden, targets = rows_of(step, rank)
            result = client.compute_loss("lm", hidden, targets, step=step, id=rank, accumulate=True, grad_hidden=True)
            assert result.grad_hidden is not None
            seen.append(result.grad_hidden.tobytes())
            dist.barrier()
            if rank == 0:
                client.apply_step("lm", step, lossd.AdamW(lr=0.01), expected_microbatches=[*range(RANKS)])
            dist.barrier()
        seen.append(client.read_tensor("lm").tobytes())
        devices = [device.classes for device in client.describe_head("lm").devices]
        dist.barrier()  # the first that closes ends the server
    return seen, devices


@pytest.mark.parametrize("split", ["vocabulary", "rows"])
def test_it_computes_what_a_server_of_as_many_devices_does(tmp_path: Path, split: str) -> None:
    found, codes = run(tmp_path, train, split)
    assert codes == [0] * RANKS
    assert list((tmp_path / "sockets").iterdir()) == []
    server = ServerProcess("--deterministic", f"--cpu_devices={RANKS}", f"--split={split}", "--threads=3")
    try:
        with lossd.Client(server.target) as client:
            make(client)
            for step in range(3):
                for rank in range(RANKS):
                    hidden, targets = rows_of(step, rank)
                    result = client.compute_loss("lm", hidden, targets, step=step, id=rank, accumulate=True, grad_hidden=True)
                    assert result.grad_hidden is not None
                    assert result.grad_hidden.tobytes() == found[rank][0][step]
                client.apply_step("lm", step, lossd.AdamW(lr=0.01), expected_microbatches=[*range(RANKS)])
            weight = client.read_tensor("lm").tobytes()
            devices = [device.classes for device in client.describe_head("lm").devices]
    finally:
        server.stop()
    for seen, of_devices in found.values():
        assert seen[-1] == weight and of_devices == devices


TEACHER_D = 20


def make_taught(client: lossd.Client) -> None:
    client.create_head("student", hidden_size=D, vocab_size=V, seed=3, compute_dtype="fp32")
    client.create_head("teacher", hidden_size=TEACHER_D, vocab_size=V, seed=4, compute_dtype="fp32", frozen=True)


def distil_once(client: lossd.Client, rank: int) -> np.ndarray:
    hidden, targets = rows_of(0, rank)
    taught = np.random.default_rng([7, rank]).standard_normal((N, TEACHER_D)).astype(np.float32)
    mixture = lossd.Distillation("teacher", "forward_kl", temperature=2.0, target_weight=0.25)
    result = client.distill("student", hidden, taught, mixture, targets, step=0, id=rank, accumulate=True, grad_hidden=True)
    assert result.grad_hidden is not None
    return np.append(result.grad_hidden, np.float32(result.loss))


def learn(rank: int, folder: Path, split: str, transport: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Each rank sends rows with a teacher's: its dL/dx and loss, and the head after a step."""
    with member(folder, split=split, client={"transport": transport}) as client:
        if rank == 0:
            make_taught(client)
        dist.barrier()
        seen = distil_once(client, rank)
        dist.barrier()
        if rank == 0:
            client.apply_step("student", 0, lossd.AdamW(lr=0.01), expected_microbatches=[*range(RANKS)])
        dist.barrier()
        weight = client.read_tensor("student")
        dist.barrier()  # the first that closes ends the server
    return seen, weight


@pytest.mark.parametrize(("split", "transport"), [("vocabulary", None), ("rows", None), ("vocabulary", "grpc")])
def test_ranks_distil_as_one_device_does(tmp_path: Path, split: str, transport: str | None) -> None:
    found, codes = run(tmp_path, learn, split, transport)
    assert codes == [0] * RANKS
    with lossd.embedded(backend="cpu", threads=1) as client:
        make_taught(client)
        for rank in range(RANKS):
            np.testing.assert_allclose(found[rank][0], distil_once(client, rank), rtol=2e-4, atol=2e-6)
        client.apply_step("student", 0, lossd.AdamW(lr=0.01), expected_microbatches=[*range(RANKS)])
        for _, weight in found.values():
            np.testing.assert_allclose(weight, client.read_tensor("student"), rtol=1e-3, atol=1e-4)


def opened(rank: int, folder: Path) -> tuple[tuple[str, str], tuple[str, str]]:
    """How rows travel before the first call: of a rank on the CPU, and of one whose thread works on a GPU."""
    with member(folder) as client:
        on_cpu = client.transport
        dist.barrier()
    with mock.patch.object(_native, "current_gpu", return_value=(0, "GPU-of-nobody")), member(folder) as client:
        on_gpu = client.transport
        dist.barrier()
    return on_cpu, on_gpu


def test_ranks_on_gpus_open_their_memory_when_they_start(tmp_path: Path) -> None:
    found, codes = run(tmp_path, opened)
    assert codes == [0] * RANKS
    for on_cpu, on_gpu in found.values():
        assert on_cpu == ("grpc", "nothing was sent yet")
        assert on_gpu[0] == "shared_memory" and "256 MiB" in on_gpu[1]


def module(rank: int, folder: Path) -> list[float]:
    """LossHead and HeadOptimizer as on a server of its own."""
    client = member(folder, split="rows")
    if rank == 0:
        make(client)
    dist.barrier()
    head = lossd.torch.LossHead(client, "lm", process_group=dist.group.WORLD)
    optimizer = lossd.torch.HeadOptimizer(head, lr=0.05)
    losses = []
    for _ in range(3):
        hidden, targets = rows_of(0, rank)
        loss = head(torch.from_numpy(hidden).requires_grad_(), torch.from_numpy(targets))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dist.barrier()
    return losses  # nothing is closed: the end of the processes does that


def test_the_end_of_the_processes_ends_it(tmp_path: Path) -> None:
    found, codes = run(tmp_path, module)
    assert codes == [0] * RANKS
    assert all(losses[0] > losses[1] > losses[2] for losses in found.values())
    assert list((tmp_path / "sockets").iterdir()) == []


def goes(rank: int, folder: Path, goer: int, how: str) -> tuple[str, str]:
    """Rank `goer` goes, in one way or another; what the others hear in a call."""
    client = member(folder, flags={"rank_silence_timeout": "3s", "collective_timeout": "5s"})
    if rank == 0:
        make(client)
    dist.barrier()
    hidden, targets = rows_of(0, rank)
    client.compute_loss("lm", hidden, targets)
    dist.barrier()
    if rank == goer:
        if how == "close":
            client.close()
            return "closed", ""
        if how == "exit":
            sys.exit(0)
        if how == "raise":
            raise RuntimeError("something else went wrong")
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    try:
        while True:
            client.compute_loss("lm", hidden, targets)
    except lossd.LossdError as error:
        client.close()
        return type(error).__name__, str(error)


WAYS = [("close", 0), ("stop", 0), ("kill", 2)]
MORE_WAYS = [("kill", 0), ("close", 2), ("exit", 2), ("raise", 2), ("stop", 2)]


@pytest.mark.parametrize(("how", "goer"), WAYS + (MORE_WAYS if os.environ.get("LOSSD_NIGHTLY") else []))
def test_a_rank_that_goes_is_noticed_by_all(tmp_path: Path, how: str, goer: int) -> None:
    found, codes = run(tmp_path, goes, goer, how, stays=goer if how == "stop" else None)
    for rank in {*range(RANKS)} - {goer}:
        assert codes[rank] == 0
        kind, words = found[rank]
        assert kind in ("Unavailable", "Internal", "Aborted"), words
        if how == "stop" or (how, goer) == ("kill", 2):  # else the connection says so first
            assert f"rank {goer}" in words if goer else "is lost" in words, words


def starts(rank: int, folder: Path, options: dict[str, Any]) -> tuple[str, str]:
    try:
        with member(folder, **options):
            return "started", ""
    except lossd.LossdError as error:
        return type(error).__name__, str(error)


WRONG = [({"flags": {"peer_share": 3}}, "peer_share")]
MORE_WRONG = [({"threads": -1}, "threads"), ({"split": "columns"}, "split"),
              ({"flags": {"rank": 1}}, "flags has rank, which colocate() chooses itself")]


@pytest.mark.parametrize(("options", "words"), WRONG + (MORE_WRONG if os.environ.get("LOSSD_NIGHTLY") else []))
def test_what_is_wrong_is_named_in_every_rank(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    found, codes = run(tmp_path, starts, options, size=2)
    assert codes == [0, 0]
    for kind, text in found.values():
        assert kind == "InvalidArgument" and words in text, text


def has_a_taken_port(rank: int, folder: Path, port: int) -> tuple[str, str]:
    """Rank 0 alone looks at `http`, when all have come together."""
    return starts(rank, folder, {"http": f"127.0.0.1:{port}"})


def test_a_first_rank_that_does_not_start_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found, codes = run(tmp_path, has_a_taken_port, taken.getsockname()[1], size=2)
    assert codes == [0, 0]
    assert "http" in found[0][1], found
    assert found[1][0] == "Unavailable" and "rank 0: " in found[1][1] and "http" in found[1][1], found


def comes_late(rank: int, folder: Path) -> tuple[str, str]:
    if rank == 1:
        from lossd.torch import _colocate

        def never(*_: Any) -> Any:
            raise lossd.Unavailable("this rank has no memory")
        _colocate.Member = never  # type: ignore[assignment,misc]
    return starts(rank, folder, {"flags": {"rank_timeout": "1s"}})


def test_a_rank_that_does_not_start_is_named(tmp_path: Path) -> None:
    found, codes = run(tmp_path, comes_late, size=2)
    assert codes == [0, 0]
    assert found[1][0] == "Unavailable" and found[1][1].startswith("this rank has no memory; of the other ranks rank 0: DeadlineExceeded")
    assert found[0][0] == "DeadlineExceeded" and "rank 1: Unavailable: this rank has no memory" in found[0][1], found


def alone(rank: int, folder: Path) -> str:
    with member(folder) as client:
        make(client)
        return client.target


def test_a_group_of_one_is_an_embedded_server(tmp_path: Path) -> None:
    found, codes = run(tmp_path, alone, size=1)
    assert codes == [0] and found[0].startswith("unix:")


def test_no_group_is_said() -> None:
    with pytest.raises(lossd.FailedPrecondition, match="init_process_group"):
        lossd.torch.colocate()


def test_several_hosts_are_said(tmp_path: Path) -> None:
    found, codes = run(tmp_path, on_several_hosts, size=2)
    assert codes == [0, 0]
    for kind, text in found.values():
        assert kind == "FailedPrecondition" and "on 2 hosts (host-0, host-1)" in text, text


def on_several_hosts(rank: int, folder: Path) -> tuple[str, str]:
    from lossd.torch import _colocate
    _colocate._this_host = lambda: f"host-{rank}"
    return starts(rank, folder, {})


def test_several_ranks_on_gpus_are_asked_for_by_name() -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=True), \
            mock.patch.object(lossd.torch._colocate, "_place_in", return_value=(0, 2)), \
            pytest.raises(lossd.Unimplemented, match=r'docs/training/colocated.md says how. backend="cuda" says that they do'):
        lossd.torch.colocate()
