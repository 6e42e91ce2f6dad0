# SPDX-License-Identifier: Apache-2.0
"""A KeyboardInterrupt ends what the interrupted call does before the caller sees it: his memory is free then.

It leaves no lock taken, wherever it comes: the client goes on, and closes.
"""

import contextlib
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from conftest import delete_when_idle

import lossd

torch = pytest.importorskip("torch", reason="torch is not installed")

from lossd.torch import LossHead  # noqa: E402

D, V, N = 16, 40, 3000


@pytest.fixture
def observer(deterministic_server):
    with lossd.Client(deterministic_server.target) as made:
        made.create_head("a", hidden_size=D, vocab_size=V)
        yield made
        delete_when_idle(made, "a")


@pytest.fixture
def client(deterministic_server, observer):
    with lossd.Client(deterministic_server.target) as made:
        yield made


def eventually(holds):
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def interrupted(when):
    """The block ends with a KeyboardInterrupt, which comes once `when` holds."""
    def interrupt():
        try:
            eventually(when)
        finally:  # else the block would wait for ever
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
        time.sleep(120)  # the interrupt may come late
    thread.join()


def is_in(function):
    """Whether the main thread is in a function of this name, such as one that waits: what was started and is not waited for goes
    on."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def blocking_calls(client):
    hidden, targets = np.ones((N, D), np.float32), np.zeros(N, int)
    head = LossHead(client, "a")
    torch_hidden, torch_targets = torch.ones(N, D, requires_grad=True), torch.zeros(N, dtype=torch.long)
    pending = []

    def wait_of_pending():
        pending.append(client.compute_loss_async("a", hidden, targets, step=0, id=1, accumulate=True))
        pending[0].wait()

    def wait_of_head():
        head.start(torch_hidden, torch_targets, microbatch=1).wait()

    return {
        "compute_loss": lambda: client.compute_loss("a", hidden, targets, step=0, id=1, accumulate=True),
        "wait": wait_of_pending,
        "LossHead": lambda: head(torch_hidden, torch_targets, microbatch=1),
        "LossHead.start": wait_of_head,
        "a lazy loss": lambda: head.start(torch_hidden, torch_targets, microbatch=1).lazy().backward(),
        "add_gradient": lambda: client.add_gradient("a", "weight", np.ones((V, D), np.float32), step=0, id=1),
    }


@pytest.mark.parametrize("name", ["compute_loss", "wait", "LossHead", "LossHead.start", "a lazy loss", "add_gradient"])
def test_an_interrupt_ends_the_call(client, observer, name):
    call = blocking_calls(client)[name]

    def waits():
        head = observer.describe_head("a")
        return (head.waiting_slices > 0 or head.step_contributions > 0) and is_in("await_end")

    with interrupted(waits):
        call()
    assert not client._pending
    eventually(lambda: observer.describe_head("a").open_streams == 0)
    observer.zero_gradients("a", 0)
    observer.compute_loss("a", np.ones((N, D), np.float32), np.zeros(N, int), step=0, id=0, accumulate=True)
    assert observer.describe_head("a").step_rows == N


class Interrupts:
    """Raises KeyboardInterrupt on the main thread where a signal handler may: after the `at`-th call of a function in C.

    Not in a __del__, where Python would ignore it (3.11 even loses the call that is being made).
    """

    def __init__(self, at=None):
        self.at = at
        self.seen = 0

    def __enter__(self):
        sys.setprofile(self._event)
        return self

    def __exit__(self, *raised):
        sys.setprofile(None)

    def _event(self, frame, event, argument):
        if event != "c_return" or argument is sys.setprofile:
            return
        self.seen += 1
        if self.at is not None and self.seen >= self.at and not self._finalizes(frame):
            sys.setprofile(None)
            raise KeyboardInterrupt

    @staticmethod
    def _finalizes(frame):
        while frame is not None and frame.f_code.co_name != "__del__":
            frame = frame.f_back
        return frame is not None


def within(seconds, body):
    """Runs `body` on another thread; fails if it has not ended in time."""
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"{body} has not ended within {seconds} s"


def short_calls(client):
    weight = np.ones((V, D), np.float32)
    hidden, targets = np.ones((8, D), np.float32), np.zeros(8, int)
    return {
        "describe_head": lambda: client.describe_head("a"),
        "read_tensor": lambda: client.read_tensor("a"),
        "write_tensor": lambda: client.write_tensor("a", "weight", weight),
        "add_gradient": lambda: client.add_gradient("a", "weight", weight, step=0, id=0),
        "compute_loss": lambda: client.compute_loss("a", hidden, targets, step=0, id=0, accumulate=True),
        "wait": lambda: client.compute_loss_async("a", hidden, targets, step=0, id=0, accumulate=True).wait(),
        "cancel": lambda: client.compute_loss_async("a", hidden, targets, step=0, id=0, accumulate=True).cancel(),
        "LossHead": lambda: LossHead(client, "a")(torch.ones(8, D, requires_grad=True), torch.zeros(8, dtype=torch.long)),
        "save_checkpoint": lambda: client.save_checkpoint("a", f"kept-{time.monotonic_ns()}"),
        "Client": lambda: lossd.Client(client.target).close(),
        "close": client.close,
    }


@pytest.mark.parametrize("name", ["describe_head", "read_tensor", "write_tensor", "add_gradient", "compute_loss", "wait", "cancel",
                                  "LossHead", "save_checkpoint", "Client", "close"])
def test_an_interrupt_anywhere_leaves_no_lock_taken(deterministic_server, observer, rng, name):
    def made():
        return lossd.Client(deterministic_server.target)

    client = made()
    with Interrupts() as all_of_them:
        short_calls(client)[name]()
    client.close()
    every = max(1, all_of_them.seen // 40)
    for at in range(1 + rng.integers(every), all_of_them.seen + 1, every):
        eventually(lambda: observer.describe_head("a").open_streams == 0)
        observer.zero_gradients("a", 0)
        client = made()
        call = short_calls(client)[name]
        try:
            with Interrupts(at):
                call()
        except KeyboardInterrupt:
            pass
        if name != "close":
            within(60, lambda: client.describe_head("a"))
        within(60, client.close)
