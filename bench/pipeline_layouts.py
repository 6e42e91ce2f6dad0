# SPDX-License-Identifier: Apache-2.0
"""What pipeline_bench.py compares: configurations of stages, replicas and heads that take the same number of GPUs.

Pure functions. Times are seconds of one microbatch, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ONE_F_ONE_B, OVERLAPPED = "1F1B", "overlapped 1F1B"
KINDS = ("local", "server", "server replicas", "local replicas")


@dataclass(frozen=True)
class Configuration:
    """`replicas` pipelines of len(layers) stages each. The head is in each replica's last stage, or on one server."""

    kind: str  # of KINDS
    head: str  # a function of peer_losses.methods, or "lossd": on a server with a GPU of its own
    layers: tuple[int, ...]  # of each stage
    replicas: int = 1
    schedule: str = ONE_F_ONE_B
    gradients: str = ""  # of a server: "exact" or "sampled"

    @property
    def on_server(self) -> bool:
        return self.head == "lossd"

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def trainers(self) -> int:
        """Ranks of torch.distributed: rank replica * stages + stage."""
        return self.replicas * self.stages

    @property
    def gpus(self) -> int:
        return self.trainers + self.on_server

    @property
    def exact(self) -> bool:
        """Whether its losses are those of the other exact configurations up to rounding.

        Cut Cross-Entropy's default leaves out small gradients.
        """
        return self.gradients in ("", "exact") and self.head != "cce"

    @property
    def name(self) -> str:
        replicas = f"{self.replicas} x " if self.replicas > 1 else ""
        head = f"lossd {self.gradients}" if self.on_server else self.head
        return f"{self.kind}, {head}, {replicas}({'-'.join(map(str, self.layers))}), {self.schedule}"


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Stages that differ by one layer at most. The first stage, which has the embedding, is among those with fewer."""
    base, more = divmod(layers, stages)
    return tuple(base + (1 <= stage <= more) for stage in range(stages))


def with_last(layers: int, stages: int, last: int) -> tuple[int, ...]:
    """`last` layers in the last stage and the others divided evenly."""
    return (*even_split(layers - last, stages - 1), last) if stages > 1 else (layers,)


def stage_seconds(split: tuple[int, ...], layer_seconds: float, head_seconds: float) -> list[float]:
    return [*(count * layer_seconds for count in split[:-1]), split[-1] * layer_seconds + head_seconds]


def local_splits(layers: int, stages: int, layer_seconds: float, head_seconds: float,
                 neighbours: int) -> list[tuple[int, ...]]:
    """First the split whose slowest stage is the fastest with the head on the last stage, and of several the one whose
    next slowest is. Then those whose last stage has up to `neighbours` layers fewer or more."""
    most = layers - (stages - 1) if stages > 1 else layers  # of the last stage
    times = {last: sorted(stage_seconds(with_last(layers, stages, last), layer_seconds, head_seconds), reverse=True)
             for last in range(layers if stages == 1 else 0, most + 1)}
    best = min(times, key=lambda last: times[last])
    wanted = [best, *(best + sign * apart for apart in range(1, neighbours + 1) for sign in (-1, 1))]
    return [with_last(layers, stages, last) for last in wanted if last in times]


def seconds_without_gaps(configuration: Configuration, microbatches: int, layer_seconds: float, head_seconds: float,
                         server_seconds: float) -> float:
    """The least that a step takes, as client/plan/pipeline.h has it: a microbatch passes through all stages, and the
    slowest stage, or the server that all replicas share, works on one after the other. Without the optimizer and
    transfers.

    `microbatches`: of a step, of all replicas. `head_seconds`: of a local head; `server_seconds`: of a server's.
    """
    head = 0.0 if configuration.on_server else head_seconds
    stages = stage_seconds(configuration.layers, layer_seconds, head)
    slowest = max(*stages, configuration.replicas * server_seconds if configuration.on_server else 0.0)
    return sum(stages) + (microbatches // configuration.replicas - 1) * slowest


def read_splits(text: str, layers: int) -> list[tuple[int, ...]]:
    """Of "6-6-6-2,7-6-6-1". ValueError if one has another number of layers."""
    splits = []
    for part in filter(None, text.split(",")):
        try:
            split = tuple(int(count) for count in part.split("-"))
        except ValueError:
            raise ValueError(f"splits has {part!r}; a split is like 6-6-6-2") from None
        if sum(split) != layers or min(split) < 0:
            raise ValueError(f"splits has {part!r} of {sum(split)} layers; layers is {layers}")
        splits.append(split)
    return splits


def replica_counts(ranks: int) -> list[int]:
    """In how many replicas so many ranks can be divided: at least two, and all alike."""
    return [count for count in range(2, ranks + 1) if ranks % count == 0]


def configurations(*, gpus: int, layers: int, kinds: Iterable[str], layer_seconds: float,
                   head_seconds: dict[str, float], gradients: Iterable[str], schedules: Iterable[str],
                   splits: list[tuple[int, ...]], neighbours: int) -> list[Configuration]:
    """What fits so many GPUs. Every configuration takes all of them.

    `head_seconds` are those of the local heads. The fastest is tried with neighbouring splits and in replicas; the
    others with their best split. `splits`: instead of those that the times predict, for every head.
    """
    fastest = min(head_seconds, key=lambda head: head_seconds[head]) if head_seconds else None
    found: list[Configuration] = []
    if "local" in kinds:
        for head, seconds in head_seconds.items():
            wanted = splits or local_splits(layers, gpus, layer_seconds, seconds, neighbours if head == fastest else 0)
            found += (Configuration("local", head, split) for split in wanted)
    on_server = [(each, schedule) for each in gradients for schedule in schedules]
    if "server" in kinds and gpus > 1:
        found += (Configuration("server", "lossd", even_split(layers, gpus - 1), schedule=schedule, gradients=each)
                  for each, schedule in on_server)
    if "server replicas" in kinds:
        found += (Configuration("server replicas", "lossd", even_split(layers, (gpus - 1) // count), count, schedule, each)
                  for count in replica_counts(gpus - 1) for each, schedule in on_server)
    if "local replicas" in kinds and fastest is not None:
        found += (Configuration("local replicas", fastest,
                                local_splits(layers, gpus // count, layer_seconds, head_seconds[fastest], 0)[0], count)
                  for count in replica_counts(gpus))
    return found
