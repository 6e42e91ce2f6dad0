# SPDX-License-Identifier: Apache-2.0
"""balance(): divides the layers of a model over the stages of a pipeline, and the classes of a head over the stages' GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WHOLE = 1000  # the sum of the shares, up to rounding


@dataclass(frozen=True)
class Balance:
    """The result of balance()."""

    layers: tuple[int, ...]  # for each stage: the number of its layers; the stages have the layers in order
    shares: tuple[int, ...]  # for each stage: its share of the head's classes, for Client.create_head(shares=)
    seconds: tuple[float, ...]  # for each stage: its time for a microbatch, with its share of the head
    bound: float  # seconds: the total time divided by the number of stages; the slowest stage is never faster than this


def balance(layer_seconds: Sequence[float], head_seconds: float, stages: int, *, stage_seconds: Sequence[float] = (),
            least_share: int = 0) -> Balance:
    """Divides the layers of a model and the classes of its head over the GPUs of a pipeline, so that all stages finish
    together.

    Use it for a server whose devices are the pipeline's own GPUs, one for each stage, and a head that is split by vocabulary.
    The layers stay in order, and are divided so that the slowest stage is as fast as possible. The head fills the time that
    the other stages have left.

        divided = lossd.torch.balance([0.0021] * 26, 0.0114, stages=4)
        client.create_head("lm", ..., split="vocabulary", shares=divided.shares)

    A stage that takes L seconds without the head gets the part (T - L) / head_seconds of the head, or `least_share` if
    `least_share` is more. T is chosen so that the parts add up to 1. `lossctl shares HEAD --balance` corrects shares with the
    same formula, from the times that the devices of a server took for their classes.

    Args:
      layer_seconds: for each layer, in order: the time of forward and backward of a microbatch.
      head_seconds: the time of the whole head for a microbatch on one GPU.
      stage_seconds: the time that each stage needs for other work, such as the embedding on the first stage. Empty: none.
      least_share: the smallest share of a stage, in thousandths of the head. With 0, a stage that is the slowest even without
        the head gets no share.

    Raises:
      ValueError: a time is negative or not finite, there are fewer layers than stages, or stage_seconds does not have one
        entry for each stage.
    """
    times = _checked("layer_seconds", layer_seconds)
    besides = _checked("stage_seconds", stage_seconds or [0.0] * stages)
    head = _checked("head_seconds", [head_seconds])[0]
    if not 1 <= stages <= len(times):
        raise ValueError(f"stages is {stages}; it must be in [1, {len(times)}], the number of layers")
    if len(besides) != stages:
        raise ValueError(f"stage_seconds has {len(besides)} entries for {stages} stages")
    if not 0 <= least_share <= _WHOLE // stages:
        raise ValueError(f"least_share is {least_share}; it must be in [0, {_WHOLE // stages}]")
    bound = (math.fsum(times) + math.fsum(besides) + head) / stages
    layers = _divide(times, besides, bound)
    loads = _loads(times, besides, layers)
    shares = _shares(_fill(loads, head, head * (least_share / _WHOLE)), head, least_share)
    whole = sum(shares)
    return Balance(layers, shares, tuple(load + head * share / whole for load, share in zip(loads, shares)), bound)


def _checked(name: str, seconds: Sequence[float]) -> list[float]:
    for index, value in enumerate(seconds):
        if not math.isfinite(value) or value < 0:
            where = name if name == "head_seconds" else f"{name}[{index}]"
            raise ValueError(f"{where} is {value}; it must be a time in seconds, finite and not negative")
    return [float(value) for value in seconds]


def _loads(times: list[float], besides: list[float], layers: tuple[int, ...]) -> list[float]:
    loads, first = [], 0
    for count, more in zip(layers, besides):
        loads.append(math.fsum(times[first:first + count]) + more)
        first += count
    return loads


def _divide(times: list[float], besides: list[float], bound: float) -> tuple[int, ...]:
    """The number of layers of each stage, at least one. `besides`: the other time of each stage.

    The slowest stage is as fast as possible, unless it is faster than `bound`, up to which the head fills the stages anyway.
    So the limit for a stage's time is the larger one of the two. Within this limit, the stages are as even as possible.
    """
    slowest = max(_loads(times, besides, _best(times, besides, math.inf, squares=False)))
    return _best(times, besides, max(slowest, bound) * (1 + 1e-12), squares=True)


def _best(times: list[float], besides: list[float], limit: float, *, squares: bool) -> tuple[int, ...]:
    """The division of the layers with no load above `limit` and the least cost: the largest load, or with `squares` the sum
    of the squared loads. A load is the time of a stage."""
    sums = [0.0]
    for time in times:
        sums.append(sums[-1] + time)
    count = len(times)
    # costs[end]: the least cost of the first `end` layers on the stages that the loop has passed.
    costs = [0.0 if end == 0 else math.inf for end in range(count + 1)]
    choices: list[list[int]] = []
    for more in besides:
        reached, begins = [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for begin in range(end):
                load = sums[end] - sums[begin] + more
                if load > limit or costs[begin] == math.inf:
                    continue
                cost = costs[begin] + load * load if squares else max(costs[begin], load)
                if cost < reached[end]:
                    reached[end], begins[end] = cost, begin
        costs = reached
        choices.append(begins)
    layers, end = [], count
    for begins in reversed(choices):
        layers.append(end - begins[end])
        end = begins[end]
    return tuple(reversed(layers))


def _fill(loads: list[float], head: float, least: float) -> list[float]:
    """The seconds of the head that each stage takes: at least `least`, and so that all stages that take more than `least`
    finish together."""
    lowest = min(loads)
    above = [load - lowest for load in loads]  # differences, because a short time of the head would be lost in rounding beside a long load
    order = sorted(above)
    rest = max(0.0, head - least * len(loads))
    level = 0.0
    for number in range(1, len(order) + 1):
        level = (math.fsum(order[:number]) + rest) / number
        if number == len(order) or level <= order[number]:
            break
    return [least + max(0.0, level - more) for more in above]


def _shares(parts: list[float], head: float, least: int) -> tuple[int, ...]:
    if max(parts) == 0:  # the head takes no time
        return (max(least, 1),) * len(parts)
    return tuple(max(least, round(_WHOLE * (part / head))) for part in parts)
