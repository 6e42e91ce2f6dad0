# SPDX-License-Identifier: Apache-2.0
"""Small dramas: what several clients do to one head, in which order. A scenario asserts nothing: the checker judges the
history that it gives. Those of FINDINGS are impossible on a server that breaks the rule named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from history import Event, History, family
from clients import Pause, RawClient, halves, sleeper, whole
from stage import Stage

import lossd

ROWS = 64


def repeat_behind_zero(stage: Stage) -> History:
    """B's connection breaks in a microbatch; A zeroes the gradients before B repeats it; then B repeats its step."""
    admin, a = stage.raw("admin"), stage.raw("A")
    admin.create(stage.vocab)
    proxy = stage.proxy(0, 0, piece_bytes=128, piece_seconds=0.004)
    b = stage.trainer("B", proxy, transport="grpc", retry=lossd.RetryOptions(max_attempts=20, initial_backoff=0.3))
    computing = stage.start(b.compute_loss, 1, ROWS, step=0, slice_rows=1)
    _until(lambda: any(event.call == "ComputeLoss" and "accepted" in event.result
                       for event in stage.history().events))
    proxy.cut_all()
    a.zero_gradients(0)
    computing.result()
    b.acknowledge()
    b.compute_loss(1, ROWS, step=0)
    return stage.history()


def load_under_trainer(stage: Stage) -> History:
    """A loads a checkpoint between two microbatches of B's step."""
    admin, b = stage.raw("admin"), stage.trainer("B")
    admin.create(stage.vocab)
    admin.save("start")
    b.compute_loss(1, 4, step=0)
    admin.load("start")
    b.compute_loss(2, 4, step=0)
    return stage.history()


def load_under_stream(stage: Stage) -> History:
    """A loads a checkpoint while a stream that does not accumulate computes row after row."""
    a, b = stage.raw("A"), stage.raw("B")
    a.create(stage.vocab)
    a.write(whole(family(2, stage.vocab)))
    a.save("two")
    a.write(whole(family(5, stage.vocab)))
    loaded, begun = threading.Event(), threading.Event()

    def keep_going(number: int) -> None:
        if number > 2:
            begun.set()
        if number == 199:
            loaded.wait(20)

    computing = stage.start(b.compute_loss, 1, [(row, row + 1) for row in range(200)], 200, pause=keep_going)
    begun.wait(20)
    a.load("two")
    loaded.set()
    computing.result()
    return stage.history()


def step_under_stream(stage: Stage) -> History:
    """A closes step 0 between two slices of a stream of step 0 that does not accumulate."""
    a, b = stage.raw("A"), stage.raw("B")
    a.create(stage.vocab)
    a.write(whole(family(9, stage.vocab)))
    a.add_gradient(0, 100, whole(family(4, stage.vocab)))
    answered, applied = threading.Event(), threading.Event()

    def pause(number: int) -> None:
        if number == 1:
            applied.wait(20)

    computing = stage.start(b.compute_loss, 1, [(0, 2), (2, 4)], 4, step=0, pause=pause,
                            on_slice=lambda number: answered.set())
    answered.wait(20)
    a.apply_step(0)
    applied.set()
    computing.result()
    return stage.history()


def steps_under_read(stage: Stage) -> History:
    """A reads a tensor of several messages, slowly, while B applies steps."""
    a, b = stage.raw("A"), stage.raw("B")
    a.create(stage.vocab)
    a.write(whole(family(50, stage.vocab)))
    reading = stage.start(a.read, on_slice=sleeper(0.3, 0.3))
    for step in range(4):
        b.add_gradient(step, 100, whole(family(3, stage.vocab)))
        b.apply_step(step)
    reading.result()
    return stage.history()


def recreation_under_read(stage: Stage) -> History:
    """A reads a tensor of several messages, slowly; B deletes the head and creates it again, smaller."""
    a, b = stage.raw("A"), stage.raw("B")
    a.create(stage.vocab)
    first = threading.Event()
    recreated = threading.Event()

    def slow(number: int) -> None:
        first.set()
        if number == 0:
            recreated.wait(20)

    reading = stage.start(a.read, on_slice=slow)
    first.wait(20)
    threading.Event().wait(0.5)  # the server has the next message ready, and waits for the reader
    b.delete()
    b.create(2)
    recreated.set()
    reading.result()
    return stage.history()


def two_retains(stage: Stage) -> History:
    """A and B retain one id with different logit scales at the same time, and A goes backward."""
    a, b = stage.raw("A"), stage.raw("B")
    a.create(stage.vocab)
    a.write(whole(family(9, stage.vocab)))

    def both_answered() -> bool:
        calls = [event for event in stage.history().events if event.call == "ComputeLoss"]
        return len(calls) == 2 and all("accepted" in event.result or event.end is not None for event in calls)

    def meet(number: int) -> None:
        if number == 0:
            _until(both_answered)

    first = stage.start(a.compute_loss, 1, [(0, 4)], 4, retain=True, scale=1.0, pause=meet)
    second = stage.start(b.compute_loss, 1, [(0, 4)], 4, retain=True, scale=2.0, pause=meet)
    first.result(), second.result()
    a.backward(1, 4)
    return stage.history()


