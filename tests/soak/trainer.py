# SPDX-License-Identifier: Apache-2.0
"""A trainer of a soak run: a process that trains one head until it is killed, whatever becomes of server and connection.

    trainer.py TARGET HEAD LOG

Writes a line into LOG for each step ("step N"), for each start after the server or the step was lost ("again REASON") and,
before it ends with status 3, for a step that did not have each row once ("wrong ...").
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from typing import TextIO

import numpy as np

import lossd

HIDDEN, VOCAB, ROWS, MICROBATCHES = 64, 512, 192, 4
SAVE_EVERY = 25  # steps


class WrongStep(Exception):
    """The server's count of a step is not what was sent."""


def resume(client: lossd.Client, head: str) -> int:
    """Makes the head if it is not there, from its newest checkpoint if it has one; the open step, with no gradients."""
    try:
        state = client.describe_head(head).state
    except lossd.NotFound:
        saved = client.list_checkpoints(head)
        made = client.load_checkpoint(saved[0].checkpoint) if saved else client.create_head(
            head, hidden_size=HIDDEN, vocab_size=VOCAB, if_exists="keep")
        state = made.state
    client.acknowledge_restart(head)
    client.zero_gradients(head, state.step)
    return int(state.step)


def train_step(client: lossd.Client, head: str, step: int, rng: np.random.Generator) -> None:
    pending = []
    for id in range(MICROBATCHES):
        hidden = rng.standard_normal((ROWS, HIDDEN), dtype=np.float32)
        pending.append(client.compute_loss_async(
            head, hidden, rng.integers(0, VOCAB, ROWS), step=step, id=id, accumulate=True, grad_hidden=True,
            reduction="sum", slice_bytes=1 << 14))
    for each in pending:
        each.wait()
    if step % 3 == 0:
        client.add_gradient(head, "weight", np.zeros((VOCAB, HIDDEN), np.float32), step=step, id=99)
    told = client.apply_step(head, step, lossd.SGD(lr=1e-3), expected_microbatches=range(MICROBATCHES))
    if (told.rows, told.microbatches) != (MICROBATCHES * ROWS, MICROBATCHES):
        raise WrongStep(f"step {step} has {told.rows} rows of {told.microbatches} microbatches")


def train(target: str, head: str, log: TextIO) -> None:
    retry = lossd.RetryOptions(max_attempts=20, initial_backoff=0.05, max_backoff=1.0)
    rng = np.random.default_rng()
    # One of the two in shared memory: its rows do not pass through the network that cuts.
    transport = "grpc" if head.endswith("0") else "auto"
    with lossd.Client(target, channels=2, transport=transport, retry=retry, call_timeout=60.0, loss_timeout=120.0,
                      wait_for_server=True) as client:
        step = resume(client, head)
        while True:
            train_step(client, head, step, rng)
            print("step", step, file=log, flush=True)
            step += 1
            if step % SAVE_EVERY == 0:
                with contextlib.suppress(lossd.AlreadyExists):
                    client.save_checkpoint(head, keep=3)
            if step % 10 == 0:
                client.read_tensor(head)
            time.sleep(random.uniform(0.0, 0.2))


def main() -> None:
    target, head, path = sys.argv[1:]
    with open(path, "a", encoding="utf-8") as log:
        while True:
            try:
                train(target, head, log)
            except WrongStep as error:
                print("wrong", error, file=log, flush=True)
                sys.exit(3)
            except lossd.LossdError as error:
                print("again", type(error).__name__, str(error)[:300].replace("\n", " "), file=log, flush=True)
                time.sleep(0.5)


if __name__ == "__main__":
    main()
