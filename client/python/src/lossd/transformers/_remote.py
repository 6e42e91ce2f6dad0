# SPDX-License-Identifier: Apache-2.0
"""RemoteHeadCausalLM: a module around a causal model whose head is on a lossd server."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

import lossd
from lossd._arrays import known_arguments
from lossd.torch import LossHead, TiedEmbedding, _data_parallel
from lossd.torch._job import Extra
from lossd.transformers._logits import HeadPath, HeadPlace, measure, random_tokens_loss
from lossd.transformers._model_head import IfExists, ModelHead, Tied, existing, head_options, set_values, values

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


class RemoteHeadCausalLM(torch.nn.Module):
    """A causal language model whose head, with its loss, is on a lossd server.

        model = AutoModelForCausalLM.from_pretrained(...)
        remote = RemoteHeadCausalLM(model, client, "lm")
        loss = remote(input_ids, labels=labels, attention_mask=mask)

    Takes the model over: the head's weights, and with move_norm the final norm's, go to the server as a new head, and
    the model is left without them; save_back() brings them back. What the model makes of its head's logits (scale, softcap)
    and of labels (shifted or not) is measured with a few tokens; ValueError if lossd cannot do the same.

    `loss_head` is the LossHead: HeadOptimizer(remote.loss_head, ...) steps it.
    """

    @known_arguments
    def __init__(
            self, model: Any, client: lossd.Client, name: str, *, if_exists: IfExists = "error", move_norm: bool = False,
            tied: Tied = "refuse", compute_dtype: lossd.types.DType | None = None,
            optimizer_state: lossd.types.OptimizerState = "adam",
            logits: lossd.types.Logits = "stored", verify: bool = True, reduction: lossd.types.Reduction = "mean",
            normalizer: float | None = None, grad_output: float = 1.0, deferred: bool = False, train_head: bool = True,
            extras: Iterable[Extra] = (), process_group: Any = _data_parallel.UNSAID, averaged_over: int | None = None,
            rank: int | None = None, world_size: int | None = None, state: Literal["checkpoint", "none"] = "checkpoint",
            streams: int | None = None, slice_bytes: int | None = None, timeout: float | None = None,
            label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
            logit_scale: float | None = None, gradients: lossd.types.Gradients | None = None,
            filter_epsilon: float | None = None, sample_threshold: float | None = None,
            max_gradient_error: float | None = None) -> None:
        """
        Args:
          if_exists: as patch().
          move_norm: the final norm goes to the server too.
          tied: what becomes of a head that shares its weights with the input embeddings. "part": each goes its own
            way, the head trained by the server, the embeddings by the trainer. "share": they stay one matrix, which
            the server trains; see `tied` of this object (lossd.torch.TiedEmbedding), and leave the embeddings out of
            the trainer's optimizer.
          compute_dtype: of the head's matrix products; the server's choice (bf16 on a GPU) if None.
          logits: as Client.create_head.
          verify: measure, and compare the losses of a few random tokens before and after; ValueError if they differ.
            False: what softcap and logit_scale or else the configuration say is believed, and labels are shifted.
          softcap, logit_scale: as LossHead; as was measured if None.
          reduction, normalizer, grad_output, deferred, train_head, extras, state: as LossHead.
          process_group, averaged_over, rank, world_size, streams, slice_bytes, timeout: as LossHead.
          label_smoothing, z_loss, gradients, filter_epsilon, sample_threshold, max_gradient_error: as LossHead.
        """
        super().__init__()
        head = ModelHead.of(model, tied)
        norm = _FinalNorm.find(model) if move_norm else None
        classes = head.layer.weight.shape[0]
        place = HeadPlace(model, head.layer)
        path = measure(model, head.layer, place) if verify else None
        options = head_options(model, head, path, softcap, logit_scale)
        if path is not None:
            options["logit_scale"] *= _factor(type(model).__name__, path)
        expected = random_tokens_loss(lambda **inputs: model(**inputs).loss, model, classes) if verify else 0.0

        head.create(client, name, norm=norm.kind if norm else "none", norm_epsilon=norm.epsilon if norm else None,
                    compute_dtype=compute_dtype, optimizer_state=optimizer_state, logits=logits,
                    frozen=head.is_frozen, if_exists=existing(if_exists, False))
        if norm:
            norm.write(client, name)
        self.loss_head = LossHead(
            client, name, shift=path is None or path.shift, reduction=reduction, normalizer=normalizer, grad_output=grad_output,
            deferred=deferred, train_head=train_head, extras=extras, process_group=process_group,
            averaged_over=averaged_over, rank=rank, world_size=world_size, state=state, streams=streams,
            slice_bytes=slice_bytes, timeout=timeout, label_smoothing=label_smoothing, z_loss=z_loss,
            gradients=gradients, filter_epsilon=filter_epsilon, sample_threshold=sample_threshold,
            max_gradient_error=max_gradient_error, **options)
        self.tied = TiedEmbedding(self.loss_head, head.embedding) if head.shared else None
        self.model = model
        self._norm = norm
        self._layer = (head.layer.bias is not None, head.layer.weight.dtype, head.layer.weight.device)
        self._place = place
        place.put(_NoHead())
        if norm:
            setattr(norm.owner, norm.name, torch.nn.Identity())
        if verify:
            self._verify(expected, classes)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **inputs: Any) -> Any:
        """The loss (or what the LossHead's extras make of it); `inputs` are those of the model without its head."""
        if "num_items_in_batch" in inputs:
            raise TypeError("RemoteHeadCausalLM is for loops of your own: for a Trainer use "
                            "lossd.transformers.patch(model, client, name), and attach(trainer) after making it")
        hidden = self.model.base_model(input_ids=input_ids, **inputs).last_hidden_state
        return self.loss_head(hidden, labels)

    def save_back(self) -> Any:
        """Brings the weights back from the server and returns the model as it was before, trained."""
        client, name = self.loss_head.client, self.loss_head.head_name
        bias, dtype, device = self._layer
        layer = torch.nn.Linear(self.loss_head.hidden_size, self.loss_head.vocab_size, bias=bias, dtype=dtype,
                                device=device)
        set_values(layer.weight, client.read_tensor(name, "weight"))
        if bias:
            set_values(layer.bias, client.read_tensor(name, "bias"))
        if self.tied is not None:
            self.tied.pull()
            layer.weight = self.tied.weight
        self._place.put(layer)
        if self._norm:
            self._norm.read(client, name)
            setattr(self._norm.owner, self._norm.name, self._norm.module)
        return self.model

    def _verify(self, expected: float, classes: int) -> None:
        got = random_tokens_loss(self, self.model, classes)
        if not np.isclose(got, expected, rtol=2e-2):
            raise ValueError(
                f"{type(self.model).__name__} gives a loss of {expected:.4f} for random tokens, its head on the server "
                f"{got:.4f}: it makes its logits in a way that this class does not know")


def _factor(model: str, path: HeadPath) -> float:
    """Of logits whose hidden states are the base model's. ValueError if the head gets others."""
    if not math.isfinite(path.input_factor):
        raise ValueError(f"the head of {model} does not get the last hidden states of its base model; "
                         "lossd.transformers.patch() takes what the head gets")
    return path.input_factor


class _NoHead(torch.nn.Module):
    """Stands where the head was."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the head of this model is on a lossd server: call the RemoteHeadCausalLM, or save_back()")


@dataclass
class _FinalNorm:
    """The norm that a model applies to its last hidden states."""

    owner: torch.nn.Module
    name: str
    module: torch.nn.Module
    kind: lossd.types.Norm
    epsilon: float
    gain_offset: float  # Gemma's RMSNorm multiplies by 1 + weight

    @staticmethod
    def find(model: Any) -> _FinalNorm:
        owner = model.base_model
        for name in _NORM_NAMES:
            module = getattr(owner, name, None)
            if module is None:
                continue
            kind = type(module).__name__
            if isinstance(module, torch.nn.LayerNorm) and module.elementwise_affine and module.bias is not None:
                return _FinalNorm(owner, name, module, "layernorm", module.eps, 0.0)
            if kind.endswith("RMSNorm"):
                epsilon = getattr(module, "variance_epsilon", None) or module.eps
                return _FinalNorm(owner, name, module, "rmsnorm", float(epsilon), float(kind.startswith("Gemma")))
        raise ValueError(f"{type(owner).__name__} has no final norm that lossd knows; leave it with move_norm=False")

    def write(self, client: lossd.Client, head: str) -> None:
        client.write_tensor(head, "norm_gain", values(self.module.weight) + np.float32(self.gain_offset))
        if self.kind == "layernorm":
            client.write_tensor(head, "norm_shift", values(self.module.bias))

    def read(self, client: lossd.Client, head: str) -> None:
        set_values(self.module.weight, client.read_tensor(head, "norm_gain") - np.float32(self.gain_offset))
        if self.kind == "layernorm":
            set_values(self.module.bias, client.read_tensor(head, "norm_shift"))
