# SPDX-License-Identifier: Apache-2.0
"""The processes that pipeline_bench.py starts. train() is one rank of a pipeline that trains. measure_parts() and
measure_server() measure the time of a layer and of the heads. This file also has the model that they train (Stage), a local
head (LocalHead), and the clients that time a head on a server (TimedClient, TimedHead).
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import io
import json
import os
import resource
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
import torch.distributed
from numpy.typing import NDArray
from pipeline_layouts import EXCHANGE, OVERLAPPED, ROWS, Configuration
from pipeline_models import Llama, Parts
from pipeline_server import read_metrics
from pipeline_text import draw
from torch import nn
from torch.nn import functional

import lossd
import lossd.torch
from lossd.torch import HeadOptimizer, LossHead, PendingHeadLoss, PipelineLoss, ServedEmbedding


# The model: stages of the blocks of examples/gpt_torch, or of the layers of a known model, a local head, and tokens to learn.
#
# Weights and tokens depend only on the seed, not on how layers are divided into stages. So all configurations learn the same.

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "gpt_torch"))

from model import Block, Embedding, Shape  # noqa: E402

USED_TOKENS, SUCCESSORS = 16384, 8  # how many tokens occur, and how many may follow each of them


class FusedBlock(Block):
    """The block of examples/gpt_torch, with fused attention: it stores no matrix of attention scores."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        del self.future  # the causal mask, which fused attention does not need

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, d = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, length, d)


class Stage(nn.Module):
    """One stage of the pipeline: some of the model's layers. Takes tokens (first stage) or hidden states, and returns hidden
    states. Parameters are float32; on a GPU the stage computes under bf16 autocast and returns bf16."""

    def __init__(self, parts: list[nn.Module], device: torch.device) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        on_gpu = self.device.type == "cuda"  # not the device of x: tokens for a served embedding are on the host
        with torch.autocast("cuda" if on_gpu else "cpu", torch.bfloat16, enabled=on_gpu):
            for part in self.parts:  # bf16 between all parts, so results do not depend on where stages begin
                x = part(x).bfloat16() if on_gpu else part(x)
        return x


def parts_of(shape: Shape, model: Llama | None) -> Parts:
    """The functions that make the parts of a known model, or (None) of the model of examples/gpt_torch."""
    if model is not None:
        return model.parts(shape.vocab_size, shape.hidden_size, shape.heads)
    return Parts(lambda: Embedding(shape), lambda: FusedBlock(shape), lambda: nn.LayerNorm(shape.hidden_size))


