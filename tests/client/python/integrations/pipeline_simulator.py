# SPDX-License-Identifier: Apache-2.0
"""How long a pipeline takes whose ranks run tables of actions, with a server that answers a loss after some time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Kind(NamedTuple):
    name: str


class Action(NamedTuple):
    """As those of torch's tables, as far as they are read here."""

    stage_index: int
    computation_type: Kind
    microbatch_index: int


FORWARD, BACKWARD = Kind("FORWARD"), Kind("FULL_BACKWARD")


@dataclass(frozen=True)
class Simulated:
    seconds: float  # from the first forward to the last action
    kept: list[int]  # forwards whose activations each rank keeps at once, at most
    waits: float  # seconds that the rank of the last stage waits for answers of the server, all together


def one_forward_one_backward(stages: int, microbatches: int, slack: int) -> dict[int, list[Action]]:
    """1F1B with `slack` forwards more before the first backward of every stage."""
    order = {}
    for stage in range(stages):
        warm_up = min(microbatches, stages - stage + slack)
        actions = [Action(stage, FORWARD, number) for number in range(warm_up)]
        for number in range(microbatches):
            actions.append(Action(stage, BACKWARD, number))
            if warm_up + number < microbatches:
                actions.append(Action(stage, FORWARD, warm_up + number))
        order[stage] = actions
    return order


def simulate(order: dict[int, Sequence[Action]], stages: int, forward: float, backward: float, latency: float,
             service: float = 0.0) -> Simulated:
    """
    Args:
      order: the actions of every rank.
      forward, backward: seconds of a stage for a microbatch; those of the input and of the weights take half a backward.
      latency: seconds from the end of a forward of the last stage until the server's answer.
      service: seconds of these that the server has for one microbatch alone.

    Raises:
      AssertionError: ranks wait for each other.
    """
    seconds = {"FORWARD": forward, "FULL_BACKWARD": backward, "BACKWARD_INPUT": backward / 2, "BACKWARD_WEIGHT": backward / 2}
    ends: dict[tuple[str, int, int], float] = {}  # of "F" and "B", which others wait for
    clocks, places = dict.fromkeys(order, 0.0), dict.fromkeys(order, 0)
    keeps, kept = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    server, waits = 0.0, 0.0
    while any(places[rank] < len(order[rank]) for rank in order):
        before = sum(places.values())
        for rank, actions in order.items():
            while places[rank] < len(actions):
                stage, kind, number = actions[places[rank]][:3]
                needed = None
                if kind.name == "FORWARD" and stage > 0:
                    needed = ("F", stage - 1, number)
                elif kind.name in ("FULL_BACKWARD", "BACKWARD_INPUT"):
                    needed = ("B", stage + 1, number)
                if needed is not None and needed not in ends:
                    break
                begin = max(clocks[rank], ends[needed] if needed else 0.0)
                if needed == ("B", stages, number):
                    waits += max(0.0, begin - clocks[rank])
                clocks[rank] = begin + seconds[kind.name]
                places[rank] += 1
                if kind.name == "FORWARD":
                    ends["F", stage, number] = clocks[rank]
                    keeps[rank] += 1
                    kept[rank] = max(kept[rank], keeps[rank])
                    if stage == stages - 1:
                        asked = max(server, clocks[rank])
                        server = asked + service
                        ends["B", stages, number] = asked + latency
                    continue
                if kind.name != "BACKWARD_WEIGHT":
                    ends["B", stage, number] = clocks[rank]
                keeps[rank] -= kind.name != "BACKWARD_INPUT"
        assert sum(places.values()) > before, f"ranks wait for each other: {places}"
    return Simulated(max(clocks.values()), [kept[rank] for rank in sorted(kept)], waits)
