# SPDX-License-Identifier: Apache-2.0
"""Unmodified transformers.Trainer and trl.SFTTrainer with patch(): losses, norms and weights of the stock model."""

import copy
import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from ranks import run_ranks
from tiny_models import MODELS, V, arguments, assert_same_weights, both, make_model, make_tokenizer, patched, rows, train_both, trainer_of

import lossd
import lossd.transformers
from lossd.transformers._trainer import FILE

ROWS, LENGTH = 16, 20


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(12)
    rows = torch.randint(3, V, (ROWS, LENGTH), generator=generator)
    labels = rows.clone()
    for row in range(ROWS):
        labels[row, :row] = -100  # uneven numbers of valid labels
    return Dataset.from_dict({"input_ids": rows.tolist(), "labels": labels.tolist(),
                              "attention_mask": torch.ones_like(rows).tolist()})


def arguments_of_epochs(folder, accumulation=1, **more):
    config = more.pop("config", transformers.TrainingArguments)
    return config(**{
        "output_dir": str(folder), "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": accumulation, "num_train_epochs": 2 * accumulation, "learning_rate": 5e-3,
        "weight_decay": 0.1, "max_grad_norm": 0.5, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "lr_scheduler_type": "linear", "seed": 3,
        "disable_tqdm": True, **more})


def run(trainer, **options):
    trainer.train(**options)
    return trainer.state.log_history


def compare(ours, stock):
    """Training and evaluation losses, learning rates and norms of every step."""
    steps = [(log["step"], key) for log in stock for key in ("loss", "eval_loss", "learning_rate", "grad_norm") if key in log]
    assert len([key for _, key in steps if key == "loss"]) == 8 and len([key for _, key in steps if key == "eval_loss"]) == 3
    for expected in stock:
        got = [log for log in ours if log["step"] == expected["step"] and set(log) & {"loss", "eval_loss"} == set(expected) & {"loss", "eval_loss"}]
        for key in ("loss", "eval_loss", "learning_rate"):
            if key in expected:
                assert got[0][key] == pytest.approx(expected[key], abs=1e-5), (expected["step"], key)
        if "grad_norm" in expected:
            assert got[0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4), expected["step"]


def patch(model, client, head_name, kind, **options):
    return lossd.transformers.patch(model, client, head_name, compute_dtype="fp32",
                                    tied={"tied": "share", "rows": "rows"}.get(kind, "refuse"), **options)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_trainer(client, head_name, data, tmp_path, kind, accumulation):
    stock = make_model(kind)
    model = patch(copy.deepcopy(stock), client, head_name, kind)
    assert type(model) is type(stock)
    logs = []
    for each in (model, stock):
        trainer = transformers.Trainer(each, arguments_of_epochs(tmp_path, accumulation), train_dataset=data, eval_dataset=data)
        if each is model:
            lossd.transformers.attach(trainer)
        logs.append(run(trainer))
    compare(*logs)
    assert_same_weights(model, stock)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_sft_trainer(client, head_name, data, tmp_path, tokenizer, kind, accumulation):
    stock = make_model(kind)
    model = patch(copy.deepcopy(stock), client, head_name, kind)
    logs = []
    for each in (model, stock):
        trainer = trl.SFTTrainer(
            each, arguments_of_epochs(tmp_path, accumulation, config=trl.SFTConfig, gradient_checkpointing=False, bf16=False),
            train_dataset=data, eval_dataset=data, processing_class=tokenizer)
        if each is model:
            lossd.transformers.attach(trainer)
        logs.append(run(trainer))
    compare(*logs)
    for got, expected in zip(*logs):
        for key in ("entropy", "mean_token_accuracy"):
            if key in expected:
                assert got[key] == pytest.approx(expected[key], abs=1e-4)
    assert_same_weights(model, stock)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def make_trainer(kind, model, folder, data, tokenizer, **more):
    """Trainer or SFTTrainer."""
    if kind == "Trainer":
        return transformers.Trainer(model, arguments_of_epochs(folder, **more), train_dataset=data, eval_dataset=data)
    config = arguments_of_epochs(folder, config=trl.SFTConfig, gradient_checkpointing=False, bf16=False, **more)
    return trl.SFTTrainer(model, config, train_dataset=data, eval_dataset=data, processing_class=tokenizer)


@pytest.mark.parametrize("kind, trainer_kind", [
    ("llama", "Trainer"), ("tied", "Trainer"), ("rows", "Trainer"), ("gemma2", "SFTTrainer"), ("qwen", "SFTTrainer")])
