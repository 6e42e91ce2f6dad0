# SPDX-License-Identifier: Apache-2.0
"""The command line of pipeline_bench.py."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from pipeline_layouts import BALANCED, EVEN, KINDS, ONE_F_ONE_B, OVERLAPPED, read_shares, read_splits
from pipeline_mps import CONTROL

SHAPES = {  # of examples/gpt_torch/model.py; layers as --layers says
    "gemma2-2b": {"vocab_size": 256000, "hidden_size": 2304, "heads": 18, "context": 2048},
    "llama3-8b": {"vocab_size": 128256, "hidden_size": 4096, "heads": 32, "context": 2048},
}


def parse_arguments(given: list[str] | None = None, description: str | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lossd", default="build/release/bin/lossd", help="the server's program")
    parser.add_argument("--lossctl", help="for its plan [the program beside lossd]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--gpus", type=int, default=0, help="as many processes on the CPU [all]")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="gemma2-2b")
    for name in ("vocab_size", "hidden_size", "heads", "context"):
        parser.add_argument(f"--{name}", type=int, help="instead of the shape's")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequences", type=int, default=4, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=24, help="of a step, all replicas together")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of configurations, with commas between them")
    parser.add_argument("--local_heads", default="torch.compile,liger,cce,torch.linear_cross_entropy",
                        help="local ones, of peer_losses.py")
    parser.add_argument("--splits", default="", help="layers of each stage, for local heads: 4-4-3-1,4-4-4-0")
    parser.add_argument("--neighbours", type=int, default=1, help="splits on each side of the predicted one")
    parser.add_argument("--most_splits", type=int, default=1000, help="of a local head, the fastest as predicted first")
    parser.add_argument("--fastest_local", action="store_true", help="train with that local head alone")
    parser.add_argument("--shares", default=BALANCED,
                        help=f"of a colocated head: {BALANCED}, {EVEN} or 3-1-1-3, with commas between them")
    parser.add_argument("--colocated_splits", default="", help="like --splits, for a colocated head [as --shares needs them]")
    parser.add_argument("--mps", default="off", help="for a colocated head: on, off or on,off")
    parser.add_argument("--mps_control", default=CONTROL, help="the program that starts MPS")
    parser.add_argument("--trainer_priority", type=int, default=1, choices=(0, 1),
                        help="CUDA_MPS_CLIENT_PRIORITY of the trainers: 0 is the server's, 1 below it")
    parser.add_argument("--server_flags", default="", help="further ones, with blanks between them")
    parser.add_argument("--gradients", default="exact,sampled", help="of the server")
    parser.add_argument("--schedules", default=f"{ONE_F_ONE_B},{OVERLAPPED}", help="with the server")
    parser.add_argument("--slack", default="1", help=f"of the {OVERLAPPED} schedule: 1 or 1,2")
    parser.add_argument("--warm_up", type=int, default=3, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=10, help="steps that are")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", help="of lossd.Client [its own choice]")
    parser.add_argument("--threads", type=int, default=1, help="of a rank on the CPU")
    parser.add_argument("--tolerance", type=float,
                        help="of losses in nats, and of gradient norms relatively [0.02, on the CPU 1e-4]")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a configuration is given up")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which none is started any more")
    parser.add_argument("--parts", type=Path,
                        help="an earlier file of this shape, whose measured times of layer and heads count")
    parser.add_argument("--commit", help="of the tree, for the file [what git says]")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args(given)
    for name, known in (("kinds", KINDS), ("gradients", ("exact", "sampled")), ("schedules", (ONE_F_ONE_B, OVERLAPPED)),
                        ("mps", ("on", "off"))):
        setattr(arguments, name, list(filter(None, getattr(arguments, name).split(","))))
        for each in getattr(arguments, name):
            if each not in known:
                parser.error(f"{name} has {each!r}; there are {', '.join(known)}")
    for name in ("layers", "sequences", "microbatches", "warm_up", "steps", "threads", "most_splits"):
        if getattr(arguments, name) < 1:
            parser.error(f"{name} is {getattr(arguments, name)}; it must be positive")
    available = torch.cuda.device_count() if arguments.device == "cuda" else 4
    arguments.gpus = arguments.gpus or available
    if not 1 <= arguments.gpus <= (available if arguments.device == "cuda" else 64):
        parser.error(f"gpus is {arguments.gpus}; there are {available}")
    if arguments.layers < arguments.gpus - 1:
        parser.error(f"layers is {arguments.layers}; {arguments.gpus} GPUs need {arguments.gpus - 1} at least")
    try:
        arguments.splits = read_splits(arguments.splits, arguments.layers)
        arguments.colocated_splits = read_splits(arguments.colocated_splits, arguments.layers)
        arguments.slack = read_slacks(arguments.slack)
        arguments.shares = list(filter(None, arguments.shares.split(",")))
        for each in arguments.shares:
            if each not in (BALANCED, EVEN):
                read_shares(each, arguments.gpus)
    except ValueError as error:
        parser.error(str(error))
    if any(len(split) != arguments.gpus for split in (*arguments.splits, *arguments.colocated_splits)):
        parser.error(f"splits must have {arguments.gpus} stages, one a GPU")
    if "colocated" in arguments.kinds and arguments.layers < arguments.gpus and not arguments.colocated_splits:
        parser.error(f"layers is {arguments.layers}; a colocated head on {arguments.gpus} GPUs needs as many, or "
                     "--colocated_splits, or other --kinds")
    return arguments


def read_slacks(text: str) -> list[int]:
    """Of "1,2". ValueError if one is no positive number."""
    try:
        slacks = [int(part) for part in text.split(",")]
    except ValueError:
        slacks = [0]
    if min(slacks) < 1:
        raise ValueError(f"slack is {text!r}; it must be positive numbers with commas between them")
    return slacks
