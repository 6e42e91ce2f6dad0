# SPDX-License-Identifier: Apache-2.0
"""Steps of PipelineLoss whose microbatches are uneven, and evaluations, against one process; two stages, two processes."""

import pytest
import torch
from ranks import run_ranks

import lossd
from lossd.torch import HeadOptimizer, LossHead, PipelineLoss

D, V, N, MICROBATCHES, STEPS, LR = 12, 50, 16, 4, 3, 0.5
VALID = [[0, 3, 4, 4], [1, 0, 0, 0], [4, 4, 4, 4]]  # targets of each microbatch that count, of each step
CASES = [("ScheduleGPipe", True, False), ("Schedule1F1B", True, False), ("Schedule1F1B", False, False),
         ("Overlapped1F1B", True, False), ("Schedule1F1B", True, True)]


def layers(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh()), torch.nn.Linear(D, D)


def data(seed):
    generator = torch.Generator().manual_seed(seed + 1)
    inputs = torch.randn(STEPS, N, D, generator=generator)
    targets = torch.randint(0, V, (STEPS, MICROBATCHES, N // MICROBATCHES), generator=generator)
    for step, counts in enumerate(VALID):
        for microbatch, count in enumerate(counts):
            targets[step, microbatch, count:] = -100
    return inputs, targets.flatten(1)


def run_stage(rank, target, names, seed):
    """For each case: the losses of its steps, those of its evaluations, and the stage's parameters."""
    from torch.distributed import pipelining

    from lossd.torch import schedules
    found = []
    with lossd.Client(target) as client:
        for name, (schedule_name, scale_grads, deferred) in zip(names, CASES):
            module = layers(seed)[rank]
            inputs, targets = data(seed)
            stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
            optimizer = torch.optim.SGD(module.parameters(), lr=LR)
            step = 0
            head = LossHead(client, name, process_group=None, deferred=deferred)
            head_optimizer = HeadOptimizer(head, lr=LR, algorithm="sgd")
            loss_fn = PipelineLoss(head, n_microbatches=MICROBATCHES, scale_grads=scale_grads,
                                   normalizer=lambda: (targets[step] != -100).sum())
            kind = getattr(schedules if schedule_name == "Overlapped1F1B" else pipelining, schedule_name)
            schedule = kind(stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=scale_grads)
            losses, evaluations = [], []
            for step in range(STEPS):
                optimizer.zero_grad()
                of_step, of_evaluation = [], []
                if rank == 0:
                    schedule.eval(inputs[step])  # which would divide gradients that are there
                    schedule.step(inputs[step])
                else:
                    schedule.eval(target=targets[step], losses=of_evaluation)
                    after = client.describe_head(name)
                    assert (after.step_rows, after.step_microbatches) == (0, 0)
                    schedule.step(target=targets[step], losses=of_step)
                    head_optimizer.step()
                optimizer.step()
                losses.append([float(each) for each in of_step])
                evaluations.append([float(each) for each in of_evaluation])
            found.append((losses, evaluations, [each.detach() for each in module.parameters()]))
    return found


def train_alone(client, name, seed):
    first, second = layers(seed)
    inputs, targets = data(seed)
    head = torch.nn.Linear(D, V, bias=False)
    head.weight.data.copy_(torch.from_numpy(client.read_tensor(name)))
    model = torch.nn.Sequential(first, second, head).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs[step].double()), targets[step])  # over all that count
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, (first, second, head)


def test_a_mean_over_the_targets_of_a_step(server, client, make_head, seed):
    names = [make_head(hidden_size=D, vocab_size=V) for _ in CASES]
    expected = [train_alone(client, name, seed) for name in names]
    ranks = run_ranks(2, run_stage, server.target, names, seed)
    for case, name, stages, (losses, modules) in zip(CASES, names, zip(*ranks), expected):
        for (_, _, got), module in zip(stages, modules):
            for ours, theirs in zip(got, module.parameters()):
                torch.testing.assert_close(ours.double(), theirs.detach(), atol=1e-6, rtol=1e-5, msg=lambda m: f"{case}: {m}")
        torch.testing.assert_close(torch.from_numpy(client.read_tensor(name)).double(), modules[2].weight.detach(),
                                   atol=1e-6, rtol=1e-5)
        for of_steps in stages[1][:2]:  # an evaluation before the step has the losses of the step
            whole = torch.tensor(of_steps).double().sum(1) / (MICROBATCHES if case[1] else 1)
            torch.testing.assert_close(whole, torch.tensor(losses).double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normalizer, error, text", [
    ("tokens", TypeError, "normalizer is 'tokens'; it must be a number, or a function"), (-3, ValueError, "normalizer is -3"),
    (float("nan"), ValueError, "normalizer is nan")])
def test_bad_normalizers(client, make_head, normalizer, error, text):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    with pytest.raises(error, match=text):
        PipelineLoss(head, n_microbatches=2, normalizer=normalizer)
    with pytest.raises(error, match=text):
        PipelineLoss(head, n_microbatches=2, normalizer=lambda: normalizer)(
            torch.randn(N, D, requires_grad=True), torch.zeros(N, dtype=torch.long))
    with pytest.raises(ValueError, match="normalizer is for means"):
        PipelineLoss(LossHead(client, head.head_name, reduction="sum"), n_microbatches=2, normalizer=3)


def test_an_evaluation_outside_of_schedules(client, make_head):
    """A LossHead in evaluation mode under torch.no_grad() gives the loss at once."""
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    head.eval()
    with torch.no_grad():
        assert PipelineLoss(head, n_microbatches=2)(torch.randn(N, D), torch.zeros(N, dtype=torch.long)) > 0
