# SPDX-License-Identifier: Apache-2.0
"""A program that runs again: what becomes of a head that exists, and of its optimizer."""

import numpy as np
import pytest
import torch
from tiny_models import make_model
from tiny_trainers import assert_same_weights, both, patched, train_both, trainer_of

import lossd
import lossd.transformers
from lossd.transformers import RemoteHeadCausalLM


@pytest.mark.parametrize("if_exists, step", [("keep", 3), ("reset", 0)])
def test_what_becomes_of_a_head_that_exists(client, head_name, tmp_path, if_exists, step):
    train_both(both(client, head_name), tmp_path)
    with pytest.raises(lossd.AlreadyExists):
        patched(make_model("llama"), client, head_name)
    models = both(client, head_name, if_exists=if_exists)
    assert client.describe_head(head_name).state.step == step
    assert_same_weights(*models)
    train_both(models, tmp_path)  # as a new model with a new optimizer
    assert_same_weights(*models)
    assert client.describe_head(head_name).state.step == step + 3


@pytest.mark.parametrize("if_exists, step", [("keep", 1), ("reset", 0)])
def test_a_remote_head_that_exists(client, head_name, if_exists, step):
    remote = RemoteHeadCausalLM(make_model("llama"), client, head_name)
    optimizer = lossd.torch.HeadOptimizer(remote.loss_head, lr=0.1)
    tokens = torch.arange(3, 15)[None]
    remote(tokens, labels=tokens).backward()
    optimizer.step()
    with pytest.raises(lossd.AlreadyExists):
        RemoteHeadCausalLM(make_model("llama"), client, head_name)
    again = RemoteHeadCausalLM(make_model("llama"), client, head_name, if_exists=if_exists)
    assert again.loss_head.step == step
    np.testing.assert_allclose(client.read_tensor(head_name), make_model("llama").lm_head.weight.detach().numpy())


def test_a_second_trainer_begins_with_a_new_optimizer(client, head_name, tmp_path):
    models = both(client, head_name)
    for _ in range(2):
        train_both(models, tmp_path)
        assert_same_weights(*models)


def test_one_trainer_that_trains_twice(client, head_name, tmp_path):
    models = both(client, head_name)
    trainers = [trainer_of(model, tmp_path) for model in models]
    lossd.transformers.attach(trainers[0])
    for _ in range(2):
        for trainer in trainers:
            trainer.train()
    assert_same_weights(*models)
    assert client.describe_head(head_name).state.step == 6


def test_the_old_word(client, head_name):
    patched(make_model("llama"), client, head_name)
    with pytest.warns(DeprecationWarning, match="if_exists='keep' says the same"):
        patched(make_model("llama"), client, head_name, exist_ok=True)
    with pytest.raises(ValueError, match="old word for if_exists='keep'"):
        patched(make_model("llama"), client, head_name, exist_ok=True, if_exists="reset")
    with pytest.raises(ValueError, match="if_exists is 'new'"):
        patched(make_model("llama"), client, head_name, if_exists="new")
    with pytest.raises(lossd.AlreadyExists, match="frozen False instead of True"):
        patched(make_model("llama"), client, head_name, if_exists="reset", freeze=True)