def test_training_resumes(client, head_name, data, tmp_path, tokenizer, kind, trainer_kind):
    """Interrupted after 5 of 8 steps; the head is even gone from the server meanwhile."""
    stock = make_model(kind)
    whole = patch(copy.deepcopy(stock), client, head_name, kind)
    trainer = make_trainer(trainer_kind, whole, tmp_path / "whole", data, tokenizer, save_strategy="steps", save_steps=5)
    lossd.transformers.attach(trainer)
    logs = run(trainer)
    expected = {key: value.clone() for key, value in whole.state_dict().items()}
    moments = client.read_tensor(head_name, role="moment2")
    checkpoint = tmp_path / "whole" / "checkpoint-5"
    client.delete_head(head_name)
    resumed = patch(copy.deepcopy(stock), client, head_name, kind)
    trainer = make_trainer(trainer_kind, resumed, tmp_path / "resumed", data, tokenizer)
    lossd.transformers.attach(trainer)
    assert run(trainer, resume_from_checkpoint=str(checkpoint))[-2]["step"] == logs[-2]["step"]
    got = resumed.state_dict()
    for key, value in expected.items():
        assert torch.equal(got[key], value), key
    np.testing.assert_array_equal(client.read_tensor(head_name, role="moment2"), moments)


def test_a_checkpoint_that_lacks_the_head_is_refused(client, head_name, data, tmp_path):
    stock = make_model("llama")
    trainer = transformers.Trainer(stock, arguments_of_epochs(tmp_path, save_strategy="steps", save_steps=5), train_dataset=data,
                                   eval_dataset=data)
    run(trainer)
    model = patch(make_model("llama"), client, head_name, "llama")
    trainer = transformers.Trainer(model, arguments_of_epochs(tmp_path / "other"), train_dataset=data, eval_dataset=data)
    lossd.transformers.attach(trainer)
    with pytest.raises((RuntimeError, ValueError)):
        run(trainer, resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


def test_a_patched_model_is_what_it_was(client, head_name, tmp_path):
    stock = make_model("gemma2").eval()
    model = patch(copy.deepcopy(stock), client, head_name, "gemma2").eval()
    tokens = torch.arange(3, 15)[None]
    ours, theirs = (each.generate(tokens, max_new_tokens=8, do_sample=False) for each in (model, stock))
    assert torch.equal(ours, theirs)
    output = model(input_ids=tokens, labels=tokens)
    assert isinstance(output, transformers.utils.ModelOutput) and output.logits is None
    assert output.loss.item() == pytest.approx(stock(input_ids=tokens, labels=tokens).loss.item(), rel=1e-5)
    assert output[0] is output.loss and list(output.keys())[0] == "loss"
    model.save_pretrained(tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(back) is type(stock)
    torch.testing.assert_close(back(input_ids=tokens).logits, stock(input_ids=tokens).logits)
    model.train()
    with pytest.raises(RuntimeError, match="Give the model labels"):
        model(input_ids=tokens)


def test_a_trainer_without_attach_does_not_pass_silently(client, head_name, data, tmp_path, tokenizer):
    """trl's trainers compute losses with the model's own weight."""
    model = patch(make_model("llama"), client, head_name, "llama")
    trainer = trl.SFTTrainer(model, arguments_of_epochs(tmp_path, config=trl.SFTConfig, gradient_checkpointing=False, bf16=False),
                             train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    with pytest.raises(RuntimeError, match=r"attach\(trainer\)"):
        run(trainer)


def test_a_head_that_a_trainer_would_leave_out(client, head_name, data, tmp_path):
    """Of transformers' own Trainer, which takes the loss as it comes: also behind an earlier one that was attached."""
    model = patch(make_model("llama"), client, head_name, "llama")
    for attached in (False, True, False):
        trainer = transformers.Trainer(model, arguments_of_epochs(tmp_path, max_steps=1, eval_strategy="no"), train_dataset=data)
        if attached:
            lossd.transformers.attach(trainer)
            trainer.train()
            continue
        before = client.describe_head(head_name)
        with pytest.raises(RuntimeError, match=rf"not its head '{head_name}'.*attach\(trainer\)"):
            trainer.train()
        assert client.describe_head(head_name).step_microbatches == before.step_microbatches
    assert client.describe_head(head_name).state.step == 1
    tokens = torch.tensor(data["input_ids"][:2])
    assert model.eval()(input_ids=tokens, labels=tokens, num_items_in_batch=38).loss > 0


def test_a_loop_of_ones_own_may_count_items(client, head_name):
    model = patch(make_model("llama"), client, head_name, "llama").train()
    optimizer = lossd.torch.HeadOptimizer(model.get_output_embeddings().loss_head, lr=0.1)
    tokens = torch.arange(3, 15)[None]
    model(input_ids=tokens, labels=tokens, num_items_in_batch=11).loss.backward()
    assert optimizer.step() is None and client.describe_head(head_name).state.step == 1


def test_models_that_a_trainer_cannot_take(client, head_name, data, tmp_path):
    remote = lossd.transformers.RemoteHeadCausalLM(make_model("llama"), client, head_name)
    trainer = transformers.Trainer(remote, arguments_of_epochs(tmp_path, max_steps=1, eval_strategy="no"), train_dataset=data)
    with pytest.raises(ValueError, match=r"lossd.transformers.patch\(model, client, name\) first"):
        lossd.transformers.attach(trainer)
    with pytest.raises(TypeError, match=r"for a Trainer use lossd.transformers.patch"):
        trainer.train()


def test_a_model_is_patched_once(client, head_name):
    model = patch(make_model("llama"), client, head_name, "llama")
    with pytest.raises(ValueError, match=f"on a lossd server already, as head '{head_name}'"):
        patch(model, client, f"{head_name}-again", "llama")


@pytest.mark.parametrize("trainer_kind", ["Trainer", "SFTTrainer"])
def test_lora_with_a_frozen_head(client, head_name, data, tmp_path, tokenizer, trainer_kind):
    def with_adapter(model):
        torch.manual_seed(4)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)
    stock = with_adapter(make_model("llama"))
    model = with_adapter(patch(make_model("llama"), client, head_name, "llama", freeze=True))
    assert client.describe_head(head_name).spec.frozen
    logs = []
    for each in (model, stock):
        trainer = make_trainer(trainer_kind, each, tmp_path, data, tokenizer)
        if each is model:
            assert lossd.transformers.attach(trainer) is None
        logs.append(run(trainer))
    compare(*logs)


def test_a_head_that_exists(client, head_name):
    model = patch(make_model("llama"), client, head_name, "llama")
    with pytest.raises(lossd.AlreadyExists):
        patch(make_model("llama"), client, head_name, "llama")
    patch(make_model("llama"), client, head_name, "llama", if_exists="keep")
    with pytest.raises(lossd.AlreadyExists, match="frozen false instead of true"):
        patch(make_model("llama"), client, head_name, "llama", if_exists="keep", freeze=True)
    assert model.config.vocab_size == V


def train_rank(rank, target, head_name, rows, folder):
    """The same training of a patched and of a stock model, both under DistributedDataParallel."""
    dataset, losses = Dataset.from_dict(rows), []
    with lossd.Client(target) as client:
        stock = make_model("llama")
        model = patch(copy.deepcopy(stock), client, head_name, "llama", process_group=torch.distributed.group.WORLD)
        for each in (model, stock):
            trainer = transformers.Trainer(
                each, arguments_of_epochs(f"{folder}/{rank}", 2, per_device_train_batch_size=2, eval_strategy="no",
                                ddp_backend="gloo", average_tokens_across_devices=True), train_dataset=dataset)
            if each is model:
                lossd.transformers.attach(trainer)
            assert trainer.accelerator.num_processes == 2
            losses.append([(log["loss"], log["grad_norm"]) for log in run(trainer) if "loss" in log])
        return losses, {key: value.clone() for key, value in model.state_dict().items()}, stock.state_dict()


def test_trainer_in_two_ranks(server, client, head_name, data, tmp_path):
    for (ours, theirs), model, stock in run_ranks(2, train_rank, server.target, head_name, data.to_dict(), str(tmp_path)):
        assert len(ours) == 8
        np.testing.assert_allclose(np.array(ours)[:, 0], np.array(theirs)[:, 0], atol=1e-5)
        np.testing.assert_allclose(np.array(ours)[:, 1], np.array(theirs)[:, 1], rtol=1e-4)
        for key, value in stock.items():
            torch.testing.assert_close(model[key], value, atol=2e-5, rtol=1e-3)


# The hyper-parameters that the head steps with, and how often it steps.


def groups_by_rate(model, **head):
    """The head in a group of its own."""
    names = dict(model.named_parameters())
    of_head = [parameter for name, parameter in names.items() if "lm_head" in name]
    assert len(of_head) >= 1
    rest = [parameter for name, parameter in names.items() if "lm_head" not in name]
    return torch.optim.AdamW([{"params": rest, "lr": 1e-3, "weight_decay": 0.3},
                              {"params": of_head, "lr": 7e-3, "weight_decay": 0.0, **head}])


def trainers(models, folder, optimizers, attaching=()):
    made = []
    for index, (model, optimizer) in enumerate(zip(models, optimizers)):
        trainer = trainer_of(model, folder, of_trainer={"optimizers": (optimizer, None)}, max_steps=4)
        if index == 0:
            lossd.transformers.attach(trainer, **dict(attaching))
        trainer.train()
        made.append(trainer)
    return made


@pytest.mark.parametrize("made", ["after patch", "before patch"])
def test_the_group_that_the_head_was_in(client, head_name, tmp_path, made):
    stock, model = make_model("llama"), make_model("llama")
    before = groups_by_rate(model)
    patched(model, client, head_name)
    trainers((model, stock), tmp_path, (before if made == "before patch" else groups_by_rate(model), groups_by_rate(stock)))
    assert_same_weights(model, stock)


def test_rates_that_attach_is_given(client, head_name, tmp_path):
    """The scheduler scales head_lr as it does the rest."""
    model, stock = both(client, head_name)
    optimizers = (torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.3),
                  groups_by_rate(stock, lr=9e-3, weight_decay=0.05))
    trainers((model, stock), tmp_path, optimizers, {"head_lr": 9e-3, "head_weight_decay": 0.05})
    assert_same_weights(model, stock)


def test_the_group_is_that_of_the_weight_by_the_trainers_rules(client, head_name, tmp_path):
    """No decay, because the trainer's rules say so for this name."""
    class Rules(transformers.Trainer):
        def get_decay_parameter_names(self, model):
            return [name for name in super().get_decay_parameter_names(model) if "lm_head" not in name]

    models = both(client, head_name)
    train_both(models, tmp_path, trainer=Rules, weight_decay=5.0)
    assert_same_weights(*models)


def with_bias(model):
    model.lm_head.bias = torch.nn.Parameter(0.1 * torch.arange(120.0).sin())
    return model


@pytest.mark.parametrize("decayed", [True, False])
def test_the_bias_of_the_head_decays_as_its_group_does(client, head_name, tmp_path, decayed):
    stock = with_bias(make_model("llama"))
    model = patched(copy.deepcopy(stock), client, head_name)
    if decayed:
        optimizers = [torch.optim.AdamW(each.parameters(), lr=5e-3, weight_decay=2.0) for each in (model, stock)]
        trainers((model, stock), tmp_path, optimizers)
    else:
        train_both((model, stock), tmp_path, weight_decay=2.0)
    assert_same_weights(model, stock)


def test_an_optimizer_without_the_head(client, head_name, tmp_path):
    model, _ = both(client, head_name)
    trainer = trainer_of(model, tmp_path, of_trainer={"optimizers": (torch.optim.AdamW(model.model.parameters()), None)})
    with pytest.raises(ValueError, match=rf"no group for the head '{head_name}'.*attach\(head_lr=\)"):
        lossd.transformers.attach(trainer)


def test_attach_twice_is_once(client, head_name, tmp_path):
    models = both(client, head_name)
    trainer = trainer_of(models[0], tmp_path)
    optimizer = lossd.transformers.attach(trainer, head_lr=5e-3)
    assert lossd.transformers.attach(trainer) is optimizer and optimizer is not None
    assert lossd.transformers.attach(trainer, head_lr=5e-3) is optimizer
    with pytest.raises(ValueError, match="attached once"):
        lossd.transformers.attach(trainer, head_lr=1e-3)
    trainer.train()
    stock = trainer_of(models[1], tmp_path)
    stock.train()
    assert client.describe_head(head_name).state.step == 3
    assert_same_weights(*models)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_rates_that_are_none(client, head_name, tmp_path, wrong):
    trainer = trainer_of(both(client, head_name)[0], tmp_path)
    for name in ("head_lr", "head_weight_decay"):
        with pytest.raises(ValueError, match=f"{name} is {wrong}"):
            lossd.transformers.attach(trainer, **{name: wrong})


# Whatever freezes the head of a model freezes it on the server, before patch() and after it.


def head_of(model):
    return model.get_output_embeddings()


def freeze_by_a_loop(model):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in model.model.layers[-1].parameters():
        parameter.requires_grad_(True)


def freeze_all_but_a_layer(model):
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)


