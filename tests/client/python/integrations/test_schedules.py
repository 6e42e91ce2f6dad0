# SPDX-License-Identifier: Apache-2.0
"""Schedules that leave the server time for the head: what they hide, what they keep, and that they learn alike."""

from __future__ import annotations

import itertools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.distributed import pipelining

import lossd
from lossd.torch import HeadOptimizer, LossHead, PipelineLoss, _colocate, schedules
from lossd.torch.schedules import Overlapped1F1B, delayed, keep_pace, overlapped


# How long a pipeline takes whose ranks run tables of actions, with a server that answers a loss after some time.


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


D, V, ROWS, STAGES, MICROBATCHES, STEPS, LR = 12, 50, 4, 4, 6, 2, 0.5
SLACKS = (0, 1, 2, 5, 9)  # 0: Schedule1F1B
SEVERAL_STAGES = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")


def stages_of(ranks, each, kind):
    """The stages of rank 0, without processes."""
    count = ranks * each
    mine = (0, count - 1) if "ZBV" in kind.__name__ or "Dual" in kind.__name__ else range(0, count, ranks)
    return [types.SimpleNamespace(stage_index=index, num_stages=count, group_size=ranks, group_rank=0, is_first=index == 0,
                                  is_last=index == count - 1, submod=torch.nn.Identity()) for index in mine]


def tables(schedule):
    return {rank: [action for action in actions if action is not None] for rank, actions in schedule.pipeline_order.items()}


def test_what_slack_hides_of_a_latency():
    stages, microbatches, forward, backward = 4, 24, 1.0, 2.0
    both = forward + backward
    for slack, latency in itertools.product(range(4), (0.0, 2.0, 3.0, 5.0, 6.0, 8.0)):
        found = simulate(one_forward_one_backward(stages, microbatches, slack), stages, forward, backward, latency)
        assert found.kept == [stages - stage + slack for stage in range(stages)]
        if latency <= slack * both:  # hidden, but beside the first forwards alone and beside the last backwards alone
            seen = max(0.0, latency - slack * forward) + max(0.0, latency - slack * backward)
            expected = (microbatches + stages - 1) * both + seen
            assert found.seconds == pytest.approx(expected), (slack, latency)
        else:  # slack + 1 microbatches go round between last stage and server
            least = (stages - 1) * both + microbatches * (latency + both) / (slack + 1)
            assert least <= found.seconds <= least + latency, (slack, latency)
    # A server that has each microbatch for as long as a stage has it: two of latency need a slack of two.
    steps = [simulate(one_forward_one_backward(stages, microbatches, slack), stages, forward, backward, 6.0, 3.0).seconds
             for slack in range(4)]
    assert steps[0] > 1.8 * steps[1] and steps[1] > 1.3 * steps[2] and steps[2] == pytest.approx(steps[3], rel=0.05)


@pytest.mark.parametrize("name, ranks, each, microbatches", [
    *((name, *sizes) for name in SEVERAL_STAGES for sizes in ((2, 2, 4), (3, 2, 9), (4, 2, 4), (4, 2, 24))),
    *((name, 4, 3, 16) for name in SEVERAL_STAGES[:2])])
def test_tables_of_several_stages_on_a_rank(name, ranks, each, microbatches):
    kind = getattr(pipelining, name)
    stages = stages_of(ranks, each, kind)
    ordinary = tables(kind(stages, microbatches, loss_fn=lambda *_: 0))
    count, latency = ranks * each, 3.0  # of a forward and a backward of two stages
    before = simulate(ordinary, count, 0.5, 1.0, latency)
    seconds = [before.seconds]
    for slack in (1, 2, 3, 100):
        schedule = overlapped(kind, slack)(stages, microbatches, loss_fn=lambda *_: 0)
        assert isinstance(schedule, kind) and type(schedule).__name__ == name.replace("Schedule", "Overlapped")
        table = tables(schedule)
        for rank, actions in table.items():  # the same, in the same order among forwards and among the others
            for forwards in (True, False):
                assert [each for each in actions if (each.computation_type.name == "FORWARD") is forwards] == [
                    each for each in ordinary[rank] if (each.computation_type.name == "FORWARD") is forwards]
        found = simulate(table, count, 0.5, 1.0, latency)
        assert all(now <= least + slack for now, least in zip(found.kept, before.kept)), (slack, found)
        seconds.append(found.seconds)
    assert seconds[0] > seconds[1] > seconds[2] >= seconds[3]
    if microbatches > 8:  # of what the latency cost, a seventh at most is left
        hidden = simulate(ordinary, count, 0.5, 1.0, 0.0).seconds
        assert seconds[3] - hidden < (1 / 7) * (seconds[0] - hidden), (seconds, hidden)


