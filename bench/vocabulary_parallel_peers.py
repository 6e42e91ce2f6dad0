# SPDX-License-Identifier: Apache-2.0
"""Times linear cross-entropy whose classes are divided among several GPUs: PyTorch, Megatron, Liger, Cut Cross-Entropy.

    export NCCL_NVLS_ENABLE=0
    torchrun --nproc_per_node=2 bench/vocabulary_parallel_peers.py --real-data build/release/bin/real_data --out peers.json
    build/release/bin/cuda_bench loss --devices=2 --split=vocabulary --data=real --gradients=exact,sampled --out=lossd.json \
        --shapes=gemma2-2b,llama3-8b,phi3.5-mini,mistral-nemo,n4096,8192x1024x1048576,8192x1024x4194304

The second command measures lossd's head on the same GPUs. Each of G ranks has V/G classes; hidden states and targets are on all
ranks. A method is run if it can be imported.

A time is from the beginning until the loss and both gradients are ready on every rank; the median of the iterations. If logits
do not fit into memory, the rows are computed in 2, 4, ... parts (`parts`). Communication is the time in NCCL's kernels, from the
profiler, for the rank with the least and the rank with the most of it. It contains waiting for other ranks, and time that
overlaps with matrix products. Errors of the loss, of dx and of dW (sampled rows and classes) are relative to double precision.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
import torch.distributed as dist
import torch.nn.functional as F


# The methods: linear cross-entropy of PyTorch, Megatron, Liger and Cut Cross-Entropy with classes that are divided among ranks.
#
# A method is a function of (hidden [N, D], weight [V/G, D], targets [N], factor). Every rank passes the same hidden states
# and targets, and the weight of its own classes. The function returns the mean loss. It adds the gradients of factor * mean
# loss to weight.grad and hidden.grad; the latter is complete, over the classes of all ranks.

Method = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


class ClassParallelLinear(torch.autograd.Function):
    """Computes logits [N, V/G] of this rank's classes. Backward works like Megatron's column-parallel linear layer: it sums the
    gradient of the hidden states over the ranks, in their dtype, and computes the gradient of the weight meanwhile."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        of_hidden = gradient @ weight
        sum_over_ranks = dist.all_reduce(of_hidden, async_op=True)
        of_weight = gradient.T @ hidden
        sum_over_ranks.wait()
        return of_hidden, of_weight


def torch_loss_parallel(device: str) -> Method:
    """PyTorch's method: logits as a DTensor in float32, and the cross-entropy within
    torch.distributed.tensor.parallel.loss_parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, factor: float) -> torch.Tensor:
        logits = ClassParallelLinear.apply(hidden, weight).float()
        with loss_parallel():
            loss = F.cross_entropy(DTensor.from_local(logits, mesh, [Shard(1)], run_check=False), targets)
            (loss * factor).backward()
        return loss.detach().to_local()

    return run


def of_logits(loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Method:
    """Makes a method from a loss of logits. `loss_of`: a function of logits [N, 1, V/G] and targets [N, 1] that returns losses
    [N, 1]."""
    def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, factor: float) -> torch.Tensor:
        loss = loss_of(ClassParallelLinear.apply(hidden, weight)[:, None], targets[:, None]).mean()
        (loss * factor).backward()
        return loss.detach()

    return run


def megatron() -> dict[str, Method]:
    """The two losses of Megatron-core: the ordinary one, and the fused one, whose steps are compiled and whose gradients of logits
    are bf16."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    group = parallel_state.get_tensor_model_parallel_group()
    return {"megatron": of_logits(vocab_parallel_cross_entropy),
            "megatron_fused": of_logits(lambda logits, targets: fused_vocab_parallel_cross_entropy(logits, targets, group))}


def liger() -> dict[str, Method]:
    from liger_kernel.transformers.vocab_parallel_cross_entropy import LigerVocabParallelCrossEntropy
    loss = LigerVocabParallelCrossEntropy()
    return {"liger": of_logits(lambda logits, targets: loss(logits, targets, dist.group.WORLD))}


