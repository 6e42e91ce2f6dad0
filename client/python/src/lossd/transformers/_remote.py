# SPDX-License-Identifier: Apache-2.0
"""RemoteHeadCausalLM: a module around a causal model whose head is on a lossd server. For attach(), also ParameterGroup, the
hyper-parameters of a head's steps under a Trainer, and ZeroSteps, a head's steps under DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

import lossd
from lossd.torch import HeadOptimizer, LossHead, TiedEmbedding, _data_parallel
from lossd.torch._input import known_arguments
from lossd.torch._job import Extra
from lossd.transformers._head_module import (
    IfExists,
    ModelHead,
    ServedHead,
    Tied,
    existing,
    head_options,
    set_values,
    values,
)
from lossd.transformers._logits import HeadPath, HeadPlace, measure, random_tokens_loss

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


class RemoteHeadCausalLM(torch.nn.Module):
    """A causal language model whose head, with its loss, is on a lossd server.

        model = AutoModelForCausalLM.from_pretrained(...)
        remote = RemoteHeadCausalLM(model, client, "lm")
        loss = remote(input_ids, labels=labels, attention_mask=mask)

    The module takes over the model. It moves the head's weights, and with move_norm the final norm's weights, to a new head
    on the server. Then the model does not have them any more; save_back() puts them back. The module measures with a few
    tokens how the model transforms its head's logits (scale, softcap), and whether the model shifts labels. ValueError if
    lossd cannot do the same.

    The attribute `loss_head` is the LossHead. HeadOptimizer(remote.loss_head, ...) applies its steps.
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
          if_exists: as in patch().
          move_norm: also move the final norm to the server.
          tied: what to do with a head that shares its weights with the input embeddings. "refuse": raise ValueError. "part":
            head and embeddings become different matrices; the server trains the head, and the trainer trains the embeddings.
            "share": they stay one matrix, which the server trains. Then use the attribute `tied`
            (lossd.torch.TiedEmbedding) in each step, and leave the embeddings out of the trainer's optimizer. "rows" is only
            for patch().
          compute_dtype: the type of the head's matrix products. None: the server chooses (bf16 on a GPU).
          logits: as in Client.create_head.
          verify: measure as described above, and compare the losses of a few random tokens before and after; ValueError if
            they differ. False: trust `softcap` and `logit_scale`, or else the configuration, and assume that labels are
            shifted.
          softcap, logit_scale: as in LossHead. None: as measured.
          reduction, normalizer, grad_output, deferred, train_head, extras, state: as in LossHead.
          process_group, averaged_over, rank, world_size, streams, slice_bytes, timeout: as in LossHead.
          label_smoothing, z_loss, gradients, filter_epsilon, sample_threshold, max_gradient_error: as in LossHead.
        """
        super().__init__()
        if tied == "rows":
            raise ValueError('tied is "rows"; that is for lossd.transformers.patch(). RemoteHeadCausalLM takes "share" or "part"')
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
        """Returns the loss, or (loss, LossExtras) if there are extras. `inputs`: further inputs of the model's base model."""
        if "num_items_in_batch" in inputs:
            raise TypeError("RemoteHeadCausalLM is for loops of your own: for a Trainer use "
                            "lossd.transformers.patch(model, client, name), and attach(trainer) after making it")
        hidden = self.model.base_model(input_ids=input_ids, **inputs).last_hidden_state
        return self.loss_head(hidden, labels)

    def save_back(self) -> Any:
        """Copies the trained weights back from the server, and returns the model with a head of its own again."""
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
    """path.input_factor. ValueError if the head's input is not the base model's last hidden states times a factor."""
    if not math.isfinite(path.input_factor):
        raise ValueError(f"the head of {model} does not get the last hidden states of its base model; "
                         "lossd.transformers.patch() takes what the head gets")
    return path.input_factor