FREEZING = {"head": lambda model: head_of(model).requires_grad_(False), "loop": freeze_by_a_loop,
            "model": freeze_all_but_a_layer}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("how", FREEZING)
def test_a_frozen_head_stays(client, head_name, tmp_path, how, before):
    stock = make_model("llama")
    FREEZING[how](stock)
    model = make_model("llama")
    if before:
        FREEZING[how](model)
    patched(model, client, head_name)
    if not before:
        FREEZING[how](model)
    weight = client.read_tensor(head_name)
    train_both((model, stock), tmp_path)
    np.testing.assert_array_equal(client.read_tensor(head_name), weight)
    assert client.describe_head(head_name).state.step == 0


def test_a_tied_head_is_frozen_with_the_embeddings(client, head_name, tmp_path):
    model, stock = both(client, head_name, "tied", tied="share")
    for each in (model, stock):
        each.get_input_embeddings().requires_grad_(False)
    weight = client.read_tensor(head_name)
    train_both((model, stock), tmp_path)
    np.testing.assert_array_equal(client.read_tensor(head_name), weight)


def test_a_head_that_is_unfrozen_is_trained(client, head_name, tmp_path):
    model, stock = both(client, head_name)
    head_of(model).requires_grad_(False)
    head_of(model).requires_grad_(True)
    train_both((model, stock), tmp_path)
    assert client.describe_head(head_name).state.step == 3


