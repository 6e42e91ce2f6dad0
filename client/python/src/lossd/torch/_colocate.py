# SPDX-License-Identifier: Apache-2.0
"""colocate(): one lossd server whose ranks are the processes of a torch.distributed group."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lossd import errors
from lossd._embedded import EmbeddedClient, Member, check_client, options_of, run_uninterrupted

T = TypeVar("T")

_CHOSEN = {"rank", "ranks", "local_rank", "leader", "rank_listen", "rank_secret_file", "listen"}
_NOT_ON_GPUS = ("several ranks inside the trainer's processes compute on GPUs only beside trainers that have loaded their code before and "
                "keep pace with their GPUs, or all stand still; docs/training/colocated.md says how. backend=\"cuda\" says that they do, "
                'backend="cpu" computes on the CPU, and one server on these GPUs needs neither')
# The clients that colocate() has made in this process, if it computes on a GPU as one of several ranks.
_computing: weakref.WeakSet[EmbeddedClient] = weakref.WeakSet()
# The clients' shared memory has a fixed size. If it grew with the rows, it would be replaced while ranks train. But CUDA frees
# the old memory only when all work on the GPU has ended. That work may be a collective that waits for another rank, and the
# other rank may wait for the head: then no rank continues.
_CLIENT = {"shared_memory_bytes": 256 << 20}
_LOOPBACK = "127.{}.{}.{}"  # all of 127.0.0.0/8 is this host: two groups rarely draw the same address


def colocate(group: Any = None, *, split: str = "vocabulary", checkpoint_dir: str | os.PathLike[str] | None = None,
             restore: str | None = None, backend: str | None = None, device: str | int | None = None, threads: int | None = None,
             deterministic: bool | None = None, http: str | None = None, log_level: str | None = None,
             flags: Mapping[str, Any] | None = None, client: Mapping[str, Any] | None = None) -> EmbeddedClient:
    """Makes the processes of a group one lossd server, and returns a client of it in each process. Every rank must call it.

        client = lossd.torch.colocate()
        if dist.get_rank() == 0:
            client.create_head("lm", hidden_size=64, vocab_size=1000)
        dist.barrier()

    The devices of all ranks compute together. With split "vocabulary" each device has a part of the classes; with "rows" each
    device has all classes and computes a part of the rows. No other program has to be started: each process computes its part
    of the head next to its own work. Rank 0 of the group serves the clients.

    If a rank's thread uses a GPU, its client allocates the memory for its rows in colocate(): 256 MiB, pinned for its GPU. It
    does not do this later, because a GPU may never be free for it while the ranks train. `client` may set another size,
    `{"shared_memory_bytes": ...}`.

    All ranks end together. When a rank closes its client or ends, the server drains for at most `drain_timeout` and then ends
    in all ranks. So save the head and call a barrier before a rank closes its client. If a rank dies or hangs, it counts as
    lost within `rank_silence_timeout` (30 s), and then the calls of the other ranks fail with Unavailable or Internal.

    On GPUs, the trainer's code and the head can wait for each other in CUDA's driver. Then all ranks stand still, until the
    server reports after `collective_timeout` that a rank is lost. A trainer avoids this by doing three things
    (docs/training/colocated.md). With backend="cuda" the caller confirms that the trainer does them; without it, colocate()
    refuses GPUs.

    Each rank takes the GPU that its thread uses. If the thread uses none yet, the rank takes the GPU with the number
    LOCAL_RANK, or else with the rank's number in the group.

    Args:
      group: the group of ranks; None: all ranks. They must be processes of one host.
      split: the split of heads that are created without one: "vocabulary", "rows", or "any".
      checkpoint_dir, restore, backend, device, threads, deterministic, http, log_level, flags, client: as in
        lossd.embedded(). Every rank must give the same values, except for `device`, `threads` and `client`. These flags
        concern several ranks: `collectives`, `rank_timeout` (here "1m" by default), `rank_silence_timeout`,
        `collective_timeout`.

    Raises:
      Unimplemented: there are several ranks and a GPU, and `backend` is not given.
      Unavailable, InvalidArgument, ResourceExhausted: as in lossd.embedded(), in the rank that fails. The other ranks raise
        Unavailable or DeadlineExceeded with the text of its error.
      FailedPrecondition: the ranks are on several hosts, torch.distributed is not initialized, or this process is not in the
        group.
    """
    check_client(client)
    rank, size = _place_in(group)
    if size > 1 and backend in (None, "auto") and torch.cuda.is_available():
        raise errors.Unimplemented(_NOT_ON_GPUS)
    if taken := sorted(_CHOSEN & {*(flags or {})}):
        raise errors.InvalidArgument(f"flags has {taken[0]}, which colocate() chooses itself")
    options = options_of(checkpoint_dir=checkpoint_dir, restore=restore, backend=backend, device=device, threads=threads,
                         deterministic=deterministic, http=http, log_level=log_level, flags={"split": split, **(flags or {})})
    hosts = _gathered(group, size, _this_host())
    if len(set(hosts)) > 1:
        raise errors.FailedPrecondition(f"the ranks of the group are on {len(set(hosts))} hosts ({', '.join(sorted(set(hosts)))}); "
                                        "colocate() is for one host: start the program lossd on several (docs/scaling.md)")
    leader, secret = _from_first(group, rank, lambda: (_free_address(), secrets.token_hex(32)))
    if size > 1:
        options = {"rank_timeout": "1m", "rank": rank, "ranks": size, "leader": leader,
                   "local_rank": os.environ.get("LOCAL_RANK", rank),
                   "shared_memory_bytes": max(1 << 30, 2 * size * _CLIENT["shared_memory_bytes"]), **options}
    member = _start_all(group, rank, size, options, secret)
    address = _from_first(group, rank, lambda: member.address)
    made = EmbeddedClient(member, {**_CLIENT, **(client or {})}, address if size > 1 else None)
    if size > 1 and backend != "cpu" and torch.cuda.is_available():
        _computing.add(made)
    return made


def computes_here() -> bool:
    """Whether this process computes on a GPU as one of several ranks of a head."""
    return any(not each.closed for each in _computing)


def _start_all(group: Any, rank: int, size: int, options: dict[str, Any], secret: str) -> Member:
    """Starts this rank's part of the server. If a rank does not start, all ranks raise: the failed rank its own error, the
    others an error that names the failed rank."""
    member, problem = None, None
    with tempfile.NamedTemporaryFile("w", prefix="lossd-rank-") as file:  # only its owner can read it
        file.write(secret)
        file.flush()
        of_rank = {"rank_secret_file": file.name} if size > 1 else {}
        try:
            member = run_uninterrupted(lambda: Member({**options, **of_rank}))
        except errors.LossdError as error:
            problem = error
    problems = _gathered(group, size, None if problem is None else f"{type(problem).__name__}: {problem}")
    others = "; ".join(f"rank {each}: {text}" for each, text in enumerate(problems) if text is not None and each != rank)
    if problem is not None:
        if others:
            problem.add(f"; of the other ranks {others}")
        raise problem
    assert member is not None
    if others:
        member.stop()
        raise errors.Unavailable(f"not all ranks of the group have started: {others}")
    return member


def _place_in(group: Any) -> tuple[int, int]:
    """The rank of this process in the group, and the number of ranks."""
    if not dist.is_available() or not dist.is_initialized():
        raise errors.FailedPrecondition("torch.distributed has no group yet: torch.distributed.init_process_group() makes one; "
                                        "a process that is alone takes lossd.embedded()")
    rank = dist.get_rank(group)
    if rank < 0:
        raise errors.FailedPrecondition("this process is not in the group that colocate() was given")
    return rank, dist.get_world_size(group)


def _this_host() -> str:
    """A unique name of this host. It has the id of the last boot, because two hosts may have the same host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def _free_address() -> str:
    host = _LOOPBACK.format(*(1 + secrets.randbelow(254) for _ in range(3)))
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def _gathered(group: Any, size: int, value: T) -> list[T]:
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def _from_first(group: Any, rank: int, make: Callable[[], T]) -> T:
    """Calls `make` in the group's first rank, and returns its value in all ranks."""
    values: list[Any] = [make() if rank == 0 else None]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    value: T = values[0]
    return value