class _NoHead(torch.nn.Module):
    """Takes the place of the head in the model. A call raises."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the head of this model is on a lossd server: call the RemoteHeadCausalLM, or save_back()")


@dataclass
class _FinalNorm:
    """The norm that a model applies to its last hidden states, before the head."""

    owner: torch.nn.Module  # the module that has the norm as a child
    name: str  # the norm's name in `owner`
    module: torch.nn.Module  # the norm
    kind: lossd.types.Norm
    epsilon: float
    gain_offset: float  # the gain is this plus the module's weight: 1 for Gemma's RMSNorm, else 0

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


# The head is stepped with the hyper-parameters of one parameter group of the trainer's optimizer: the group that has the
# head's weight.

_NAMES = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov")  # the hyper-parameters


def algorithm_of(optimizer: Any) -> Literal["adamw", "sgd"]:
    """The server's algorithm for this optimizer. ValueError if there is none."""
    name = type(optimizer).__name__
    if type(optimizer) is torch.optim.AdamW:
        return "adamw"
    if type(optimizer) is torch.optim.SGD:
        return "sgd"
    if getattr(optimizer, "adam_w_mode", False) and name in ("FusedAdam", "DeepSpeedCPUAdam"):
        return "adamw"
    raise ValueError(f"the trainer's optimizer is {name}; a head on a server steps with torch's AdamW (optim='adamw_torch') "
                     "or SGD (optim='sgd')")


class ParameterGroup:
    """The parameter group of the trainer's optimizer that has the head's weight."""

    def __init__(self, served: ServedHead, optimizer: Any, parameters: Sequence[Sequence[Any]], head_lr: float | None,
                 head_weight_decay: float | None) -> None:
        """
        Args:
          parameters: for each group of the optimizer, its parameters. The groups themselves may hold other tensors by now, as
            under ZeRO.
          head_lr, head_weight_decay: the caller's own values for the head, or None.

        ValueError if the head's weight is in no group and there is no head_lr, or if the groups of weight and bias do not go
        together.
        """
        self._optimizer, self._head_lr, self._head_weight_decay = optimizer, head_lr, head_weight_decay
        found = {name: _index(parameters, served.tensors_of(name)) for name in served.stand_ins}
        index = found["weight"]
        if index is None and head_lr is None:
            raise ValueError(
                f"the trainer's optimizer has no group for the head {served.loss_head.head_name!r}, so it would not be "
                "trained: give the optimizer model.parameters() after patch(), or give attach(head_lr=), or freeze the head "
                "with patch(freeze=True)")
        self._index = index or 0
        self._first_lr = float(self._group["lr"])
        if head_lr is not None and not self._initial_lr:
            raise ValueError("head_lr is scaled as the learning rate of the trainer's optimizer is by its scheduler, and that is 0")
        bias = found.get("bias")
        self.decays_bias = bias is not None and optimizer.param_groups[bias]["weight_decay"] > 0.0
        if bias is not None and index is not None and head_lr is None and (
                optimizer.param_groups[bias]["lr"] != optimizer.param_groups[index]["lr"]):
            raise ValueError("the head's bias and its weight are in groups of different learning rates; a server steps them with "
                             "one: put them into groups of one rate, or give attach(head_lr=)")

    @property
    def _group(self) -> dict[str, Any]:
        groups = self._optimizer.param_groups
        return groups[self._index if self._index < len(groups) else 0]  # some wrappers show only one group at a time

    @property
    def _initial_lr(self) -> float:
        return float(self._group.get("initial_lr", self._first_lr))

    def copy_to(self, optimizer: HeadOptimizer) -> None:
        """Copies the group's present hyper-parameters to the head's optimizer. Called before each step, because a scheduler
        may have changed them."""
        group, ours = self._group, optimizer.param_groups[0]
        for name in _NAMES:
            if name in group:
                ours[name] = group[name]
        if self._head_lr is not None:
            ours["lr"] = self._head_lr * float(group["lr"]) / self._initial_lr
        if self._head_weight_decay is not None:
            ours["weight_decay"] = self._head_weight_decay
        optimizer.decay_vectors = self.decays_bias


def _index(parameters: Sequence[Sequence[Any]], wanted: Sequence[Any]) -> int | None:
    """The first group that has one of the `wanted` parameters; None if no group has."""
    for index, group in enumerate(parameters):
        if any(each is one for each in group for one in wanted):
            return index
    return None


# Steps under DeepSpeed. Its engine clips and steps inside backward(), in the trainer's place.
#
# DeepSpeed's optimizer ZeRO steps the trainer's optimizer once for each parameter group, and clips by a norm that it computes
# from its partitions. So ZeRO's own step is changed to step the head, too, and ZeRO's norm to include the head's gradient.

