# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer with DeepSpeed: one step of the head in each step, clipped by the norm of everything."""

import json
import types
from pathlib import Path

import accelerate
import pytest
import torch
from ranks import deepspeed as on_cpu, run_ranks
from tiny_models import assert_same_weights, both, train_both, trainer_of

import lossd
import lossd.transformers
from lossd.transformers._trainer import FILE
from lossd.transformers._remote import ZeroSteps, check

CONFIG = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
          "train_batch_size": "auto", "zero_allow_untested_optimizer": True}


def zero(stage, **more):
    return {**CONFIG, "zero_optimization": {"stage": stage}, **more}


def train(rank, target, name, folder, config, more, kind="llama"):
    """Of a patched model and of the stock one; both under DeepSpeed."""
    on_cpu()
    with lossd.Client(target) as client:
        models = both(client, name, kind, tied="rows", process_group=torch.distributed.group.WORLD)
        trainers = train_both(models, f"{folder}/{rank}", deepspeed=config, average_tokens_across_devices=True, **more)
        assert_same_weights(*models)
        assert trainers[0].accelerator.state.deepspeed_plugin.zero_stage == config["zero_optimization"]["stage"]
        return [log["grad_norm"] for log in trainers[0].state.log_history if "grad_norm" in log]


@pytest.mark.parametrize("ranks, stage, more", [
    pytest.param(1, 1, {}, marks=pytest.mark.nightly), (1, 2, {"gradient_accumulation_steps": 2}),
    (2, 2, {"per_device_train_batch_size": 2}), (1, 1, {"max_grad_norm": 0.0})])
def test_one_step_and_the_norm_of_everything(server, client, head_name, tmp_path, ranks, stage, more):
    norms = run_ranks(ranks, train, server.target, head_name, str(tmp_path), zero(stage), more)
    assert client.describe_head(head_name).state.step == 3
    assert all(each == norms[0] for each in norms)
    if more.get("max_grad_norm") != 0.0:
        assert norms[0][0] > 0.5  # it was clipped


def test_a_tied_model_whose_matrix_is_the_servers(server, client, head_name, tmp_path):
    """Under ZeRO too, which keeps copies of what it steps: here of one element."""
    run_ranks(2, train, server.target, head_name, str(tmp_path), zero(2), {"per_device_train_batch_size": 2}, "rows")
    assert client.describe_head(head_name).state.step == 3


def resume(rank, target, name, folder):
    """Two of four steps again, from a checkpoint, with the head gone from the server meanwhile."""
    on_cpu()
    weights = []
    with lossd.Client(target) as client:
        for run in ("whole", "resumed"):
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            model, _ = both(client, name, process_group=torch.distributed.group.WORLD)
            trainer = trainer_of(model, f"{folder}/{run}", deepspeed=zero(2), max_steps=4, save_strategy="steps", save_steps=1,
                                 save_total_limit=3)
            lossd.transformers.attach(trainer)
            trainer.train(resume_from_checkpoint=None if run == "whole" else f"{folder}/whole/checkpoint-2")
            weights.append({key: value.clone() for key, value in model.state_dict().items()})
            kept = [json.loads(path.read_text())["checkpoint"] for path in Path(folder).glob(f"*/*/{FILE}")]
            assert sorted(each.checkpoint for each in client.list_checkpoints(name)) == sorted(set(kept))
            client.delete_head(name)
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, atol=1e-6, rtol=1e-5)


def test_training_resumes(server, head_name, tmp_path):
    run_ranks(1, resume, server.target, head_name, str(tmp_path))
    assert len(list(tmp_path.glob(f"*/*/{FILE}"))) == 5


class Zero:
    """As DeepSpeed's optimizer of ZeRO 1 and 2."""

    def __init__(self, parameters, norms, overflow=False):
        self.bit16_groups, self.norms, self.overflow, self.loss_scale = [[each] for each in parameters], norms, overflow, 2.0
        self._global_grad_norm = None

    def scaled_global_norm(self):
        return torch.tensor(self.norms * self.loss_scale)

    def step(self):
        if not self.overflow:
            self._global_grad_norm = self.scaled_global_norm() / self.loss_scale


@pytest.mark.parametrize("overflow", [True, False])
def test_steps_that_the_engine_skips(overflow):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizer, done = Zero(parameters, 3.0, overflow), []
    engine = types.SimpleNamespace(optimizer=optimizer, basic_optimizer=torch.optim.AdamW(parameters),
                                   gradient_clipping=lambda: 2.5)
    assert not ZeroSteps.are_in(engine)
    steps = ZeroSteps(engine, lambda: 4.0, done.append, lambda: done.append("discarded"))
    assert ZeroSteps.are_in(engine) and steps.parameters == [[each] for each in parameters]
    optimizer.step()
    assert done == (["discarded"] if overflow else [pytest.approx(0.5)])  # 2.5 of the norm of 3 and 4


def test_a_norm_that_is_not_finite_stays_what_deepspeed_calls_it():
    optimizer = Zero([torch.nn.Parameter(torch.zeros(1))], -0.5)
    engine = types.SimpleNamespace(optimizer=optimizer, basic_optimizer=torch.optim.AdamW(optimizer.bit16_groups[0]),
                                   gradient_clipping=lambda: 0.0)
    done = []
    ZeroSteps(engine, lambda: 4.0, done.append, lambda: None)
    assert float(optimizer.scaled_global_norm()) == -1.0
    optimizer.step()
    assert done == [1.0]


@pytest.mark.parametrize("attributes, message", [
    ({"is_fsdp_enabled": True}, "fsdp= of TrainingArguments"), ({"is_distributed_loading_by_transformers": True}, "tp_plan="),
    ({"args": types.SimpleNamespace(n_gpu=2)}, "to 2 GPUs in one process")])
def test_other_ways_to_shard(attributes, message):
    trainer = types.SimpleNamespace(**{"args": types.SimpleNamespace(n_gpu=1), "is_deepspeed_enabled": False, **attributes})
    with pytest.raises(ValueError, match=message):
        check(trainer, tied=False)


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
