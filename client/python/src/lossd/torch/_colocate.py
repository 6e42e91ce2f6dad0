# SPDX-License-Identifier: Apache-2.0
"""One lossd server inside the processes of a torch.distributed group."""

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
from lossd._embedded import EmbeddedClient, Member, check_client, options_of, to_its_end

T = TypeVar("T")

_CHOSEN = {"rank", "ranks", "local_rank", "leader", "rank_listen", "rank_secret_file", "listen"}
_NOT_ON_GPUS = ("several ranks inside the trainer's processes compute on GPUs only beside trainers that have loaded their code before and "
                "keep pace with their GPUs, or all stand still; docs/training/colocated.md says how. backend=\"cuda\" says that they do, "
                'backend="cpu" computes on the CPU, and one server on these GPUs needs neither')
_computing: weakref.WeakSet[EmbeddedClient] = weakref.WeakSet()  # clients whose processes compute on GPUs as one of several ranks
# Shared memory of one size. Memory that grows with the rows is replaced while ranks train, and CUDA gives the old memory back only
# once all work on the GPU has ended: also a collective that waits for a rank that waits for the head.
_CLIENT = {"shared_memory_bytes": 256 << 20}
_LOOPBACK = "127.{}.{}.{}"  # all of 127.0.0.0/8 is this host: two groups hardly ever draw the same address


def colocate(group: Any = None, *, split: str = "vocabulary", checkpoint_dir: str | os.PathLike[str] | None = None,
             restore: str | None = None, backend: str | None = None, device: str | int | None = None, threads: int | None = None,
             deterministic: bool | None = None, http: str | None = None, log_level: str | None = None,
             flags: Mapping[str, Any] | None = None, client: Mapping[str, Any] | None = None) -> EmbeddedClient:
    """Makes the processes of a group one lossd server, and returns a client of it in each. Every rank calls it.

        client = lossd.torch.colocate()
        if dist.get_rank() == 0:
            client.create_head("lm", hidden_size=64, vocab_size=1000)
        dist.barrier()

    The devices of all ranks compute together: with split "vocabulary" each has a part of the classes, with "rows" each has all
    classes and computes a part of the rows. There is no program to start and no launcher of its own: a process computes its part of the head
    beside its own work. Rank 0 of the group serves the clients.

    A rank whose thread works on a GPU opens the memory for its rows at once, 256 MiB that its GPU pins: while ranks train, a GPU may have
    no time for that. `client` may say another size, `{"shared_memory_bytes": ...}`.

    The ranks end together. When a rank closes its client or ends, the server drains for at most `drain_timeout` and ends in all of
    them, so a save of the head comes before, and then a barrier. When a rank dies or hangs, the calls of the others end with
    Unavailable or Internal once it is lost: within `rank_silence_timeout` (30 s).

    On GPUs, the trainer's code and the head can wait for each other in CUDA's driver. All ranks then stand still, until the server
    says after `collective_timeout` that a rank is lost. A trainer that does three things avoids this (docs/training/colocated.md).
    backend="cuda" says that the trainer does them; colocate() refuses GPUs without it. Each rank then takes the GPU that its thread
    works on; a rank that works on none yet takes the GPU with the number LOCAL_RANK, or with the rank's number in the group.

    Args:
      group: the ranks; None: all of them. They are processes of one host.
      split: how heads that do not say lie on the devices: "vocabulary", "rows", or "any".
      checkpoint_dir, restore, backend, device, threads, deterministic, http, log_level, flags, client: as lossd.embedded();
        every rank gives the same, but for `device`, `threads` and `client`. Flags of several ranks are `collectives`,
        `rank_timeout` (here "1m"), `rank_silence_timeout`, `collective_timeout`.

    Raises:
      Unimplemented: there are several ranks, and a GPU, and `backend` does not say.
      Unavailable, InvalidArgument, ResourceExhausted: as lossd.embedded(), in the rank that it is about; the other ranks raise
        Unavailable or DeadlineExceeded with the text of that one.
      FailedPrecondition: the ranks are not on one host, or the group is not one of torch.distributed that this process is in.
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
    """Starts this rank. Where one does not start, all raise: that one its own error, the others one that names it."""
    member, problem = None, None
    with tempfile.NamedTemporaryFile("w", prefix="lossd-rank-") as file:  # which its owner alone can read
        file.write(secret)
        file.flush()
        of_rank = {"rank_secret_file": file.name} if size > 1 else {}
        try:
            member = to_its_end(lambda: Member({**options, **of_rank}))
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
    """The rank in the group, and how many there are."""
    if not dist.is_available() or not dist.is_initialized():
        raise errors.FailedPrecondition("torch.distributed has no group yet: torch.distributed.init_process_group() makes one; "
                                        "a process that is alone takes lossd.embedded()")
    rank = dist.get_rank(group)
    if rank < 0:
        raise errors.FailedPrecondition("this process is not in the group that colocate() was given")
    return rank, dist.get_world_size(group)


def _this_host() -> str:
    """A name of the host, and what tells it from others that are called the same."""
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
    """What the group's first rank makes, in all of them."""
    values: list[Any] = [make() if rank == 0 else None]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    value: T = values[0]
    return value
