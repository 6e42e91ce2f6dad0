# SPDX-License-Identifier: Apache-2.0
"""What patch() finds out of a model by a few tokens, and what it refuses; of models that do something else than Llama."""

import math

import pytest
import torch
import transformers
from tiny_models import make_model
from torch.nn import functional

import lossd.transformers
from lossd.transformers._logits import HeadPath, HeadPlace, measure
from lossd.transformers._model_head import ModelHead, head_options
from lossd.transformers._probe_batch import ProbeBatch


def altered(logits_of=lambda logits: logits, loss_of=None, hidden_of=lambda hidden, labels: hidden, times=1):
    """A Llama that makes its logits and its loss in another way."""
    class Altered(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, num_items_in_batch=None, **inputs):
            inputs.pop("return_dict", None)
            hidden = hidden_of(self.model(input_ids=input_ids, **inputs).last_hidden_state, labels)
            for _ in range(times):
                logits = logits_of(self.lm_head(hidden))
            loss = None
            if labels is not None:
                loss = (loss_of or shifted)(logits, labels, num_items_in_batch)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    stock = make_model("llama")
    model = Altered(stock.config)
    model.load_state_dict(stock.state_dict())
    return model


def shifted(logits, labels, items=None, by=1, **options):
    rows = logits[:, :-by].flatten(0, 1) if by else logits.flatten(0, 1)
    if items is None:
        return functional.cross_entropy(rows, labels[:, by:].flatten(), **options)
    return functional.cross_entropy(rows, labels[:, by:].flatten(), reduction="sum", **options) / items


def measured(model):
    head = ModelHead.of(model, "refuse")
    return measure(model, head.layer, HeadPlace(model, head.layer))


RIGHT = {
    "a scale": (altered(lambda z: 0.37 * z), HeadPath(0.37, input_factor=1.0)),
    "a negative scale": (altered(lambda z: -2.5 * z), HeadPath(-2.5, input_factor=1.0)),
    "a softcap": (altered(lambda z: 30.0 * torch.tanh(z / 30.0)), HeadPath(1.0, 30.0, input_factor=1.0)),
    "a scale and a softcap": (altered(lambda z: 7.0 * torch.tanh(0.3 * z / 7.0)), HeadPath(0.3, 7.0, input_factor=1.0)),
    "labels that are not shifted": (altered(loss_of=lambda z, y, n: shifted(z, y, n, by=0)), HeadPath(shift=False, input_factor=1.0)),
    "items that are not counted": (altered(loss_of=lambda z, y, n: shifted(z, y)), HeadPath(counts_items=False, input_factor=1.0)),
    "hidden states that are scaled": (altered(hidden_of=lambda x, y: x / 4), HeadPath(input_factor=0.25)),
}


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_found(what):
    model, expected = RIGHT[what]
    found = measured(model)
    for name, value in vars(expected).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3), name


