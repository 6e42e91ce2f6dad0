# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT twice, with a head of its own and with a head on a lossd server, and draws both loss curves.

    lossd &
    python3 train.py --steps=500 --figure=curves.svg
    python3 train.py --heads_to_run lossd --gradients=filtered

Same seeds, same weights, same batches. Both clip the global gradient norm and follow the same learning-rate schedule.
The tokens are learnt from the manual pages of Perl, or from --text.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from model import LocalHead, Shape, add_loss_arguments, head_weight, loss_options, remote_head, trunk
from numpy.typing import NDArray
from plots import loss_curves
from text import load_tokens

import lossd
from lossd.torch import HeadOptimizer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:7070")
    parser.add_argument("--heads_to_run", nargs="+", choices=("local", "lossd"), default=["local", "lossd"])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--text", help="file to learn instead of the manual pages of Perl")
    parser.add_argument("--folder", type=Path, default=Path("gpt_torch-data"), help="for tokens and the curves")
    parser.add_argument("--figure", type=Path, help="draw the curves (needs matplotlib)")
    add_loss_arguments(parser)
    Shape.add_arguments(parser)
    return parser.parse_args()


def batches(tokens: NDArray[np.int64], arguments: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random stretches of the text, and the same one token on; the same ones for the same seed."""
    rng = np.random.default_rng(arguments.seed)
    for _ in range(arguments.steps):
        begins = rng.integers(0, len(tokens) - arguments.context - 1, arguments.batch)
        rows = torch.from_numpy(np.stack([tokens[b:b + arguments.context + 1] for b in begins]))
        yield rows[:, :-1].contiguous().to(arguments.device), rows[:, 1:]


def schedule(steps: int) -> Callable[[int], float]:
    """Warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, steps // 20)
    return lambda step: min(1.0, (step + 1) / warm_up) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


@dataclass
class Trained:
    """What became of a run."""

    trunk: torch.nn.Module
    weight: torch.Tensor  # [V, D], of the head, after the last step
    losses: list[float] = field(default_factory=list)  # by step, in nats a token
    dropped_mass: float = 0.0  # probability that gradients left out, a row, in the mean over the steps
    gradient_error: float = 0.0  # predicted from sampling, in the mean over the steps


def run(arguments: argparse.Namespace, tokens: NDArray[np.int64], client: lossd.Client | None,
        head_name: str = "gpt") -> Trained:
    """Trains from scratch; with a client the head is on its server and replaces one of that name."""
    shape, device = Shape.from_arguments(arguments), torch.device(arguments.device)
    model = trunk(shape, arguments.seed).to(device)
    weight = head_weight(shape, arguments.seed)
    settings = {"lr": arguments.lr, "betas": (0.9, 0.95), "weight_decay": 0.01}
    parameters = list(model.parameters())
    head: torch.nn.Module
    head_optimizer: HeadOptimizer | None = None
    if client is None:
        head = LocalHead(weight).to(device)
        parameters += head.parameters()
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(parameters, **settings)]
    else:
        head = remote_head(client, head_name, weight, "bf16" if device.type == "cuda" else "fp32",
                           extras=("dropped_mass", "gradient_error"), **loss_options(arguments))
        head_optimizer = HeadOptimizer(head, device=device, **settings)
        optimizers = [torch.optim.AdamW(parameters, **settings), head_optimizer]
        parameters.append(head_optimizer.stand_in)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, schedule(arguments.steps)) for each in optimizers]

    result = Trained(model, weight)
    start = time.monotonic()
    for step, (inputs, targets) in enumerate(batches(tokens, arguments)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = model(inputs)
            if client is None:
                loss = head(hidden, targets.to(device))
            else:
                loss, extras = head(hidden, targets)
                result.dropped_mass += extras.dropped_mass.item() / arguments.steps
                result.gradient_error += extras.gradient_error.item() / arguments.steps
        loss.backward()
        if head_optimizer is not None:
            head_optimizer.load_grad_norm()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for each in (*optimizers, *schedulers):
            each.step()
        result.losses.append(loss.item())
        if step % 50 == 0 or step + 1 == arguments.steps:
            print(f"  step {step:5}  loss {result.losses[-1]:.4f}  {time.monotonic() - start:.1f} s", flush=True)
    if client is not None and arguments.gradients != "exact":
        print(f"  gradients left out {result.dropped_mass:.4f} of a row's probability in the mean; "
              f"predicted error from sampling {result.gradient_error:.4f}")
    if client is None:
        result.weight = head.weight.detach().cpu()
    else:
        result.weight = torch.from_numpy(client.read_tensor(head_name, "weight"))
    return result


def report(curves: dict[str, list[float]], folder: Path) -> None:
    """Writes the curves as CSV and says how far they are apart."""
    with open(folder / "curves.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *curves])
        writer.writerows([step, *values] for step, values in enumerate(zip(*curves.values())))
    for name, values in curves.items():
        print(f"{name:>6}: first loss {values[0]:.4f}, mean of the last 20 {np.mean(values[-20:]):.4f}")
    if len(curves) == 2:
        apart = np.abs(np.subtract(*curves.values()))
        print(f"curves are apart by {apart.mean():.5f} in the mean, {apart.max():.5f} at most (nats a token)")


def main() -> None:
    arguments = parse_arguments()
    tokens = load_tokens(arguments.folder, arguments.text, arguments.vocab_size)
    curves: dict[str, list[float]] = {}
    for kind in arguments.heads_to_run:
        print(f"training with a {kind} head on {arguments.device}", flush=True)
        if kind == "local":
            curves[kind] = run(arguments, tokens, None).losses
        else:
            with lossd.Client(arguments.server) as client:
                curves[kind] = run(arguments, tokens, client).losses
    report(curves, arguments.folder)
    if arguments.figure:
        loss_curves(curves).savefig(arguments.figure)


if __name__ == "__main__":
    main()