def test_backwards_come_after_forwards_more():
    actions = [action and Action(0, *action) for action in (
        (FORWARD, 0), None, (BACKWARD, 0), (FORWARD, 1), (BACKWARD, 1), (FORWARD, 2), (BACKWARD, 2))]
    def order(slack):
        return "".join(f"{each.computation_type.name[:2]}{each.microbatch_index} " for each in delayed(actions, slack))
    assert order(1) == "FO0 FO1 FU0 FO2 FU1 FU2 " and order(2) == order(9) == "FO0 FO1 FO2 FU0 FU1 FU2 "
    assert delayed([], 1) == []


def test_schedules_that_are_refused():
    for slack in (0, -1, True, 1.0, "2", None):
        with pytest.raises(ValueError, match=f"slack is {slack!r}; it must be a positive integer"):
            Overlapped1F1B(None, 4, slack=slack)
        with pytest.raises(ValueError, match=f"slack is {slack!r}; it must be a positive integer"):
            overlapped(pipelining.ScheduleInterleaved1F1B, slack)
    for kind in (pipelining.ScheduleDualPipeV, pipelining.ScheduleLoopedBFS, pipelining.ScheduleGPipe, "1F1B"):
        with pytest.raises(ValueError, match="kind is .*, which cannot leave the server more time"):
            overlapped(kind)
    made = overlapped(pipelining.Schedule1F1B, slack=3)
    assert made.func is Overlapped1F1B and made.keywords == {"slack": 3}


def test_torch_without_tables(monkeypatch):
    class ScheduleInterleaved1F1B:
        pass
    monkeypatch.setattr(pipelining, "ScheduleInterleaved1F1B", ScheduleInterleaved1F1B)
    with pytest.raises(RuntimeError, match="ScheduleInterleaved1F1B of this version of torch has no table"):
        overlapped(ScheduleInterleaved1F1B)


def test_ranks_that_would_wait_for_each_other(monkeypatch):
    kind = pipelining.ScheduleInterleaved1F1B
    def refuse(*_):
        raise AssertionError("Malformed")
    monkeypatch.setattr(kind, "_prepare_schedule_with_comms", refuse)
    with pytest.raises(ValueError, match="slack is 2, with which ScheduleInterleaved1F1B cannot run .*Malformed"):
        overlapped(kind, 2)(stages_of(2, 2, kind), 4, loss_fn=lambda *_: 0)


def layers():
    torch.manual_seed(8)
    return [torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh()) for _ in range(STAGES)]


def data():
    generator = torch.Generator().manual_seed(9)
    return (torch.randn(STEPS, MICROBATCHES * ROWS, D, generator=generator),
            torch.randint(0, V, (STEPS, MICROBATCHES * ROWS), generator=generator))


def train_stage(rank, target, names):
    """For each slack: losses, gradients of the last step, and the order of forwards and backwards in it."""
    found = {}
    inputs, targets = data()
    with lossd.Client(target) as client:
        for slack, name in names.items():
            module = layers()[rank]
            stage = pipelining.PipelineStage(module, rank, STAGES, torch.device("cpu"))
            optimizers, loss_fn = [torch.optim.SGD(module.parameters(), lr=LR)], torch.nn.functional.cross_entropy
            if rank == STAGES - 1:
                head = LossHead(client, name, process_group=None)
                optimizers.append(HeadOptimizer(head, lr=LR, algorithm="sgd"))
                loss_fn = PipelineLoss(head, n_microbatches=MICROBATCHES)
            schedule = overlapped(pipelining.Schedule1F1B, slack) if slack else pipelining.Schedule1F1B
            schedule = schedule(stage, MICROBATCHES, loss_fn=loss_fn)
            order, losses = [], []
            module.register_forward_hook(lambda *_, order=order: order.append("F"))
            next(module.parameters()).register_hook(lambda _, order=order: order.append("B"))
            for step in range(STEPS):
                order.clear()
                of_step = []
                optimizers[0].zero_grad()
                given = {"target": targets[step], "losses": of_step} if rank == STAGES - 1 else {}
                schedule.step(*([inputs[step]] if rank == 0 else []), **given)
                gradients = [parameter.grad.clone() for parameter in module.parameters()]
                for each in optimizers:
                    each.step()
                losses += (float(loss) for loss in of_step)
            found[slack] = (losses, gradients, "".join(order))
    return found


