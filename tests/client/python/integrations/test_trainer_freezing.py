# SPDX-License-Identifier: Apache-2.0
"""Whatever freezes the head of a model freezes it on the server, before patch() and after it."""

import copy

import numpy as np
import peft
import pytest
import torch
import trl
from tiny_models import make_model, make_tokenizer
from tiny_trainers import arguments, both, patched, rows, train_both

import lossd
import lossd.transformers


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
