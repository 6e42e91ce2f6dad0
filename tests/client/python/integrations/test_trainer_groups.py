# SPDX-License-Identifier: Apache-2.0
"""The hyper-parameters that the head steps with, and how often it steps."""

import copy

import pytest
import torch
import transformers
from tiny_models import make_model
from tiny_trainers import assert_same_weights, both, patched, train_both, trainer_of

import lossd.transformers


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

