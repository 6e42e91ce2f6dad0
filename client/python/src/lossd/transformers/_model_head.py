# SPDX-License-Identifier: Apache-2.0
"""The head of a causal language model of transformers: found in the model, written to a server, and checked there."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

import lossd
from lossd.transformers._logits import HeadPath

Tied = Literal["refuse", "part", "share"]


IfExists = Literal["error", "keep", "reset"]


@dataclass
class ModelHead:
    """The output embeddings of a model."""

    layer: Any  # a torch.nn.Linear, or what a model has in its place
    embedding: Any  # the weight of the input embeddings
    shared: bool  # the two have the same weight, and shall keep it

    @staticmethod
    def of(model: Any, tied: Tied) -> ModelHead:
        """ValueError if there is none that a server could compute, or if it is tied to the input embeddings and `tied` does
        not say what then.
        """
        try:
            layer, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        except NotImplementedError as error:
            raise ValueError(f"{type(model).__name__} does not say what its embeddings are: {error}") from error
        if layer is None or embedding is None:
            raise ValueError(f"{type(model).__name__} has no output embeddings")
        check_linear(type(model).__name__, layer)
        embedding = embedding.weight
        is_tied = layer.weight is embedding
        if is_tied and tied not in ("part", "share"):
            raise ValueError('the head shares its weights with the input embeddings; choose tied="part" or "share"')
        if is_tied and tied == "part":
            model.config.tie_word_embeddings = False
        return ModelHead(layer, embedding, is_tied and tied == "share")

    @property
    def is_frozen(self) -> bool:
        return not self.layer.weight.requires_grad

    def create(self, client: lossd.Client, name: str, **options: Any) -> None:
        """Creates the head on the server with this one's shape, and writes its weights."""
        vocab_size, hidden_size = self.layer.weight.shape
        has_bias = self.layer.bias is not None
        client.create_head(name, hidden_size=hidden_size, vocab_size=vocab_size, bias=has_bias, zeros=True, **options)
        client.write_tensor(name, "weight", values(self.layer.weight))
        if has_bias:
            client.write_tensor(name, "bias", values(self.layer.bias))


@torch.no_grad()
def check_linear(model: str, layer: Any) -> None:
    """ValueError unless a layer does what a torch.nn.Linear does, with a weight that is here."""
    if hasattr(layer, "base_layer") or hasattr(layer, "modules_to_save"):
        raise ValueError(
            f"the head of this {model} is wrapped by peft as {type(layer).__name__}, an adapter or a copy of it, which a "
            "server does not compute: leave lm_head out of target_modules and modules_to_save, and call patch() first")
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not weight.dtype.is_floating_point:
        kind = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise ValueError(f"the weight of the head of this {model} is {kind}; lossd takes floating-point numbers [V, D]. What is "
                         "quantized, or partitioned over ranks (ZeRO 3), has to be whole when patch() is called")
    if bias is not None and bias.requires_grad != weight.requires_grad:
        raise ValueError(f"of the head of this {model} either the weight or the bias is frozen; a server trains both or neither")
    if weight.is_meta:
        raise ValueError(f"the weight of the head of this {model} is on the meta device: load it before patch()")
    hidden = torch.randn((4, weight.shape[1]), generator=torch.Generator().manual_seed(5)).to(weight)
    expected = torch.nn.functional.linear(hidden, weight, bias)
    try:
        got = layer(hidden)
    except Exception as error:
        raise ValueError(f"the head of this {model}, a {type(layer).__name__}, is not a linear layer: {error}") from error
    if got.shape != expected.shape or not torch.allclose(got, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise ValueError(f"the head of this {model}, a {type(layer).__name__}, computes something else than hidden @ weight.T + "
                         "bias, and lossd computes that alone")


def existing(if_exists: IfExists, exist_ok: bool) -> IfExists:
    """What becomes of a head that exists, of the two arguments that say it."""
    if if_exists not in ("error", "keep", "reset"):
        raise ValueError(f"if_exists is {if_exists!r}; it must be 'error', 'keep' or 'reset'")
    if not exist_ok:
        return if_exists
    if if_exists != "error":
        raise ValueError(f"exist_ok=True is the old word for if_exists='keep'; if_exists={if_exists!r} says something else")
    warnings.warn("exist_ok=True is deprecated: if_exists='keep' says the same, and 'reset' begins the head anew",
                  DeprecationWarning, stacklevel=4)
    return "keep"


class LogitOptions(TypedDict):
    """Of LossHead."""

    softcap: float
    logit_scale: float


def head_options(model: Any, head: ModelHead, path: HeadPath | None, softcap: float | None,
                 logit_scale: float | None) -> LogitOptions:
    """What is done with logits: as was measured, else as was given or as the configuration says. ValueError if what was
    given is not what was measured."""
    if path is not None:
        for name, given, measured in (("softcap", softcap, path.softcap), ("logit_scale", logit_scale, path.logit_scale)):
            if given is not None and not math.isclose(given, measured, rel_tol=1e-3, abs_tol=1e-6):
                raise ValueError(f"{name} is {given}, and {type(model).__name__} computes its logits with {measured:.6g}; "
                                 "verify=False takes what is given")
        return {"softcap": path.softcap, "logit_scale": path.logit_scale}
    config = model.config.get_text_config()
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
