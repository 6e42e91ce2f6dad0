# SPDX-License-Identifier: Apache-2.0
"""Tests whether the way in which gradients are computed matters for training. Trains the GPT of examples/gpt_torch from scratch
with each kind of gradients and several seeds, and compares the losses, also separately for rare tokens.

    lossd &
    python3 bench/convergence.py --servers 127.0.0.1:7070 --steps=3000 --seeds=3 --jobs=8 --out=convergence.json

Runs with the same seed begin with the same weights and see the same batches, so their losses are compared pair by pair. After
training, PyTorch computes the loss on held-out text in fp32 from the trunk and the head's weight. The different tokens that
occur in the training text are sorted by frequency and divided into ten groups of as many different tokens each (deciles). A bias
of gradients in the tail of the softmax would show in the decile of the rarest tokens.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import pathlib
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch.nn import functional

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "gpt_torch"))

import lossd  # noqa: E402
import train  # noqa: E402
from model import Shape  # noqa: E402
from text import load_tokens  # noqa: E402

# The kinds of runs, by name: the loss options of the head. None: no server; the head is a part of the PyTorch model.
KINDS = {
    "torch": None,
    "exact": {"gradients": "exact"},
    "filtered": {"gradients": "filtered"},
    "sampled, 2^-10": {"gradients": "sampled", "sample_threshold": 2.0**-10},
    "sampled, 2^-8": {"gradients": "sampled", "sample_threshold": 2.0**-8},
    "auto": {"gradients": "auto"},
}
DECILES = 10
BLOCK, HELD_OUT_EVERY = 2048, 10  # the text is divided into blocks of 2048 tokens, and every tenth block is held out
CURVE_STEPS = 50  # each point of a curve is the mean loss of so many steps
EVALUATED_ROWS = 64  # the number of sequences that are evaluated at once


@dataclass
class Run:
    """The settings and the results of one training run. Losses are in nats per token."""

    kind: str
    seed: int
    curve: list[float]  # the training loss; each point is the mean of CURVE_STEPS steps
    held_out: float  # the mean loss on the held-out text
    deciles: list[float]  # the mean held-out loss of the tokens of each decile, the rarest first
    dropped_mass: float  # the probability of the classes whose gradients were left out, a row, in the mean over the steps
    predicted_error: float  # the relative error that sampling is expected to give the gradients, in the mean over the steps
    seconds: float


def split(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divides a text into the tokens to train on and the held-out tokens."""
    held = np.arange(len(tokens)) // BLOCK % HELD_OUT_EVERY == 0
    return tokens[~held], tokens[held]


def decile_of_token(training: np.ndarray, vocab_size: int) -> np.ndarray:
    """The decile of each token, [vocab_size]: 0 for the rarest tenth of the tokens in `training`, 9 for the most frequent. -1 for
    tokens that do not occur there."""
    counts = np.bincount(training, minlength=vocab_size)
    order = np.argsort(counts, kind="stable")
    order = order[counts[order] > 0]
    deciles = np.full(vocab_size, -1)
    deciles[order] = np.arange(len(order)) * DECILES // len(order)
    return deciles


@torch.no_grad()
def held_out_losses(trained: train.Trained, tokens: np.ndarray, shape: Shape,
                    device: torch.device) -> tuple[np.ndarray, np.ndarray]:
    """The targets of the held-out text `tokens`, and the loss of each."""
    rows = (len(tokens) - 1) // shape.context
    inputs = torch.from_numpy(tokens[:rows * shape.context].reshape(rows, shape.context))
    targets = torch.from_numpy(tokens[1:rows * shape.context + 1].reshape(rows, shape.context))
    weight = trained.weight.to(device, torch.float32)
    losses = []
    for begin in range(0, rows, EVALUATED_ROWS):
        hidden = trained.trunk(inputs[begin:begin + EVALUATED_ROWS].to(device)).float()
        logits = functional.linear(hidden, weight).flatten(0, 1)
        wanted = targets[begin:begin + EVALUATED_ROWS].flatten().to(device)
        losses.append(functional.cross_entropy(logits, wanted, reduction="none").cpu())
    return targets.flatten().numpy(), torch.cat(losses).double().numpy()