def cut_cross_entropy() -> dict[str, Method]:
    """The methods of Cut Cross-Entropy, which do not store logits. They need VocabParallelOptions, which its repository has, and
    version 25.1.1 on PyPI has not."""
    from cut_cross_entropy import VocabParallelOptions, linear_cross_entropy

    def method(implementation: str) -> Method:
        def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, factor: float) -> torch.Tensor:
            begin = dist.get_rank() * weight.shape[0]
            options = VocabParallelOptions(begin, begin + weight.shape[0], group=dist.group.WORLD)
            loss = linear_cross_entropy(hidden, weight, targets, impl=implementation, vocab_parallel_options=options)
            (loss * factor).backward()
            return loss.detach()
        return run

    return {"cce": method("cce"), "cce_exact": method("cce_exact")}


def methods(device: str) -> tuple[dict[str, Method], dict[str, str]]:
    """The methods that can be imported, by name, and for the others the reason why they cannot be imported. Collective;
    torch.distributed must be initialized."""
    found, without = {"torch": torch_loss_parallel(device)}, {}
    for name, make in (("megatron", megatron), ("liger", liger), ("cce", cut_cross_entropy)):
        try:
            found.update(make())
        except ImportError as error:
            without[name] = str(error)
    return found, without


# The measurements.

SHAPES = {**peers.SHAPES, "1M": (8192, 1024, 1 << 20), "4M": (8192, 1024, 1 << 22)}
DATA = {"real": peers.real, "peaked": peers.peaked, "flat": peers.flat}
MOST_PARTS = 32
REFERENCE_BYTES = 4 << 30  # the most bytes of logits in double precision that the reference has at once
RAN, OUT_OF_MEMORY, FAILED = range(3)  # how a run ended; the worst has the largest number
SAMPLED_ROWS, SAMPLED_CLASSES = 32, 256  # rows, and classes of each rank, whose gradients are compared


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="names, or NxDxV")
    parser.add_argument("--data", choices=tuple(DATA), default="real", help="as in peers.py")
    parser.add_argument("--real-data", default="bin/real_data", help="the program real_data, for real data")
    parser.add_argument("--methods", default="", help="those to run, with commas between them [all]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--warm_up", type=int, default=15, help="iterations that are not timed")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a collective may take")
    parser.add_argument("--commit", default="", help="of the tree, for the file")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(given)
    if "RANK" not in os.environ:
        parser.error("RANK is not set: start this with torchrun")
    ranks = int(os.environ["WORLD_SIZE"])
    try:
        arguments.shapes = {name: shape_of(name) for name in arguments.shapes.split(",")}
    except ValueError as error:
        parser.error(str(error))
    for name, (_, _, v) in arguments.shapes.items():
        if v % ranks:
            parser.error(f"shapes has {name!r} with {v} classes, which do not divide among {ranks} ranks")
    for name in ("warm_up", "iterations"):
        if getattr(arguments, name) < 1:
            parser.error(f"{name} is {getattr(arguments, name)}; it must be positive")
    return arguments


def shape_of(name: str) -> tuple[int, int, int]:
    """(N, D, V) of a shape. ValueError if `name` is neither a known name nor three positive numbers like 8192x1024x4096."""
    if name in SHAPES:
        return SHAPES[name]
    parts = name.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"shapes has {name!r}; there are {', '.join(SHAPES)}, and NxDxV")
    return int(parts[0]), int(parts[1]), int(parts[2])


