# SPDX-License-Identifier: Apache-2.0
"""The head of a causal language model of transformers. ModelHead finds the head in a model, checks it, and writes it to a
server. ServedHead then takes its place in the model."""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

import lossd
from lossd.torch import LossHead, TiedEmbedding
from lossd.transformers._logits import HeadPath


class ServedHead(torch.nn.Module):
    """A linear layer whose weight is on a lossd server. patch() puts it in the place of a model's head.

    For each parameter of the server's head, the module has a stand-in: a parameter of one element, with the name that the
    layer's parameter had. The values and gradients of stand-ins are 0. They have three purposes:

      - To freeze or unfreeze a stand-in freezes or unfreezes the head.
      - The head is optimized with the settings of the optimizer's parameter group that contains its stand-ins.
      - Copies of the head's tensors are made on the stand-ins' device and in their dtype, so `to()` concerns them, too.

    With tied="share" there is no stand-in for the weight: the weight of the input embeddings has these purposes.

    The state_dict of the module holds the weight, which is read from the server; load_state_dict writes it to the server. So
    checkpoints of the model are complete. If the module is called without gradients, as by generate(), it computes logits
    with a copy of the weight, which it keeps until the server's weight changes.
    """

    def __init__(self, loss_head: LossHead, layer: torch.nn.Linear, tied: TiedEmbedding | None,
                 bias_aliases: list[torch.nn.Parameter], serves_rows: bool = False) -> None:
        """
        Args:
          layer: the model's own head, which this module replaces.
          tied: for tied="share": keeps the input embeddings in the trainer equal to the weight. Else None.
          bias_aliases: parameters of other modules of the model that were the layer's bias (_aliases_of_bias).
          serves_rows: for tied="rows": the input embeddings are rows of the weight on the server (ServedRows). Never true
            together with `tied`.
        """
        super().__init__()
        self.out_features, self.in_features = layer.weight.shape
        # object.__setattr__ keeps loss_head from becoming a submodule: the state of this module holds the head's tensors, not
        # the state of the LossHead.
        object.__setattr__(self, "loss_head", loss_head)
        object.__setattr__(self, "tied", tied)
        self._names = ["weight"] + ["bias"] * (layer.bias is not None)
        for name in self._names:
            if not (tied is not None and name == "weight"):
                old = getattr(layer, name)
                # Written directly, because register_parameter() of this class raises.
                self._parameters[name] = torch.nn.Parameter(
                    old.new_zeros(1), requires_grad=old.requires_grad and loss_head.train_head)
        # The layer's own parameters: an optimizer that was made before patch() may contain them. Weak references do not keep
        # them alive.
        object.__setattr__(self, "_before", {name: weakref.ref(getattr(layer, name)) for name in self._names})
        object.__setattr__(self, "_aliases", bias_aliases)
        self.serves_rows = serves_rows
        self._shared: weakref.ref[torch.Tensor] | None = None  # the weight that was last read for a state_dict
        self._shared_version: tuple[Any, ...] | None = None  # the version of _shared, in the form of _version
        self._loaded: torch.Tensor | None = None  # the weight that the present load_state_dict() has written
        self._copies: dict[str, torch.Tensor] = {}  # the head's tensors in this process, by name
        self._version: tuple[Any, ...] | None = None  # the version of _copies: incarnation, weights_version, dtype, device
        self._captured: list[torch.Tensor] | None = None  # within capturing(): the inputs of calls
        self._with_logits = False  # within capturing(): whether calls return logits
        self.could_train = loss_head.train_head  # whether the server and patch() allow training
        self._trained = loss_head.train_head  # the value that settle() has last given to the LossHead's train_head
        # Whether a trainer that attach() was called with is within its train(). None: attach() was not called.
        self.armed: bool | None = None
        self.counts_items = True  # whether the loss is divided by num_items_in_batch, if that is given
        self.keeps_hidden = False  # whether a forward without labels keeps its hidden states, for a trainer's own loss
        self.kept: torch.Tensor | None = None  # the hidden states that the last such forward has kept
        self.evaluation_logits = True  # whether the model's output in an evaluation has logits beside the loss

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, head={self.loss_head.head_name!r}, on a lossd server"

    def copy_error(self) -> TypeError:
        """The error that an attempt to copy the model raises."""
        return TypeError(
            f"head {self.loss_head.head_name!r} is on a lossd server, so a copy of the model cannot have it: leave lm_head out "
            "of peft's modules_to_save (it is trained on the server unless it is frozen), and average or copy the trunk alone")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise self.copy_error()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise self.copy_error()

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if self.tied is not None and name == "weight":
            return  # nothing to do: the input embeddings have the weight
        raise RuntimeError(f"the {name} of head {self.loss_head.head_name!r} is on a lossd server and cannot be replaced here: "
                           f"client.write_tensor({self.loss_head.head_name!r}, {name!r}, values) writes it")

    @property
    def stand_ins(self) -> dict[str, torch.nn.Parameter]:
        """For each tensor of the server's head, by name, the parameter of the model that stands for it."""
        found: dict[str, Any] = dict(self._parameters)
        if self.tied is not None:
            found["weight"] = self.tied.weight
        return found

    def tensors_of(self, name: str) -> list[Any]:
        """All parameters by which an optimizer may refer to the server's tensor `name`."""
        return [each for each in (self.stand_ins[name], self._before[name](), *(self._aliases if name == "bias" else []))
                if each is not None]

    @property
    def trains(self) -> bool:
        return self.could_train and self.stand_ins["weight"].requires_grad

    def settle(self) -> None:
        """Applies two things to the LossHead: the model's mode (training or evaluation), and whether the stand-in of the
        weight was frozen or unfrozen since the last call. RuntimeError if a head that cannot be trained was unfrozen."""
        if self.loss_head.training != self.training:
            self.loss_head.train(self.training)
        wanted = self.tied is None and self.stand_ins["weight"].requires_grad
        if wanted and not self.could_train and self.training and torch.is_grad_enabled():
            raise RuntimeError(
                f"head {self.loss_head.head_name!r} was made frozen, by freeze=True or because its weight took no gradient at "
                "patch(), so it cannot be trained now: delete it, and patch() a model whose head takes a gradient")
        if self.trains != self._trained:
            self._trained = self.loss_head.train_head = self.trains

    @property
    def device(self) -> torch.device:
        return self.stand_ins["weight"].device

    @property
    def weight(self) -> torch.Tensor:
        if self._captured is not None:  # some models read only the weight's dtype before they call the head
            return self.stand_ins["weight"]
        return self._copy("weight", self.stand_ins["weight"])

    @property
    def bias(self) -> torch.Tensor | None:
        return self._copy("bias", self.stand_ins["weight"]) if "bias" in self._names else None

    def check_trained(self) -> None:
        """RuntimeError if a trainer computes a loss for training and the head would not be trained, because attach() was not
        called and there is no HeadOptimizer."""
        trained = self.loss_head.has_optimizer if self.armed is None else self.armed
        if torch.is_grad_enabled() and self.training and self.loss_head.train_head and not trained:
            raise RuntimeError(
                f"this trainer would train the model and not its head {self.loss_head.head_name!r}, which is on a lossd "
                "server: call lossd.transformers.attach(trainer) after making it. patch(..., freeze=True) leaves the head "
                "as it is; a loop of your own makes a lossd.torch.HeadOptimizer(head)")

    @contextlib.contextmanager
    def capturing(self, with_logits: bool = False) -> Iterator[list[torch.Tensor]]:
        """Within the block, calls of the module append their inputs to the list that this yields. They return zeros instead
        of logits, unless `with_logits`."""
        self._captured, self._with_logits = [], with_logits
        try:
            yield self._captured
        finally:
            self._captured, self._with_logits = None, False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._captured is not None:
            self._captured.append(hidden)
            if not self._with_logits:
                return hidden.detach().new_zeros((*hidden.shape[:-1], 1))
        weight = self._copy("weight", hidden)
        return torch.nn.functional.linear(hidden, weight, self._copy("bias", hidden) if "bias" in self._names else None)

    def in_graph(self, *losses: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The losses, with a backward that gives each stand-in a gradient of 0. Wrappers such as DistributedDataParallel wait
        for a gradient of every parameter."""
        wanted = [each for each in self._parameters.values() if each is not None and each.requires_grad]
        if not wanted or not torch.is_grad_enabled():
            return losses
        return tuple(_InGraph.apply(loss, *wanted) for loss in losses)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The head's tensors, read from the server, on the device and in the dtype of the stand-ins."""
        return self._read(self._names, self.stand_ins["weight"])

    def _read(self, names: list[str], like: torch.Tensor) -> dict[str, torch.Tensor]:
        head = self.loss_head
        with torch.inference_mode(False):
            return {name: torch.from_numpy(head.client.read_tensor(head.head_name, name)).to(like.device, like.dtype)
                    for name in names}

    def _copy(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """A copy of the server's tensor `name` in the dtype and on the device of `like`. RuntimeError in training, where logits
        that are computed here could not train the head."""
        head = self.loss_head
        self.settle()
        if torch.is_grad_enabled() and self.training and head.train_head:
            raise RuntimeError(
                f"the weight of head {head.head_name!r} is on a lossd server, and so is its gradient: logits that are "
                "computed here could not train it. Give the model labels, use torch.no_grad() for logits, and call "
                "lossd.transformers.attach(trainer) after making a Trainer. An adapter of peft cannot be put on it: leave "
                "lm_head out of target_modules")
        version = self._version_like(like)
        if self._version != version:
            self._copies = self._read(self._names, like)
            self._version = version
        return self._copies[name]

    def _version_like(self, like: torch.Tensor) -> tuple[Any, ...]:
        """The version of the server's weights, with the dtype and the device of `like`."""
        state = self.loss_head.client.describe_head(self.loss_head.head_name).state
        return state.incarnation, state.weights_version, like.dtype, like.device

    def shared_weight(self) -> torch.Tensor:
        """The server's weight, for a state_dict. The head and the input embeddings (ServedRows) get the same tensor, as long
        as the caller still has it."""
        like = self.stand_ins["weight"]
        version = self._version_like(like)
        shared = None if self._shared is None or self._shared_version != version else self._shared()
        if shared is None:
            shared = self._read(["weight"], like)["weight"]
            self._shared, self._shared_version = weakref.ref(shared), version
        return shared

    def load_shared_weight(self, weight: torch.Tensor) -> None:
        """Writes the weight of a state_dict to the server. If the state_dict has the same tensor for several modules, writes
        it once. Collective with process_group."""
        if self._loaded is not None and (weight is self._loaded or (
                weight.data_ptr() == self._loaded.data_ptr() and weight.shape == self._loaded.shape)):
            return
        self._write("weight", weight)
        self._loaded = weight

    def forget_copies(self) -> None:
        """Frees the memory of the copies."""
        self._copies, self._version = {}, None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        tensors = {}
        if self.tied is not None:
            tensors["weight"] = self.tied.weight if keep_vars else self.tied.weight.detach()
        if self.serves_rows:
            tensors["weight"] = self.shared_weight()
        tensors.update(self._read([name for name in self._names if name not in tensors], self.stand_ins["weight"]))
        for name in self._names:
            destination[prefix + name] = tensors[name]
        for alias in self._aliases:
            alias.data.copy_(tensors["bias"])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
                              missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str]) -> None:
        for name in self._names:
            if self.tied is not None and name == "weight":
                continue  # loaded() writes the embeddings' weight later
            if prefix + name not in state_dict:
                if not (self.serves_rows and name == "weight"):  # the state of the input embeddings has it
                    missing_keys.append(prefix + name)
            elif self.serves_rows and name == "weight":
                self.load_shared_weight(state_dict[prefix + name])
            else:
                self._write(name, state_dict[prefix + name])

    def _write(self, name: str, values: torch.Tensor) -> None:
        """Writes a tensor to the server. Collective with process_group."""
        head = self.loss_head
        if head.parallel.rank == 0:
            head.client.write_tensor(head.head_name, name, np.ascontiguousarray(values.detach().to("cpu", torch.float32).numpy()))
        head.parallel.barrier()

    def loaded(self) -> None:
        """Called after a state_dict of the model was loaded. With tied="share", writes the embeddings' weight to the server's
        head."""
        self._loaded = None
        if self.tied is not None:
            if self.loss_head.parallel.rank == 0:
                self.tied.push()
            self.loss_head.parallel.barrier()


