# SPDX-License-Identifier: Apache-2.0
"""PipelineLoss in schedules with several stages on a rank: interleaved 1F1B and zero-bubble ones, against one process."""

import numpy as np
import pytest
import torch
from ranks import run_ranks

import lossd
from lossd.torch import HeadOptimizer, LossHead, PipelineLoss

D, V, N, MICROBATCHES, STEPS, STAGES = 12, 50, 32, 4, 2, 4
SCHEDULES = {  # the stages of either rank
    "ScheduleInterleaved1F1B": ((0, 2), (1, 3)), "ScheduleLoopedBFS": ((0, 2), (1, 3)),
    "ScheduleInterleavedZeroBubble": ((0, 2), (1, 3)), "ScheduleZBVZeroBubble": ((0, 3), (1, 2)),
    "ScheduleDualPipeV": ((0, 3), (1, 2))}
OVERLAPPED = "overlapped "  # with a slack of 2
SCHEDULES |= {OVERLAPPED + name: SCHEDULES[name]
              for name in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")}


def layers():
    torch.manual_seed(4)
    return [torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh()) for _ in range(STAGES)]


def data():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(STEPS, N, D, generator=generator), torch.randint(0, V, (STEPS, N), generator=generator)


def train_rank(rank, target, names):
    with lossd.Client(target) as client:
        return {name: train_stages(rank, client, name, head_name) for name, head_name in names.items()}


def train_stages(rank, client, name, head_name):
    from torch.distributed import pipelining

    from lossd.torch.schedules import overlapped
    mine = SCHEDULES[name][rank]
    modules = layers()
    stages = [pipelining.PipelineStage(modules[each], each, STAGES, torch.device("cpu")) for each in mine]
    optimizer = torch.optim.SGD([p for each in mine for p in modules[each].parameters()], lr=0.5)
    inputs, targets = data()
    last = STAGES - 1 in mine
    head_optimizer, loss_fn = None, torch.nn.functional.cross_entropy  # of a rank that does not call it
    if last:
        head = LossHead(client, head_name, process_group=None)
        head_optimizer = HeadOptimizer(head, lr=0.5, algorithm="sgd")
        loss_fn = PipelineLoss(head, n_microbatches=MICROBATCHES)
    kind = getattr(pipelining, name.removeprefix(OVERLAPPED))
    schedule = (overlapped(kind, slack=2) if name.startswith(OVERLAPPED) else kind)(stages, MICROBATCHES, loss_fn=loss_fn)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        of_step = []
        given = {"target": targets[step], "losses": of_step} if last else {}
        schedule.step(*([inputs[step]] if 0 in mine else []), **given)
        if last:
            losses.append(torch.stack(of_step).mean().item())
            head_optimizer.load_grad_norm()
            head_optimizer.step()
        optimizer.step()
    return losses, {each: [p.detach() for p in modules[each].parameters()] for each in mine}


def train_alone(weight):
    head = torch.nn.Linear(D, V, bias=False)
    head.weight.data.copy_(weight)
    modules = torch.nn.ModuleList([*layers(), head])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.5)
    inputs, targets = data()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = inputs[step]
        for module in modules:
            logits = module(logits)
        loss = torch.nn.functional.cross_entropy(logits, targets[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, modules


def test_schedules_with_several_stages_on_a_rank(server, client, make_head):
    names = {schedule: make_head(hidden_size=D, vocab_size=V, seed=1) for schedule in SCHEDULES}
    losses, modules = train_alone(torch.from_numpy(client.read_tensor(next(iter(names.values())))))
    ranks = run_ranks(2, train_rank, server.target, names)
    for schedule, name in names.items():
        for rank in ranks:
            means, parameters = rank[schedule]
            for stage, values in parameters.items():
                for got, expected in zip(values, modules[stage].parameters()):
                    torch.testing.assert_close(got, expected.detach(), atol=1e-5, rtol=1e-5, msg=f"{schedule}, stage {stage}")
            if means:
                np.testing.assert_allclose(means, losses, rtol=1e-5, err_msg=schedule)
        np.testing.assert_allclose(client.read_tensor(name), modules[-1].weight.detach().numpy(), atol=1e-5, err_msg=schedule)