def write_before_backward(stage: Stage) -> History:
    """B writes other weights between A's retaining call and its backward."""
    a, b = stage.raw("A"), stage.raw("B")
    a.create(stage.vocab)
    a.write(whole(family(9, stage.vocab)))
    a.compute_loss(1, [(0, 4)], 4, retain=True)
    b.write(whole(family(20, stage.vocab)))
    a.backward(1, 4)
    return stage.history()


def _within_write(stage: Stage, meanwhile: Callable[[RawClient], object]) -> History:
    """B does something between two messages of A's write; then the tensor is read."""
    a, b = stage.raw("A"), stage.raw("B")
    a.create(stage.vocab)
    a.write(whole(family(5, stage.vocab)))
    a.add_gradient(0, 100, whole(family(2, stage.vocab)))
    done = threading.Event()
    writing = stage.start(a.write, halves(family(30, stage.vocab)),
                          pause=lambda number: done.wait(20) if number == 1 else None)
    _until(lambda: any(event.call == "WriteTensor" and event.result.get("sent") and event.end is None
                       for event in stage.history().events))
    threading.Event().wait(0.2)  # the server has the first message
    meanwhile(b)
    done.set()
    writing.result()
    b.read()
    return stage.history()


def save_within_write(stage: Stage) -> History:
    """B saves between two messages of A's write; then the checkpoint is loaded and read."""
    _within_write(stage, lambda b: b.save("half"))
    c = stage.raw("C")
    c.load("half")
    c.read()
    return stage.history()


def read_within_write(stage: Stage) -> History:
    return _within_write(stage, lambda b: b.read())


def step_within_write(stage: Stage) -> History:
    return _within_write(stage, lambda b: b.apply_step(0))


def step_under_accumulation(stage: Stage) -> History:
    """A closes the step between two slices of B's microbatch, which accumulates."""
    return _step_under(stage, lambda b, pause: b.compute_loss(1, [(0, 2), (2, 4)], 4, step=0, accumulate=True,
                                                              pause=pause))


def step_under_contribution(stage: Stage) -> History:
    """A closes the step between two messages of B's contribution."""
    values = family(4, stage.vocab)
    return _step_under(stage, lambda b, pause: b.add_gradient(0, 100, halves(values), pause=pause))


def _step_under(stage: Stage, call: Callable[[RawClient, Pause], Event]) -> History:
    a, b = stage.raw("A"), stage.raw("B")
    a.create(stage.vocab)
    begun, applied = threading.Event(), threading.Event()

    def pause(number: int) -> None:
        if number == 1:
            begun.set()
            applied.wait(20)

    under_way = stage.start(call, b, pause)
    begun.wait(20)
    threading.Event().wait(0.2)  # the server has the first message
    a.apply_step(0)
    applied.set()
    under_way.result()
    return stage.history()


def creation_seen(stage: Stage) -> History:
    """B looks for a head again and again while A creates it, and creates it as well."""
    a, b, c = stage.raw("A"), stage.raw("B"), stage.raw("C")
    creating = stage.start(a.create, stage.vocab)
    while not creating.done():
        b.describe()
        b.list_heads()
        c.compute_loss(1, [(0, 1)], 1)
        c.read()
    return stage.history()


def _until(holds: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if holds():
            return
        threading.Event().wait(0.002)


@dataclass(frozen=True)
class Finding:
    sentence: str  # what a server does that breaks a rule
    scenario: Callable[[Stage], History]
    vocab: int = 8
    large: bool = False  # rows of 1 MiB
    mended: bool = False  # the server does so no more


FINDINGS = [
    Finding("a repeat inside the client slips behind ZeroGradients of another client", repeat_behind_zero,
            mended=True),
    Finding("a trainer goes on with its step after another client has loaded a checkpoint", load_under_trainer,
            mended=True),
    Finding("LoadCheckpoint under an open stream that does not accumulate: old, half-loaded and new weights in one "
            "answer", load_under_stream, 16, True, mended=True),
    Finding("a stream of step 0 that does not accumulate survives ApplyStep(0)", step_under_stream, mended=True),
    Finding("ReadTensor beside running steps mixes rows of several steps", steps_under_read, 16, True, mended=True),
    Finding("a read whose head is deleted and created again ends with another error than NOT_FOUND",
            recreation_under_read, 16, True, mended=True),
    Finding("two retaining calls of one id with other options at the same time both succeed", two_retains, mended=True),
    Finding("WriteTensor between retain and backward: dx comes from other weights than the loss",
            write_before_backward, mended=True),
    Finding("a save between two messages of a WriteTensor stores a half-written tensor", save_within_write, mended=True),
    Finding("a read between two messages of a WriteTensor sees a half-written tensor", read_within_write, mended=True),
    Finding("a step between two messages of a WriteTensor updates a half-written tensor", step_within_write, mended=True),
    Finding("a microbatch that accumulates ends with FAILED_PRECONDITION, not ABORTED, when its step is applied",
            step_under_accumulation, mended=True),
    Finding("a contribution whose step is applied has added half of its rows and ends with FAILED_PRECONDITION",
            step_under_contribution, mended=True),
    Finding("a head that is being created is described to other clients", creation_seen, 16, True,
            mended=True),
]
