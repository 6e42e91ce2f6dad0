# SPDX-License-Identifier: Apache-2.0
"""Schedules of torch.distributed.pipelining that give the server time to compute the head (torch 2.4 or later)."""

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
    """A 1F1B schedule that treats the server like `slack` additional stages after the last one. It takes the arguments of
    Schedule1F1B, and `slack`.

    In Schedule1F1B, the last stage needs the gradient of a loss as soon as it has the loss, and would wait for the server.
    Here every stage runs `slack` more forwards before its first backward. So the server computes the loss of a microbatch
    while the last stage does a forward and a backward of each of `slack` other microbatches. If the server takes longer than
    that, the last stage waits for it.

    Stage i of n keeps the activations of n - i + slack microbatches, `slack` more than in Schedule1F1B, but at most those of
    all microbatches of a step. Losses and gradients are the same.
    """

    def __init__(self, *args: Any, slack: int = 1, **options: Any) -> None:
        """ValueError if `slack` is not a positive integer."""
        _check_slack(slack)
        super().__init__(*args, **options)
        _keep_pace_where_needed(args[0] if args else options["stage"])
        # From this private member Schedule1F1B computes the number of forwards before the first backward.
        self._num_stages: int = self._num_stages + slack


def overlapped(kind: Any, slack: int = 1) -> Callable[..., Any]:
    """Returns a function that makes a schedule like `kind` that gives the server time to compute the head. The function takes
    the arguments of `kind`.

        schedule = overlapped(ScheduleInterleaved1F1B, slack=2)(stages, n_microbatches=8, loss_fn=loss_fn)

    Each rank runs its forwards in the order of `kind`, and its backwards, too, but runs `slack` more forwards before every
    backward. If a rank has several stages, forwards of all of them count. A rank keeps the activations of `slack` more
    forwards than with `kind`. The server gets the time of `slack` forwards and backwards of one stage. Losses and gradients
    are the same.

    Args:
      kind: Schedule1F1B (then this makes an Overlapped1F1B), ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble or
        ScheduleZBVZeroBubble.
      slack: the number of additional forwards before every backward; a positive integer.

    Raises:
      ValueError: `slack` is not a positive integer, or `kind` is another schedule. ScheduleGPipe and ScheduleLoopedBFS run all
        forwards before they need a gradient, and ScheduleDualPipeV merges a forward and a backward into one action.
      RuntimeError: this version of torch has no table of the actions of each rank, which could be put into another order.
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
        """Replaces the schedule's method that adds communication to the table of each rank. Puts the actions into the new
        order before, unless the table already has communication."""
        if format == "compute_only":
            schedule.pipeline_order = actions = {rank: delayed(of_rank, slack) for rank, of_rank in actions.items()}
        try:
            kind._prepare_schedule_with_comms(schedule, actions, format)
        except AssertionError as error:  # two ranks would wait for each other
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
    """Makes the thread of a stage wait for the end of each forward and backward before it begins the next one. No effect on a
    CPU.

    Call it once for each stage of a process that computes a part of a head next to its stages (lossd.torch.colocate() on
    GPUs). The schedules of this module call it themselves if colocate() was called before.

    Without it, all processes can stand still. Another stage may wait for this process's part of the head, while work of this
    stage on the GPU waits for that other stage. CUDA queues about a thousand kernels behind work that waits. The launch of
    one more kernel blocks, and holds a lock of CUDA's driver meanwhile. Then the part of the head cannot begin.

    Args:
      stage: a stage of torch.distributed.pipelining. One forward or backward of it must not have more than about a thousand
        kernels.
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
    """The actions of one rank in another order: each action that is not a forward is moved behind `slack` more forwards, or
    behind the last forward if fewer are left. A None in `actions` means that there is nothing to do, and is left out.
    """
    found: list[Any] = []
    # For each action that is not a forward: the number of forwards that must precede it, and the action. In the given order.
    waiting: deque[tuple[int, Any]] = deque()
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