@pytest.mark.parametrize("freeze", [True, False])
def test_a_head_that_was_made_frozen_is_not_trained_in_silence(client, head_name, freeze):
    model = make_model("llama")
    head_of(model).requires_grad_(freeze)
    patched(model, client, head_name, freeze=freeze).train()
    tokens = torch.arange(3, 15)[None]
    assert not any(each.requires_grad for each in head_of(model).parameters())
    model(input_ids=tokens, labels=tokens).loss.backward()
    head_of(model).requires_grad_(True)
    with pytest.raises(RuntimeError, match=f"head '{head_name}' was made frozen"):
        model(input_ids=tokens, labels=tokens)


def test_a_loop_of_ones_own_with_a_frozen_head(client, head_name):
    model, _ = both(client, head_name)
    model.train()
    head_of(model).requires_grad_(False)
    tokens = torch.arange(3, 15)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert client.describe_head(head_name).step_microbatches == 0
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0


LORA = {"target_modules": ["q_proj", "v_proj"], "r": 4, "task_type": "CAUSAL_LM"}


def with_adapter(model):
    torch.manual_seed(4)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA))


@pytest.mark.parametrize("first", ["patch", "peft"])
def test_lora_without_a_word_about_the_head(client, head_name, tmp_path, caplog, first):
    stock = with_adapter(make_model("llama"))
    if first == "patch":
        model = with_adapter(patched(make_model("llama"), client, head_name))
    else:
        model = patched(with_adapter(make_model("llama")), client, head_name)
        assert isinstance(model, peft.PeftModel)
    weight = client.read_tensor(head_name)
    train_both((model, stock), tmp_path)
    np.testing.assert_array_equal(client.read_tensor(head_name), weight)
    assert (f"head '{head_name}' is frozen" in caplog.text) == (first == "patch")