def test_four_stages_learn_alike_with_any_slack(server, client, make_head):
    names = {slack: make_head(hidden_size=D, vocab_size=V, seed=3) for slack in SLACKS}
    ranks = run_ranks(STAGES, train_stage, server.target, names)
    for slack, rank in itertools.product(SLACKS, range(STAGES)):
        losses, gradients, order = ranks[rank][slack]
        expected = one_forward_one_backward(STAGES, MICROBATCHES, slack)[rank]
        assert order == "".join(each.computation_type.name.removeprefix("FULL_")[0] for each in expected), (slack, rank)
        np.testing.assert_allclose(losses, ranks[rank][0][0], rtol=1e-6)
        for got, wanted in zip(gradients, ranks[rank][0][1]):
            torch.testing.assert_close(got, wanted, atol=1e-7, rtol=1e-5)
    weights = {slack: client.read_tensor(name) for slack, name in names.items()}
    for slack in SLACKS:
        np.testing.assert_allclose(weights[slack], weights[0], atol=1e-7, rtol=1e-5)


# Stages that keep pace with their GPUs.


def stage_of(device: str, story: list[object]) -> types.SimpleNamespace:
    def forward(microbatch: int, *, save: bool) -> str:
        story.append(("forward", microbatch, save))
        return "out"

    def backward(microbatch: int) -> None:
        story.append(("backward", microbatch))

    return types.SimpleNamespace(device=device, forward_one_chunk=forward, backward_one_chunk=backward)


def test_a_stage_that_keeps_pace_waits_for_each_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    story: list[object] = []

    class Event:
        def record(self, stream: object) -> None:
            story.append(f"recorded on {stream}")

        def synchronize(self) -> None:
            story.append("waited for")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    stage = stage_of("cuda:1", story)
    keep_pace(stage)
    assert stage.forward_one_chunk(0, save=True) == "out"
    stage.backward_one_chunk(0)
    stage.forward_one_chunk(1, save=False)
    recorded = "recorded on the stream of cuda:1"
    assert story == [("forward", 0, True), recorded, "waited for", ("backward", 0), recorded, "waited for", ("forward", 1, False), recorded]


def test_a_stage_on_a_cpu_stays_as_it_is() -> None:
    stage = stage_of("cpu", [])
    before = dict(vars(stage))
    keep_pace(stage)
    assert vars(stage) == before


@pytest.mark.parametrize("computes", [True, False])
def test_schedules_beside_a_part_of_a_head_keep_pace(computes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []

    def one_stage(schedule: object, stage: object, n_microbatches: int) -> None:
        schedule._num_stages = 3  # type: ignore[attr-defined]

    def several(schedule: object, stages: list[object], n_microbatches: int) -> None:
        pass

    monkeypatch.setattr(_colocate, "computes_here", lambda: computes)
    monkeypatch.setattr(schedules, "keep_pace", kept.append)
    monkeypatch.setattr(pipelining.Schedule1F1B, "__init__", one_stage)
    monkeypatch.setattr(pipelining.ScheduleInterleaved1F1B, "__init__", several)
    Overlapped1F1B("a", n_microbatches=4)
    Overlapped1F1B(stage="b", n_microbatches=4)
    made = overlapped(pipelining.ScheduleInterleaved1F1B)
    made(["c", "d"], n_microbatches=4)
    made(stages=["e"], n_microbatches=4)
    assert kept == (["a", "b", "c", "d", "e"] if computes else [])
