# SPDX-License-Identifier: Apache-2.0
"""How many layers each stage of a pipeline gets, and which part of a head that lies on the stages' own GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WHOLE = 1000  # the sum of the shares, but for rounding


@dataclass(frozen=True)
class Balance:
    """What balance() says of each stage."""

    layers: tuple[int, ...]  # how many layers it has; stages have them in order
    shares: tuple[int, ...]  # of the head's classes: Client.create_head(shares=)
    seconds: tuple[float, ...]  # that it takes for a microbatch, its share of the head included
    bound: float  # seconds that no division of layers and head goes below: all time divided by the number of stages


def balance(layer_seconds: Sequence[float], head_seconds: float, stages: int, *, stage_seconds: Sequence[float] = (),
            least_share: int = 0) -> Balance:
    """Divides the layers of a model and the classes of its head over the GPUs of a pipeline, so that all end together.

    For a server whose devices are the pipeline's own GPUs, one for each stage, and a head that is split by vocabulary. The
    layers go to the stages in order so that the slowest stage is as fast as can be; the head fills what the others have left.

        divided = lossd.torch.balance([0.0021] * 26, 0.0114, stages=4)
        client.create_head("lm", ..., split="vocabulary", shares=divided.shares)

    A stage that takes L seconds without the head gets the part (T - L) / head_seconds of it, or its least share if that is
    more; the parts add up to 1, which says what T is. `lossctl shares HEAD --balance` corrects shares by the same formula from what the
    devices of a server were measured to take for their classes.

    Args:
      layer_seconds: of each layer, in order: forward and backward of a microbatch.
      head_seconds: of the whole head on one GPU, likewise.
      stage_seconds: what each stage does besides, such as the embedding on the first one; empty: nothing.
      least_share: of every stage, in thousandths of the head. 0: a stage that is late without it gets none.

    Raises:
      ValueError: a time is negative or not finite, there are fewer layers than stages, or stage_seconds has another
        number of entries than there are stages.
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
    """At least one layer each. The slowest stage is as fast as can be; then, as long as none is slower than that or than
    `bound`, which the head fills, stages are as even as can be."""
    slowest = max(_loads(times, besides, _best(times, besides, math.inf, squares=False)))
    return _best(times, besides, max(slowest, bound) * (1 + 1e-12), squares=True)


def _best(times: list[float], besides: list[float], limit: float, *, squares: bool) -> tuple[int, ...]:
    """The division whose largest load, or whose sum of squared loads, is least, with no load above `limit`."""
    sums = [0.0]
    for time in times:
        sums.append(sums[-1] + time)
    count = len(times)
    costs = [0.0 if end == 0 else math.inf for end in range(count + 1)]  # of the layers before `end`, by the stages so far
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
    """The part of the head's time that each stage takes, `least` or more, so that those that take more end together."""
    lowest = min(loads)
    above = [load - lowest for load in loads]  # beside the lowest load, a short time of the head would be rounded away
    order = sorted(above)
    rest = max(0.0, head - least * len(loads))
    level = 0.0
    for number in range(1, len(order) + 1):
        level = (math.fsum(order[:number]) + rest) / number
        if number == len(order) or level <= order[number]:
            break
    return [least + max(0.0, level - more) for more in above]


def _shares(parts: list[float], head: float, least: int) -> tuple[int, ...]:
    if max(parts) == 0:  # there is no head to speak of
        return (max(least, 1),) * len(parts)
    return tuple(max(least, round(_WHOLE * (part / head))) for part in parts)
