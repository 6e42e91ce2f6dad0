# SPDX-License-Identifier: Apache-2.0
"""What stands in a model where its language-model head was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lossd.torch import LossHead, TiedEmbedding


class ServedHead(torch.nn.Module):
    """A linear layer without parameters: its weight is on a lossd server.

    Its state_dict holds the weight nevertheless, read from the server, and load_state_dict writes it there. So
    checkpoints of the model are complete. Called without gradients, as by generate(), it computes logits with a copy of
    the weight, which it keeps until the weight changes.
    """

    def __init__(self, loss_head: LossHead, layer: torch.nn.Linear, tied: TiedEmbedding | None) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        # Not a submodule: its state is the tensors below.
        object.__setattr__(self, "loss_head", loss_head)
        self.tied = tied  # keeps the input embeddings equal to the weight, if it shares it with them
        self._names = ["weight"] + ["bias"] * (layer.bias is not None)
        self._dtype, self._device = layer.weight.dtype, layer.weight.device
        self._copies: dict[str, torch.Tensor] = {}
        self._version: tuple[int, int] | None = None  # incarnation, weights_version of the copies
        self._captured: list[torch.Tensor] | None = None
        self.armed: bool | None = None  # an attached trainer is in its train(); None: none was attached yet

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, head={self.loss_head.head_name!r}"

    @property
    def weight(self) -> torch.Tensor:
        return self._copy("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        return self._copy("bias") if "bias" in self._names else None

    def check_trained(self) -> None:
        """RuntimeError if a trainer computes a loss to train from, and would leave the head as it is."""
        trained = self.loss_head.has_optimizer if self.armed is None else self.armed
        if torch.is_grad_enabled() and self.training and self.loss_head.train_head and not trained:
            raise RuntimeError(
                f"this trainer would train the model and not its head {self.loss_head.head_name!r}, which is on a lossd "
                "server: call lossd.transformers.attach(trainer) after making it. patch(..., freeze=True) leaves the head "
                "as it is; a loop of your own makes a lossd.torch.HeadOptimizer(head)")

    @contextlib.contextmanager
    def capturing(self) -> Iterator[list[torch.Tensor]]:
        """Inside, calls give no logits; what they would have been computed from is in the list."""
        self._captured = []
        try:
            yield self._captured
        finally:
            self._captured = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._captured is not None:
            self._captured.append(hidden)
            return hidden.detach().new_zeros((*hidden.shape[:-1], 1))
        return torch.nn.functional.linear(hidden, self.weight, self.bias)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of the layer, as the server has them."""
        head = self.loss_head
        return {name: torch.from_numpy(head.client.read_tensor(head.head_name, name)).to(self._device, self._dtype)
                for name in self._names}

    def _copy(self, name: str) -> torch.Tensor:
        head = self.loss_head
        if torch.is_grad_enabled() and self.training and head.train_head:
            raise RuntimeError(
                f"the weight of head {head.head_name!r} is on a lossd server, and so is its gradient: logits that are "
                "computed here could not train it. Give the model labels, use torch.no_grad() for logits, and call "
                "lossd.transformers.attach(trainer) after making a Trainer")
        state = head.client.describe_head(head.head_name).state
        if self._version != (state.incarnation, state.weights_version):
            self._copies = self.tensors()
            self._version = (state.incarnation, state.weights_version)
        return self._copies[name]

    def forget_copies(self) -> None:
        """Lets go of the memory of the weight's copy."""
        self._copies, self._version = {}, None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.tied is not None:
            destination[prefix + "weight"] = self.tied.weight if keep_vars else self.tied.weight.detach()
            return
        for name, tensor in self.tensors().items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
                              missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str]) -> None:
        if self.tied is not None:
            return  # push_tied() follows
        head = self.loss_head
        for name in self._names:
            if prefix + name not in state_dict:
                missing_keys.append(prefix + name)
                continue
            values = state_dict[prefix + name].detach().to("cpu", torch.float32).numpy()
            if head.parallel.rank == 0:
                head.client.write_tensor(head.head_name, name, np.ascontiguousarray(values))
            head.parallel.barrier()

    def push_tied(self) -> None:
        """The embeddings were loaded: the head's weight becomes theirs."""
        if self.tied is not None:
            if self.loss_head.parallel.rank == 0:
                self.tied.push()
            self.loss_head.parallel.barrier()


def served_head(model: Any) -> ServedHead:
    """That of a model that patch() was called with, which may be inside a PEFT model. ValueError if it has none."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if not isinstance(head, ServedHead):
        raise ValueError(f"the head of this {type(base).__name__} is not on a lossd server: call "
                         "lossd.transformers.patch(model, client, name) first")
    return head


