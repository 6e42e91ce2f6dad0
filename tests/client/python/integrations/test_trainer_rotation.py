# SPDX-License-Identifier: Apache-2.0
"""A trainer that removes its checkpoints removes those of the server that they named, and no others."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny_models import make_model
from tiny_trainers import both, patched, trainer_of

import lossd
import lossd.transformers
from lossd.transformers._trainer import FILE


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


def train_rank(rank, target, name, folder):
    with lossd.Client(target) as client:
        model = patched(make_model("llama"), client, name, process_group=torch.distributed.group.WORLD)
        trainer = trainer_of(model, folder, max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=1,
                             ddp_backend="gloo", per_device_train_batch_size=2)
        lossd.transformers.attach(trainer)
        trainer.train()
        assert trainer.accelerator.num_processes == 2


@pytest.mark.nightly
def test_ranks_remove_once(server, client, head_name, tmp_path):
    run_ranks(2, train_rank, server.target, head_name, str(tmp_path))
    assert names(client, head_name) == named(tmp_path) and len(named(tmp_path)) == 1
