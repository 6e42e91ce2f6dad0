# SPDX-License-Identifier: Apache-2.0
"""The purpose of a forward (Plan): a step, an evaluation, or the repeated pass of a checkpoint; and what its backward
does."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import itertools
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import torch
import torch.utils.checkpoint
from numpy.typing import NDArray

from lossd.types import LossResult, RowOutput

if TYPE_CHECKING:
    from lossd.torch._job import Job


# Code that torch.compile must not trace.

F = TypeVar("F", bound=Callable[..., object])


def outside_of_compile(function: F) -> F:
    """Makes a function run uncompiled when compiled code calls it. The graph is cut there once, without a warning.

    Code that talks to a server cannot be compiled. Without this function, torch.compile would trace the calls into the client
    and cut the graph in many places. torch 1.13 has no compiler, and torch 2.0 has no torch.compiler.disable.
    """
    disable = getattr(getattr(torch, "compiler", None), "disable", None)
    return function if disable is None else cast(F, disable(function))


# What the call stack says: which functions of torch are running above a call. torch has no other way to tell.

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__
# The functions that run a function again to restore tensors that its backward needs; names in torch 1.13 and 2.0, and in
# later versions.
_RECOMPUTES = frozenset(("unpack", "unpack_hook", "recompute_fn"))


def _frames() -> Iterator[FrameType]:
    """The frame of the caller, and the frames above it on this thread."""
    frame = inspect.currentframe()
    frame = None if frame is None else frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


class Pass(enum.Enum):
    """The pass of torch.utils.checkpoint to which a forward belongs."""

    ORDINARY = enum.auto()  # not under a checkpoint, or the only forward with gradients
    FIRST = enum.auto()  # the function may be run again, to restore the tensors that it saves
    REPEATED = enum.auto()  # the function runs again, and its result is not used


def checkpoint_pass() -> Pass:
    """The pass to which a forward with gradients belongs.

    A reentrant checkpoint (use_reentrant=True) has no gradients in its first pass. Only its second pass counts, which runs in
    `backward`. If checkpoints are nested, the innermost one decides.
    """
    inside = False
    for frame in _frames():
        code = frame.f_code
        if code.co_filename != _CHECKPOINT_FILE:
            continue
        if code.co_name in _RECOMPUTES:
            return Pass.REPEATED
        if code.co_name == "backward":
            break
        inside = True
    return Pass.FIRST if inside else Pass.ORDINARY


class Asked(enum.Enum):
    """What a pipeline schedule needs of a loss."""

    LOSS = enum.auto()  # a loss that will have its backward
    VALUE = enum.auto()  # only the value: schedule.eval(), or a schedule without backward
    SHAPE = enum.auto()


def asked_by_schedule() -> Asked:
    """
    What a schedule of torch.distributed.pipelining that calls a loss needs of it. If its stages were made without example
    arguments, the schedule calls the loss once before its first step, with uninitialized memory, to find the shape of the
    gradient. These rows must not reach the server, and only the name of the calling function identifies the call. If that
    name changes in torch, the step has one microbatch too many and is refused (StepTracker.group).
    """
    for frame in _frames():
        if frame.f_code.co_name == "_backward_metadata_inference":
            return Asked.SHAPE
        if not str(frame.f_globals.get("__name__")).startswith("torch.distributed.pipelining"):
            continue
        if not getattr(frame.f_locals.get("self"), "_has_backward", True):
            return Asked.VALUE
    return Asked.LOSS


_REQUIRES_GRAD = torch.nn.Module.requires_grad_.__code__
_FRAMES_OF_COLLECTION = 16  # there are at most this many frames between it and a module's named_modules()


def wanted_of_parameters() -> bool | None:
    """The argument of the Module.requires_grad_() that is collecting parameters now. None: there is no such call."""
    for frame in itertools.islice(_frames(), _FRAMES_OF_COLLECTION):
        if frame.f_code is _REQUIRES_GRAD:
            return bool(frame.f_locals["requires_grad"])
    return None


class _Freezable(Protocol):
    train_head: bool
    frozen_on_server: bool


def heed_requires_grad(head: _Freezable) -> None:
    """If requires_grad_() of a module is collecting parameters now, applies it to the head."""
    wanted = wanted_of_parameters()
    if wanted is not None and not (wanted and head.frozen_on_server):
        head.train_head = wanted


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning that names the line of the user's program, not a line of torch or lossd."""
    level = 1
    for level, frame in enumerate(_frames(), start=1):
        if not str(frame.f_globals.get("__name__")).split(".")[0] in ("torch", "lossd"):
            break
    warnings.warn(message, category, stacklevel=level)


# The autograd functions of a loss: what backward passes to a Job, and what it takes from the Job.


class Direct(torch.autograd.Function):
    """Gradients that are already known when backward comes."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, job: Job, loss: float | None, *hidden: torch.Tensor) -> torch.Tensor:
        ctx.job = job
        return job.scalar(math.nan if loss is None else loss)

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: Job | None = ctx.job
        if job is None:
            raise RuntimeError(_SECOND_BACKWARD)
        job.check_backward()
        factor = job.meet(float(grad_loss))
        ctx.job = None
        job.fill_lazy_loss()
        job.had_backward()
        return torch.zeros(()), None, None, *map(_once_differentiable, job.gradients(factor))


class Deferred(torch.autograd.Function):
    """Gradients that the server computes in backward, when the upstream gradients of the rows are known."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, hidden: torch.Tensor, job: Job, names: list[RowOutput],
                rows: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ctx.job, ctx.names = job, names
        ctx.set_materialize_grads(False)
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        job: Job | None = ctx.job
        if job is None:
            raise RuntimeError(_SECOND_BACKWARD)
        job.check_backward()
        ctx.job = None
        job.run_backward(dict(zip(ctx.names, upstream)))
        return torch.zeros(()), _once_differentiable(job.gradients()[0]), None, None, None


