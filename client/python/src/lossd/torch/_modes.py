# SPDX-License-Identifier: Apache-2.0
"""What a forward of a LossHead is for (Plan): a step, an evaluation, or the repeated pass of an activation checkpoint. Also
the autograd functions of its loss (Direct, Deferred), and functions that find out from the call stack which code of torch
calls lossd."""

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


F = TypeVar("F", bound=Callable[..., object])


def outside_of_compile(function: F) -> F:
    """A decorator: the function runs uncompiled when code under torch.compile calls it. The compiled graph is cut once at the
    call, without a warning.

    Code that talks to a server cannot be compiled. Without this decorator, torch.compile would trace the calls into the
    client and cut the graph in many places. torch 1.13 and 2.0 have no torch.compiler.disable, so there the decorator has no
    effect.
    """
    disable = getattr(getattr(torch, "compiler", None), "disable", None)
    return function if disable is None else cast(F, disable(function))


# The call stack shows which functions of torch call lossd. torch has no other way to find this out.

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__
# The functions of torch.utils.checkpoint that run the user's function again, to restore the tensors that its backward needs.
# The names are those of torch 1.13, 2.0 and later versions.
_RECOMPUTES = frozenset(("unpack", "unpack_hook", "recompute_fn"))


def _frames() -> Iterator[FrameType]:
    """The stack frames of this thread, from the caller's outward."""
    frame = inspect.currentframe()
    frame = None if frame is None else frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


class Pass(enum.Enum):
    """The pass of torch.utils.checkpoint (an activation checkpoint) to which a forward belongs."""

    ORDINARY = enum.auto()  # not under a checkpoint, or the only pass that has gradients
    FIRST = enum.auto()  # the first pass; a repeated one may follow, to restore the tensors that this one saves
    REPEATED = enum.auto()  # the repeated pass, whose result is not used


def checkpoint_pass() -> Pass:
    """The pass to which a forward with gradients belongs.

    A reentrant checkpoint (use_reentrant=True) has no gradients in its first pass. Its second pass, which runs in `backward`,
    is ORDINARY. If checkpoints are nested, the innermost one decides.
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
    """What a pipeline schedule that calls a loss function needs."""

    LOSS = enum.auto()  # a loss that will have its backward
    VALUE = enum.auto()  # only the loss's value: schedule.eval(), or a schedule without backward
    SHAPE = enum.auto()  # only a tensor whose gradient has the right shape; the inputs are meaningless


def asked_by_schedule() -> Asked:
    """What the schedule of torch.distributed.pipelining that is calling a loss function needs. LOSS if no schedule calls it.

    If the stages were made without example arguments, the schedule calls the loss function once before its first step, with
    uninitialized memory, to find the shape of the gradient (SHAPE). These rows must not reach the server, and only the name
    of the calling function identifies the call. If that name changes in torch, the step has one microbatch too many and is
    refused (StepTracker.group).
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
_FRAMES_OF_COLLECTION = 16  # at most so many frames lie between requires_grad_() and a module's named_modules()


def wanted_of_parameters() -> bool | None:
    """If this is called within Module.requires_grad_() of torch, the argument of requires_grad_(). None: it is not."""
    for frame in itertools.islice(_frames(), _FRAMES_OF_COLLECTION):
        if frame.f_code is _REQUIRES_GRAD:
            return bool(frame.f_locals["requires_grad"])
    return None


class _Freezable(Protocol):
    """The members of LossHead that heed_requires_grad() uses."""

    train_head: bool
    frozen_on_server: bool


def heed_requires_grad(head: _Freezable) -> None:
    """If this is called within requires_grad_() of a module, freezes or unfreezes the head accordingly. A head that is frozen
    on the server stays frozen."""
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


# The autograd functions of a loss. Their backward passes upstream gradients to a Job and returns the Job's gradients.


