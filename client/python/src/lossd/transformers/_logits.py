# SPDX-License-Identifier: Apache-2.0
"""measure(): finds out by experiment how a model computes its logits and its loss from the output of its head (HeadPath).

A probe is put in the place of the head. It returns known values, from very small ones to values as large as in trained models.
The model's output then shows by which scale and softcap the model transforms them, and which loss it computes from labels. If
a model does anything that lossd cannot do, a ValueError names it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lossd.torch import ServedEmbedding

IGNORED = -100  # the same as in transformers
_SEQUENCES, _POSITIONS = 2, 8  # the shape of the batch of tokens with which a model is measured
_SMALLEST, _LARGEST = -2.0, 2.0  # powers of 10: the smallest and the largest absolute value of the probe's logits
_ITEMS = 7  # the value of num_items_in_batch with which a model is measured


@dataclass(frozen=True)
class HeadPath:
    """What the model does with the output of its head."""

    logit_scale: float = 1.0
    softcap: float = 0.0  # 0: no softcap
    shift: bool = True  # whether the hidden state of position i predicts the label of position i + 1
    counts_items: bool = True  # whether the sum of the losses is divided by num_items_in_batch, if that is given
    # The factor between the base model's last hidden states and the head's input. NaN: they are not proportional.
    input_factor: float = math.nan


class HeadPlace:
    """The places of the head in a model, where another module can be put. The head is a child of one or several modules.
    ValueError if it is a child of none, or is the input embeddings' module itself."""

    def __init__(self, model: Any, layer: torch.nn.Module) -> None:
        self._layer = layer
        self._places = [(module, name) for module in model.modules() for name, child in module.named_children()
                        if child is layer]
        if not self._places or layer is model.get_input_embeddings():
            raise ValueError(f"{type(model).__name__} has no module of its own for its head, so lossd cannot stand in its "
                             "place")

    def put(self, module: torch.nn.Module) -> None:
        for parent, name in self._places:
            setattr(parent, name, module)

    @contextmanager
    def held_by(self, module: torch.nn.Module) -> Iterator[None]:
        """Within the block, the module is in the head's place."""
        self.put(module)
        try:
            yield
        finally:
            self.put(self._layer)


class _Probe(torch.nn.Module):
    """Returns known logits, fp32 [..., V], and keeps its inputs [..., D]."""

    def __init__(self, layer: Any, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.inputs: list[torch.Tensor] = []
        self.given: torch.Tensor | None = None
        self.classes = layer.weight.shape[0]
        self.in_features, self.out_features = layer.weight.shape[1], layer.weight.shape[0]
        # Some models read the weight's dtype and device. These are right; the values and the shape are not. ServedHead.weight
        # is the same within capturing().
        self.weight = torch.nn.Parameter(layer.weight.new_zeros(1), requires_grad=False)
        self.bias = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.inputs.append(hidden.detach())
        generator = torch.Generator().manual_seed(self.seed)
        shape = (*hidden.shape[:-1], self.classes)
        powers = _SMALLEST + (_LARGEST - _SMALLEST) * torch.rand(shape, generator=generator)
        given = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0) * 10.0 ** powers
        rows = given.view(-1, self.classes)
        place = torch.arange(self.classes)
        rows[place % len(rows), place] = 0.0  # every class has a 0 in some row, which shows whether the model adds something
        self.given = given.to(hidden.device)
        return self.given.clone()  # a copy, because the model may change it in place


@dataclass(frozen=True)
class _Seen:
    """The values of one forward with a probe in the place of the head."""

    given: torch.Tensor  # the output of the probe, fp32 [B, T, V]
    hidden: torch.Tensor  # the input of the probe, [B, T, D]
    logits: torch.Tensor  # the logits that the model returned, fp64 [B, T, V]
    loss: float
    aux_loss: float


