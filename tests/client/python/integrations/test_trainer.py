# SPDX-License-Identifier: Apache-2.0
"""Unmodified transformers.Trainer and trl.SFTTrainer with patch(): losses, norms and weights of the stock model."""

import copy

import numpy as np
import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from ranks import run_ranks
from tiny_models import MODELS, V, make_model, make_tokenizer

import lossd
import lossd.transformers

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


def arguments(folder, accumulation=1, **more):
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
                                    tied="share" if kind == "tied" else "refuse", **options)


def assert_same_weights(model, stock, tolerance=2e-5):
    ours, theirs = model.state_dict(), stock.state_dict()
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=tolerance, rtol=1e-3)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_trainer(client, head_name, data, tmp_path, kind, accumulation):
    stock = make_model(kind)
    model = patch(copy.deepcopy(stock), client, head_name, kind)
    assert type(model) is type(stock)
    logs = []
    for each in (model, stock):
        trainer = transformers.Trainer(each, arguments(tmp_path, accumulation), train_dataset=data, eval_dataset=data)
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
            each, arguments(tmp_path, accumulation, config=trl.SFTConfig, gradient_checkpointing=False, bf16=False),
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
        return transformers.Trainer(model, arguments(folder, **more), train_dataset=data, eval_dataset=data)
    config = arguments(folder, config=trl.SFTConfig, gradient_checkpointing=False, bf16=False, **more)
    return trl.SFTTrainer(model, config, train_dataset=data, eval_dataset=data, processing_class=tokenizer)


@pytest.mark.parametrize("kind, trainer_kind", [
    ("llama", "Trainer"), ("tied", "Trainer"), ("gemma2", "SFTTrainer"), ("qwen", "SFTTrainer")])
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
    trainer = transformers.Trainer(stock, arguments(tmp_path, save_strategy="steps", save_steps=5), train_dataset=data,
                                   eval_dataset=data)
    run(trainer)
    model = patch(make_model("llama"), client, head_name, "llama")
    trainer = transformers.Trainer(model, arguments(tmp_path / "other"), train_dataset=data, eval_dataset=data)
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
    trainer = trl.SFTTrainer(model, arguments(tmp_path, config=trl.SFTConfig, gradient_checkpointing=False, bf16=False),
                             train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    with pytest.raises(RuntimeError, match=r"attach\(trainer\)"):
        run(trainer)


def test_a_head_that_a_trainer_would_leave_out(client, head_name, data, tmp_path):
    """Of transformers' own Trainer, which takes the loss as it comes: also behind an earlier one that was attached."""
    model = patch(make_model("llama"), client, head_name, "llama")
    for attached in (False, True, False):
        trainer = transformers.Trainer(model, arguments(tmp_path, max_steps=1, eval_strategy="no"), train_dataset=data)
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
    trainer = transformers.Trainer(remote, arguments(tmp_path, max_steps=1, eval_strategy="no"), train_dataset=data)
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
    with pytest.raises(lossd.AlreadyExists, match="frozen False instead of True"):
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
                each, arguments(f"{folder}/{rank}", 2, per_device_train_batch_size=2, eval_strategy="no",
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