def test_sft_trainer_that_makes_the_adapter(client, head_name, tmp_path):
    model = patched(make_model("llama"), client, head_name)
    trainer = trl.SFTTrainer(model, arguments(tmp_path, config=trl.SFTConfig, gradient_checkpointing=False, bf16=False),
                             train_dataset=rows(), processing_class=make_tokenizer(), peft_config=peft.LoraConfig(**LORA))
    assert lossd.transformers.attach(trainer) is None
    weight = client.read_tensor(head_name)
    trainer.train()
    np.testing.assert_array_equal(client.read_tensor(head_name), weight)


def test_lora_with_a_trained_head(client, head_name, tmp_path):
    model, stock = (with_adapter(each) for each in both(client, head_name))
    model.get_base_model().get_output_embeddings().requires_grad_(True)
    stock.get_base_model().lm_head.requires_grad_(True)
    train_both((model, stock), tmp_path)
    assert client.describe_head(head_name).state.step == 3


def test_what_peft_cannot_wrap(client, head_name):
    model = patched(make_model("llama"), client, head_name)
    with pytest.raises(TypeError, match="leave lm_head out of peft's modules_to_save"):
        peft.get_peft_model(model, peft.LoraConfig(**LORA, modules_to_save=["lm_head"]))
    for mode, message in ((True, "leave lm_head out of target_modules"), (False, "on a lossd server.* is not supported")):
        model = patched(make_model("llama"), client, head_name, if_exists="keep").train(mode)
        with pytest.raises((RuntimeError, ValueError), match=message):
            peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))
    for options in ({**LORA, "modules_to_save": ["lm_head"]}, {"target_modules": ["lm_head"]}):
        wrapped = peft.get_peft_model(make_model("llama"), peft.LoraConfig(**options))
        with pytest.raises(ValueError, match="leave lm_head out of target_modules and modules_to_save"):
            patched(wrapped, client, f"{head_name}-wrapped")
    assert f"{head_name}-wrapped" not in [each.spec.name for each in client.list_heads()]