def distribute(kind: str, shape: tuple[int, int, int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Makes data in rank 0 and sends it to all ranks. Returns hidden states [N, D], the weight of this rank's classes [V/G, D], and
    targets [N]."""
    n, d, v = shape
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    hidden, targets = torch.empty(n, d, device=device, dtype=dtype), torch.empty(n, device=device, dtype=torch.long)
    weight, parts = torch.empty(v // ranks, d, device=device, dtype=dtype), None
    if rank == 0:
        made_hidden, made_weight, made_targets = DATA[kind](n, d, v)
        hidden.copy_(made_hidden)
        targets.copy_(made_targets)
        parts = list(made_weight.to(dtype).chunk(ranks))
    for each in (hidden, targets):
        dist.broadcast(each, 0)
    dist.scatter(weight, parts, src=0)
    return hidden, weight, targets


class Work:
    """A call computes the loss and both gradients with one method, with the rows divided into `parts` parts."""

    def __init__(self, method: Method, data: tuple[torch.Tensor, ...], parts: int) -> None:
        hidden, weight, targets = data
        self.method, self.rows = method, len(targets)
        self.hidden = [part.detach().requires_grad_() for part in hidden.chunk(parts)]
        self.targets = targets.chunk(parts)
        self.weight = weight.detach().requires_grad_()

    def __call__(self) -> torch.Tensor:
        """Returns the mean loss. Afterwards hidden_gradient() and weight.grad are the gradients."""
        self.weight.grad = None
        total = torch.zeros((), device=self.weight.device)
        for hidden, targets in zip(self.hidden, self.targets):
            hidden.grad = None
            share = len(targets) / self.rows
            total += self.method(hidden, self.weight, targets, share) * share
        return total

    def hidden_gradient(self) -> torch.Tensor:
        return torch.cat([hidden.grad for hidden in self.hidden])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], Any], device: torch.device, count: int) -> list[float]:
    """The seconds of each of `count` runs of work(). All ranks begin a run together, and the slowest rank counts."""
    found = []
    for _ in range(count):
        synchronize(device)
        dist.barrier()
        begin = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - begin)
    slowest = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def communication_ms(work: Callable[[], Any], device: torch.device, count: int = 3) -> dict[str, float] | None:
    """Milliseconds of communication in one run of work(): the least and the most of all ranks. None if the profiler of a rank has
    recorded no communication."""
    from torch.profiler import ProfilerActivity, profile
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        for _ in range(count):
            work()
        synchronize(device)
    microseconds = 0.0
    for event in recorded.key_averages():
        if on_gpu and event.key.startswith(("ncclDevKernel", "ncclKernel")):
            microseconds += event.self_device_time_total
        elif not on_gpu and event.key.startswith("gloo:"):
            microseconds += event.cpu_time_total
    both = torch.tensor([-microseconds, microseconds], dtype=torch.float64, device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    least, most = -both[0].item() / count / 1e3, both[1].item() / count / 1e3
    return {"least": least, "most": most} if least > 0 else None


class Reference:
    """The reference in double precision: the loss, dx of some rows, and dW of some of this rank's classes."""

    def __init__(self, data: tuple[torch.Tensor, ...]) -> None:
        hidden, weight, targets = data
        n, begin = len(targets), dist.get_rank() * len(weight)
        exact, step = weight.double(), max(1, REFERENCE_BYTES // (8 * len(weight)))
        lse, target_logits = [], []
        for first in range(0, n, step):
            rows, wanted = hidden[first:first + step].double(), targets[first:first + step] - begin
            logits = rows @ exact.T
            largest = logits.amax(1)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            total = (logits - largest[:, None]).exp_().sum(1)
            dist.all_reduce(total)
            lse.append(largest + total.log())
            mine = (wanted >= 0) & (wanted < len(weight))
            chosen = torch.where(mine, logits.gather(1, wanted.clamp(0, len(weight) - 1)[:, None])[:, 0], 0.0)
            dist.all_reduce(chosen)
            target_logits.append(chosen)
        self.lse = torch.cat(lse)
        self.loss = (self.lse - torch.cat(target_logits)).mean()
        generator = torch.Generator().manual_seed(n)
        self.rows = torch.randperm(n, generator=generator)[:SAMPLED_ROWS].to(hidden.device)
        self.classes = torch.randperm(len(weight), generator=generator)[:SAMPLED_CLASSES].to(hidden.device)
        gradient = (hidden[self.rows].double() @ exact.T - self.lse[self.rows, None]).exp_()
        gradient -= (targets[self.rows, None] - begin == torch.arange(len(weight), device=hidden.device)).double()
        self.hidden_gradient = gradient @ exact / n
        dist.all_reduce(self.hidden_gradient)
        gradient = (hidden.double() @ exact[self.classes].T - self.lse[:, None]).exp_()
        gradient -= (targets[:, None] - begin == self.classes).double()
        self.weight_gradient = gradient.T @ hidden.double() / n

    def errors(self, loss: torch.Tensor, work: Work) -> dict[str, float]:
        """The relative errors of a loss and of the gradients in `work`. The error of dW is over the sampled classes of all ranks."""
        squares = torch.stack([(work.weight.grad[self.classes].double() - self.weight_gradient).square().sum(),
                               self.weight_gradient.square().sum()])
        dist.all_reduce(squares)
        hidden = work.hidden_gradient()[self.rows].double()
        return {"loss": (abs(loss.double() - self.loss) / self.loss).item(),
                "hidden_gradient": ((hidden - self.hidden_gradient).norm() / self.hidden_gradient.norm()).item(),
                "weight_gradient": (squares[0] / squares[1]).sqrt().item()}


def worst_of_ranks(outcome: int, device: torch.device) -> int:
    worst = torch.tensor(float(outcome), device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return int(worst.item())


def measure(method: Method, data: tuple[torch.Tensor, ...], reference: Reference,
            arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures time, memory and errors of a method, or returns {"failed": why}. If a rank runs out of memory, all ranks divide the
    rows into twice as many parts and try again.

    All ranks must fail in the same way. If one rank fails alone, the others wait in a collective, which ends them after --limit.
    """
    device, parts = data[0].device, 1
    while True:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        work = Work(method, data, parts)
        outcome, why = RAN, "in another rank"
        try:
            loss = work()
            synchronize(device)
        except torch.OutOfMemoryError:
            outcome, why = OUT_OF_MEMORY, f"out of memory with the rows in {parts} parts"
        except Exception as error:  # peers raise errors of many kinds
            outcome, why = FAILED, str(error).strip()[:300] or type(error).__name__
        worst = worst_of_ranks(outcome, device)
        if worst == RAN:
            break
        parts *= 2
        if worst == FAILED or parts > min(MOST_PARTS, len(data[2])):
            return {"failed": why}
        del work
    result: dict[str, Any] = {"parts": parts, "errors": reference.errors(loss, work)}
    if device.type == "cuda":
        result["peak_mib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    times = [1e3 * seconds for seconds in seconds_of(work, device, arguments.warm_up + arguments.iterations)]
    times = times[arguments.warm_up:]
    return result | {"median_ms": float(np.median(times)), "min_ms": min(times), "max_ms": max(times),
                     "communication_ms": communication_ms(work, device)}


def describe(name: str, result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"  {name:14s} failed: {result['failed']}"
    communication, errors = result["communication_ms"], result["errors"]
    between = f"{communication['least']:.2f} to {communication['most']:.2f}" if communication else "not seen"
    return (f"  {name:14s} {result['median_ms']:8.2f} ms, communication {between}, parts {result['parts']}, "
            f"peak {result.get('peak_mib', 0):.0f} MiB, errors "
            + " ".join(f"{key} {value:.1e}" for key, value in errors.items()))


def describe_run(arguments: argparse.Namespace, without: dict[str, str]) -> dict[str, Any]:
    commit = arguments.commit or subprocess.run(
        ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
        check=False).stdout.strip()
    return {"card": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu", "gpus": dist.get_world_size(),
            "date": time.strftime("%Y-%m-%d"), "commit": commit, "versions": peers.versions("megatron-core"),
            "without": without, "results": []}


def main() -> None:
    arguments = parse_arguments()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if arguments.device == "cuda":
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if arguments.device == "cuda" else torch.device("cpu")
    peers.DEVICE, peers.REAL_DATA = str(device), arguments.real_data
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo", timeout=timedelta(seconds=arguments.limit))
    torch.manual_seed(arguments.seed)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True  # as in peers.py
    found, without = methods(arguments.device)
    wanted = list(filter(None, arguments.methods.split(","))) or list(found)
    first = dist.get_rank() == 0
    result = describe_run(arguments, without | {name: "not known" for name in wanted if name not in found | without})
    for name, why in result["without"].items() if first else ():
        print(f"without {name}: {why}")
    for name, shape in arguments.shapes.items():
        data = distribute(arguments.data, shape, device)
        reference = Reference(data)
        entry: dict[str, Any] = {"shape": dict(zip(("name", "rows", "hidden", "vocab"), (name, *shape))),
                                 "data": arguments.data, "loss": reference.loss.item(), "methods": {}}
        result["results"].append(entry)
        if first:
            print(f"{name} {shape}, {arguments.data}, {dist.get_world_size()} ranks", flush=True)
        for method in filter(found.__contains__, wanted):
            entry["methods"][method] = measure(found[method], data, reference, arguments)
            if first:
                print(describe(method, entry["methods"][method]), flush=True)
            if first and arguments.out:
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        del data, reference
        torch.compiler.reset()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