def make_stage(shape: Shape, layers: tuple[int, ...], index: int, seed: int, device: torch.device,
               model: Llama | None = None) -> Stage:
    """Makes stage `index` of len(layers) stages; `layers`: the number of layers of each. The weights of each part depend on
    `seed` and on the part's place in the model."""
    def part(number: int, make: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(seed * 1_000_003 + number)
        with device:
            return make()

    make = parts_of(shape, model)
    parts = [part(0, make.embedding)] if index == 0 else []
    begin = sum(layers[:index])
    parts += (part(1 + layer, make.layer) for layer in range(begin, begin + layers[index]))
    if index == len(layers) - 1:
        parts.append(part(1 + shape.layers, make.norm))
    return Stage(parts, device)


def make_head_weight(shape: Shape, seed: int, device: torch.device) -> torch.Tensor:
    """The initial weight of the head, [V, D] float32, for a local head and for a head on a server."""
    torch.manual_seed(seed * 1_000_003 + 2 + shape.layers)
    return torch.randn(shape.vocab_size, shape.hidden_size, device=device).mul_(0.02)


class LocalHead:
    """A head in the process of the last stage, with its optimizer. A schedule takes it as loss_fn.

    Weight and gradient are float32. The loss uses a working copy of the weight, in bf16 on a GPU, which step() renews. After
    each backward, the gradient of the working copy is added to the float32 gradient. With a process group, the all-reduce
    that averages the gradient over its ranks starts when the last microbatch has been added.
    """

    def __init__(self, function: Callable[..., torch.Tensor], weight: torch.Tensor, microbatches: int, lr: float,
                 group: torch.distributed.ProcessGroup | None = None) -> None:
        self.function, self.microbatches, self.group = function, microbatches, group
        self.ranks = 1 if group is None else torch.distributed.get_world_size(group)
        self.weight = nn.Parameter(weight)
        self.weight.grad = torch.zeros_like(weight)
        self.working = weight.to(torch.bfloat16 if weight.is_cuda else weight.dtype, copy=True).requires_grad_()
        self.working.register_post_accumulate_grad_hook(self._collect)
        self.optimizer = make_optimizer([self.weight], lr)
        self.collected = 0  # the backward passes of this step so far
        self.reduction: torch.distributed.Work | None = None  # the all-reduce under way

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.function(output.flatten(0, -2), self.working, targets.flatten())

    def step(self) -> None:
        """Applies the step. RuntimeError if the number of backward passes is not the number of microbatches."""
        if self.collected != self.microbatches:
            raise RuntimeError(f"{self.collected} gradients of the head in a step of {self.microbatches} microbatches")
        self.collected = 0
        self._wait()
        self.optimizer.step()
        with torch.no_grad():
            self.working.copy_(self.weight)
            self.weight.grad.zero_()

    def gradient_norm(self) -> float:
        """The norm of the step's gradient. Call it before step()."""
        self._wait()
        return float(self.weight.grad.norm())

    def _wait(self) -> None:
        if self.reduction is not None:
            self.reduction.wait()
            self.reduction = None

    def _collect(self, working: torch.Tensor) -> None:
        """A hook of autograd: adds the gradient of the working copy to the float32 gradient."""
        self.weight.grad.add_(working.grad, alpha=1.0 / (self.microbatches * self.ranks))
        working.grad = None
        self.collected += 1
        if self.group is not None and self.collected == self.microbatches:
            self.reduction = torch.distributed.all_reduce(self.weight.grad, group=self.group, async_op=True)


def make_optimizer(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01, fused=parameters[0].is_cuda)


def make_tokens(shape: Shape, sequences: int, seed: int, step: int) -> NDArray[np.int64]:
    """Random tokens to learn, [sequences, context + 1]. Each token has SUCCESSORS possible next tokens; the first is the most
    probable. The successors depend on `seed`, the sequences also on `step`."""
    used = min(USED_TOKENS, shape.vocab_size)
    successors = np.random.default_rng(seed).integers(0, used, (used, SUCCESSORS))
    chances = 1.0 / np.arange(1, SUCCESSORS + 1)**2
    rng = np.random.default_rng([seed, step])
    choices = rng.choice(SUCCESSORS, (sequences, shape.context + 1), p=chances / chances.sum())
    tokens = np.empty((sequences, shape.context + 1), np.int64)
    tokens[:, 0] = rng.integers(0, used, sequences)
    for place in range(shape.context):
        tokens[:, place + 1] = successors[tokens[:, place], choices[:, place]]
    return tokens


# How long the last stage of a pipeline waits for a microbatch of a head on a server.

_UNDER_WAY = 8  # the number of microbatches whose time is taken at the same time


class TimedClient(lossd.Client):
    """A client that times every loss computation: from the moment when its rows are complete until its result has arrived."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.seconds: list[float] = []  # the time of each computation that has ended
        self.calls_of_gpu = self.calls_of_host = 0  # the number of computations with rows in GPU memory, and in host memory
        # Blocks until the rows of the next computation are complete. None: they are complete when the computation begins.
        self.rows_are_there: Callable[[], None] | None = None
        self._watchers = ThreadPoolExecutor(_UNDER_WAY)
        super().__init__(*arguments, **options)

    def compute_loss_async(self, head: str, hidden: Any, *arguments: Any, **options: Any) -> lossd.PendingLoss:
        on_gpu = hasattr(hidden, "is_cuda") and hidden.is_cuda
        self.calls_of_gpu, self.calls_of_host = self.calls_of_gpu + on_gpu, self.calls_of_host + (not on_gpu)
        rows_are_there, self.rows_are_there = self.rows_are_there, None
        begin = time.perf_counter()
        pending = super().compute_loss_async(head, hidden, *arguments, **options)
        self._watchers.submit(self._watch, begin, rows_are_there, pending)
        return pending

    def _watch(self, begin: float, rows_are_there: Callable[[], None] | None, pending: lossd.PendingLoss) -> None:
        if rows_are_there is not None:
            rows_are_there()
            begin = time.perf_counter()
        pending.wait()
        self.seconds.append(time.perf_counter() - begin)

    def median_seconds(self) -> float | None:
        """The median time of the computations that have ended; None if none has."""
        return float(np.median(self.seconds)) if self.seconds else None

    def close(self) -> None:
        super().close()
        self._watchers.shutdown()


class TimedHead(LossHead):
    """A LossHead of a TimedClient. On a GPU it tells the client that rows are complete when the work that was enqueued before
    start() has ended."""

    def start(self, hidden: torch.Tensor, *arguments: Any, **options: Any) -> PendingHeadLoss:
        if hidden.is_cuda and isinstance(self.client, TimedClient):
            event = torch.cuda.Event(blocking=True)
            event.record()
            self.client.rows_are_there = event.synchronize
        return super().start(hidden, *arguments, **options)


def transports(client: TimedClient) -> dict[str, Any]:
    """How a client has sent its rows, after a run: {"took": {transport: number of computations}, "host": [transport, reason]
    for rows in host memory, "gpu": [transport, reason] for rows in GPU memory}."""
    host, gpu = client.transport, client.cuda_transport
    took: dict[str, int] = {}
    for transport, calls in ((host[0], client.calls_of_host), (gpu[0], client.calls_of_gpu)):
        if calls:
            took[transport] = took.get(transport, 0) + calls
    return {"took": took, "host": list(host), "gpu": list(gpu)}


# What the processes run: measurements of a layer and of heads, and the ranks that train.

HEAD = "pipeline-bench"  # the name of the head on a server
_EMBEDDED_MEMORY = 256 << 20  # bytes of the client's shared memory if the server is embedded, as in colocate()


@dataclass(frozen=True)
class Settings:
    """The settings that all configurations of one run of pipeline_bench.py have in common."""

    shape: Shape
    device: str  # "cpu" or "cuda": rank r takes GPU r
    sequences: int  # sequences of a microbatch
    microbatches: int  # microbatches of a step, over all replicas
    warm_up: int  # the number of steps at the beginning that are not timed
    steps: int  # the number of timed steps after them
    lr: float
    seed: int
    transport: str | None  # the argument of lossd.Client
    threads: int  # CPU threads of a rank, if the device is "cpu"
    server_flags: tuple[tuple[str, str], ...] = ()  # flags of embedded servers: (name, value)
    model: Llama | None = None  # the model whose layers the stages have; None: blocks of examples/gpt_torch
    text: str = ""  # the path of the tokens to learn (pipeline_text); empty: random tokens (make_tokens)
    lr_warm_up: int = 0  # the number of steps in which the learning rate grows linearly to `lr`

    @property
    def rows(self) -> int:
        """The number of rows of a microbatch."""
        return self.sequences * self.shape.context

    def tokens(self, sequences: int, step: int) -> NDArray[np.int64]:
        """The tokens of a step, [sequences, context + 1]. They are the same in every process."""
        if self.text:
            return draw(self.text, sequences, self.shape.context, self.seed, step)
        return make_tokens(self.shape, sequences, self.seed, step)

    def lr_of(self, step: int) -> float:
        return self.lr * min(1.0, (step + 1) / self.lr_warm_up) if self.lr_warm_up else self.lr

    def device_of(self, rank: int) -> torch.device:
        """The device of a rank. Also makes it the device of this process."""
        if self.device == "cpu":
            torch.set_num_threads(self.threads)
            return torch.device("cpu")
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)


def reported(path: Path, work: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    """The main function of a process. Writes the result of work(*arguments) to `path` as JSON. If `work` raises, writes
    {"error": ...} instead, and raises again. The environment variable LOSSD_BENCH_STACKS is a number of seconds after which
    the process prints the stacks of its threads."""
    if seconds := os.environ.get("LOSSD_BENCH_STACKS"):
        faulthandler.dump_traceback_later(float(seconds))
    try:
        result = work(*arguments)
    except (torch.OutOfMemoryError, lossd.ResourceExhausted) as error:
        path.write_text(json.dumps({"error": f"out of memory: {str(error).splitlines()[0]}", "out_of_memory": True}))
        raise
    except BaseException:
        path.write_text(json.dumps({"error": traceback.format_exc()}))
        raise
    path.write_text(json.dumps(result))


def local_losses() -> dict[str, Callable[..., torch.Tensor]]:
    """The losses of peers.py that can be imported, by name."""
    with contextlib.redirect_stdout(io.StringIO()):  # peers.methods() prints which losses cannot be imported
        return peers.methods(dynamic=False)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Bytes on a GPU: the most that tensors took since the last reset, the most that torch reserved, and what the whole GPU has
    in use now. On the CPU: the most memory that the process had."""
    if device.type == "cpu":
        return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    free, total = torch.cuda.mem_get_info(device)
    return {"peak_bytes": torch.cuda.max_memory_allocated(device), "reserved_bytes": torch.cuda.max_memory_reserved(device),
            "device_used_bytes": total - free}


def seconds_of(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    """The median time of work() in `repeats` runs, after three runs that warm up."""
    times = []
    for _ in range(3 + repeats):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return float(np.median(times[3:]))


def measure_parts(settings: Settings, heads: list[str], repeats: int) -> dict[str, Any]:
    """Measures the seconds of forward and backward of a microbatch, for one layer and for each of the local `heads`. Returns
    {"card": name of the device, "layer": seconds, "heads": {head: seconds}, "without": {head: why it could not be run}}."""
    device, shape = settings.device_of(0), settings.shape
    size = (settings.sequences, shape.context, shape.hidden_size)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(size, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(size, device=device, dtype=dtype)
    with device:
        block = Stage([parts_of(shape, settings.model).layer()], device)

    def layer() -> None:
        block(hidden).backward(gradient)

    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    measured: dict[str, Any] = {"card": card, "layer": seconds_of(layer, device, repeats), "heads": {}, "without": {}}
    del block
    available = local_losses()
    targets = torch.from_numpy(settings.tokens(settings.sequences, 0)[:, 1:]).to(device)
    for name in heads:
        if name not in available:
            measured["without"][name] = "it cannot be imported"
            continue
        try:
            head = LocalHead(available[name], make_head_weight(shape, settings.seed, device), 1, settings.lr)
            measured["heads"][name] = seconds_of(lambda head=head: head(hidden, targets).backward(), device, repeats)
        except Exception as error:  # other libraries raise errors of many kinds
            measured["without"][name] = str(error)[:300]
        head = None
    return measured


def measure_server(settings: Settings, target: str, http: str, gradients: list[str], repeats: int) -> dict[str, float]:
    """The seconds that a server with one device, which has the whole head, computes for one microbatch, for each of
    `gradients`. `target`, `http`: the server's addresses."""
    device, shape = settings.device_of(0), settings.shape
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the server uses the same GPU
    tokens = settings.tokens(settings.sequences, 0)
    hidden = torch.randn((settings.sequences, shape.context, shape.hidden_size), device=device, requires_grad=True,
                         dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    measured = {}
    with lossd.Client(target, transport=settings.transport) as client:
        for each in gradients:
            client.create_head(HEAD, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, seed=settings.seed,
                               compute_dtype="bf16" if device.type == "cuda" else "fp32", if_exists="reset")
            head = LossHead(client, HEAD, process_group=None, gradients=each)
            optimizer = HeadOptimizer(head, lr=settings.lr)
            for number in range(2 + repeats):
                if number == 2:
                    before = read_metrics(http)
                head(hidden, torch.from_numpy(tokens[:, 1:].copy())).backward()
            rose = read_metrics(http)["lossd_head_device_seconds_total"] - before["lossd_head_device_seconds_total"]
            measured[each] = rose / repeats
            optimizer.zero_grad()
    return measured


def exchanged_ids(microbatches: int) -> list[int]:
    """The ids that a step with EXCHANGE must have. It has two trainers: trainer 0 (the last stage) sends `microbatches`
    microbatches, and trainer 1 (the first stage) adds one contribution."""
    return [*range(0, 2 * microbatches, 2), 1]


class Ahead(nn.Module):
    """A served embedding that prefetches: after each forward it asks for the rows of the next microbatch. Tie.expect() sets the
    microbatches of a step."""

    def __init__(self, served: ServedEmbedding) -> None:
        super().__init__()
        self.served = served
        self.coming: deque[torch.Tensor] = deque()  # the ids of the step's microbatches that had no forward yet

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.served(ids)
        if self.coming:
            self.coming.popleft()
        if self.coming:
            self.served.prefetch(self.coming[0])
        return rows


class OneRow(nn.Module):
    """Replaces a served embedding while the ranks warm up without a server: all ids get the same row, a parameter, in the dtype
    that the served rows have."""

    def __init__(self, served: ServedEmbedding, device: torch.device) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(served.embedding_dim, device=device))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        kind = self.row.device.type
        rows = self.row.expand(*ids.shape, -1)
        return rows.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else rows


class Tie:
    """Ties the token embedding of the first stage to a head on a server: both have the same matrix. With ROWS the server serves
    the rows. With EXCHANGE the stage has a copy, whose gradient and values are sent once a step. For the first stage only."""

    def __init__(self, part: Any, embedding: str, target: str, microbatches: int, settings: Settings,
                 device: torch.device) -> None:
        """`part`: the module with the token embedding, which is replaced (ROWS) or gets the head's values (EXCHANGE).
        `embedding`: ROWS or EXCHANGE."""
        self.client = lossd.Client(target, transport=settings.transport)
        self.microbatches, self.step = microbatches, 0
        self.ahead: Ahead | None = None
        self.optimizers: list[HeadOptimizer] = []
        self.copy: nn.Parameter | None = None  # with EXCHANGE: the stage's copy of the matrix
        if embedding == ROWS:
            served = ServedEmbedding(self.client, HEAD, process_group=None, rank=1, world_size=2, n_microbatches=microbatches,
                                     device=device)
            self.ahead = part.token = Ahead(served)
            self.optimizers = [HeadOptimizer(served, lr=settings.lr, weight_decay=0.01)]
        else:
            self.copy = part.token.weight
            self._pull()

    def expect(self, inputs: torch.Tensor) -> None:
        """Called before a step with the ids of all its microbatches."""
        if self.ahead is not None:
            self.ahead.coming = deque(inputs.chunk(self.microbatches))

    def add_gradient(self) -> None:
        """Called after the last backward of a step. When it returns, the server has the embedding's gradients."""
        if self.ahead is not None:
            self.ahead.served.head.row_gradients.settle()
            return
        assert self.copy is not None and self.copy.grad is not None
        # The schedule has divided this gradient by the number of microbatches. The head's step will divide the server's gradient,
        # too, so the first division is undone here.
        self.client.add_gradient(HEAD, "weight", wire(self.copy.grad), step=self.step, id=1, scale=self.microbatches,
                                 dtype="bf16" if self.copy.is_cuda else "fp32")
        self.copy.grad = None

    def take_values(self) -> None:
        """Called after the head's step. With EXCHANGE, copies the head's new values."""
        self.step += 1
        if self.ahead is None:
            self._pull()

    def close(self) -> None:
        self.client.close()

    def _pull(self) -> None:
        assert self.copy is not None
        values = self.client.read_tensor(HEAD, "weight", dtype="bf16" if self.copy.is_cuda else "fp32")
        with torch.no_grad():
            self.copy.copy_(torch.from_numpy(values.view(np.int16)).view(torch.bfloat16) if self.copy.is_cuda
                            else torch.from_numpy(values))


class LocalTie:
    """Ties the token embedding of the first stage to the local head of the last stage: both have the same matrix. Each of the two
    stages has a LocalTie. They call the same method at the same time, and each call sends a matrix [V, D] over the process group of
    all ranks.

    The first stage has a copy of the matrix, without an optimizer and its moments. The gradient of the copy (float32) is sent to the
    last stage and added to the head's. The new values (LocalHead.working) are sent back.
    """

    def __init__(self, first: int, last: int, copy: nn.Parameter | None, head: LocalHead | None) -> None:
        """`first`, `last`: the ranks of the two stages. `copy`: in the first stage, its copy of the matrix, which gets the head's
        values; else None. `head`: in the last stage, its head; else None."""
        self.first, self.last, self.copy, self.head = first, last, copy, head
        self.ahead: Ahead | None = None
        self.optimizers: list[HeadOptimizer] = []
        self.take_values()

    def expect(self, inputs: torch.Tensor) -> None:
        """As in Tie. Has no effect, because no rows are prefetched."""

    def add_gradient(self) -> None:
        """Called after the last backward of a step. The gradients can be added as they are: the schedule has divided the embedding's
        gradient by the number of microbatches, and LocalHead has divided the head's."""
        if self.copy is not None:
            assert self.copy.grad is not None
            torch.distributed.send(self.copy.grad, self.last)
            self.copy.grad = None
        if self.head is not None:
            gradient = torch.empty_like(self.head.weight.grad)
            torch.distributed.recv(gradient, self.first)
            self.head.weight.grad.add_(gradient)

    def take_values(self) -> None:
        """Called after the head's step. The copy gets the head's new values."""
        with torch.no_grad():
            if self.head is not None:
                torch.distributed.send(self.head.working.detach(), self.first)
            if self.copy is not None:
                values = torch.empty_like(self.copy, dtype=torch.bfloat16 if self.copy.is_cuda else self.copy.dtype)
                torch.distributed.recv(values, self.last)
                self.copy.copy_(values)

    def close(self) -> None:
        """As in Tie. Has no effect, because nothing is open."""


def wire(values: torch.Tensor) -> NDArray[Any]:
    """Values as an array that a client can send: float32 from the CPU, and the bits of bf16 from a GPU."""
    if values.is_cuda:
        return values.bfloat16().view(torch.int16).cpu().numpy().view(np.uint16)
    return values.numpy()


class Rank:
    """One rank of a configuration: a stage with its optimizer, the schedule and, in the last stage, the loss. All ranks call its
    methods step(), close() and http() together."""

    def __init__(self, rank: int, configuration: Configuration, settings: Settings, target: str) -> None:
        from torch.distributed import pipelining
        from torch.distributed.device_mesh import init_device_mesh
        from torch.nn.parallel import DistributedDataParallel

        from lossd.torch.schedules import Overlapped1F1B, keep_pace
        self.configuration, self.settings, self.device = configuration, settings, settings.device_of(rank)
        self.replica, self.index = divmod(rank, configuration.stages)
        mesh = init_device_mesh(settings.device, (configuration.replicas, configuration.stages),
                                mesh_dim_names=("replica", "stage"))
        self.microbatches = settings.microbatches // configuration.replicas
        self.first, self.last = self.index == 0, self.index == configuration.stages - 1
        self.member = self._member() if configuration.embedded else None
        if self.member is not None:
            target = self.member.target
        self.client: TimedClient | None = None
        self.optimizers: list[Any] = []
        group = mesh.get_group("replica") if configuration.replicas > 1 else None
        loss_fn: Any = torch.nn.functional.mse_loss  # a schedule needs one in every stage; only the last stage calls it
        if self.last:
            loss_fn = self._server_loss(target, group) if configuration.on_server else self._local_loss(group)
        module: torch.nn.Module = make_stage(settings.shape, configuration.layers, self.index, settings.seed, self.device,
                                             settings.model)
        self.tie = self._tie(module, target, loss_fn) if configuration.tied else None
        if self.tie is not None:
            self.optimizers += self.tie.optimizers
        parameters = [each for each in module.parameters() if self.tie is None or each is not self.tie.copy]
        if parameters:
            self.optimizers.append(make_optimizer(parameters, settings.lr))
            if group is not None:
                module = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
        self.module, self.squared_norms = module, {}
        if configuration.embedded:
            self._warm_up(mesh.get_group("stage"))
        stage = pipelining.PipelineStage(module, self.index, configuration.stages, self.device,
                                         group=mesh.get_group("stage"))
        if configuration.schedule == OVERLAPPED:
            self.schedule = Overlapped1F1B(stage, self.microbatches, loss_fn=loss_fn, slack=configuration.slack)
        else:
            if configuration.embedded:
                keep_pace(stage)
            self.schedule = pipelining.Schedule1F1B(stage, self.microbatches, loss_fn=loss_fn)

    def _tie(self, module: Any, target: str, loss_fn: Any) -> Tie | LocalTie | None:
        """The tie between the model's embedding and its head. None in stages that take no part in it."""
        torch.distributed.barrier()  # after this, the last stage has made the head
        configuration = self.configuration
        if configuration.on_server:
            return Tie(module.parts[0], configuration.embedding, target, self.microbatches, self.settings,
                       self.device) if self.first else None
        if not (self.first or self.last):
            return None
        copy = module.parts[0].token.weight if self.first else None
        return LocalTie(0, configuration.stages - 1, copy, loss_fn if self.last else None)

    def _warm_up(self, group: Any) -> None:
        """Runs steps of a copy of the stages, without head and served embedding, so that all code for the GPU is loaded before the
        first real step. For embedded servers.

        cuBLAS loads code when it first multiplies matrices of a kind, and then waits for all work on the GPU. If this happened beside a
        head in the same process, the head's work on the GPU might be waiting for this rank, and neither would ever end."""
        from torch.distributed import pipelining
        stand_ins = {id(each): OneRow(each.served, self.device) for each in self.module.modules() if isinstance(each, Ahead)}
        own = copy.deepcopy(self.module, stand_ins)
        stage = pipelining.PipelineStage(own, self.index, self.configuration.stages, self.device, group=group)
        count = 2 * self.configuration.stages
        rows = count * self.settings.sequences
        schedule = pipelining.Schedule1F1B(stage, count, loss_fn=lambda output, _: output.float().square().mean())
        tokens = torch.from_numpy(self.settings.tokens(rows, 0)[:, :-1].copy())
        received = {"target": torch.zeros(rows, 1, device=self.device)} if self.last else {}
        for _ in range(2):
            schedule.step(*([tokens.to(self.device)] if self.first else []), return_outputs=False, **received)
            if parameters := list(own.parameters()):
                make_optimizer(parameters, self.settings.lr).step()
        synchronize(self.device)
        torch.distributed.barrier()

    def batches(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Yields inputs and targets of each step. Inputs are None except in the first stage, targets except in the last. Targets for a
        server stay on the host, and so do inputs of a served embedding."""
        each, settings = self.microbatches * self.settings.sequences, self.settings
        for step in range(settings.warm_up + settings.steps):
            tokens = torch.from_numpy(settings.tokens(settings.microbatches * settings.sequences,
                                                      step)[self.replica * each:(self.replica + 1) * each])
            place = torch.device("cpu") if self.tie is not None and self.tie.ahead is not None else self.device
            inputs = tokens[:, :-1].contiguous().to(place) if self.first else None
            targets = tokens[:, 1:].contiguous() if self.last else None
            yield inputs, targets if targets is None or self.client is not None else targets.to(self.device)

    def step(self, inputs: torch.Tensor | None, targets: torch.Tensor | None, number: int) -> list[torch.Tensor]:
        """Runs step `number`, counted from 0. In the last stage, returns the losses of this replica's microbatches. Step 0 also sets
        squared_norms in all ranks."""
        losses: list[torch.Tensor] = []
        for each in self.optimizers:
            if isinstance(each, torch.optim.Optimizer):
                each.zero_grad()
            for group in (each.optimizer if isinstance(each, LocalHead) else each).param_groups:
                group["lr"] = self.settings.lr_of(number)
        received = {"target": targets, "losses": losses} if self.last else {}
        if self.tie is not None and inputs is not None:
            self.tie.expect(inputs)
        self.schedule.step(*([] if inputs is None else [inputs]), return_outputs=False, **received)
        served = self.configuration.tied and self.configuration.on_server
        if self.tie is not None:
            self.tie.add_gradient()
        if served:
            torch.distributed.barrier()  # after this, the server has all gradients of the head
        if number == 0:
            self.squared_norms = self._squared_norms()
            if served:
                torch.distributed.barrier()  # a stage that stepped now would close the step while the other one asks for its norm
        expected = {"expected_microbatches": exchanged_ids(self.microbatches)} if self.configuration.embedding == EXCHANGE else {}
        for each in self.optimizers:
            each.step(**expected) if isinstance(each, HeadOptimizer) else each.step()
        if served and self.configuration.embedding == EXCHANGE:
            torch.distributed.barrier()  # after this, the server has the head's new values
        if self.tie is not None:
            self.tie.take_values()
        return losses

    def description(self) -> dict[str, Any]:
        found: dict[str, Any] = {"replica": self.replica, "stage": self.index, **peak_memory(self.device)}
        if self.client is not None:
            found |= {"transport": transports(self.client), "latency_seconds": self.client.median_seconds()}
        return found

    def _squared_norms(self) -> dict[str, float]:
        """The squared norms of the gradients: "layers" for this stage and, in the last stage, "head"."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        found = {"layers": sum(float(gradient.double().norm())**2 for gradient in gradients)}
        for each in self.optimizers:
            if isinstance(each, HeadOptimizer):
                each.load_grad_norm()  # called in both stages of a tied model, because their steps must be the same
                found |= {"head": float(each.stand_in.grad)**2} if self.last else {}
            elif isinstance(each, LocalHead):
                found["head"] = each.gradient_norm()**2
        return found

    def devices(self) -> list[dict[str, float]]:
        """What the server reports of each of its devices, if the head is split by vocabulary: classes and seconds."""
        assert self.client is not None
        return [{"classes": each.classes, "busy_seconds": each.busy_seconds, "exchange_seconds": each.exchange_seconds}
                for each in self.client.describe_head(HEAD).devices]

    def close(self) -> None:
        """Closes the clients, and then this rank's part of an embedded server. All ranks call it: an embedded server ends in all ranks
        when the first rank closes its part, so there is a barrier before that."""
        if self.tie is not None:
            self.tie.close()
        if self.client is not None:
            self.client.close()
        torch.distributed.barrier()
        if self.member is not None:
            self.member.close()

    def http(self) -> str:
        """The address of the metrics of an embedded server, which rank 0 serves. Returned in all ranks."""
        assert self.member is not None
        addresses = [self.member.http_address]
        torch.distributed.broadcast_object_list(addresses, src=0)
        return addresses[0]

    def _member(self) -> lossd.EmbeddedClient:
        """Starts this process's part of the embedded server, which runs in the processes of all ranks."""
        own = {"backend": "cuda"} if self.settings.device == "cuda" else {"backend": "cpu", "threads": self.settings.threads}
        return lossd.torch.colocate(http="127.0.0.1:0", flags=dict(self.settings.server_flags), **own)

    def _local_loss(self, group: Any) -> LocalHead:
        function = local_losses()[self.configuration.head]
        weight = make_head_weight(self.settings.shape, self.settings.seed, self.device)
        head = LocalHead(function, weight, self.microbatches, self.settings.lr, group)
        self.optimizers.append(head)
        return head

    def _server_loss(self, target: str, group: Any) -> PipelineLoss:
        shape = self.settings.shape
        size = _EMBEDDED_MEMORY if self.configuration.embedded else None
        self.client = TimedClient(target, transport=self.settings.transport, shared_memory_bytes=size)
        if self.configuration.embedded and self.device.type == "cuda":
            # Opens the shared GPU memory before the GPU has work that waits for the head. colocate() does so for its own client.
            self.client.shares_gpu(self.device.index)
        if self.replica == 0:
            split = {"split": "vocabulary", "shares": self.configuration.shares} if self.configuration.colocated else {}
            self.client.create_head(HEAD, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, zeros=True, **split,
                                    compute_dtype="bf16" if self.device.type == "cuda" else "fp32")
            weight = make_head_weight(shape, self.settings.seed, self.device)
            self.client.write_tensor(HEAD, "weight", weight.cpu().numpy())
            del weight
        if group is not None:
            torch.distributed.barrier(group)
        trainers = {"rank": 0, "world_size": 2} if self.configuration.tied else {}
        head = TimedHead(self.client, HEAD, gradients=self.configuration.gradients,
                         normalizer=self.settings.rows * self.configuration.replicas, process_group=group, **trainers)
        self.optimizers.append(HeadOptimizer(head, lr=self.settings.lr, weight_decay=0.01))
        return PipelineLoss(head, n_microbatches=self.microbatches)


def train(rank: int, rendezvous: str, configuration: Configuration, settings: Settings, target: str,
          http: str, limit_seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    """Trains as rank `rank` of a configuration, and returns what this rank has measured. The time of a step is from one barrier of all
    ranks to the next.

    `environment`: environment variables that CUDA reads when this process first uses it. `target`, `http`: the addresses of a server
    that is not embedded; else empty.
    """
    os.environ.update(environment)
    torch.distributed.init_process_group(
        "nccl" if settings.device == "cuda" else "gloo", f"file://{rendezvous}", rank=rank,
        world_size=configuration.trainers, timeout=timedelta(seconds=limit_seconds))
    mine = Rank(rank, configuration, settings, target)
    if configuration.embedded:
        http = mine.http()
    watches = bool(http) and rank == configuration.stages - 1
    losses, seconds = [], []
    for step, batch in enumerate(mine.batches()):
        if step == settings.warm_up:
            if settings.device == "cuda":
                torch.cuda.reset_peak_memory_stats(mine.device)
            if mine.client is not None:
                mine.client.seconds.clear()
            before, devices_before = (read_metrics(http), mine.devices()) if watches else ({}, [])
        synchronize(mine.device)
        torch.distributed.barrier()
        begin = time.perf_counter()
        of_step = mine.step(*batch, number=step)
        synchronize(mine.device)
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - begin)
        if of_step:
            losses.append(float(np.mean([loss.item() for loss in of_step])))
    after, devices_after = (read_metrics(http), mine.devices()) if watches else ({}, [])
    result = {**mine.description(), "losses": losses, "seconds": seconds, "squared_norms": mine.squared_norms,
              "before": before, "after": after, "devices_before": devices_before, "devices_after": devices_after}
    mine.close()
    torch.distributed.destroy_process_group()
    return result