class Direct(torch.autograd.Function):
    """The loss of a Job whose gradients the server computes in forward. Without a value (None), forward returns NaN, and
    Job.fill_lazy_loss writes the value later. Backward returns the gradients, times a factor."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, job: Job, value: float | None, *hidden: torch.Tensor) -> torch.Tensor:
        ctx.job = job
        return job.scalar(math.nan if value is None else value)

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
    """The row outputs of a Job whose gradients the server computes in backward, from the gradients of the row outputs."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, hidden: torch.Tensor, job: Job, names: list[RowOutput],
                rows: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ctx.job, ctx.names = job, names
        ctx.save_for_backward(*job.kept)
        ctx.set_materialize_grads(False)
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        job: Job | None = ctx.job
        if job is None:
            raise RuntimeError(_SECOND_BACKWARD)
        job.check_backward()
        _ = ctx.saved_tensors  # raises if they were changed in place
        ctx.job = None
        job.run_backward(dict(zip(ctx.names, upstream)))
        return torch.zeros(()), _once_differentiable(job.gradients()[0]), None, None, None


_SECOND_BACKWARD = (
    "backward ran twice on one loss; the server accumulated its weight gradient once. Compute the loss again, or add "
    "losses up before backward()")


class _NotTwice(torch.autograd.Function):
    """The identity for a gradient. Its backward raises, because lossd has no second derivatives."""

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
    """What has to be computed for one microbatch. plan() makes it."""

    hidden: bool  # compute the gradient of the hidden states
    head: bool  # add the gradient of the head to the step
    # The head is trained, but the module is in evaluation mode. Then the head's gradient is not accumulated, and a backward
    # that would give a local head a gradient raises.
    evaluates: bool = False
    # The pass of torch.utils.checkpoint (use_reentrant=False). The result of a repeated pass is not used, but the pass must
    # save the same tensors as the first pass.
    checkpoint: Pass = Pass.ORDINARY

    @property
    def repeats(self) -> bool:
        return self.checkpoint is Pass.REPEATED

    @property
    def has_graph(self) -> bool:
        """Whether the loss is part of an autograd graph."""
        return self.hidden or self.head or self.evaluates

    def computes(self, deferred: bool) -> bool:
        """Whether the server computes gradients, in forward or (`deferred`) in backward."""
        return not self.repeats and (self.head or (self.hidden and not (self.evaluates and deferred)))

    @property
    def joins_step(self) -> bool:
        return self.head and not self.repeats

    @property
    def counts_with_ranks(self) -> bool:
        """Whether the normalizer counts the rows of all ranks of a process group, not only this rank's."""
        return (self.hidden or self.head) and not self.evaluates and not self.repeats


def plan(trained: bool, training: bool, hidden: torch.Tensor) -> Plan:
    """The plan for a forward. `trained`: whether the head is trained. `training`: the mode of the module."""
    if not torch.is_grad_enabled() or not (trained or hidden.requires_grad):
        return Plan(hidden=False, head=False)
    return Plan(hidden=hidden.requires_grad, head=trained and training, evaluates=trained and not training,
                checkpoint=checkpoint_pass())


class Anchor:
    """A scalar in the autograd graph of a loss, in the place of a local head's weight. It shows whether a backward asks for
    the weight's gradient."""

    def __init__(self, trained: bool) -> None:
        self.tensor = torch.zeros((), requires_grad=trained)
        if trained:
            with torch.enable_grad():
                self.tensor = self.tensor.view(())  # not a leaf: torch cannot tell whether a leaf is needed

    def is_asked_for(self) -> bool:
        """Whether the backward that is running needs the gradient of a local head. False for torch.autograd.grad and
        backward(inputs=...) that ask only for gradients of other tensors. Call it within a backward."""
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
    """Keeps the results of first passes under activation checkpoints in the open step. A repeated pass takes the result from
    here, and the server does not compute it again. Bounded."""

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
        if len(given) < 2:  # a second result makes find() return none
            given.append((dataclasses.replace(result, grad_hidden=None), normalizer))
        if len(self._given) > self._MOST:
            self._given.popitem(last=False)

    def find(self, key: bytes) -> tuple[LossResult | None, float | None]:
        """The result of the first pass with this key, and the divisor of its mean. The result is None if there is none or if
        several first passes have the key; the divisor is None if there is none."""
        given = self._given.get(key, [])
        if not given:
            return None, None
        result, normalizer = given[-1]
        return (result if len(given) == 1 else None), normalizer
