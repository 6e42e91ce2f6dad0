# SPDX-License-Identifier: Apache-2.0
"""The configurations that pipeline_bench.py compares: stages, replicas and heads that use the same number of GPUs.
configurations() makes them.

Pure functions. If nothing else is said, times are seconds of forward and backward of one microbatch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lossd.torch import balance

ONE_F_ONE_B, OVERLAPPED = "1F1B", "overlapped 1F1B"
KINDS = ("local", "embedded", "colocated", "server", "server replicas", "local replicas")
ON_STAGES = ("embedded", "colocated")  # the kinds whose head is on the GPUs of the stages
MEASURED = Path(__file__).parents[1] / "client" / "plan" / "measured.json"
OWN, ROWS, EXCHANGE = "own", "rows", "exchange"  # Configuration.embedding
EMBEDDINGS = (OWN, ROWS, EXCHANGE)
BALANCED, EVEN = "balanced", "even"  # how to choose the shares of a head on the stages' GPUs; numbers are possible, too


@dataclass(frozen=True)
class Configuration:
    """A way to divide a model over GPUs: `replicas` pipelines of len(layers) stages each, and a head.

    The head is in one of these places: in each replica's last stage; on one server with a GPU of its own; on one server whose
    devices are the GPUs of the stages. The server of the last case is a program of its own (kind "colocated"), or it runs
    inside the processes of the stages (kind "embedded")."""

    kind: str  # one of KINDS
    head: str  # the name of a local head in peers.methods, or "lossd" for a head on a server
    layers: tuple[int, ...]  # for each stage: the number of its layers
    replicas: int = 1
    schedule: str = ONE_F_ONE_B
    gradients: str = ""  # how a server computes gradients: "exact" or "sampled"; empty without a server
    # For a head on the stages' GPUs: the share of each GPU in the head's classes. Empty: all shares are equal.
    shares: tuple[int, ...] = ()
    mps: bool = False  # whether the programs on a GPU run at the same time, by MPS; else they take turns
    slack: int = 1  # with OVERLAPPED: the number of additional forwards that give the server time
    # The embedding in the first stage. OWN: a matrix that the first stage's optimizer trains. The other two are for tied models,
    # whose embedding is the head's matrix. ROWS: the server serves the rows. EXCHANGE: the first stage has a copy of the matrix;
    # gradient and values are sent once a step, to and from the server or, with a local head, the last stage.
    embedding: str = OWN

    @property
    def colocated(self) -> bool:
        return self.kind in ON_STAGES

    @property
    def embedded(self) -> bool:
        return self.kind == "embedded"

    @property
    def on_server(self) -> bool:
        return self.head == "lossd"

    @property
    def tied(self) -> bool:
        return self.embedding != OWN

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def trainers(self) -> int:
        """The number of ranks of torch.distributed. Stage s of replica r is rank r * stages + s."""
        return self.replicas * self.stages

    @property
    def gpus(self) -> int:
        return self.trainers + (self.on_server and not self.colocated)

    @property
    def exact(self) -> bool:
        """Whether the losses must be equal to those of the other exact configurations, up to rounding. They need not be with
        sampled gradients, or with Cut Cross-Entropy ("cce"), which leaves out small gradients.
        """
        return self.gradients in ("", "exact") and self.head != "cce"

    @property
    def name(self) -> str:
        replicas = f"{self.replicas} x " if self.replicas > 1 else ""
        head = f"lossd {self.gradients}" if self.on_server else self.head
        name = f"{self.kind}, {head}, {replicas}({dashed(self.layers)}), {self.schedule}"
        if self.schedule == OVERLAPPED and self.slack > 1:
            name += f", slack {self.slack}"
        if self.colocated:
            name += f", shares {dashed(self.shares) or EVEN}"
        if self.tied:
            name += f", tied by {self.embedding}"
        if self.kind == "colocated":
            name += ", MPS" if self.mps else ", no MPS"
        return name


def dashed(numbers: Sequence[int]) -> str:
    return "-".join(map(str, numbers))


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """The layers of stages that differ by at most one layer. If they differ, the first stage, which also has the embedding, has
    the smaller number."""
    base, more = divmod(layers, stages)
    return tuple(base + (1 <= stage <= more) for stage in range(stages))  # stages 1 to `more` have one layer more


def with_last(layers: int, stages: int, last: int) -> tuple[int, ...]:
    """The layers of stages: `last` layers in the last stage, and the others divided evenly over the other stages."""
    return (*even_split(layers - last, stages - 1), last) if stages > 1 else (layers,)


def stage_seconds(split: tuple[int, ...], layer_seconds: float, head_seconds: float) -> list[float]:
    return [*(count * layer_seconds for count in split[:-1]), split[-1] * layer_seconds + head_seconds]


def local_splits(layers: int, stages: int, layer_seconds: float, head_seconds: float,
                 neighbours: int) -> list[tuple[int, ...]]:
    """Splits of the layers for a head on the last stage, the best split first: its slowest stage is the fastest (among equal
    ones, its next slowest stage is). The other splits have up to `neighbours` layers fewer or more in the last stage than the
    best; they are ordered in the same way."""
    most = layers - (stages - 1) if stages > 1 else layers  # the most layers of the last stage
    times = {last: sorted(stage_seconds(with_last(layers, stages, last), layer_seconds, head_seconds), reverse=True)
             for last in range(layers if stages == 1 else 0, most + 1)}
    best = min(times, key=lambda last: times[last])
    near = sorted((last for last in times if abs(last - best) <= neighbours), key=lambda last: times[last])
    return [with_last(layers, stages, last) for last in near]


def seconds_without_gaps(configuration: Configuration, microbatches: int, layer_seconds: float, head_seconds: float,
                         server_seconds: float) -> float:
    """The least time of a step, as in client/plan/plan.h: one microbatch passes through all stages, and the slowest stage, or
    the server that all replicas share, computes the other microbatches one after the other. Optimizer and transfers are left
    out.

    Args:
      microbatches: the microbatches of a step, over all replicas.
      head_seconds: the time of a local head.
      server_seconds: the time of a head on a server; for a colocated head, the time of the whole head on one GPU.
    """
    head = 0.0 if configuration.on_server else head_seconds
    stages = stage_seconds(configuration.layers, layer_seconds, head)
    if configuration.colocated:
        shares = configuration.shares or (1,) * configuration.stages
        heads = [server_seconds * share / sum(shares) for share in shares]
        slowest = max(stage + head for stage, head in zip(stages, heads))
        return sum(stages) + max(heads) + (microbatches - 1) * slowest
    slowest = max(*stages, configuration.replicas * server_seconds if configuration.on_server else 0.0)
    return sum(stages) + (microbatches // configuration.replicas - 1) * slowest


def evenly_divided_seconds(gpus: int, microbatches: int, layers_seconds: float, head_seconds: float) -> float:
    """The time of a step if all work were divided evenly over the GPUs. No pipeline with the head on the stages' GPUs is faster.

    Each microbatch takes a GPU's part of layers and head. To fill and empty the pipeline takes a GPU's part of the layers for
    each stage but one. Optimizer and transfers are left out. `layers_seconds`, `head_seconds`: the time of all layers, and of
    the whole head, on one GPU.
    """
    return microbatches * (layers_seconds + head_seconds) / gpus + (gpus - 1) * layers_seconds / gpus


def divided(split: tuple[int, ...], shares: str, layer_seconds: float, head_seconds: float) -> tuple[int, ...]:
    """The shares of the stages' GPUs. `shares`: BALANCED, EVEN, or numbers like 3-1-1-3. `split`: the layers of each stage."""
    if shares == BALANCED:
        return balance([count * layer_seconds for count in split], head_seconds, len(split)).shares
    return () if shares == EVEN else read_shares(shares, len(split))


