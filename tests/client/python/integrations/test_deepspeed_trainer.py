# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer with DeepSpeed: one step of the head in each step, clipped by the norm of everything."""

import accelerate
import pytest
import torch
from on_cpu import deepspeed as on_cpu
from ranks import run_ranks
from tiny_trainers import assert_same_weights, both, train_both, trainer_of

import lossd
import lossd.transformers

CONFIG = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
          "train_batch_size": "auto", "zero_allow_untested_optimizer": True}


def zero(stage, **more):
    return {**CONFIG, "zero_optimization": {"stage": stage}, **more}


def train(rank, target, name, folder, config, more):
    """Of a patched model and of the stock one; both under DeepSpeed."""
    on_cpu()
    with lossd.Client(target) as client:
        models = both(client, name, process_group=torch.distributed.group.WORLD)
        trainers = train_both(models, f"{folder}/{rank}", deepspeed=config, average_tokens_across_devices=True, **more)
        assert_same_weights(*models)
        assert trainers[0].accelerator.state.deepspeed_plugin.zero_stage == config["zero_optimization"]["stage"]
        return [log["grad_norm"] for log in trainers[0].state.log_history if "grad_norm" in log]


@pytest.mark.parametrize("ranks, stage, more", [
    (1, 1, {}), (1, 2, {"gradient_accumulation_steps": 2}), (2, 2, {"per_device_train_batch_size": 2}),
    (1, 1, {"max_grad_norm": 0.0})])
def test_one_step_and_the_norm_of_everything(server, client, head_name, tmp_path, ranks, stage, more):
    norms = run_ranks(ranks, train, server.target, head_name, str(tmp_path), zero(stage), more)
    assert client.describe_head(head_name).state.step == 3
    assert all(each == norms[0] for each in norms)
    if more.get("max_grad_norm") != 0.0:
        assert norms[0][0] > 0.5  # it was clipped


def refuse(rank, target, name, folder, cases):
    on_cpu()
    words = []
    with lossd.Client(target) as client:
        for stage, kind, tied in cases:
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            model, _ = both(client, name, kind=kind, tied=tied, if_exists="reset", process_group=torch.distributed.group.WORLD)
            trainer = trainer_of(model, folder, deepspeed=zero(stage))
            try:
                lossd.transformers.attach(trainer)
                trainer.train()
                words.append("nothing")
            except ValueError as error:
                words.append(str(error))
        try:  # models are made in parts from now on
            both(client, f"{name}-in-parts", process_group=torch.distributed.group.WORLD)
        except ValueError as error:
            words.append(str(error))
    return words


def test_what_deepspeed_cannot_do_with_a_head(server, client, head_name, tmp_path):
    cases = {(0, "llama", "refuse"): "or max_grad_norm=0", (1, "tied", "share"): 'tied="part"',
             (3, "llama", "refuse"): "use ZeRO 1 or 2"}
    words, = run_ranks(1, refuse, server.target, head_name, str(tmp_path), list(cases))
    assert len(words) == len(cases) + 1
    for message, got in zip([*cases.values(), r"partitioned over ranks (ZeRO 3), has to be whole"], words):
        assert message in got
    assert client.describe_head(head_name).state.step == 0
