# SPDX-License-Identifier: Apache-2.0
"""patch(): a transformers model whose head, with its loss, is on a lossd server, and which stays what it was."""

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
from lossd._arguments import known_arguments
from lossd.torch import LossHead, TiedEmbedding, _data_parallel
from lossd.transformers._head_module import ServedHead
from lossd.transformers._model_head import ModelHead, Tied, head_options, random_tokens_loss

_IGNORED = -100  # transformers' own


@known_arguments
def patch(
        model: Any, client: lossd.Client, name: str, *, exist_ok: bool = False, freeze: bool = False,
        tied: Tied = "refuse", process_group: Any = _data_parallel.UNSAID, averaged_over: int | None = None,
        compute_dtype: lossd.types.DType | None = None, optimizer_state: lossd.types.OptimizerState = "adam",
        logits: lossd.types.Logits = "stored", verify: bool = True, deferred: bool = False,
        state: Literal["checkpoint", "none"] = "checkpoint", streams: int | None = None, slice_bytes: int | None = None,
        timeout: float | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
        logit_scale: float | None = None, gradients: lossd.types.Gradients | None = None,
        filter_epsilon: float | None = None, sample_threshold: float | None = None,
        max_gradient_error: float | None = None) -> Any:
    """Moves the head of a causal language model to a server, and returns the model.

        model = lossd.transformers.patch(AutoModelForCausalLM.from_pretrained(path), client, "lm")
        trainer = Trainer(model, ...)  # or trl.SFTTrainer
        lossd.transformers.attach(trainer)
        trainer.train()

    The model keeps its class, configuration, generate() and save_pretrained(), which reads the head's weights from the
    server. Called with labels it returns a ModelOutput whose loss comes from the server and which has no logits.

    Args:
      exist_ok: a head of this name and shape may exist; it gets the model's weights. AlreadyExists otherwise.
      freeze: the head is not trained. Also what a head without requires_grad becomes.
      tied, compute_dtype, optimizer_state, logits, verify: as RemoteHeadCausalLM.
      process_group, averaged_over: as LossHead. With torch.distributed every rank calls patch(), and rank 0 of the
        group makes the head.
      softcap, logit_scale: as LossHead; as the model's configuration says if None.
      deferred, state, streams, slice_bytes, timeout, label_smoothing, z_loss: as LossHead.
      gradients, filter_epsilon, sample_threshold, max_gradient_error: as LossHead.
    """
    if isinstance(model.get_output_embeddings(), ServedHead):
        raise ValueError(f"the head of this {type(model).__name__} is on a lossd server already, as head "
                         f"{model.get_output_embeddings().loss_head.head_name!r}: patch() was called with it before")
    head = ModelHead.of(model, tied)
    expected = random_tokens_loss(lambda **inputs: model(**inputs).loss, model) if verify else 0.0
    if process_group is _data_parallel.UNSAID:
        _data_parallel.check_said(name)
        process_group = None
    parallel = _data_parallel.DataParallel(process_group)
    with parallel.before_total():
        if parallel.rank == 0:
            head.create(client, name, compute_dtype=compute_dtype, optimizer_state=optimizer_state,
                        frozen=freeze or not head.layer.weight.requires_grad, logits=logits, exist_ok=exist_ok)
    parallel.barrier()
    of_config = head_options(model.config.get_text_config(), softcap, logit_scale)
    loss_head = LossHead(
        client, name, shift=True, process_group=process_group, averaged_over=averaged_over, deferred=deferred,
        state=state, streams=streams, slice_bytes=slice_bytes, timeout=timeout, label_smoothing=label_smoothing,
        z_loss=z_loss, gradients=gradients, filter_epsilon=filter_epsilon, sample_threshold=sample_threshold,
        max_gradient_error=max_gradient_error, **of_config)
    served = ServedHead(loss_head, head.layer, TiedEmbedding(loss_head, head.embedding) if head.shared else None)
    model.set_output_embeddings(served)
    model.register_load_state_dict_post_hook(lambda *_: served.push_tied())
    wrap_forward(model, served)
    if verify:
        got = random_tokens_loss(lambda **inputs: model(**inputs).loss, model)
        if abs(got - expected) > 2e-2 * abs(expected):
            raise ValueError(
                f"{type(model).__name__} gives a loss of {expected:.4f} for random tokens, its head on the server "
                f"{got:.4f}: it makes its logits in a way that this function does not know")
    return model