def test_all_linear_leaves_the_head_out(client, head_name):
    model = peft.get_peft_model(patched(make_model("llama"), client, head_name), peft.LoraConfig(target_modules="all-linear"))
    assert isinstance(model.get_base_model().get_output_embeddings(), lossd.transformers._head_module.ServedHead)


def test_what_would_copy_or_resize_the_head(client, head_name):
    model = patched(make_model("llama"), client, head_name)
    for copying in (lambda: copy.deepcopy(model), lambda: torch.optim.swa_utils.AveragedModel(model)):
        with pytest.raises(TypeError, match=f"head '{head_name}' is on a lossd server, so a copy of the model cannot have it"):
            copying()
    with pytest.raises(RuntimeError, match=r"resize_token_embeddings\(\) before lossd.transformers.patch\(\)"):
        model.resize_token_embeddings(200)
    with pytest.raises(RuntimeError, match="client.write_tensor"):
        head_of(model).weight = torch.nn.Parameter(torch.zeros(120, 32))


def test_a_head_of_which_a_part_is_frozen(client, head_name):
    model = make_model("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(120))
    model.lm_head.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="either the weight or the bias is frozen"):
        patched(model, client, head_name)


# Smoothed labels, evaluation and prediction with logits, and models that are moved after patch().


@pytest.mark.parametrize("kind, more", [
    ("llama", {}), ("llama", {"gradient_accumulation_steps": 2}), ("gemma2", {"eval_strategy": "steps", "eval_steps": 2})])
def test_smoothed_labels(client, head_name, tmp_path, kind, more):
    ours, stock = train_both(both(client, head_name, kind), tmp_path, label_smoothing_factor=0.1, **more)
    for got, expected in zip(ours.state.log_history, stock.state.log_history):
        if "eval_loss" in expected:
            assert got["eval_loss"] == pytest.approx(expected["eval_loss"], abs=2e-5)
    assert (len(more) == 2) == any("eval_loss" in log for log in ours.state.log_history)


def test_smoothed_labels_of_sft(client, head_name, tmp_path):
    train_both(both(client, head_name), tmp_path, label_smoothing_factor=0.1, trainer=trl.SFTTrainer, config=trl.SFTConfig,
               gradient_checkpointing=False, bf16=False, of_trainer={"processing_class": make_tokenizer()})