def check(trainer: Any, tied: bool) -> None:
    """ValueError if the trainer shards or copies its model in a way that does not work with a head on a server. `tied`: whether
    the model was patched with tied="share"."""
    if getattr(trainer, "is_fsdp_enabled", False):
        raise ValueError("fsdp= of TrainingArguments shards the head's place in the model as well; use DistributedDataParallel "
                         "(torchrun without fsdp=), DeepSpeed's ZeRO 1 or 2, or fully_shard in a loop of your own")
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ValueError("a model that from_pretrained has sharded over ranks clips by norms of its own, without the head; "
                         "load it without tp_plan= and use DistributedDataParallel")
    if trainer.args.n_gpu > 1:
        raise ValueError(f"the trainer would copy the model to {trainer.args.n_gpu} GPUs in one process (DataParallel); start it "
                         "with torchrun, or show it one GPU with CUDA_VISIBLE_DEVICES")
    if not trainer.is_deepspeed_enabled:
        return
    stage = trainer.accelerator.state.deepspeed_plugin.zero_stage
    if stage == 3:
        raise ValueError("ZeRO 3 partitions the parameters that stand for the head; use ZeRO 1 or 2")
    if tied:
        raise ValueError('ZeRO steps its own copy of the embeddings that the head shares (tied="share"); use tied="part", or '
                         "train without DeepSpeed")


class ZeroSteps:
    """Makes DeepSpeed's engine step and clip a head together with its model."""

    def __init__(self, engine: Any, norm: Any, apply: Any, discard: Any) -> None:
        """
        Args:
          norm: norm() loads the norm of the head's gradient into the stand-in, and returns it.
          apply: apply(multiplier) steps the head with its gradient times `multiplier`.
          discard: discard() discards the head's gradient. It is called for a step that DeepSpeed skips.
        """
        self._optimizer, self._norm, self._apply, self._discard = engine.optimizer, norm, apply, discard
        self.base = engine.basic_optimizer
        algorithm_of(self.base)
        partitioned = hasattr(self._optimizer, "bit16_groups") and hasattr(self._optimizer, "scaled_global_norm")
        self.parameters = (self._optimizer.bit16_groups if partitioned
                           else [group["params"] for group in self.base.param_groups])
        self.clips = float(engine.gradient_clipping() or 0.0)
        if self.clips > 0.0 and not partitioned:
            raise ValueError(f"{type(self._optimizer).__name__} of DeepSpeed clips by a norm that lacks the head: use ZeRO 1 or 2, "
                             "or max_grad_norm=0")
        if partitioned:
            self._join_norm()
        step = self._optimizer.step
        self._optimizer.steps_a_head_of_lossd = True

        def step_both(*args: Any, **options: Any) -> Any:
            result = step(*args, **options)
            if getattr(self._optimizer, "overflow", False):
                self._discard()
            else:
                self._apply(self._multiplier() if partitioned else 1.0)
            return result

        self._optimizer.step = step_both

    @staticmethod
    def are_in(engine: Any) -> bool:
        """Whether a ZeroSteps was made for this engine before."""
        return getattr(engine.optimizer, "steps_a_head_of_lossd", False)

    def _join_norm(self) -> None:
        """Makes ZeRO's norm include the head's gradient. Both are scaled by DeepSpeed's loss scale."""
        of_trunk = self._optimizer.scaled_global_norm

        def scaled_global_norm(*args: Any, **options: Any) -> Any:
            norm, head = of_trunk(*args, **options), self._norm() * float(self._optimizer.loss_scale)
            if float(norm) < 0.0:  # DeepSpeed returns a negative number for a norm that is not finite
                return norm
            if isinstance(norm, torch.Tensor):
                return torch.sqrt(norm.double() ** 2 + head ** 2).to(norm.dtype)
            return (norm ** 2 + head ** 2) ** 0.5

        self._optimizer.scaled_global_norm = scaled_global_norm

    def _multiplier(self) -> float:
        """The clipping factor that ZeRO's unscale_and_clip_grads() applies, without the loss scale."""
        norm = getattr(self._optimizer, "_global_grad_norm", None)
        if norm is None or self.clips <= 0.0:
            return 1.0
        return 1.0 / max((float(norm) + 1e-6) / self.clips, 1.0)
