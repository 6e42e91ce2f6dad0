# SPDX-License-Identifier: Apache-2.0
"""The GPT of train.py in two stages of a pipeline, with its head in the last stage and with its head on a lossd server.

    lossd &
    python3 pipeline.py --steps=20 --figure=stages.svg

    lossd --device=2 &
    python3 pipeline.py --device=cuda --batch=128 --microbatches=16 --vocab_size=131072 --hidden_size=2048 --layers=8 \\
        --heads=16 --context=512 --lr=2e-4 --channels=4

Each stage is a process (torch.distributed: gloo on CPUs, nccl with --device=cuda, a GPU each). The schedule is 1F1B;
with lossd also the one that leaves the server time (lossd.torch.schedules). Prints, and draws, each stage's step time
and peak memory, and checks that the runs lose alike. Needs a torch whose schedules know return_outputs, as 2.11 does.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from model import LocalHead, Shape, add_loss_arguments, head_weight, loss_options, remote_head, stages
from numpy.typing import NDArray
from plots import pipeline_stages
from text import load_tokens
from torch import nn
from torch.nn import functional
from train import batches

import lossd
from lossd.torch import HeadOptimizer, PipelineLoss

STAGES = 2
RUNS = (("local", "1F1B"), ("lossd", "1F1B"), ("lossd", "overlapped 1F1B"))  # head, schedule


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
    parser.add_argument("--text_tokens", type=int, default=16384,
                        help="tokens to learn from the text; the model's vocabulary may have more that it never uses")
    parser.add_argument("--folder", type=Path, default=Path("gpt_torch-data"), help="for tokens and numbers")
    parser.add_argument("--figure", type=Path, help="draw the numbers (needs matplotlib)")
    add_loss_arguments(parser)
    Shape.add_arguments(parser)
    return parser.parse_args()


class Stage(nn.Module):
    """Blocks, and in the last stage perhaps a head of its own: hidden states in, hidden states or logits out.

    On GPUs in mixed precision: parameters are float32, what travels between stages is bf16.
    """

    def __init__(self, blocks: nn.Module, weight: torch.Tensor | None = None) -> None:
        super().__init__()
        self.blocks = blocks
        self.head = None if weight is None else LocalHead(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = "cuda" if x.is_cuda else "cpu"
        with torch.autocast(kind, torch.bfloat16, enabled=x.is_cuda):
            x = self.blocks(x)
            if self.head is not None:
                return functional.linear(x, self.head.weight)
        return x.bfloat16() if x.is_cuda else x


def local_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def run_stage(rank: int, meeting: str, arguments: argparse.Namespace, kind: str, schedule_name: str,
              results: Any) -> None:
    from torch.distributed import pipelining

    from lossd.torch.schedules import Overlapped1F1B
    device = torch.device(arguments.device, rank) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", meeting, rank=rank, world_size=STAGES)
    arguments.device = device
    shape = Shape.from_arguments(arguments)
    blocks = stages(shape, STAGES, arguments.seed)[rank]
    last, settings = rank == STAGES - 1, {"lr": arguments.lr, "weight_decay": 0.01}
    head_optimizer, client, loss_fn = None, None, local_loss
    weight = head_weight(shape, arguments.seed) if last else None
    module = Stage(blocks, weight if kind == "local" else None).to(device)
    if last and kind == "lossd":
        client = lossd.Client(arguments.server, channels=arguments.channels)
        head = remote_head(client, "gpt-pipeline", weight, "bf16" if device.type == "cuda" else "fp32",
                           process_group=None, **loss_options(arguments))
        head_optimizer = HeadOptimizer(head, **settings)
        loss_fn = PipelineLoss(head, n_microbatches=arguments.microbatches)
    stage = pipelining.PipelineStage(module, rank, STAGES, device)
    make_schedule = pipelining.Schedule1F1B if schedule_name == "1F1B" else Overlapped1F1B
    schedule = make_schedule(stage, arguments.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(module.parameters(), **settings)

    tokens = load_text_tokens(arguments)
    losses, seconds = [], []
    for inputs, targets in batches(tokens, arguments):
        begin = time.monotonic()
        of_step: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs, return_outputs=False)
        else:
            schedule.step(target=targets if client else targets.to(device), losses=of_step, return_outputs=False)
            losses.append(float(np.mean([loss.item() for loss in of_step])))
        optimizer.step()
        if head_optimizer is not None:
            head_optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        torch.distributed.barrier()
        seconds.append(time.monotonic() - begin)
    results.put({"head": kind, "schedule": schedule_name, "stage": rank, "losses": losses,
                 "peak_bytes": peak_bytes(device), "step_seconds": float(np.median(seconds[2:] or seconds))})
    if client is not None:
        client.close()
    torch.distributed.destroy_process_group()


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load_text_tokens(arguments: argparse.Namespace) -> NDArray[np.int64]:
    return load_tokens(arguments.folder, arguments.text, min(arguments.text_tokens, arguments.vocab_size))


def run(arguments: argparse.Namespace, kind: str, schedule_name: str) -> list[dict[str, Any]]:
    """One run in processes of its own; what each stage measured."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "meeting").as_uri()  # the stages find each other through this file
        processes = [context.Process(target=run_stage, args=(rank, meeting, arguments, kind, schedule_name, results))
                     for rank in range(STAGES)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"a stage of the run with a {kind} head failed")
    return sorted((results.get() for _ in processes), key=lambda each: each["stage"])


def main() -> None:
    arguments = parse_arguments()
    load_text_tokens(arguments)  # once, before the stages want them
    measured = [each for kind, schedule_name in RUNS for each in run(arguments, kind, schedule_name)]
    for each in measured:
        print(f"{each['head']:>6} head, {each['schedule']:>15}, stage {each['stage']}: "
              f"step {each['step_seconds'] * 1e3:8.1f} ms, peak memory {each['peak_bytes'] / 2**20:8.1f} MiB")
    local, *remote = (each["losses"] for each in measured if each["losses"])
    print(f"losses are apart by {np.abs(np.subtract(local, remote)).max():.5f} at most, last {local[-1]:.4f}")
    (arguments.folder / "pipeline.json").write_text(json.dumps(measured, indent=1))
    if arguments.figure:
        pipeline_stages(measured).savefig(arguments.figure)


if __name__ == "__main__":
    main()
