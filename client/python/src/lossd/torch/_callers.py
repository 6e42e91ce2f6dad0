# SPDX-License-Identifier: Apache-2.0
"""What the functions of torch that are running now, above a call, say of it. Nothing else tells."""

from __future__ import annotations

import enum
import inspect
import itertools
import warnings
from collections.abc import Iterator
from types import FrameType

import torch
import torch.utils.checkpoint

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


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning that names the line of the program, not one of torch or lossd."""
    level = 1
    for level, frame in enumerate(_frames(), start=1):
        if not str(frame.f_globals.get("__name__")).split(".")[0] in ("torch", "lossd"):
            break
    warnings.warn(message, category, stacklevel=level)