_SECOND_BACKWARD = (
    "backward ran twice on one loss; the server accumulated its weight gradient once. Compute the loss again, or add "
    "losses up before backward()")


class _NotTwice(torch.autograd.Function):
    """Passes a gradient on, and raises if the gradient itself is differentiated."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise RuntimeError("lossd has no second derivatives: the gradient of its loss cannot be differentiated")


def _once_differentiable(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or not torch.is_grad_enabled():  # it is enabled only with create_graph=True
        return gradient
    marked: torch.Tensor = _NotTwice.apply(torch.zeros((), requires_grad=True), gradient)
    return marked


@dataclasses.dataclass(frozen=True)
class Plan:
    """What has to be computed for one microbatch."""

    hidden: bool  # compute the gradient of the hidden states
    head: bool  # add the gradient of the head to the step
    # The head is trained, but the module is in evaluation mode. The head's gradient is not accumulated. A backward that would
    # give a gradient to a local head is refused.
    evaluates: bool = False
    # Which pass of torch.utils.checkpoint (use_reentrant=False) this is. The result of the repeated pass is not used, but the
    # tensors that are saved in it must be the same as in the first pass.
    checkpoint: Pass = Pass.ORDINARY

    @property
    def repeats(self) -> bool:
        return self.checkpoint is Pass.REPEATED

    @property
    def has_graph(self) -> bool:
        """Whether the loss is part of a graph."""
        return self.hidden or self.head or self.evaluates

    def computes(self, deferred: bool) -> bool:
        """Whether the server computes gradients, now or in backward."""
        return not self.repeats and (self.head or (self.hidden and not (self.evaluates and deferred)))

    @property
    def joins_step(self) -> bool:
        return self.head and not self.repeats

    @property
    def counts_with_ranks(self) -> bool:
        """Whether the ranks of a group count their rows together."""
        return (self.hidden or self.head) and not self.evaluates and not self.repeats


def plan(trained: bool, training: bool, hidden: torch.Tensor) -> Plan:
    """The plan for a forward. `trained`: whether the head is trained. `training`: the mode of the module."""
    if not torch.is_grad_enabled() or not (trained or hidden.requires_grad):
        return Plan(hidden=False, head=False)
    return Plan(hidden=hidden.requires_grad, head=trained and training, evaluates=trained and not training,
                checkpoint=checkpoint_pass())


class Anchor:
    """Connects a loss to the graph at the place where a local head would be, and knows whether a backward needs that
    place."""

    def __init__(self, trained: bool) -> None:
        self.tensor = torch.zeros((), requires_grad=trained)
        if trained:
            with torch.enable_grad():
                self.tensor = self.tensor.view(())  # not a leaf, because torch does not say whether a leaf is needed

    def is_asked_for(self) -> bool:
        """Within a backward: false if it is torch.autograd.grad, or backward(inputs=...), of other tensors only."""
        node: Any = self.tensor.grad_fn
        return node is not None and bool(torch._C._will_engine_execute_node(node))


def refuse_evaluation(head: str, deferred: bool) -> None:
    """Raises the error for the backward of a loss in evaluation mode."""
    alone = ("make the LossHead with train_head=False" if deferred else
             "ask for that with torch.autograd.grad(loss, hidden)")
    raise RuntimeError(
        f"this loss of head {head!r} was computed in evaluation mode, which accumulates nothing on the server, so it has no "
        "backward for the head's weights: call .train() on the LossHead, or the model that holds it, before forward. If "
        f"only the gradient of the hidden states is wanted, {alone}")


class FirstPasses:
    """The results of first passes under checkpoints in the open step, for their repeated passes. Bounded."""

    _MOST = 256

    def __init__(self) -> None:
        self._step = -1
        self._given: OrderedDict[bytes, list[tuple[LossResult, float]]] = OrderedDict()

    @staticmethod
    def key(labels: NDArray[np.int32], hidden: torch.Tensor, objective: str = "") -> bytes:
        text = f"{tuple(hidden.shape)} {hidden.dtype} {objective}".encode()
        return hashlib.blake2b(labels.tobytes() + text, digest_size=16).digest()

    def note(self, step: int, key: bytes, result: LossResult, normalizer: float) -> None:
        if step != self._step:
            self._step = step
            self._given.clear()
        given = self._given.setdefault(key, [])
        if len(given) < 2:  # with two results for a key it would not be clear which one is meant
            given.append((dataclasses.replace(result, grad_hidden=None), normalizer))
        if len(self._given) > self._MOST:
            self._given.popitem(last=False)

    def find(self, key: bytes) -> tuple[LossResult | None, float | None]:
        """The result, or None if it is not known; and the divisor of the mean."""
        given = self._given.get(key, [])
        if not given:
            return None, None
        result, normalizer = given[-1]
        return (result if len(given) == 1 else None), normalizer
