# SPDX-License-Identifier: Apache-2.0
"""patch(): moves the head of a transformers model, with its loss, to a lossd server, without changing the model's class."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Iterator
from typing import Any, Literal

import torch
from transformers.utils import ModelOutput

import lossd
from lossd.torch import LossHead, TiedEmbedding, _data_parallel
from lossd.torch._input import known_arguments
from lossd.transformers._head_module import IfExists, ModelHead, ServedHead, Tied, base_of, existing, head_options
from lossd.transformers._logits import IGNORED, HeadPlace, inputs_without_labels, measure, random_tokens_loss
from lossd.transformers._served_rows import InputPlaces


@known_arguments
def patch(
        model: Any, client: lossd.Client, name: str, *, if_exists: IfExists = "error", exist_ok: bool = False,
        freeze: bool = False, tied: Tied = "refuse", process_group: Any = _data_parallel.UNSAID,
        averaged_over: int | None = None, compute_dtype: lossd.types.DType | None = None,
        optimizer_state: lossd.types.OptimizerState = "adam", logits: lossd.types.Logits = "stored", verify: bool = True,
        evaluation_logits: bool = True, deferred: bool = False, state: Literal["checkpoint", "none"] = "checkpoint",
        streams: int | None = None, slice_bytes: int | None = None, timeout: float | None = None,
        label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, logit_scale: float | None = None,
        gradients: lossd.types.Gradients | None = None, filter_epsilon: float | None = None,
        sample_threshold: float | None = None, max_gradient_error: float | None = None) -> Any:
    """Moves the head of a language model of transformers to a server, and returns the model.

        model = lossd.transformers.patch(AutoModelForCausalLM.from_pretrained(path), client, "lm")
        trainer = Trainer(model, ...)  # or trl.SFTTrainer
        lossd.transformers.attach(trainer)
        trainer.train()

    The model keeps its class, configuration, generate() and save_pretrained(); save_pretrained() reads the head's weights
    from the server. If the model is called with labels, it returns a ModelOutput whose loss comes from the server. The output
    has logits only in evaluation mode under torch.no_grad().

    patch() measures with a few tokens how the model transforms its head's logits (scale, softcap), and whether the model
    shifts labels. ValueError if lossd cannot do the same.

    Args:
      if_exists: what to do if the server has a head of this name. "error": raise AlreadyExists. "keep": write the model's
        weights to that head, and keep its step. "reset": reset that head to step 0, with the model's weights.
      exist_ok: deprecated; True means if_exists="keep".
      freeze: do not train the head. A head whose weight does not require a gradient is created frozen, too. If the head is
        not frozen here, requires_grad_() of the model's head may freeze and unfreeze it later.
      tied: what to do with a head that shares its weight with the input embeddings. "rows": only the server has the weight,
        and the input embeddings ask the server for rows (lossd.torch.ServedEmbedding), so the trainer has no copy. "share":
        the trainer has a copy of the weight as its embeddings, and gradient and weight are sent once a step (TiedEmbedding).
        "part": head and embeddings become different matrices; the server trains the head, and the trainer trains the
        embeddings. "refuse": raise ValueError. A model whose weights are not shared keeps its embeddings.
      compute_dtype, optimizer_state, logits: as in RemoteHeadCausalLM.
      verify: measure as described above, and compare the loss of a few random tokens before and after. False: trust `softcap`
        and `logit_scale`, or else the configuration, and assume that labels are shifted.
      evaluation_logits: whether the output also has logits in evaluation mode under torch.no_grad(). The logits are computed
        in this process, with a copy of the weight.
      process_group, averaged_over: as in LossHead. With torch.distributed every rank calls patch(), and rank 0 of the group
        creates the head.
      softcap, logit_scale: as in LossHead. None: as measured.
      deferred, state, streams, slice_bytes, timeout, label_smoothing, z_loss: as in LossHead.
      gradients, filter_epsilon, sample_threshold, max_gradient_error: as in LossHead.
    """
    given, model = model, base_of(model)
    if isinstance(model.get_output_embeddings(), ServedHead):
        raise ValueError(f"the head of this {type(model).__name__} is on a lossd server already, as head "
                         f"{model.get_output_embeddings().loss_head.head_name!r}: patch() was called with it before")
    if_exists = existing(if_exists, exist_ok)
    head = ModelHead.of(model, tied)
    classes = head.layer.weight.shape[0]
    place = HeadPlace(model, head.layer)
    inputs = InputPlaces(model, head.layer, head.embedding) if head.serves_rows else None
    path = measure(model, head.layer, place) if verify else None
    options = head_options(model, head, path, softcap, logit_scale)
    expected = random_tokens_loss(_loss_of(model), model, classes) if verify else 0.0
    if process_group is _data_parallel.UNSAID:
        _data_parallel.check_said(name)
        process_group = None
    parallel = _data_parallel.DataParallel(process_group)
    with parallel.before_total():
        if parallel.rank == 0:
            head.create(client, name, compute_dtype=compute_dtype, optimizer_state=optimizer_state,
                        frozen=freeze or head.is_frozen, logits=logits, if_exists=if_exists)
    parallel.barrier()
    loss_head = LossHead(
        client, name, shift=path is None or path.shift, process_group=process_group, averaged_over=averaged_over,
        deferred=deferred, state=state, streams=streams, slice_bytes=slice_bytes, timeout=timeout,
        label_smoothing=label_smoothing, z_loss=z_loss, gradients=gradients, filter_epsilon=filter_epsilon,
        sample_threshold=sample_threshold, max_gradient_error=max_gradient_error, **options)
    tied_embedding = TiedEmbedding(loss_head, head.embedding) if head.shared else None
    served = ServedHead(loss_head, head.layer, tied_embedding, _aliases_of_bias(model, head.layer), head.serves_rows)
    served.evaluation_logits = evaluation_logits
    served.counts_items = path is None or path.counts_items
    place.put(served)
    if inputs is not None:
        inputs.put(served)
        model.tie_weights = lambda *_, **__: None  # nothing to tie: the server has the only matrix
    model.register_load_state_dict_post_hook(lambda *_: served.loaded())
    model.resize_token_embeddings = functools.partial(_no_resize, name)
    wrap_forward(model, served)
    if verify:
        plain = dataclasses.replace(loss_head.options, label_smoothing=0.0, z_loss=0.0)
        with _as(loss_head, options=plain):
            got = random_tokens_loss(_loss_of(model), model, classes)
        if not abs(got - expected) <= 2e-2 * abs(expected):
            place.put(head.layer)
            del model.forward, model.resize_token_embeddings
            if inputs is not None:
                inputs.put_back()
                del model.tie_weights
            raise ValueError(
                f"{type(model).__name__} gives a loss of {expected:.4f} for random tokens, its head on the server "
                f"{got:.4f}: it computes its loss in a way that this function does not know")
    return given


def _loss_of(model: Any) -> Any:
    return lambda **inputs: model(**inputs).loss


def _aliases_of_bias(model: Any, layer: Any) -> list[torch.nn.Parameter]:
    """Replaces the layer's bias in other modules of the model by frozen copies, because the server trains the bias. Returns
    the copies."""
    found = []
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if module is not layer and parameter is not None and parameter is layer.bias:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().clone(), requires_grad=False)
                found.append(module._parameters[name])
    return found


def _no_resize(name: str, *_: Any, **__: Any) -> Any:
    raise RuntimeError(f"the head {name!r} of this model is on a lossd server, with as many classes as it had at patch(): call "
                       "resize_token_embeddings() before lossd.transformers.patch()")


@dataclasses.dataclass
class TokenOutput(ModelOutput):
    """The output that trl's trainers need from a model with fused_lm_head=True. Except for loss and aux_loss, each tensor has a
    value for each predicted token, and 0 for an ignored one.

    mean_logits is NaN, because the server does not compute the mean of the logits. Trainers only log it.
    """

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


def wrap_forward(model: Any, served: ServedHead, temperature: float = 1.0) -> None:
    """Makes model.forward compute losses on the server. It replaces model.forward also if a trainer has replaced it before.

    If a trainer of trl calls the model with fused_lm_head=True, the logits are divided by `temperature`.
    """
    inner = functools.partial(type(model).forward, model)

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, labels: torch.Tensor | None = None, shift_labels: torch.Tensor | None = None,
                num_items_in_batch: Any = None, fused_lm_head: bool = False, **inputs: Any) -> Any:
        served.settle()
        if labels is None and shift_labels is None:
            return _without_loss(served, inner, args, inputs) if served.keeps_hidden else inner(*args, **inputs)
        if num_items_in_batch is not None:  # only trainers give this argument
            served.check_trained()
        with_logits = served.evaluation_logits and not self.training and not torch.is_grad_enabled()
        own = inputs_without_labels(self, labels, inputs)
        with served.capturing(with_logits and not fused_lm_head) as captured:
            output = inner(*args, **{**own, "return_dict": True})
        hidden = the_one(type(self).__name__, captured)
        aux_loss = getattr(output, "aux_loss", None)
        if fused_lm_head:
            tokens = _tokens(served, hidden, labels, shift_labels, num_items_in_batch, temperature)
            tokens.aux_loss = aux_loss
            return tokens
        loss = _loss(served, hidden, labels, shift_labels, num_items_in_batch if served.counts_items else None)
        if aux_loss is not None:
            loss = loss + self.config.get_text_config().router_aux_loss_coef * aux_loss.to(loss.device)
        output.loss = loss
        if not with_logits:
            output.logits = None
        # A ModelOutput has keys only for fields that were not None when it was created.
        fields = {key: value for key, value in output.items() if value is not None and (key != "logits" or with_logits)}
        result = type(output)(**{**fields, "loss": loss})
        if inputs.get("return_dict", True) is False:
            return result.to_tuple()
        return result

    model.forward = types.MethodType(forward, model)


def the_one(model: str, captured: list[torch.Tensor]) -> torch.Tensor:
    """The hidden states with which a forward has called the head. RuntimeError unless it was called exactly once."""
    if len(captured) != 1:
        raise RuntimeError(f"{model} used its head {len(captured)} times in one forward; lossd knows models that use it once")
    return captured[0]


def _without_loss(served: ServedHead, inner: Any, args: Any, inputs: Any) -> Any:
    """The output of a forward without labels, for a trainer that computes the loss itself (_Smoother). Keeps the hidden states
    in served.kept."""
    served.check_trained()
    with_logits = served.evaluation_logits and not served.training and not torch.is_grad_enabled()
    with served.capturing(with_logits) as captured:
        output = inner(*args, **{**inputs, "return_dict": True})
    served.kept = the_one("the model", captured)
    if not with_logits:
        output.logits = None
    fields = {key: value for key, value in output.items() if value is not None and (key != "logits" or with_logits)}
    return type(output)(**fields)


def _loss(served: ServedHead, hidden: torch.Tensor, labels: Any, shift_labels: Any, num_items: Any) -> torch.Tensor:
    """The loss as transformers computes it: the mean over the valid labels, or their sum divided by `num_items`."""
    shift = shift_labels is None and served.loss_head.shift
    return summed_loss(served, hidden, labels if shift_labels is None else shift_labels, shift, num_items)


def summed_loss(served: ServedHead, hidden: torch.Tensor, targets: torch.Tensor, shift: bool, num_items: Any,
                **changes: Any) -> torch.Tensor:
    """The mean of the losses over the valid targets, or their sum divided by `num_items`. `changes`: attributes that the
    LossHead has only during this call."""
    head = served.loss_head
    predicted = targets[..., 1:] if shift else targets
    count = float(num_items) if num_items is not None else float((predicted != IGNORED).sum())
    # The trainer's losses are already made for an average over ranks. LossHead divides its normalizer for the same purpose, so
    # that division is undone here.
    ranks = head.parallel.averaged_over if torch.is_grad_enabled() else 1
    with _as(head, shift=shift, **changes):
        loss = head(hidden, targets.to(hidden.device), normalizer=count * ranks)
    assert isinstance(loss, torch.Tensor)
    return served.in_graph(loss)[0]


def _tokens(served: ServedHead, hidden: torch.Tensor, labels: Any, shift_labels: Any, num_items: Any,
            temperature: float) -> TokenOutput:
    head = served.loss_head
    if shift_labels is None:
        hidden, targets = hidden[:, :-1], labels[:, 1:]
    else:
        targets = shift_labels
    targets = targets.to(hidden.device)
    mask = targets != IGNORED
    with _as(head, shift=False, reduction="none", deferred=True, extras=("entropy", "argmax"),
             options=_at_temperature(head.options, temperature)):
        losses, extras = head(hidden, targets)
    losses = served.in_graph(losses)[0]
    count = mask.sum().clamp(min=1) if num_items is None else num_items
    return TokenOutput(loss=losses.sum() / count, log_probs=-losses, entropy=extras.entropy, label_mask=mask,
                       mean_logits=torch.full_like(losses, math.nan), is_top1=(extras.argmax == targets) & mask)


def _at_temperature(options: lossd.LossOptions, temperature: float) -> lossd.LossOptions:
    """The options for logits that are divided by `temperature` T. With scaled logits z and softcap c, c tanh(z / c) / T equals
    (c/T) tanh((z/T) / (c/T)): both the scale and the softcap are divided by T."""
    return dataclasses.replace(
        options, logit_scale=options.logit_scale / temperature, softcap=options.softcap / temperature)


@contextlib.contextmanager
def _as(head: LossHead, **changes: Any) -> Iterator[None]:
    """Within the block, the LossHead has other values of some attributes."""
    before = {name: getattr(head, name) for name in changes}
    for name, value in changes.items():
        setattr(head, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(head, name, value)
