# SPDX-License-Identifier: Apache-2.0
"""A server on the devices of a pipeline's four stages. A stage is killed in the middle of a step, and everything else is
then ended too, as a launcher does. Restarted from checkpoints that belong together, the training gives the bits of one
that nothing disturbed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import ServerProcess

import lossd
from lossd.torch import HeadOptimizer, LossHead, PipelineLoss
from lossd.torch.schedules import Overlapped1F1B

D, V, N, MICROBATCHES, STAGES, STEPS, SAVED = 12, 97, 32, 8, 4, 4, 2
JOIN_SECONDS = 600


def train_stage(rank: int, target: str, folder: Path, last: int, dies: bool) -> None:
    """Trains until `last` steps are done, from what is saved in `folder`; a stage that dies does so in step SAVED."""
    from torch.distributed import pipelining
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/rendezvous-{last}-{dies}", rank=rank, world_size=STAGES)
    torch.manual_seed(rank)
    module = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    saved, first, losses = folder / f"stage-{rank}", 0, []
    if saved.exists():
        state = torch.load(saved, weights_only=False)
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        first, losses = state["step"], state["losses"]
    data = torch.Generator().manual_seed(5)
    inputs = torch.randn(STEPS, N, D, generator=data)
    targets = torch.randint(0, V, (STEPS, N), generator=data)
    with lossd.Client(target) as client:
        head = LossHead(client, "lm", normalizer=N, process_group=None)
        head_optimizer = HeadOptimizer(head, lr=0.05, continues=first > 0)
        schedule = Overlapped1F1B(pipelining.PipelineStage(module, rank, STAGES, torch.device("cpu")), MICROBATCHES,
                                  loss_fn=PipelineLoss(head, n_microbatches=MICROBATCHES, scale_grads=False),
                                  scale_grads=False)
        passes: list[int] = []

        def count(_module: Any, _inputs: Any, _output: Any) -> None:
            passes.append(1)
            if dies and rank == 2 and len(passes) == (SAVED - first) * MICROBATCHES + 5:
                os.kill(os.getpid(), signal.SIGKILL)

        module.register_forward_hook(count)
        for step in range(first, last):
            of_step: list[torch.Tensor] = []
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(inputs[step])
            elif rank == STAGES - 1:
                schedule.step(target=targets[step], losses=of_step)
                head_optimizer.step()
            else:
                schedule.step()
            optimizer.step()
            losses += [loss.item() for loss in of_step]
            if step + 1 == SAVED:
                if rank == STAGES - 1:
                    client.save_checkpoint("lm", f"step-{SAVED}")
                torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1,
                            "losses": losses}, saved)
    torch.save((losses, list(module.state_dict().values())), folder / f"end-{rank}")
    torch.distributed.destroy_process_group()


def run_stages(target: str, folder: Path, last: int, dies: bool = False) -> list[int | None]:
    """How each stage ended; those that a dead one leaves waiting are killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.pipelining", "lossd.torch"])
    stages = [context.Process(target=train_stage, args=(rank, target, folder, last, dies)) for rank in range(STAGES)]
    for stage in stages:
        stage.start()
    if dies:
        stages[2].join(JOIN_SECONDS)
        for stage in stages:
            stage.kill()
    for stage in stages:
        stage.join(JOIN_SECONDS)
    return [stage.exitcode for stage in stages]


def ends_of(client: lossd.Client, folder: Path) -> dict[str, Any]:
    return {"stages": [torch.load(folder / f"end-{rank}", weights_only=False) for rank in range(STAGES)],
            "head": client.read_tensor("lm"), "moments": client.read_tensor("lm", role="moment2"),
            "step": client.describe_head("lm").state.step}


@pytest.mark.parametrize("shares, replicas", [((3, 1, 2, 4), 1), ((3, 1), 2)])
def test_a_stage_that_is_killed_in_a_step(tmp_path: Path, shares: tuple[int, ...], replicas: int) -> None:
    def start() -> ServerProcess:
        return ServerProcess("--backend=cpu", "--cpu_devices=4", "--deterministic", "--restore=latest")

    def make_head(client: lossd.Client) -> None:
        client.create_head("lm", hidden_size=D, vocab_size=V, split="vocabulary", shares=shares, replicas=replicas, seed=3)

    quiet, disturbed = tmp_path / "quiet", tmp_path / "disturbed"
    quiet.mkdir()
    disturbed.mkdir()
    server = start()
    try:
        with lossd.Client(server.target) as client:
            make_head(client)
            assert run_stages(server.target, quiet, STEPS) == [0] * STAGES
            wanted = ends_of(client, quiet)
    finally:
        server.stop()
    server = start()
    try:
        with lossd.Client(server.target) as client:
            make_head(client)
        ends = run_stages(server.target, disturbed, STEPS, dies=True)
        assert ends[2] == -signal.SIGKILL
        assert all(end != 0 for end in ends), "nobody got to the end without it"
        server.kill()
        server.start()
        with lossd.Client(server.target) as client:
            head = client.describe_head("lm")
            assert (head.state.step, head.spec.replicas, head.spec.shares) == (SAVED, replicas, shares)
            assert run_stages(server.target, disturbed, STEPS) == [0] * STAGES
            got = ends_of(client, disturbed)
    finally:
        server.stop()
    assert got["step"] == wanted["step"] == STEPS
    for rank in range(STAGES):
        assert got["stages"][rank][0] == wanted["stages"][rank][0], "losses, to the bit"
        for ours, theirs in zip(got["stages"][rank][1], wanted["stages"][rank][1]):
            assert torch.equal(ours, theirs)
    assert (got["head"] == wanted["head"]).all() and (got["moments"] == wanted["moments"]).all()
