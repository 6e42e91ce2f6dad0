# SPDX-License-Identifier: Apache-2.0
"""Schedules of torch.distributed.pipelining that leave the server time for the head (torch 2.4 or later)."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import Schedule1F1B

from lossd.torch import _colocate

_REORDERED = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")


class Overlapped1F1B(Schedule1F1B):
    """1F1B as if the server were `slack` more stages behind the last one; takes Schedule1F1B's arguments besides.

    Schedule1F1B's last stage needs a loss's gradient as soon as it has the loss, and would wait for the server. Here
    every stage runs `slack` forwards more before its first backward, so that the server computes a microbatch's loss while
    the last stage does a forward and a backward of each of `slack` other ones. An answer that takes longer than these
    makes the last stage wait for the rest.

    Stage i of n keeps activations of n - i + slack microbatches, `slack` more than in 1F1B, and at most those of a step.
    Losses and gradients are the same.
    """

    def __init__(self, *args: Any, slack: int = 1, **options: Any) -> None:
        """ValueError if `slack` is not a positive integer."""
        _check_slack(slack)
        super().__init__(*args, **options)
        _keep_pace_where_needed(args[0] if args else options["stage"])
        # What Schedule1F1B counts forwards before the first backward by; torch has no public name for it.
        self._num_stages: int = self._num_stages + slack


def overlapped(kind: Any, slack: int = 1) -> Callable[..., Any]:
    """What makes schedules of `kind`, with its arguments, that leave the server time for the head.

        schedule = overlapped(ScheduleInterleaved1F1B, slack=2)(stages, n_microbatches=8, loss_fn=loss_fn)

    Each rank runs its forwards and its backwards in the order of `kind`, and every backward after `slack` forwards more.
    With several stages on a rank, each forward of one stage counts. A rank keeps the activations of `slack` more such
    forwards, and the server has the time of `slack` forwards and backwards of one stage. Losses and gradients are the
    same.

    Args:
      kind: Schedule1F1B (then this makes an Overlapped1F1B), ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble or
        ScheduleZBVZeroBubble.
      slack: positive.

    Raises:
      ValueError: `slack` is not positive, or `kind` cannot have it: ScheduleGPipe and ScheduleLoopedBFS run all forwards
        before they need a gradient, and ScheduleDualPipeV joins a forward and a backward to one action.
      RuntimeError: this version of torch runs several stages of a rank in steps that all ranks do together.
    """
    _check_slack(slack)
    if kind is Schedule1F1B or kind is Overlapped1F1B:
        return functools.partial(Overlapped1F1B, slack=slack)
    name = getattr(kind, "__name__", str(kind))
    known = tuple(getattr(pipelining, each) for each in _REORDERED if hasattr(pipelining, each))
    if not (isinstance(kind, type) and issubclass(kind, known)):
        raise ValueError(f"kind is {name}, which cannot leave the server more time; it must be Schedule1F1B, "
                         f"{', '.join(_REORDERED[:-1])} or {_REORDERED[-1]}")
    if not hasattr(kind, "_prepare_schedule_with_comms"):
        raise RuntimeError(f"{name} of this version of torch has no table of actions that could be put into another order; "
                           "take a newer torch, or Overlapped1F1B")

    def prepare(schedule: Any, actions: dict[int, list[Any]], format: str = "compute_only") -> None:
        """Adds communication to the table of each rank, unless it is in it."""
        if format == "compute_only":
            schedule.pipeline_order = actions = {rank: delayed(of_rank, slack) for rank, of_rank in actions.items()}
        try:
            kind._prepare_schedule_with_comms(schedule, actions, format)
        except AssertionError as error:  # of two ranks each would wait for the other
            raise ValueError(f"slack is {slack}, with which {name} cannot run these stages and microbatches: "
                             f"{error}") from error

    def init(schedule: Any, *args: Any, **options: Any) -> None:
        kind.__init__(schedule, *args, **options)
        for stage in args[0] if args else options["stages"]:
            _keep_pace_where_needed(stage)

    members = {"__init__": init, "_prepare_schedule_with_comms": prepare, "__doc__": kind.__doc__}
    return type(f"Overlapped{name.removeprefix('Schedule')}", (kind,), members)


_COMPUTES = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def keep_pace(stage: Any) -> None:
    """Has the thread of a stage wait for each forward and backward before it begins the next one. On a CPU nothing changes.

    Where a process computes a part of a head beside its stage (lossd.torch.colocate() on GPUs), another stage may wait for that part,
    and this stage's work on the GPU for the other stage. CUDA takes about a thousand kernels behind such work. A call of this stage that
    adds one more waits, and CUDA's driver is locked while it waits: the part of the head cannot begin, and all stand still. The schedules
    of this module do this themselves if colocate() was called before; other schedules need it for each of their stages, once.

    Args:
      stage: a stage of torch.distributed.pipelining, one forward or backward of which is not more than these thousand kernels.
    """
    if torch.device(stage.device).type != "cuda":
        return
    last: list[torch.cuda.Event] = []

    def waiting(compute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compute)
        def call(*args: Any, **options: Any) -> Any:
            if last:
                last.pop().synchronize()
            result = compute(*args, **options)
            last.append(torch.cuda.Event())
            last[0].record(torch.cuda.current_stream(stage.device))
            return result
        return call

    for name in _COMPUTES:
        if hasattr(stage, name):
            setattr(stage, name, waiting(getattr(stage, name)))


def _keep_pace_where_needed(stage: Any) -> None:
    if _colocate.computes_here():
        keep_pace(stage)


def delayed(actions: Sequence[Any], slack: int) -> list[Any]:
    """The actions of one rank, in another order: each action that is no forward comes `slack` forwards later, or
    after the last forward if fewer are left. A None in `actions` means that there is nothing to do; it is left out.
    """
    found: list[Any] = []
    waiting: deque[tuple[int, Any]] = deque()  # after how many forwards, in the order of `actions`
    forwards = 0
    for action in actions:
        if action is None:
            continue
        if action.computation_type.name != "FORWARD":
            waiting.append((forwards + slack, action))
            continue
        found.append(action)
        forwards += 1
        while waiting and waiting[0][0] <= forwards:
            found.append(waiting.popleft()[1])
    return [*found, *(action for _, action in waiting)]


def _check_slack(slack: int) -> None:
    if isinstance(slack, bool) or not isinstance(slack, int) or slack < 1:
        raise ValueError(f"slack is {slack!r}; it must be a positive integer, the forwards by which backwards come later")