class _InGraph(torch.autograd.Function):
    """The identity for a loss. Its backward also gives each of `parameters` a gradient of 0."""

    @staticmethod
    def forward(context: Any, loss: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        context.shapes = [(each.shape, each.dtype, each.device) for each in parameters]
        return loss.clone()  # a copy, because the caller may change the result in place

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in context.shapes]
        return gradient, *zeros


def served_head(model: Any) -> ServedHead:
    """The ServedHead of a model. The model may be inside a PEFT model. ValueError if patch() was not called with the model."""
    base = base_of(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if not isinstance(head, ServedHead):
        raise ValueError(f"the head of this {type(base).__name__} is not on a lossd server: call "
                         "lossd.transformers.patch(model, client, name) first")
    return head


def base_of(model: Any) -> Any:
    """The model of transformers that `model` is, or that a PEFT model `model` contains."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# What to do with a head that shares its weight with the input embeddings. "refuse": raise an error. "part": make them two
# matrices. "share": the trainer has a copy of the weight as its embeddings (TiedEmbedding). "rows": only the server has the
# weight, and the embeddings ask it for rows (ServedRows).
Tied = Literal["refuse", "part", "share", "rows"]


# What to do if the server has a head of this name already (Client.create_head).
IfExists = Literal["error", "keep", "reset"]


@dataclass
class ModelHead:
    """The head of a model before it moves to a server: the model's output embeddings."""

    layer: Any  # the head itself: a torch.nn.Linear, or another layer that computes the same
    embedding: Any  # the weight of the input embeddings, a parameter
    shared: bool  # tied="share": head and input embeddings have the same weight, and the trainer keeps a copy of it
    serves_rows: bool  # tied="rows": head and input embeddings have the same weight, and only the server keeps it

    @staticmethod
    def of(model: Any, tied: Tied) -> ModelHead:
        """Finds the head of a model. With tied="part", also changes the model's configuration to weights that are not tied.

        ValueError if the model has no head that a server can compute, or if the head's weight is that of the input embeddings
        and `tied` is "refuse".
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
        if is_tied and tied not in ("part", "share", "rows"):
            raise ValueError('the head shares its weights with the input embeddings; choose tied="part", "share" or "rows"')
        if is_tied and tied == "part":
            model.config.tie_word_embeddings = False
        return ModelHead(layer, embedding, is_tied and tied == "share", is_tied and tied == "rows")

    @property
    def is_frozen(self) -> bool:
        return not self.layer.weight.requires_grad

    def create(self, client: lossd.Client, name: str, **options: Any) -> None:
        """Creates a head with this shape on the server, and writes its weights."""
        vocab_size, hidden_size = self.layer.weight.shape
        has_bias = self.layer.bias is not None
        client.create_head(name, hidden_size=hidden_size, vocab_size=vocab_size, bias=has_bias, zeros=True, **options)
        client.write_tensor(name, "weight", values(self.layer.weight))
        if has_bias:
            client.write_tensor(name, "bias", values(self.layer.bias))


@torch.no_grad()
def check_linear(model: str, layer: Any) -> None:
    """ValueError unless the layer computes the same as a torch.nn.Linear and its whole weight is in this process. `model`: the
    model's class, for the error."""
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
    """The value of if_exists, also if the caller gave the deprecated exist_ok=True instead."""
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
    """The options of LossHead that transform the logits."""

    softcap: float
    logit_scale: float


def head_options(model: Any, head: ModelHead, path: HeadPath | None, softcap: float | None,
                 logit_scale: float | None) -> LogitOptions:
    """How the model transforms its head's logits. If `path` was measured, it has the values; ValueError if a given value
    differs. Else a given value is taken, or, if it is None, the value in the model's configuration."""
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