def read_shares(text: str, stages: int) -> tuple[int, ...]:
    """Parses shares like "3-1-1-3". ValueError unless there is one for each stage and not all are 0."""
    try:
        shares = tuple(int(share) for share in text.split("-"))
    except ValueError:
        raise ValueError(f"shares has {text!r}; it must be {BALANCED}, {EVEN} or numbers like 3-1-1-3") from None
    if len(shares) != stages:
        raise ValueError(f"shares has {text!r} of {len(shares)} numbers; it must have {stages}, one a GPU")
    if not any(shares):
        raise ValueError(f"shares has {text!r}; one share at least must be positive")
    return shares


def read_splits(text: str, layers: int) -> list[tuple[int, ...]]:
    """Parses splits like "6-6-6-2,7-6-6-1". ValueError if a split does not have `layers` layers."""
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
    """The numbers of replicas, at least two, into which `ranks` ranks can be divided evenly."""
    return [count for count in range(2, ranks + 1) if ranks % count == 0]


@dataclass(frozen=True)
class Wanted:
    """The configurations that configurations() is to make, as the arguments of pipeline_bench.py select them."""

    gpus: int
    layers: int
    kinds: Sequence[str] = KINDS
    gradients: Sequence[str] = ("exact", "sampled")
    schedules: Sequence[str] = (ONE_F_ONE_B, OVERLAPPED)
    splits: Sequence[tuple[int, ...]] = ()  # for local heads; empty: the splits that measured times predict
    neighbours: int = 1  # for the fastest local head: the number of splits on each side of the predicted one
    most_splits: int = 1000  # the most splits of a local head; the best predicted ones are taken
    fastest_local: bool = False  # leave out all local heads but the fastest
    colocated_splits: Sequence[tuple[int, ...]] = ()  # for colocated and embedded heads; empty: the splits of balance()
    shares: Sequence[str] = (BALANCED,)
    mps: Sequence[bool] = (False,)
    slacks: Sequence[int] = (1,)
    embeddings: Sequence[str] = (OWN,)