def measure(model: Any, layer: Any, place: HeadPlace) -> HeadPath:
    """Measures what the model does with the output of its head. ValueError if lossd cannot do the same."""
    name = type(model).__name__
    if not (takes(model, "labels") and takes(model, "input_ids")):
        raise ValueError(f"{name} takes no input_ids and labels, so it computes no loss of tokens that lossd could compute")
    batch = ProbeBatch.of(model, layer.weight.shape[0])
    with as_in_evaluation(model):
        first, second = (_forward(model, layer, place, batch, seed) for seed in (1, 2))
        scale, softcap = _transform(name, first, _hints(model))
        shift, constant = _labels(name, batch, first, second)
        if not math.isclose(constant, _auxiliary(model, first), rel_tol=1e-3, abs_tol=_near(first)):
            raise ValueError(f"{name} adds {constant:.4g} to the loss of its labels, which is not its aux_loss")
        counts = _counts_items(model, layer, place, batch, first, shift, constant)
        factor = _without_labels(model, layer, place, batch, first)
    return HeadPath(scale, softcap, shift, counts, factor)


def _forward(model: Any, layer: Any, place: HeadPlace, batch: ProbeBatch, seed: int, **more: Any) -> _Seen:
    name = type(model).__name__
    probe = _Probe(layer, seed)
    try:
        with place.held_by(probe):
            output = model(**batch.inputs, labels=batch.labels, return_dict=True, **more)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be measured, because it does not take {', '.join([*batch.inputs, 'labels', *more])}: {error}. "
            "verify=False believes softcap=, logit_scale= and the model's configuration instead") from error
    if len(probe.inputs) != 1:
        raise ValueError(f"{name} used its head {len(probe.inputs)} times in one forward; lossd knows models that use it once")
    hidden, logits, given = probe.inputs[0], getattr(output, "logits", None), probe.given
    assert given is not None
    if not isinstance(logits, torch.Tensor) or getattr(output, "loss", None) is None:
        raise ValueError(f"{name} gives no logits, or no loss, of input_ids and labels")
    if hidden.shape[:-1] != batch.labels.shape:
        raise ValueError(f"the head of {name} is given hidden states of shape {tuple(hidden.shape)} for labels of shape "
                         f"{tuple(batch.labels.shape)}; lossd needs one for each label")
    if logits.shape != given.shape:
        raise ValueError(f"{name} makes logits of shape {tuple(logits.shape)} of {tuple(given.shape)} that its head gives: it "
                         "uses a part of its classes or positions, and lossd uses all")
    aux = getattr(output, "aux_loss", None)
    return _Seen(given, hidden, logits.double(), float(output.loss), float(aux) if isinstance(aux, torch.Tensor) else 0.0)


def _hints(model: Any) -> tuple[list[float], list[float]]:
    """The scales and the softcaps that the model's configuration names. They are exact, and measured values are not."""
    config = model.config.get_text_config()
    scales = [1.0, float(getattr(config, "logit_scale", None) or 1.0)]
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    return [*scales, 1.0 / divisor], [float(getattr(config, "final_logit_softcapping", None) or 0.0)]


def _transform(name: str, seen: _Seen, hints: tuple[list[float], list[float]]) -> tuple[float, float]:
    """The scale s and the softcap c with which the model makes logits c tanh(s z / c), or s z (c = 0), from the head's output
    z. ValueError if there are no such values. `hints`: exact values to prefer, from _hints()."""
    z, y = seen.given.double().flatten(), seen.logits.flatten()
    zeros = y[z == 0.0]
    if not torch.isfinite(y).all() or float(zeros.abs().max()) > 1e-6:
        raise ValueError(f"{name} adds something to the logits of its head, or leaves classes out: where the head gives 0 the "
                         f"logits are between {float(zeros.min()):.4g} and {float(zeros.max()):.4g}")

    def fits(scale: float, softcap: float, tolerance: float) -> bool:
        expected = softcap * torch.tanh(scale * z / softcap) if softcap else scale * z
        return bool(((y - expected).abs() <= tolerance * (y.abs() + 1e-3 * abs(scale))).all())

    tolerance = 1e-4
    scale = float((z @ y) / (z @ z))
    found = [(scale, 0.0)] if fits(scale, 0.0, tolerance) else []
    if not found:
        scale, softcap = _capped(z, y)
        found = [(scale, softcap)] if fits(scale, softcap, tolerance) else []
    if not found:
        worst = int((y - scale * z).abs().argmax())
        raise ValueError(f"{name} makes its logits in a way that lossd does not know: {float(y[worst]):.4g} where its head "
                         f"gives {float(z[worst]):.4g}, and lossd knows a scale and a softcap")
    scale, softcap = found[0]
    named = [each for each in hints[0] if math.isclose(each, scale, rel_tol=1e-4)]
    capped = [each for each in hints[1] if softcap and math.isclose(each, softcap, rel_tol=1e-3)]
    return (named or [scale])[0], (capped or [softcap])[0]


