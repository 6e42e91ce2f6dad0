# SPDX-License-Identifier: Apache-2.0
"""ServedRows: the input embeddings of a model whose weight is also the weight of the head on a lossd server (tied="rows"). They
ask the server for rows. InputPlaces puts them into the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from lossd.torch import ServedEmbedding
from lossd.transformers._head_module import ServedHead

_PROBES = 64  # the number of rows that are looked up to measure an embedding module


class ServedRows(ServedEmbedding):
    """Takes the place of a torch.nn.Embedding whose weight is also the weight of the served head.

    The module's state_dict holds the weight, read from the server, as the same tensor that the head's state_dict holds;
    load_state_dict writes the weight to the server. The head's stand-in parameter also stands for the embeddings, so to
    freeze it freezes both.
    """

    def __init__(self, served: ServedHead, scale: float, padding_idx: int | None) -> None:
        super().__init__(served.loss_head, scale=scale, padding_idx=padding_idx)
        object.__setattr__(self, "served", served)  # not a submodule: the model has it as its head already

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise self.served.copy_error()

    @property
    def weight(self) -> torch.Tensor:
        """See ServedHead.weight."""
        return self.served.weight

    @property
    def weight_device(self) -> torch.device:
        """The device on which the weight would be if it were in this process."""
        return self.served.device

    def requires_grad_(self, requires_grad: bool = True) -> ServedRows:
        """Freezes or unfreezes the head and these embeddings together."""
        self.served.requires_grad_(requires_grad)
        return self

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows for these ids, in the dtype of the model's weights."""
        self.served.settle()
        return super().forward(ids)

    def _dtype_on(self, device: torch.device) -> torch.dtype:
        return self.served.stand_ins["weight"].dtype

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.served.shared_weight()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
                              missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str]) -> None:
        if prefix + "weight" in state_dict:
            self.served.load_shared_weight(state_dict[prefix + "weight"])
        else:
            missing_keys.append(prefix + "weight")


class InputPlaces:
    """The modules of a model, other than the head, that have the head's weight as their embedding. For each: its places in
    the model, and the factor by which it multiplies the rows of the weight."""

    def __init__(self, model: Any, layer: Any, weight: torch.nn.Parameter) -> None:
        """`layer`: the head. ValueError if a module has the weight but does more than look up its rows and scale them."""
        self._model = type(model).__name__
        self._places: list[tuple[torch.nn.Module, str, Any]] = []  # the parent, the name in the parent, the module
        self._scales: dict[int, float] = {}  # for the id() of each module: its factor
        for parent in model.modules():
            for name, child in parent.named_children():
                if child is not layer and any(each is weight for each in child._parameters.values()):
                    self._places.append((parent, name, child))
                    self._scales[id(child)] = self._measured(child, weight)

    def put(self, served: ServedHead) -> None:
        """Puts ServedRows in the places of the modules."""
        made: dict[int, ServedRows] = {}  # by the id() of the module that it replaces, which may have several places
        for parent, name, module in self._places:
            if id(module) not in made:
                made[id(module)] = ServedRows(served, self._scales[id(module)], module.padding_idx)
                made[id(module)].train(module.training)
            setattr(parent, name, made[id(module)])

    def put_back(self) -> None:
        """Puts the model's own modules back."""
        for parent, name, module in self._places:
            setattr(parent, name, module)

    @torch.no_grad()
    def _measured(self, module: Any, weight: torch.Tensor) -> float:
        """The factor by which the module multiplies rows of the weight. ValueError if it does anything else with them."""
        kind = type(module).__name__
        if not isinstance(module, torch.nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq:
            raise ValueError(f"{self._model} uses the weight of its head in a {kind} that is no plain embedding, so the server "
                             'cannot serve its rows: choose tied="share" or "part"')
        generator = torch.Generator().manual_seed(9)
        ids = torch.randint(0, weight.shape[0], (_PROBES,), generator=generator).to(weight.device)
        with _in_evaluation(module):
            given = module(ids)
        rows = weight[ids]
        if given.shape != rows.shape or not rows.any():
            raise ValueError(f"{self._model} has an embedding, a {kind}, that cannot be measured: it gives {tuple(given.shape)} for "
                             f"{_PROBES} ids")
        fitted = float((given.double() * rows.double()).sum() / rows.double().square().sum())
        named = float(getattr(module, "embed_scale", None) or 1.0)
        # min() takes the first of equally good candidates: 1, and the factor that the module names, come before the fitted one.
        candidates = [1.0, named, float(torch.tensor(named, dtype=weight.dtype)), fitted]
        scale = min(candidates, key=lambda each: float((given - rows * each).double().norm()))
        tolerance = 4 * torch.finfo(weight.dtype).eps
        if not float((given - rows * scale).double().norm()) <= tolerance * float(given.double().norm()):
            raise ValueError(f"{self._model} has an embedding, a {kind}, that does more than multiply rows of the weight by a "
                             'number, and the server gives rows alone: choose tied="share" or "part"')
        return scale


@contextlib.contextmanager
def _in_evaluation(module: torch.nn.Module) -> Iterator[None]:
    before = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(before)
