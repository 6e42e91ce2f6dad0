"""The GPT of train.py in two stages of a pipeline, with its head in the last stage and with its head on a lossd server.

    lossd &
    python3 pipeline.py --steps=20 --figure=stages.svg

Each stage is a process (torch.distributed: gloo on CPUs, nccl with --device=cuda, a GPU each); the schedule is 1F1B.
Prints, and draws, each stage's step time and peak memory, and checks that both runs lose alike. Needs torch 2.4.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from model import LocalHead, Shape, head_weight, stages
from text import load_tokens
from torch import nn
from torch.nn import functional
from train import batches, remote_head

import lossd
from lossd.torch import HeadOptimizer, PipelineLoss

STAGES = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:7070")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--channels", type=int, default=2, help="connections to the server")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--text", help="file to learn instead of the manual pages of Perl")
    parser.add_argument("--folder", type=Path, default=Path("gpt_torch-data"), help="for tokens and numbers")
    parser.add_argument("--figure", type=Path, help="draw the numbers (needs matplotlib)")
    Shape.add_arguments(parser)
    return parser.parse_args()


class LastStage(nn.Module):
    """The last stage's blocks and a head of its own: hidden states in, logits out."""

    def __init__(self, blocks: nn.Module, weight: torch.Tensor) -> None:
        super().__init__()
        self.blocks = blocks
        self.head = LocalHead(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(hidden)
        return functional.linear(hidden, self.head.weight.to(hidden.dtype))


def local_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def run_stage(rank: int, port: int, arguments: argparse.Namespace, kind: str, results: Any) -> None:
    from torch.distributed import pipelining
    device = torch.device(arguments.device, rank) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=STAGES)
    arguments.device = device
    shape = Shape.from_arguments(arguments)
    module: nn.Module = stages(shape, STAGES, arguments.seed)[rank]
    last, settings = rank == STAGES - 1, {"lr": arguments.lr, "weight_decay": 0.01}
    head_optimizer, client, loss_fn = None, None, local_loss
    if last and kind == "local":
        module = LastStage(module, head_weight(shape, arguments.seed))
    elif last:
        client = lossd.Client(arguments.server, channels=arguments.channels)
        weight = head_weight(shape, arguments.seed)
        head = remote_head(client, weight, "bf16" if device.type == "cuda" else "fp32")
        head_optimizer = HeadOptimizer(head, **settings)
        loss_fn = PipelineLoss(head, n_microbatches=arguments.microbatches)
    module.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    stage = pipelining.PipelineStage(module, rank, STAGES, device)
    schedule = pipelining.Schedule1F1B(stage, arguments.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(module.parameters(), **settings)

    tokens = load_tokens(arguments.folder, arguments.text, arguments.vocab_size)
    losses, seconds = [], []
    for inputs, targets in batches(tokens, arguments):
        begin = time.monotonic()
        of_step: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets if client else targets.to(device), losses=of_step)
            losses.append(float(np.mean([loss.item() for loss in of_step])))
        optimizer.step()
        if head_optimizer is not None:
            head_optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        torch.distributed.barrier()
        seconds.append(time.monotonic() - begin)
    results.put({"head": kind, "stage": rank, "losses": losses, "peak_bytes": peak_bytes(device),
                 "step_seconds": float(np.median(seconds[2:] or seconds))})
    if client is not None:
        client.close()
    torch.distributed.destroy_process_group()


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(arguments: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """One run in processes of its own; what each stage measured."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=run_stage, args=(rank, port, arguments, kind, results))
                 for rank in range(STAGES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"a stage of the run with a {kind} head failed")
    return sorted((results.get() for _ in processes), key=lambda each: each["stage"])


def draw(measured: list[dict[str, Any]], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5), constrained_layout=True)
    names = [f"stage {m['stage']}\n{m['head']} head" for m in measured]
    colors = ["tab:blue" if m["head"] == "local" else "tab:orange" for m in measured]
    left.bar(names, [m["peak_bytes"] / 2**20 for m in measured], color=colors)
    left.set_ylabel("peak memory, MiB")
    right.bar(names, [m["step_seconds"] * 1e3 for m in measured], color=colors)
    right.set_ylabel("step time, ms")
    figure.savefig(path)


def main() -> None:
    arguments = parse_arguments()
    load_tokens(arguments.folder, arguments.text, arguments.vocab_size)  # once, before the stages want them
    measured = [each for kind in ("local", "lossd") for each in run(arguments, kind)]
    for each in measured:
        print(f"{each['head']:>6} head, stage {each['stage']}: step {each['step_seconds'] * 1e3:8.1f} ms, "
              f"peak memory {each['peak_bytes'] / 2**20:8.1f} MiB")
    local, remote = (each["losses"] for each in measured if each["losses"])
    print(f"losses are apart by {np.abs(np.subtract(local, remote)).max():.5f} at most, last {local[-1]:.4f}")
    (arguments.folder / "pipeline.json").write_text(json.dumps(measured, indent=1))
    if arguments.figure:
        draw(measured, arguments.figure)


if __name__ == "__main__":
    main()
