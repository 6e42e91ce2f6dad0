# SPDX-License-Identifier: Apache-2.0
"""Steps of a process group: ranks without rows, clips, and optimizers that begin or continue; two ranks, one process."""

import warnings

import torch
from ranks import run_ranks

import lossd
from lossd.torch import HeadOptimizer, LossHead

D, V, N, LR = 12, 50, 32, 0.5


def data():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(3, 2, N, D, generator=generator), torch.randint(0, V, (3, 2, N), generator=generator)


def run_rank(rank, target, names):
    """What is compared with one process: norms and numbers of steps that updated the head."""
    hidden, targets = data()
    found = {}
    with lossd.Client(target) as client, warnings.catch_warnings():
        warnings.simplefilter("error")
        group = torch.distributed.group.WORLD
        # Nobody has rows, then one rank has, then both.
        head = LossHead(client, names["rows"], reduction="sum", process_group=group)
        optimizer = HeadOptimizer(head, lr=LR, algorithm="sgd")
        optimizer.step()
        assert head.step == 0 and optimizer.last is None and optimizer.stand_in.grad is None
        for ranks in ([0], [1], [0, 1]):
            if rank in ranks:
                (head(hidden[head.step, rank], targets[head.step, rank]) / N).backward()
            optimizer.step()
        assert head.step == 3
        # A clip, which reads the stand-in's gradient on each rank.
        head = LossHead(client, names["clipped"], process_group=group)
        optimizer = HeadOptimizer(head, lr=LR, algorithm="sgd")
        for step in range(2):
            head(hidden[step, rank], targets[step, rank]).backward()
            found["norm"] = float(torch.nn.utils.clip_grad_norm_([optimizer.stand_in], 0.05))
            optimizer.step()
        # A clip by another norm stops every rank.
        head(hidden[2, rank], targets[2, rank]).backward()
        if rank == 1:
            torch.nn.utils.clip_grad_norm_([optimizer.stand_in], 0.05, norm_type=float("inf"))
        else:
            optimizer.load_grad_norm()
        try:
            optimizer.step()
        except RuntimeError as error:
            found["refused"] = str(error)
        # One rank restores the head; the optimizers of all continue.
        for restored in (False, True):
            if rank == 0 and restored:
                client.load_checkpoint(f"{names['begun']}/kept")
            torch.distributed.barrier()
            head_again = LossHead(client, names["begun"], process_group=group)
            optimizer = HeadOptimizer(head_again, lr=1e-2)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                head_again(hidden[0, rank], targets[0, rank]).backward()
            found[f"said {restored}"] = len(said)
            optimizer.step()
            found[f"updates {restored}"] = client.describe_head(names["begun"]).updates
            head_again.parallel.barrier()
    return found


def test_steps_of_two_ranks(server, client, make_head):
    names = {name: make_head(hidden_size=D, vocab_size=V) for name in ("rows", "clipped", "begun")}
    hidden, targets = data()
    with lossd.Client(server.target, run="night-3") as other:
        for step in range(3):
            other.compute_loss(names["begun"], hidden[step, 0].numpy(), targets[step, 0].numpy(), step=step, id=0,
                               accumulate=True)
            other.apply_step(names["begun"], step, lossd.AdamW(lr=1e-2))
        other.save_checkpoint(names["begun"], "kept")
    local = {name: torch.nn.Parameter(torch.from_numpy(client.read_tensor(names[name]))) for name in ("rows", "clipped")}
    for step, ranks in enumerate(([0], [1], [0, 1])):
        loss = sum(torch.nn.functional.cross_entropy(hidden[step, rank] @ local["rows"].T, targets[step, rank])
                   for rank in ranks)
        local["rows"].grad = None
        loss.backward()  # the ranks' losses average to that of all rows
        local["rows"].data -= LR * local["rows"].grad
    norms = []
    for step in range(2):
        local["clipped"].grad = None
        logits = hidden[step].flatten(0, 1) @ local["clipped"].T
        torch.nn.functional.cross_entropy(logits, targets[step].flatten()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_([local["clipped"]], 0.05)))
        local["clipped"].data -= LR * local["clipped"].grad
    found = run_ranks(2, run_rank, server.target, names)
    for name, weight in local.items():
        torch.testing.assert_close(torch.from_numpy(client.read_tensor(names[name])), weight.data, atol=1e-6, rtol=1e-5)
    for each in found:
        assert abs(each["norm"] - norms[-1]) < 1e-5
        assert (each["updates False"], each["updates True"]) == (1, 4)
    assert "norm_type=inf" in found[1]["refused"] and "another rank failed" in found[0]["refused"]
    assert [each["said False"] for each in found] == [1, 0] and [each["said True"] for each in found] == [0, 0]
