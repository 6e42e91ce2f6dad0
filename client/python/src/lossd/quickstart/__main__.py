# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny character model on the source text of Python's standard library. Its loss head is on a lossd server.

    python -m lossd.quickstart                        # starts a server in this process, trains for 30 seconds
    python -m lossd.quickstart --server HOST:PORT     # uses a server that runs already
    python -m lossd.quickstart --plot loss.png        # also draws the curve with matplotlib

Everything except the head is NumPy, so only the packages lossd and lossd-server are needed.

Exit status: 0 if the model learned, 1 if it did not, 2 if it could not run.
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import lossd
from lossd.quickstart.chart import draw
from lossd.quickstart.model import CONTEXT, Trunk
from lossd.quickstart.text import CLASSES, Text

HIDDEN = 128
ROWS = 1024  # of a step
LEARNT = 0.7  # the model has learned if its loss is below this part of its first losses


class NoPlot(Exception):
    """The curve cannot be drawn into the given file."""


def seconds_above_zero(text: str) -> float:
    seconds = float(text) if text.strip() else math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return seconds


def whole_number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, got {text!r}")
        return int(text)
    return parse


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lossd.quickstart", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="HOST:PORT of a server that runs already; default: one is started in this process")
    parser.add_argument("--seconds", type=seconds_above_zero, default=30.0, help="of training at most; default 30")
    parser.add_argument("--steps", type=whole_number(1), help="of training at most; default: as many as the seconds allow")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of the first weights and of the order of the text; default 0")
    parser.add_argument("--plot", type=Path, help="file for the curve (.png, .svg, ...); needs matplotlib")
    return parser.parse_args(arguments)


def own_server(stack: ExitStack) -> lossd.EmbeddedClient:
    """Starts a server in this process and returns its client. Both end with the stack."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lossd-quickstart."))
    client = stack.enter_context(lossd.embedded(http="127.0.0.1:0", checkpoint_dir=folder))
    print(f"started a server in this process: status page on http://{client.http_address}/")
    return client


def train(client: lossd.Client, seconds: float, steps: int | None, seed: int) -> list[float]:
    """Trains a new head and deletes it. Returns the loss of every step, in nats."""
    head = f"quickstart-{secrets.token_hex(4)}"  # other programs may use the same server
    client.create_head(head, hidden_size=HIDDEN, vocab_size=CLASSES, seed=seed)
    try:
        return train_head(client, head, seconds, steps, seed)
    finally:
        client.delete_head(head)


def train_head(client: lossd.Client, head: str, seconds: float, steps: int | None, seed: int) -> list[float]:
    text = Text.of_the_standard_library()
    trunk = Trunk(CLASSES, HIDDEN, seed)
    step = 0
    batches = text.batches(CONTEXT, ROWS, seed)
    losses: list[float] = []
    told = begin = time.monotonic()
    print(f"training on {len(text.codes):,} characters of {text.files} modules of Python's standard library")
    while time.monotonic() - begin < seconds and (steps is None or len(losses) < steps):
        contexts, targets = next(batches)
        hidden = trunk.forward(contexts)
        result = client.compute_loss(head, hidden, targets, step=step, accumulate=True, grad_hidden=True)
        assert result.grad_hidden is not None
        step = client.apply_step(head, step, lossd.AdamW(lr=3e-3)).state.step
        trunk.backward(result.grad_hidden)
        losses.append(result.loss)
        if time.monotonic() - told > 5.0:
            told = time.monotonic()
            print(f"  {told - begin:5.1f} s  step {len(losses):6,}  loss {mean_of_last(losses):.3f} nats")
    elapsed = time.monotonic() - begin
    print(f"{len(losses):,} steps, {len(losses) * ROWS / elapsed:,.0f} rows per second")
    print(f"\nwhat it writes: {text.shown(sample(client, head, trunk, text, seed))}\n")
    return losses


def mean_of_last(losses: list[float], count: int = 50) -> float:
    last = losses[-count:]
    return sum(last) / len(last)


def sample(client: lossd.Client, head: str, trunk: Trunk, text: Text, seed: int, length: int = 160) -> list[int]:
    """Characters that the model writes with the weights that the server has."""
    weight = client.read_tensor(head, "weight")
    return trunk.write(weight, text.beginning(CONTEXT), length, seed)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    with ExitStack() as stack:
        try:
            if options.plot is not None:
                check_plot(options.plot)  # before training, which takes half a minute
            client = stack.enter_context(lossd.Client(options.server)) if options.server else own_server(stack)
            server = client.get_server()
            print(f"lossd {server.version} at {client.target}, {server.backend} backend: {server.device}")
            losses = train(client, options.seconds, options.steps, options.seed)
        except (NoPlot, lossd.LossdError) as error:
            print(f"quickstart: {error}", file=sys.stderr)
            return 2
    print(draw(losses, width=min(100, os.get_terminal_size().columns if sys.stdout.isatty() else 80)))
    if options.plot is not None:
        plot(losses, options.plot)
    learnt = len(losses) > 1 and mean_of_last(losses) < LEARNT * losses[0]
    print(f"the model has learnt: {'yes' if learnt else 'no'}, {losses[0]:.3f} nats at first, {mean_of_last(losses):.3f} at the end")
    return 0 if learnt else 1


def check_plot(file: Path) -> None:
    try:
        from matplotlib import figure  # not a dependency of the package
    except ImportError:
        raise NoPlot("--plot needs matplotlib: `pip install matplotlib`; without --plot the curve is drawn in the terminal") from None
    kinds = figure.Figure().canvas.get_supported_filetypes()
    if file.suffix.lstrip(".").lower() not in kinds:
        raise NoPlot(f"--plot must end in one of {', '.join('.' + kind for kind in sorted(kinds))}, got {str(file)!r}")
    if not file.parent.is_dir():
        raise NoPlot(f"--plot must be in a folder that exists, got {str(file)!r}")


def plot(losses: list[float], file: Path) -> None:
    from matplotlib import figure

    drawing = figure.Figure(figsize=(7, 4), layout="constrained")
    axes = drawing.subplots()
    axes.plot(losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss [nats]", title="lossd quickstart")
    drawing.savefig(file)
    print(f"drawn: {file}")


if __name__ == "__main__":
    sys.exit(main())