def test_smoothed_labels_without_attach(client, head_name, tmp_path):
    trainer = trainer_of(both(client, head_name)[0], tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(RuntimeError, match=r"attach\(trainer\)"):
        trainer.train()
    assert client.describe_head(head_name).state.step == 0


def test_a_loss_of_logits_is_refused(client, head_name, tmp_path):
    trainer = trainer_of(both(client, head_name)[0], tmp_path, of_trainer={"compute_loss_func": lambda *_, **__: None})
    with pytest.raises(ValueError, match="compute_loss_func is given logits, and these are on the server"):
        lossd.transformers.attach(trainer)


def accuracy(predictions):
    logits, labels = predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"right": float((logits.argmax(-1)[:, :-1] == labels[:, 1:]).mean()), "sum": float(np.abs(logits).sum())}


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_metrics_and_predictions(client, head_name, tmp_path, kind, attached):
    results = []
    for index, model in enumerate(both(client, head_name, kind)):
        seen = []
        trainer = trainer_of(model, tmp_path, of_trainer={
            "compute_metrics": accuracy, "preprocess_logits_for_metrics": lambda logits, labels: (seen.append(logits), logits)[1]})
        if index == 0 and attached:
            lossd.transformers.attach(trainer)
        metrics, predicted = trainer.evaluate(), trainer.predict(rows(8))
        results.append((metrics, predicted.predictions, seen))
    (ours, our_logits, our_seen), (theirs, their_logits, their_seen) = results
    for key in ("eval_loss", "eval_right", "eval_sum"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key
    np.testing.assert_allclose(our_logits, their_logits, atol=1e-4)
    assert len(our_seen) == len(their_seen) > 0


def test_an_evaluation_of_losses_alone_makes_no_logits(client, head_name, tmp_path, monkeypatch):
    model, _ = both(client, head_name)
    trainer = trainer_of(model, tmp_path)
    lossd.transformers.attach(trainer)
    monkeypatch.setattr(type(client), "read_tensor", lambda *_, **__: pytest.fail("the weight was read"))
    assert trainer.evaluate()["eval_loss"] > 0
    seen = trainer.prediction_step(model.eval(), dict(rows(2).with_format("torch")[:]), prediction_loss_only=True)
    assert seen[0] > 0 and seen[1:] == (None, None)


def test_logits_of_a_loop_of_ones_own(client, head_name):
    model, stock = both(client, head_name, "gemma2")
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        ours, theirs = (each.eval()(input_ids=tokens, labels=tokens) for each in (model, stock))
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-5, rtol=1e-4)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5) and list(ours.keys())[:2] == list(theirs.keys())[:2]
    client.delete_head(head_name)
    without = patched(copy.deepcopy(stock), client, head_name, evaluation_logits=False).eval()
    with torch.no_grad():
        assert without(input_ids=tokens, labels=tokens).logits is None
        torch.testing.assert_close(without(input_ids=tokens).logits, theirs.logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("move", [lambda model: model.to(torch.bfloat16), lambda model: model.half(), lambda model: model.to("cpu")])
def test_models_that_are_moved_after_patch(client, head_name, move):
    model, stock = (move(each).eval() for each in both(client, head_name))
    tokens = torch.arange(3, 15)[None]
    ours, theirs = (each.generate(tokens, max_new_tokens=4, do_sample=False) for each in (model, stock))
    assert torch.equal(ours, theirs)
    got, expected = model.state_dict()["lm_head.weight"], stock.state_dict()["lm_head.weight"]
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected)


def test_a_tied_model_stays_tied(client, head_name):
    """Whatever ties weights again, as transformers does after loading."""
    model, stock = (each.eval() for each in both(client, head_name, "tied", tied="share"))
    model.tie_weights()
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens).logits, stock(input_ids=tokens).logits, atol=1e-5, rtol=1e-4)
    assert set(model.state_dict()) == set(stock.state_dict())


def test_copies_follow_the_device_and_dtype_of_hidden_states(client, head_name):
    model, _ = both(client, head_name)
    head = model.get_output_embeddings()
    with torch.no_grad():
        assert head(torch.ones(2, 32, dtype=torch.bfloat16)).dtype is torch.bfloat16
        assert head(torch.ones(2, 32)).dtype is torch.float32
    head.to("meta")
    assert head.device.type == "meta"


def test_an_encoder_decoder(client, head_name, tmp_path):
    """Labels are not shifted, and the decoder reads them."""
    torch.manual_seed(2)
    config = transformers.BartConfig(
        vocab_size=120, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, dropout=0.0, tie_word_embeddings=False)
    stock = transformers.BartForConditionalGeneration(config)
    model = patched(copy.deepcopy(stock), client, head_name)
    assert not model.get_output_embeddings().loss_head.shift
    trainers = train_both((model, stock), tmp_path, gradient_accumulation_steps=2)
    assert len(trainers[0].state.log_history) >= 3


def test_a_seq2seq_trainer_that_generates(client, head_name, tmp_path):
    """Of a model that ties its embeddings and scales hidden states by that."""
    torch.manual_seed(1)
    config = transformers.T5Config(vocab_size=120, d_model=32, d_ff=48, num_layers=1, num_heads=2, d_kv=16,
                                   decoder_start_token_id=0, dropout_rate=0.0)
    stock = transformers.T5ForConditionalGeneration(config)
    model = patched(copy.deepcopy(stock), client, head_name, tied="share")
    trainers = train_both((model, stock), tmp_path, trainer=transformers.Seq2SeqTrainer,
                          config=transformers.Seq2SeqTrainingArguments, predict_with_generate=True)
    ours, theirs = (trainer.predict(rows(4)) for trainer in trainers)
    np.testing.assert_array_equal(ours.predictions, theirs.predictions)
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], abs=1e-4)


