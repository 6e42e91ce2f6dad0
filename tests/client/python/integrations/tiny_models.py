# SPDX-License-Identifier: Apache-2.0
"""Causal language models of transformers that train in a second, and trainers of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset

import lossd.transformers


# Models, with a tokenizer of as many words.

V = 120
_SMALL = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen": ("Qwen3", {"tie_word_embeddings": False}),
    "gemma2": ("Gemma2", {"tie_word_embeddings": False, "final_logit_softcapping": 2.0}),
    "tied": ("Qwen2", {"tie_word_embeddings": True}),
    "rows": ("Qwen2", {"tie_word_embeddings": True}),  # whose embeddings ask the server for rows
}


def make_model(kind: str) -> Any:
    name, changes = MODELS[kind]
    torch.manual_seed(11)
    config = getattr(transformers, f"{name}Config")(**{**_SMALL, **changes}, attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_config(config).float()


def make_tokenizer() -> Any:
    """Its words are t0 to t119, with spaces between them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(V)}, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", bos_token="t1", eos_token="t2",
                                                unk_token="t3")


# Trainers of tiny models that take a second, and what a patched and a stock one of them logged.


def rows(count: int = 16, length: int = 12) -> Dataset:
    tokens = torch.randint(3, V, (count, length), generator=torch.Generator().manual_seed(12))
    labels = tokens.clone()
    for row in range(count):
        labels[row, :row % (length - 2)] = -100  # uneven numbers of valid labels
    return Dataset.from_dict({"input_ids": tokens.tolist(), "labels": labels.tolist(),
                              "attention_mask": torch.ones_like(tokens).tolist()})


def arguments(folder: Any, **more: Any) -> Any:
    return more.pop("config", transformers.TrainingArguments)(**{
        "output_dir": str(folder), "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 3,
        "learning_rate": 5e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "lr_scheduler_type": "linear", "seed": 3, "disable_tqdm": True, **more})


def patched(model: Any, client: Any, name: str, **options: Any) -> Any:
    return lossd.transformers.patch(model, client, name, compute_dtype="fp32", **options)


def trainer_of(model: Any, folder: Any, trainer: Any = transformers.Trainer, of_trainer: dict[str, Any] | None = None,
               **more: Any) -> Any:
    return trainer(model, arguments(folder, **more), train_dataset=rows(), eval_dataset=rows(8), **(of_trainer or {}))


def both(client: Any, name: str, kind: str = "llama", **options: Any) -> tuple[Any, Any]:
    """A patched model and the stock one with the same weights."""
    stock = make_model(kind)
    return patched(copy.deepcopy(stock), client, name, **options), stock


def train_both(models: tuple[Any, Any], folder: Any, attaching: dict[str, Any] | None = None, **more: Any) -> list[Any]:
    """Trains both and compares losses, norms and learning rates of each step. The two trainers."""
    trainers = []
    for index, model in enumerate(models):
        trainer = trainer_of(model, folder, **more)
        if index == 0:
            lossd.transformers.attach(trainer, **(attaching or {}))
        trainer.train()
        trainers.append(trainer)
    logs = [[log for log in trainer.state.log_history if "loss" in log] for trainer in trainers]
    assert len(logs[0]) == len(logs[1]) >= 3
    for got, expected in zip(*logs):
        assert got["loss"] == pytest.approx(expected["loss"], abs=2e-5), expected["step"]
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-4), expected["step"]
        assert got["learning_rate"] == expected["learning_rate"]
    return trainers


def assert_same_weights(model: Any, stock: Any) -> None:
    ours, theirs = model.state_dict(), stock.state_dict()
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=2e-5, rtol=1e-3, msg=lambda text: f"{key}: {text}")