@dataclasses.dataclass
class TokenOutput(ModelOutput):
    """What trl's trainers ask of a model with fused_lm_head=True: numbers for each predicted token, 0 where ignored.

    The server does not compute the mean of the logits, which trainers only log: it is NaN.
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
    """Makes model.forward compute losses on the server, whatever has replaced it before.

    What trl's trainers ask for, with fused_lm_head=True, is of logits that are divided by `temperature`.
    """
    inner = functools.partial(type(model).forward, model)

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, labels: torch.Tensor | None = None, shift_labels: torch.Tensor | None = None,
                num_items_in_batch: Any = None, fused_lm_head: bool = False, **inputs: Any) -> Any:
        if labels is None and shift_labels is None:
            return inner(*args, **inputs)
        if num_items_in_batch is not None:  # as trainers do it
            served.check_trained()
        with served.capturing() as captured:
            output = inner(*args, **{**inputs, "return_dict": True})
        if len(captured) != 1:
            raise RuntimeError(f"{type(self).__name__} used its head {len(captured)} times in one forward; lossd knows "
                               "models that use it once")
        if fused_lm_head:
            tokens = _tokens(served.loss_head, captured[0], labels, shift_labels, num_items_in_batch, temperature)
            tokens.aux_loss = getattr(output, "aux_loss", None)
            return tokens
        loss = _loss(served.loss_head, captured[0], labels, shift_labels, num_items_in_batch)
        aux_loss = getattr(output, "aux_loss", None)
        if aux_loss is not None:
            loss = loss + self.config.get_text_config().router_aux_loss_coef * aux_loss.to(loss.device)
        output.loss, output.logits = loss, None
        # A ModelOutput has a key for each field that was not None when it was made.
        fields = {key: value for key, value in output.items() if key != "logits" and value is not None}
        result = type(output)(**{**fields, "loss": loss})
        if inputs.get("return_dict", True) is False:
            return result.to_tuple()
        return result

    model.forward = types.MethodType(forward, model)


def _loss(head: LossHead, hidden: torch.Tensor, labels: Any, shift_labels: Any, num_items: Any) -> torch.Tensor:
    """As transformers' own loss: a mean over the valid labels, or their sum over `num_items`."""
    shifted = shift_labels is not None
    targets = shift_labels if shifted else labels
    predicted = targets if shifted else targets[..., 1:]
    count = float(num_items) if num_items is not None else float((predicted != _IGNORED).sum())
    # The trainer sees to it that losses average over ranks; LossHead would do so too and divides what it is given.
    ranks = head.parallel.averaged_over if torch.is_grad_enabled() else 1
    with _as(head, shift=not shifted):
        loss = head(hidden, targets.to(hidden.device), normalizer=count * ranks)
    assert isinstance(loss, torch.Tensor)
    return loss


def _tokens(head: LossHead, hidden: torch.Tensor, labels: Any, shift_labels: Any, num_items: Any,
            temperature: float) -> TokenOutput:
    if shift_labels is None:
        hidden, targets = hidden[:, :-1], labels[:, 1:]
    else:
        targets = shift_labels
    targets = targets.to(hidden.device)
    mask = targets != _IGNORED
    with _as(head, shift=False, reduction="none", deferred=True, extras=("entropy", "argmax"),
             options=_at_temperature(head.options, temperature)):
        losses, extras = head(hidden, targets)
    count = mask.sum().clamp(min=1) if num_items is None else num_items
    return TokenOutput(loss=losses.sum() / count, log_probs=-losses, entropy=extras.entropy, label_mask=mask,
                       mean_logits=torch.full_like(losses, math.nan), is_top1=(extras.argmax == targets) & mask)


def _at_temperature(options: lossd.LossOptions, temperature: float) -> lossd.LossOptions:
    """c tanh(z / c) / T is c/T tanh(z/T / (c/T)), so a softcap is divided along with the logits."""
    return dataclasses.replace(
        options, logit_scale=options.logit_scale / temperature, softcap=options.softcap / temperature)


@contextlib.contextmanager
def _as(head: LossHead, **changes: Any) -> Iterator[None]:
    """A LossHead with other attributes, for one call."""
    before = {name: getattr(head, name) for name in changes}
    for name, value in changes.items():
        setattr(head, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(head, name, value)