def _capped(z: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Fits scale s and softcap c to y = c tanh(s z / c), in turn: c to the largest value, s to the small ones."""
    small = (z != 0.0) & (z.abs() < 10.0 ** (_SMALLEST + 0.5))
    largest = z.abs().argmax()
    far, top = abs(float(z[largest])), abs(float(y[largest]))
    scale, softcap = float((y[small] / z[small]).median()), top
    for _ in range(8):
        low, high = top, 1e4 * max(top, 1.0)
        for _ in range(200):  # c tanh(s z / c) increases with c
            softcap = 0.5 * (low + high)
            if softcap * math.tanh(abs(scale) * far / softcap) < top:
                low = softcap
            else:
                high = softcap
        scale = float((softcap * torch.atanh((y[small] / softcap).clamp(-0.999, 0.999)) / z[small]).median())
    return scale, softcap


def _near(seen: _Seen) -> float:
    """The tolerance for losses that should be equal."""
    return 1e-4 * max(1.0, abs(seen.loss))


def _cross_entropies(seen: _Seen, labels: torch.Tensor, shift: bool) -> torch.Tensor:
    """The cross-entropy of each label that is not ignored, fp64."""
    logits, targets = (seen.logits[:, :-1], labels[:, 1:]) if shift else (seen.logits, labels)
    targets = targets.to(logits.device)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return losses[targets.flatten() != IGNORED]


def _labels(name: str, batch: ProbeBatch, first: _Seen, second: _Seen) -> tuple[bool, float]:
    """Whether the model shifts labels, and the constant that it adds to their mean cross-entropy. `first`, `second`: forwards
    with different logits, which the constant does not depend on."""
    for shift in (True, False):
        means = [float(_cross_entropies(seen, batch.labels, shift).mean()) for seen in (first, second)]
        if abs((first.loss - second.loss) - (means[0] - means[1])) <= _near(first):
            return shift, first.loss - means[0]
    raise ValueError(f"the loss of {name} is not the mean cross-entropy of its labels, whether they are shifted by a position "
                     f"or not, with {IGNORED} ignored; lossd computes that alone")


def _auxiliary(model: Any, seen: _Seen) -> float:
    """The auxiliary loss that patch() adds to the loss."""
    return seen.aux_loss * float(getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0) or 0.0)


def _counts_items(model: Any, layer: Any, place: HeadPlace, batch: ProbeBatch, first: _Seen, shift: bool,
                  constant: float) -> bool:
    """HeadPath.counts_items. `constant`: as _labels() returns it."""
    if not takes_any(model) and not takes(model, "num_items_in_batch"):
        return False
    loss = _forward(model, layer, place, batch, 1, num_items_in_batch=torch.tensor(_ITEMS)).loss - constant
    counted = float(_cross_entropies(first, batch.labels, shift).sum()) / _ITEMS
    if abs(loss - counted) <= 1e-4 * max(1.0, abs(counted)):
        return True
    if abs(loss - (first.loss - constant)) <= _near(first):
        return False
    raise ValueError(f"{type(model).__name__} neither divides the sum of its losses by num_items_in_batch nor leaves that alone")


def _without_labels(model: Any, layer: Any, place: HeadPlace, batch: ProbeBatch, first: _Seen) -> float:
    """Checks that the model's hidden states do not depend on labels, other than as inputs_without_labels() knows, and returns
    HeadPath.input_factor. ValueError if they do."""
    name = type(model).__name__
    probe = _Probe(layer, 1)
    try:
        inputs = inputs_without_labels(model, batch.labels, batch.inputs)
        with place.held_by(probe):
            model(**inputs, return_dict=True)
    except Exception as error:
        raise ValueError(f"{name} gives no hidden states without its labels: {error}") from error
    if len(probe.inputs) != 1 or not _same(probe.inputs[0], first.hidden):
        raise ValueError(f"the hidden states of {name} depend on its labels, and lossd computes them without")
    return _input_factor(model, inputs, first.hidden)


def _input_factor(model: Any, inputs: dict[str, Any], hidden: torch.Tensor) -> float:
    """HeadPath.input_factor. `hidden`: the head's input for these inputs of the model."""
    try:
        last = model.base_model(**inputs).last_hidden_state
    except Exception:  # the base model takes other inputs or has other outputs
        return math.nan
    if last.shape != hidden.shape or model.base_model is model:
        return math.nan
    last, hidden = last.double(), hidden.double()
    factor = float((last * hidden).sum() / (last * last).sum())
    if not _same(factor * last, hidden):
        return math.nan
    return 1.0 if math.isclose(factor, 1.0, rel_tol=1e-2) and _same(last, hidden) else factor


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both tensors are equal up to rounding."""
    epsilon = max(torch.finfo(one.dtype).eps, torch.finfo(other.dtype).eps)
    if one.shape != other.shape:
        return False
    one, other = one.double(), other.double()
    return bool((one - other).norm() <= max(1e-5, 4 * epsilon) * other.norm())


def random_tokens_loss(loss_of: Callable[..., Any], model: Any, classes: int) -> float:
    """The loss of a few random tokens. `loss_of`: a function of the model's inputs and labels that computes it."""
    batch = ProbeBatch.of(model, classes)
    with as_in_evaluation(model):
        return float(loss_of(**batch.inputs, labels=batch.labels))


# The tokens and labels with which a model is measured.

@dataclass(frozen=True)
class ProbeBatch:
    """The inputs of a model for two short sequences of random tokens. Tokens that the configuration calls special do not
    occur."""

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor  # [B, T], int64; a few are ignored

    @staticmethod
    def of(model: Any, classes: int) -> ProbeBatch:
        """Makes a batch for a model. Tokens and labels are smaller than `classes`, the number of the head's classes."""
        embedding = model.get_input_embeddings()
        if isinstance(embedding, ServedEmbedding):  # a ServedRows, which has no weight in this process
            rows, device = embedding.num_embeddings, embedding.weight_device
        else:
            rows, device = embedding.weight.shape[0], embedding.weight.device
        special = _special_tokens(model.config)
        known = min(classes, rows)
        usual = torch.tensor([token for token in range(min(known, 1 << 16)) if token not in special] or [0])
        generator = torch.Generator().manual_seed(7)

        def draw() -> torch.Tensor:
            return usual[torch.randint(0, len(usual), (_SEQUENCES, _POSITIONS), generator=generator)]

        inputs, labels = {"input_ids": draw().to(device)}, draw().to(device)
        labels[0, :2] = labels[1, 5] = IGNORED
        if takes(model, "token_type_ids") and takes(model, "pixel_values"):  # token types, which tell text from images
            inputs["token_type_ids"] = torch.zeros_like(labels)
        return ProbeBatch(inputs, labels)


def takes(model: Any, name: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return name in inspect.signature(type(model).forward).parameters


def takes_any(model: Any) -> bool:
    """Whether the model's forward takes any other keyword arguments (**kwargs). It passes them on to the loss."""
    return any(each.kind is inspect.Parameter.VAR_KEYWORD
               for each in inspect.signature(type(model).forward).parameters.values())


def inputs_without_labels(model: Any, labels: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with which a model computes the same hidden states without labels as with them.

    Most models need no other inputs. An encoder-decoder makes its decoder's input from the labels, shifted to the right, so
    this adds that input.
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


@contextmanager
def as_in_evaluation(model: Any) -> Iterator[None]:
    """Within the block, nothing is random and no graph is built. Afterwards every module has its previous mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _special_tokens(config: Any) -> set[int]:
    """The token ids that a configuration names, also in its nested configurations."""
    found: set[int] = set()
    waiting = [config.to_dict()]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            elif str(key).endswith(("token_id", "token_index", "token_ids", "_id")):
                found.update(each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))
    return found