# A trainer that removes its checkpoints removes those of the server that they named, and no others.


def names(client, head):
    return sorted(each.checkpoint.split("/")[1] for each in client.list_checkpoints(head))


def named(folder):
    return sorted(json.loads(path.read_text())["checkpoint"].split("/")[1] for path in Path(folder).glob(f"*/{FILE}"))


def test_one_is_left_of_five(client, head_name, tmp_path):
    client_side = both(client, head_name)[0]
    own = client.save_checkpoint(head_name, "mine").checkpoint
    trainer = trainer_of(client_side, tmp_path, max_steps=5, save_strategy="steps", save_steps=1, save_total_limit=1)
    lossd.transformers.attach(trainer)
    trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-5"]
    assert names(client, head_name) == sorted(["mine", *named(tmp_path)]) and own.endswith("/mine")


@pytest.mark.parametrize("limit, kept", [(1, ["checkpoint-1"]), (2, ["checkpoint-1", "checkpoint-4"])])
def test_the_best_stays(client, head_name, tmp_path, limit, kept):
    """With a limit of 1 the trainer removes the last one at the end of its training."""
    trainer = trainer_of(both(client, head_name)[0], tmp_path, max_steps=4, save_strategy="steps", save_steps=1,
                         save_total_limit=limit, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss",
                         greater_is_better=True)  # the first is
    lossd.transformers.attach(trainer)
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == kept
    assert names(client, head_name) == named(tmp_path) and len(named(tmp_path)) == len(kept)


def test_folders_that_others_remove_stay_on_the_server(client, head_name, tmp_path):
    trainer = trainer_of(both(client, head_name)[0], tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    lossd.transformers.attach(trainer)
    trainer.train()
    (tmp_path / "checkpoint-1").rename(tmp_path / "kept")
    trainer = trainer_of(patched(make_model("llama"), client, head_name, if_exists="keep"), tmp_path, max_steps=4,
                         save_strategy="steps", save_steps=1, save_total_limit=1)
    lossd.transformers.attach(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4"]
    assert names(client, head_name) == named(tmp_path) and len(named(tmp_path)) == 2


def test_a_checkpoint_that_training_went_on_from_elsewhere_stays(client, head_name, tmp_path):
    trainer = trainer_of(both(client, head_name)[0], tmp_path / "first", max_steps=1, save_strategy="steps", save_steps=1)
    lossd.transformers.attach(trainer)
    trainer.train()
    first = named(tmp_path / "first")
    trainer = trainer_of(patched(make_model("llama"), client, head_name, if_exists="keep"), tmp_path / "second", max_steps=4,
                         save_strategy="steps", save_steps=1, save_total_limit=1)
    lossd.transformers.attach(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    assert names(client, head_name) == sorted(first + named(tmp_path / "second"))


def test_what_cannot_be_removed_is_said(client, head_name, tmp_path, monkeypatch):
    trainer = trainer_of(both(client, head_name)[0], tmp_path, max_steps=2, save_strategy="steps", save_steps=1, save_total_limit=1)
    lossd.transformers.attach(trainer)

    def refuse(*_, **__):
        raise lossd.PermissionDenied("needs the role admin")

    monkeypatch.setattr(type(client), "delete_checkpoint", refuse)
    with pytest.warns(RuntimeWarning, match="stays on the server, although the trainer has removed its own: needs the role"):
        trainer.train()
    assert len(names(client, head_name)) == 2


def train_rotating_rank(rank, target, name, folder):
    with lossd.Client(target) as client:
        model = patched(make_model("llama"), client, name, process_group=torch.distributed.group.WORLD)
        trainer = trainer_of(model, folder, max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=1,
                             ddp_backend="gloo", per_device_train_batch_size=2)
        lossd.transformers.attach(trainer)
        trainer.train()
        assert trainer.accelerator.num_processes == 2


@pytest.mark.nightly
def test_ranks_remove_once(server, client, head_name, tmp_path):
    run_ranks(2, train_rotating_rank, server.target, head_name, str(tmp_path))
    assert names(client, head_name) == named(tmp_path) and len(named(tmp_path)) == 1
