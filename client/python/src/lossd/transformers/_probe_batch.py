# SPDX-License-Identifier: Apache-2.0
"""A few tokens and labels with which a model's head is measured."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

IGNORED = -100  # transformers' own
_SEQUENCES, _POSITIONS = 2, 8


@dataclass(frozen=True)
class ProbeBatch:
    """What a model takes for some sequences of random tokens, none of which the configuration calls special."""

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor  # [B, T], int64; a few are ignored

    @staticmethod
    def of(model: Any, classes: int) -> ProbeBatch:
        """Labels are below `classes`. Bounded: 16 tokens."""
        embedding = model.get_input_embeddings().weight
        special = _special_tokens(model.config)
        known = min(classes, embedding.shape[0])
        usual = torch.tensor([token for token in range(min(known, 1 << 16)) if token not in special] or [0])
        generator = torch.Generator().manual_seed(7)

        def draw() -> torch.Tensor:
            return usual[torch.randint(0, len(usual), (_SEQUENCES, _POSITIONS), generator=generator)]

        inputs, labels = {"input_ids": draw().to(embedding.device)}, draw().to(embedding.device)
        labels[0, :2] = labels[1, 5] = IGNORED
        if takes(model, "token_type_ids") and takes(model, "pixel_values"):  # says which positions are text
            inputs["token_type_ids"] = torch.zeros_like(labels)
        return ProbeBatch(inputs, labels)


def takes(model: Any, name: str) -> bool:
    """Whether the model's own forward has an argument of this name."""
    return name in inspect.signature(type(model).forward).parameters


def takes_any(model: Any) -> bool:
    """Whether the model's own forward has arguments that it passes on to the loss."""
    return any(each.kind is inspect.Parameter.VAR_KEYWORD
               for each in inspect.signature(type(model).forward).parameters.values())


def inputs_without_labels(model: Any, labels: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with which a model that is not given its labels computes what it computes with them.

    The decoder of an encoder-decoder reads the labels, shifted to the right.
    """
    if labels is None or not takes(model, "decoder_input_ids"):
        return inputs
    inputs = {"use_cache": False, **inputs}
    if inputs.get("decoder_input_ids") is None and inputs.get("decoder_inputs_embeds") is None:
        inputs["decoder_input_ids"] = _shifted_right(model, labels)
    return inputs


def _shifted_right(model: Any, labels: torch.Tensor) -> torch.Tensor:
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels=labels)
    config = model.config.get_text_config(decoder=True)
    shifted = labels.roll(1, -1)
    shifted[..., 0] = config.decoder_start_token_id
    return shifted.masked_fill(shifted == IGNORED, config.pad_token_id)


@contextlib.contextmanager
def as_in_evaluation(model: Any) -> Iterator[None]:
    """Inside, nothing is random and no graph is made; every module is in its mode again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _special_tokens(config: Any) -> set[int]:
    found: set[int] = set()
    waiting = [config.to_dict()]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            elif str(key).endswith(("token_id", "token_index", "token_ids", "_id")):
                found.update(each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))
    return found