def with_embeddings(configuration: Configuration, embeddings: Sequence[str]) -> list[Configuration]:
    """The configuration with each of `embeddings` that it can have. Only one pipeline of several stages can have a tied embedding.
    A tied local head has no server for ROWS, so it gets EXCHANGE if any tied embedding is wanted."""
    can_tie = configuration.replicas == 1 and configuration.stages > 1
    own = (each if each == OWN or configuration.on_server else EXCHANGE for each in embeddings)
    return [replace(configuration, embedding=each) for each in dict.fromkeys(own) if each == OWN or can_tie]


def configurations(wanted: Wanted, layer_seconds: float, head_seconds: dict[str, float],
                   server_seconds: dict[str, float]) -> list[Configuration]:
    """Makes the wanted configurations, each of which uses all GPUs. Configurations that are expected to be fast come first,
    because a budget of time may end the run before the last one.

    The splits for local heads are predicted from the measured times, multiplied by factors from earlier runs (MEASURED):
    layers and head take longer in a pipeline than alone. The fastest local head is also tried with neighbouring splits and in
    replicas; the others only with their best split.

    `head_seconds`: the time of each local head. `server_seconds`: the time of a server's whole head on one GPU, for each of
    `gradients`.
    """
    fastest = min(head_seconds, key=lambda head: head_seconds[head]) if head_seconds else None
    heads = [head for head in head_seconds if head == fastest or not wanted.fastest_local]
    found: list[Configuration] = []
    neighbouring: list[Configuration] = []
    factors = json.loads(MEASURED.read_text(encoding="utf-8"))["step_factors"]

    def predicted(stages: int, head: str, neighbours: int) -> list[tuple[int, ...]]:
        return local_splits(wanted.layers, stages, factors["layer"] * layer_seconds, factors["local_head"] * head_seconds[head],
                            neighbours)

    if "local" in wanted.kinds:
        for head in heads:
            splits = wanted.splits or predicted(wanted.gpus, head, wanted.neighbours if head == fastest else 0)
            layouts = [Configuration("local", head, split) for split in splits[:wanted.most_splits]]
            found += layouts[:1]
            neighbouring += layouts[1:]
    on_server = [(gradients, schedule, slack) for gradients in wanted.gradients for schedule in wanted.schedules
                 for slack in (wanted.slacks if schedule == OVERLAPPED else (1,))]
    if "embedded" in wanted.kinds:
        found += (each for gradients, schedule, slack in on_server
                  for each in colocated(wanted, "embedded", gradients, schedule, slack, False, layer_seconds, server_seconds[gradients]))
    if "colocated" in wanted.kinds:
        found += (each for mps in wanted.mps for gradients, schedule, slack in on_server
                  for each in colocated(wanted, "colocated", gradients, schedule, slack, mps, layer_seconds, server_seconds[gradients]))
    if "server" in wanted.kinds and wanted.gpus > 1:
        found += (Configuration("server", "lossd", even_split(wanted.layers, wanted.gpus - 1), schedule=schedule,
                                gradients=gradients, slack=slack) for gradients, schedule, slack in on_server)
    if "server replicas" in wanted.kinds:
        found += (Configuration("server replicas", "lossd", even_split(wanted.layers, (wanted.gpus - 1) // count), count,
                                schedule, gradients, slack=slack)
                  for count in replica_counts(wanted.gpus - 1) for gradients, schedule, slack in on_server)
    if "local replicas" in wanted.kinds and fastest is not None:
        found += (Configuration("local replicas", fastest, predicted(wanted.gpus // count, fastest, 0)[0], count)
                  for count in replica_counts(wanted.gpus))
    return [each for one in found + neighbouring for each in with_embeddings(one, wanted.embeddings)]


def colocated(wanted: Wanted, kind: str, gradients: str, schedule: str, slack: int, mps: bool, layer_seconds: float,
              head_seconds: float) -> Iterable[Configuration]:
    """Configurations of `kind` with a stage and a part of the head on each GPU, for each of wanted.shares."""
    balanced = balance([layer_seconds] * wanted.layers, head_seconds, wanted.gpus).layers
    for shares in wanted.shares:
        splits = wanted.colocated_splits or [even_split(wanted.layers, wanted.gpus) if shares == EVEN else balanced]
        for split in splits:
            yield Configuration(kind, "lossd", split, 1, schedule, gradients,
                                divided(split, shares, layer_seconds, head_seconds), mps, slack)
