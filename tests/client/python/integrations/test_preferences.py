# SPDX-License-Identifier: Apache-2.0
"""trl's GRPO, RLOO, DPO and KTO trainers with patch() and attach(): losses and weights of the stock model."""

import copy

import numpy as np
import peft
import pytest
import torch
import trl
from datasets import Dataset
from tiny_models import V, make_model, make_tokenizer

import lossd.transformers


def words(tokens):
    return " ".join(f"t{int(token)}" for token in tokens)


def pairs():
    """Two preferred continuations of uneven length for each prompt."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(3, V, (8, 20), generator=generator)
    return Dataset.from_list([{"prompt": words(row[:4 + i % 3]), "chosen": " " + words(row[8:12 + i % 4]),
                               "rejected": " " + words(row[14:18])} for i, row in enumerate(rows)])


def reward(completions, **_):
    """Long words are good; differs within a group."""
    return [sum(len(word) for word in completion.split()) / 10 + 0.1 * len(set(completion)) for completion in completions]


def options(folder, accumulation, **more):
    return {"output_dir": str(folder), "per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulation,
            "max_steps": 3, "learning_rate": 5e-3, "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no",
            "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "seed": 3,
            "disable_tqdm": True, "adam_epsilon": 1e-5, **more}  # rounding of a gradient near 0 does not turn its step


def dpo(model, folder, accumulation, reference, **more):
    return trl.DPOTrainer(model, reference, trl.DPOConfig(**options(folder, accumulation, **more)), train_dataset=pairs(),
                          processing_class=make_tokenizer())


def online(trainer, config, model, folder, accumulation, **more):
    prompts = Dataset.from_list([{"prompt": words(range(10 + i, 14 + i))} for i in range(8)])
    return trainer(model, reward, config(**options(folder, accumulation, num_generations=4, max_completion_length=6, **more)),
                   train_dataset=prompts, processing_class=make_tokenizer())


def compare(make, kind, client, head_name, keys, prepare=lambda model: model, **patching):
    """Trains a patched and a stock model; the logs of every step agree, and so do the weights at the end."""
    stock = make_model(kind)
    model = lossd.transformers.patch(copy.deepcopy(stock), client, head_name, compute_dtype="fp32",
                                     tied="share" if kind == "tied" else "refuse", **patching)
    logs, models = [], []
    for each in (model, stock):
        trainer = make(prepare(each))
        if each is model:
            lossd.transformers.attach(trainer)
        trainer.train()
        logs.append([log for log in trainer.state.log_history if "loss" in log])
        models.append(trainer.model)
    assert len(logs[0]) == len(logs[1]) == 3
    for step, (got, expected) in enumerate(zip(*logs)):
        assert got.keys() == expected.keys()
        for key in keys & expected.keys():
            assert got[key] == pytest.approx(expected[key], abs=1e-5), (step, key)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4, abs=1e-6), step
    theirs = models[1].state_dict()
    for key, value in models[0].state_dict().items():
        np.testing.assert_allclose(value.numpy(), theirs[key].numpy(), atol=5e-5, err_msg=key)
    return logs[0]


DPO_KEYS = {"loss", "rewards/margins", "logps/chosen", "logps/rejected", "entropy", "mean_token_accuracy"}


@pytest.mark.parametrize("kind, accumulation", [("llama", 1), ("llama", 4), ("gemma2", 1), ("tied", 1), ("qwen", 4)])
def test_dpo(client, head_name, tmp_path, kind, accumulation):
    logs = compare(lambda model: dpo(model, tmp_path, accumulation, make_model(kind)), kind, client, head_name, DPO_KEYS)
    assert np.isnan(logs[0]["logits/chosen"])  # the server does not compute it


ONLINE_KEYS = {"loss", "reward", "entropy", "completions/mean_length"}


@pytest.mark.parametrize("kind, accumulation, more", [
    ("llama", 1, {}), ("llama", 4, {"num_iterations": 2}), ("gemma2", 1, {"temperature": 0.7}), ("tied", 1, {}),
    ("qwen", 1, {"entropy_coef": 0.01, "temperature": 1.3})])
def test_grpo(client, head_name, tmp_path, kind, accumulation, more):
    compare(lambda model: online(trl.GRPOTrainer, trl.GRPOConfig, model, tmp_path, accumulation, **more), kind, client,
            head_name, ONLINE_KEYS)


def test_rloo(client, head_name, tmp_path):
    compare(lambda model: online(trl.RLOOTrainer, trl.RLOOConfig, model, tmp_path, 1, beta=0.0, temperature=0.8), "llama",
            client, head_name, ONLINE_KEYS)


def test_dpo_with_lora_and_a_frozen_head(client, head_name, tmp_path):
    """The reference is the model without its adapter, so it is on the server as well."""
    def with_adapter(model):
        torch.manual_seed(4)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)
    compare(lambda model: dpo(model, tmp_path, 1, None), "llama", client, head_name, DPO_KEYS, with_adapter, freeze=True)
    assert client.describe_head(head_name).spec.frozen


def judged():
    """Completions of uneven length, good and bad."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(3, V, (8, 20), generator=generator)
    return Dataset.from_list([{"prompt": words(row[:4 + i % 3]), "completion": " " + words(row[8:12 + i % 4]), "label": i % 3 != 0}
                              for i, row in enumerate(rows)])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_kto(client, head_name, tmp_path, accumulation):
    def make(model):
        return trl.KTOTrainer(model, make_model("llama"), trl.KTOConfig(**options(tmp_path, accumulation)),
                              train_dataset=judged(), processing_class=make_tokenizer())
    compare(make, "llama", client, head_name, {"loss", "kl", "rewards/chosen", "rewards/rejected"})


def test_what_the_server_does_not_compute_is_refused(client, head_name, tmp_path):
    model = lossd.transformers.patch(make_model("llama"), client, head_name, compute_dtype="fp32")
    trainer = dpo(model, tmp_path, 1, make_model("llama"), use_weighting=True)
    with pytest.raises(ValueError, match="use_weighting=True takes the sum of squared probabilities"):
        lossd.transformers.attach(trainer)