def run(kind: str, seed: int, server: str, options: argparse.Namespace) -> Run:
    tokens = load_tokens(options.folder, options.text, options.vocab_size)
    training, held = split(tokens)
    settings = argparse.Namespace(**{**vars(options), "seed": seed, **(KINDS[kind] or {})})
    torch.set_num_threads(1)
    start = time.monotonic()
    if KINDS[kind] is None:
        trained = train.run(settings, training, None)
    else:
        with lossd.Client(server) as client:
            name = f"convergence-{list(KINDS).index(kind)}-{seed}"
            trained = train.run(settings, training, client, name)
            client.delete_head(name)
    seconds = time.monotonic() - start
    targets, losses = held_out_losses(trained, held, Shape.from_arguments(options), torch.device(options.device))
    deciles = decile_of_token(training, options.vocab_size)[targets]
    return Run(kind, seed, [float(np.mean(trained.losses[i:i + CURVE_STEPS]))
                            for i in range(0, len(trained.losses), CURVE_STEPS)],
               float(losses.mean()), [float(losses[deciles == i].mean()) for i in range(DECILES)],
               trained.dropped_mass, trained.gradient_error, seconds)


def describe_text(options: argparse.Namespace) -> dict:
    training, held = split(load_tokens(options.folder, options.text, options.vocab_size))
    deciles = decile_of_token(training, options.vocab_size)
    counts = np.bincount(training, minlength=options.vocab_size)
    return {"training_tokens": len(training), "held_out_tokens": len(held),
            "deciles": [{"occurrences_at_most": int(counts[deciles == i].max()),
                         "held_out_tokens": int(np.isin(held, np.flatnonzero(deciles == i)).sum())}
                        for i in range(DECILES)]}


def report(runs: list[Run]) -> None:
    """Prints the held-out losses, and their differences from the losses of exact gradients with the same seeds (± standard
    error)."""
    runs = sorted(runs, key=lambda each: list(KINDS).index(each.kind))
    exact = {each.seed: each for each in runs if each.kind == "exact"}
    rows = [("held-out", lambda r: r.held_out), ("rarest tenth", lambda r: r.deciles[0]),
            ("rarest three tenths", lambda r: float(np.mean(r.deciles[:3])))]
    for kind in dict.fromkeys(each.kind for each in runs):
        mine = [each for each in runs if each.kind == kind and each.seed in exact]
        parts = []
        for name, value in rows:
            apart = np.array([value(each) - value(exact[each.seed]) for each in mine])
            deviation = apart.std(ddof=1) / len(apart)**0.5 if len(apart) > 1 else float("nan")
            mean = np.mean([value(each) for each in mine])
            parts.append(f"{name} {mean:.4f} ({apart.mean():+.4f} ± {deviation:.4f})")
        print(f"{kind:>15}: " + "; ".join(parts))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", default=["127.0.0.1:7070"], help="runs take them in turn")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to this for each kind")
    parser.add_argument("--jobs", type=int, default=4, help="runs at the same time")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--text", help="file to learn instead of the manual pages of Perl")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("convergence-data"), help="for tokens")
    parser.add_argument("--commit", default="", help="of lossd, for the results")
    parser.add_argument("--out", type=pathlib.Path, help="results as JSON")
    train.add_loss_arguments(parser)
    Shape.add_arguments(parser)
    return parser.parse_args()


def save(runs: list[Run], text: dict, options: argparse.Namespace) -> None:
    names = ("steps", "batch", "lr", "vocab_size", "hidden_size", "layers", "heads", "context")
    result = {"card": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
              "date": time.strftime("%Y-%m-%d"), "commit": options.commit,
              "settings": {name: getattr(options, name) for name in names}, "text": text,
              "runs": [asdict(each) for each in runs]}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    options = parse_arguments()
    text = describe_text(options)  # this also makes the file of tokens, before several processes need it
    work = [(kind, seed) for seed in range(1, options.seeds + 1) for kind in options.kinds]
    runs: list[Run] = []
    with concurrent.futures.ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(run, kind, seed, options.servers[i % len(options.servers)], options)
                   for i, (kind, seed) in enumerate(work)]
        for each in concurrent.futures.as_completed(pending):
            runs.append(each.result())
            if options.out:  # after each run, because a later one may fail
                save(sorted(runs, key=lambda r: (list(KINDS).index(r.kind), r.seed)), text, options)
    report(runs)


if __name__ == "__main__":
    main()
