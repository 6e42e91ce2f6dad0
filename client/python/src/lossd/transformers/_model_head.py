# SPDX-License-Identifier: Apache-2.0
"""The head of a causal language model of transformers: found in the model, written to a server, and checked there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

import lossd

Tied = Literal["refuse", "part", "share"]


@dataclass
class ModelHead:
    """The output embeddings of a model."""

    layer: Any  # a torch.nn.Linear, or what a model has in its place
    embedding: Any  # the weight of the input embeddings
    shared: bool  # the two have the same weight, and shall keep it

    @staticmethod
    def of(model: Any, tied: Tied) -> ModelHead:
        """ValueError if there is none, or if it is tied to the input embeddings and `tied` does not say what then."""
        layer = model.get_output_embeddings()
        if layer is None:
            raise ValueError(f"{type(model).__name__} has no output embeddings")
        embedding = model.get_input_embeddings().weight
        is_tied = layer.weight is embedding
        if is_tied and tied not in ("part", "share"):
            raise ValueError('the head shares its weights with the input embeddings; choose tied="part" or "share"')
        if is_tied and tied == "part":
            model.config.tie_word_embeddings = False
        return ModelHead(layer, embedding, is_tied and tied == "share")

    def create(self, client: lossd.Client, name: str, **options: Any) -> None:
        """Creates the head on the server with this one's shape, and writes its weights."""
        vocab_size, hidden_size = self.layer.weight.shape
        has_bias = self.layer.bias is not None
        client.create_head(name, hidden_size=hidden_size, vocab_size=vocab_size, bias=has_bias, zeros=True, **options)
        client.write_tensor(name, "weight", values(self.layer.weight))
        if has_bias:
            client.write_tensor(name, "bias", values(self.layer.bias))


class LogitOptions(TypedDict):
    """Of LossHead."""

    softcap: float
    logit_scale: float


def head_options(config: Any, softcap: float | None, logit_scale: float | None) -> LogitOptions:
    """What a configuration says about logits, where None was given."""
    if softcap is None:
        softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    if logit_scale is None:
        divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        logit_scale = 1.0 / divisor if divisor != 1.0 else float(getattr(config, "logit_scale", None) or 1.0)
    return {"softcap": softcap, "logit_scale": logit_scale}


def values(parameter: Any) -> NDArray[np.float32]:
    return parameter.detach().to("cpu", torch.float32).numpy()


def set_values(parameter: Any, values: NDArray[np.float32]) -> None:
    parameter.data.copy_(torch.from_numpy(values))


@torch.no_grad()
def random_tokens_loss(loss_of: Any, model: Any) -> float:
    device = next(model.parameters()).device
    tokens = torch.randint(0, model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)
    training = model.training
    model.eval()
    try:
        return float(loss_of(input_ids=tokens, labels=tokens))
    finally:
        model.train(training)
