# SPDX-License-Identifier: Apache-2.0
"""What a forward is for: a step, an evaluation, or a checkpoint's second pass; and what follows for its backward."""

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


# What torch.compile leaves alone.

F = TypeVar("F", bound=Callable[..., object])


def outside_of_compile(function: F) -> F:
    """A function that runs as it is when a compiled one calls it: the graph is cut there once, and nothing is said.

    What talks to a server cannot be compiled. Without this, torch.compile would follow the calls into the client and cut
    the graph in many places. torch 1.13 has no compiler, torch 2.0 no torch.compiler.disable.
    """
    disable = getattr(getattr(torch, "compiler", None), "disable", None)
    return function if disable is None else cast(F, disable(function))


# What the functions of torch that are running now, above a call, say of it. Nothing else tells.

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__
# What runs a function again so that tensors are there that its backward needs: in torch 1.13 and 2.0, and later.
_RECOMPUTES = frozenset(("unpack", "unpack_hook", "recompute_fn"))


def _frames() -> Iterator[FrameType]:
    """The caller's frame, and those above it on this thread."""
    frame = inspect.currentframe()
    frame = None if frame is None else frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


class Pass(enum.Enum):
    """Which pass of torch.utils.checkpoint a forward belongs to."""

    ORDINARY = enum.auto()  # there is no checkpoint, or this is the only forward with gradients
    FIRST = enum.auto()  # the function may be run again, for the tensors that it saves
    REPEATED = enum.auto()  # it runs again; what it returns goes nowhere


def checkpoint_pass() -> Pass:
    """Of a forward with gradients.

    A reentrant checkpoint (use_reentrant=True) has no gradients in its first pass, and its second one is what counts: it
    runs in `backward`. What is nearest to the forward decides, for checkpoints in checkpoints.
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
    """What a pipeline schedule wants of a loss."""

    LOSS = enum.auto()  # that will have its backward
    VALUE = enum.auto()  # schedule.eval(), or a schedule without backward
    SHAPE = enum.auto()


def asked_by_schedule() -> Asked:
    """
    Before its first step a schedule whose stages were made without example arguments calls the loss once with memory
    that holds anything, to see the shape of the gradient. Those rows must not reach the server, and only the caller's
    name tells them. Should the name change, the step has one microbatch too many and is refused (StepTracker.group).
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
_FRAMES_OF_COLLECTION = 16  # that it takes at most from there to a module's named_modules()


def wanted_of_parameters() -> bool | None:
    """Whether Module.requires_grad_(True or False) of a module is collecting its parameters. None: it is not."""
    for frame in itertools.islice(_frames(), _FRAMES_OF_COLLECTION):
        if frame.f_code is _REQUIRES_GRAD:
            return bool(frame.f_locals["requires_grad"])
    return None


class _Freezable(Protocol):
    train_head: bool
    frozen_on_server: bool


def heed_requires_grad(head: _Freezable) -> None:
    """If requires_grad_() of a module is collecting its parameters now, it holds for the head."""
    wanted = wanted_of_parameters()
    if wanted is not None and not (wanted and head.frozen_on_server):
        head.train_head = wanted


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning that names the line of the program, not one of torch or lossd."""
    level = 1
    for level, frame in enumerate(_frames(), start=1):
        if not str(frame.f_globals.get("__name__")).split(".")[0] in ("torch", "lossd"):
            break
    warnings.warn(message, category, stacklevel=level)


# The place of a loss in autograd's graph: what backward brings to a Job, and what it takes from there.


class Direct(torch.autograd.Function):
    """Gradients that are known already."""

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
    """Gradients that the server computes when the upstream gradients of the rows are known."""

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
    """Passes a gradient on and raises if it is differentiated itself."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise RuntimeError("lossd has no second derivatives: the gradient of its loss cannot be differentiated")


def _once_differentiable(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or not torch.is_grad_enabled():  # enabled with create_graph=True only
        return gradient
    marked: torch.Tensor = _NotTwice.apply(torch.zeros((), requires_grad=True), gradient)
    return marked


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is asked of one microbatch."""

    hidden: bool  # the hidden states' gradient
    head: bool  # the head's gradient joins the step
    # The head is trained, but the module is in evaluation mode. Its gradient is not accumulated, and a backward that would
    # have given one to a local head is refused.
    evaluates: bool = False
    # The function around it runs for its first or second time under torch.utils.checkpoint (use_reentrant=False). What the
    # second one returns goes nowhere, but tensors that are saved on the way have to be the same.
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
        """Whether the ranks of a group compute it together."""
        return (self.hidden or self.head) and not self.evaluates and not self.repeats


def plan(trained: bool, training: bool, hidden: torch.Tensor) -> Plan:
    """`trained`: the head is. `training`: the module's mode."""
    if not torch.is_grad_enabled() or not (trained or hidden.requires_grad):
        return Plan(hidden=False, head=False)
    return Plan(hidden=hidden.requires_grad, head=trained and training, evaluates=trained and not training,
                checkpoint=checkpoint_pass())


class Anchor:
    """Ties a loss into the graph where the head's gradient would be one's; knows whether a backward asks for it."""

    def __init__(self, trained: bool) -> None:
        self.tensor = torch.zeros((), requires_grad=trained)
        if trained:
            with torch.enable_grad():
                self.tensor = self.tensor.view(())  # not a leaf: torch tells nothing of leaves

    def is_asked_for(self) -> bool:
        """Within a backward: not, if it is torch.autograd.grad, or backward(inputs=...), of other tensors alone."""
        node: Any = self.tensor.grad_fn
        return node is not None and bool(torch._C._will_engine_execute_node(node))


def refuse_evaluation(head: str, deferred: bool) -> None:
    """Of a backward."""
    alone = ("make the LossHead with train_head=False" if deferred else
             "ask for that with torch.autograd.grad(loss, hidden)")
    raise RuntimeError(
        f"this loss of head {head!r} was computed in evaluation mode, which accumulates nothing on the server, so it has no "
        "backward for the head's weights: call .train() on the LossHead, or the model that holds it, before forward. If "
        f"only the gradient of the hidden states is wanted, {alone}")


class FirstPasses:
    """What first passes under checkpoints have given in the open step, for their second ones. Bounded."""

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
        if len(given) < 2:  # of two it is not known which is which
            given.append((dataclasses.replace(result, grad_hidden=None), normalizer))
        if len(self._given) > self._MOST:
            self._given.popitem(last=False)

    def find(self, key: bytes) -> tuple[LossResult | None, float | None]:
        """The result, or None where it is not known; and what a mean was divided by."""
        given = self._given.get(key, [])
        if not given:
            return None, None
        result, normalizer = given[-1]
        return (result if len(given) == 1 else None), normalizer