WRONG = {
    "a part of the classes": (altered(lambda z: z[..., :100], loss_of=lambda z, y, n: shifted(z, y.clamp(max=99))), "uses a part of its classes"),
    "something added": (altered(lambda z: z + 0.5), "adds something to the logits"),
    "a class masked": (altered(lambda z: z.index_fill(-1, torch.tensor([7]), -torch.inf)), "leaves classes out"),
    "another function": (altered(lambda z: z / (1 + z.abs())), "in a way that lossd does not know"),
    "a softcap of large logits alone": (altered(lambda z: z.clamp(-60, 60)), "in a way that lossd does not know"),
    "one class scaled": (altered(lambda z: torch.cat([z[..., :-1], 2 * z[..., -1:]], -1)), "in a way that lossd does not know"),
    "a softmax": (altered(lambda z: z.log_softmax(-1)), "adds something to the logits"),
    "a factor on the loss": (altered(loss_of=lambda z, y, n: 1.5 * shifted(z, y)), "is not the mean cross-entropy"),
    "a sum": (altered(loss_of=lambda z, y, n: shifted(z, y, 1)), "is not the mean cross-entropy"),
    "smoothed labels": (altered(loss_of=lambda z, y, n: shifted(z, y, label_smoothing=0.1)), "is not the mean cross-entropy"),
    "labels of two positions on": (altered(loss_of=lambda z, y, n: shifted(z, y, by=2)), "is not the mean cross-entropy"),
    "no labels ignored": (altered(loss_of=lambda z, y, n: shifted(z, y.clamp(min=0))), "is not the mean cross-entropy"),
    "a loss on top": (altered(loss_of=lambda z, y, n: shifted(z, y) + 0.3), "adds 0.3 to the loss"),
    "items counted twice": (altered(loss_of=lambda z, y, n: shifted(z, y, None if n is None else 2 * n)), "num_items_in_batch"),
    "a head that is used twice": (altered(times=2), "used its head 2 times"),
    "hidden states of the labels": (altered(hidden_of=lambda x, y: x if y is None else x + 1.0), "depend on its labels"),
    "rows left out": (altered(hidden_of=lambda x, y: x[:, 2:], loss_of=lambda z, y, n: shifted(z, y[:, 2:])), "one for each label"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused(what):
    model, message = WRONG[what]
    layer = model.lm_head
    with pytest.raises(ValueError, match=message):
        measured(model)
    assert model.lm_head is layer and model.training


def test_refused_models_leave_nothing_behind(client, head_name):
    model = altered(lambda z: z + 0.5)
    with pytest.raises(ValueError, match="adds something"):
        lossd.transformers.patch(model, client, head_name)
    assert head_name not in [each.spec.name for each in client.list_heads()]
    assert isinstance(model.lm_head, torch.nn.Linear) and "forward" not in vars(model)


def test_a_remote_head_scales_hidden_states_as_its_model(client, head_name):
    model = altered(hidden_of=lambda x, y: x / 4)
    tokens = torch.arange(3, 15)[None]
    expected = model(input_ids=tokens, labels=tokens).loss.item()
    remote = lossd.transformers.RemoteHeadCausalLM(model, client, head_name, compute_dtype="fp32")
    assert remote.loss_head.options.logit_scale == pytest.approx(0.25)
    assert remote(tokens, labels=tokens).item() == pytest.approx(expected, rel=1e-5)


def test_a_remote_head_of_other_hidden_states(client, head_name):
    with pytest.raises(ValueError, match="does not get the last hidden states of its base model"):
        lossd.transformers.RemoteHeadCausalLM(altered(hidden_of=lambda x, y: x + 1.0), client, head_name)
    assert head_name not in [each.spec.name for each in client.list_heads()]


def test_what_is_given_has_to_be_what_is_measured():
    model = altered(lambda z: 0.5 * z)
    head, path = ModelHead.of(model, "refuse"), measured(model)
    with pytest.raises(ValueError, match="logit_scale is 0.3, and Altered computes its logits with 0.5; verify=False"):
        head_options(model, head, path, None, 0.3)
    assert head_options(model, head, path, 0.0, 0.5) == {"softcap": 0.0, "logit_scale": 0.5}
    assert head_options(model, head, None, 3.0, 0.3) == {"softcap": 3.0, "logit_scale": 0.3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_models_of_16_bits(kind, dtype):
    model = make_model(kind).to(dtype)
    found = measured(model)
    assert (found.logit_scale, found.softcap, found.shift) == (1.0, 2.0 if kind == "gemma2" else 0.0, True)


def test_a_loss_of_experts_is_known():
    """Mixtral adds its aux_loss, as patch() does."""
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)
    assert measured(transformers.MixtralForCausalLM(config)).shift


def test_the_probes_tokens_are_usual_ones():
    model = make_model("llama")
    batch = ProbeBatch.of(model, 120)
    assert not set(batch.inputs["input_ids"].flatten().tolist()) & {0, 1, 2}
    assert batch.labels.max() < 120 and (batch.labels == -100).any()


def test_heads_that_are_not_linear():
    model = make_model("llama")

    class Scaled(torch.nn.Linear):
        def forward(self, hidden):
            return math.pi * super().forward(hidden)

    for layer, message in ((Scaled(32, 120, bias=False), "computes something else than"),
                           (torch.nn.Sequential(torch.nn.Linear(32, 120)), "lossd takes floating-point numbers"),
                           (torch.nn.Linear(32, 120, bias=False, device="meta"), "on the meta device")):
        model.lm_head = layer
        with pytest.raises(ValueError, match=message):
            ModelHead.of(model, "refuse")
