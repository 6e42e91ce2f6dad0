# SPDX-License-Identifier: Apache-2.0
"""Every class of transformers that computes losses of tokens: with its head on a server it is right, or patch() refuses it.

The long form, of all classes, is in the nightly suite (make test-integrations-nightly).
"""

import copy
import math

import pytest
import torch
from small_models import V, class_names, small_model

import lossd
import lossd.transformers

# What is done with logits and labels differs among these.
FEW = ["BartForConditionalGeneration", "BertForMaskedLM", "CohereForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM",
       "Gemma3ForConditionalGeneration", "GraniteForCausalLM", "LlavaForConditionalGeneration", "MambaForCausalLM",
       "MiniCPM3ForCausalLM", "MixtralForCausalLM", "OPTForCausalLM", "RobertaForMaskedLM", "T5ForConditionalGeneration"]
REFUSED = {"ProphetNetForCausalLM": "one for each label", "EsmForMaskedLM": "adds something to the logits"}


def without_dropout(model):
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(module).__name__)):
                setattr(module, name, 0.0)
    return model


def batch_of(stock):
    """Other tokens than those that patch() measures with; half of the labels are as the model would have them."""
    generator = torch.Generator().manual_seed(29)
    ids = torch.randint(10, V - 4, (2, 10), generator=generator)
    labels = torch.randint(10, V - 4, ids.shape, generator=generator)
    with torch.no_grad():
        best = copy.deepcopy(stock).eval()(input_ids=ids, labels=labels).logits.argmax(-1)
    labels[:, ::2] = best[:, ::2]
    labels[1, :3] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model, batch):
    """The loss, and the gradient of each parameter, as in training; in evaluation mode if the class needs more for training."""
    for training in (True, False):
        model.train(training).zero_grad()
        try:
            output = model(**batch)
            break
        except (ValueError, TypeError):
            if not training:
                raise
    output.loss.backward()
    return float(output.loss), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}, training


def check(client, head_name, name):
    """"right" or "refused"; AssertionError if it is wrong."""
    stock = without_dropout(small_model(name))
    try:
        model = lossd.transformers.patch(copy.deepcopy(stock), client, head_name, compute_dtype="fp32", tied="share")
    except ValueError as error:
        assert head_name not in [each.spec.name for each in client.list_heads()], error
        return f"refused: {error}"
    try:
        batch = batch_of(stock)
        expected, theirs, training = gradients(stock, batch)
        got, ours, _ = gradients(model.train(training), batch)
        assert math.isclose(got, expected, rel_tol=1e-4), (got, expected)
        served = model.get_output_embeddings()
        shared = served.tied
        left_out = {parameter for parameter, each in model.named_parameters() if shared is not None and each is shared.weight}
        left_out |= {parameter for parameter in theirs if parameter.startswith(head_prefix(model))}
        for parameter in sorted(set(theirs) - left_out - aliases(stock)):
            scale = float(theirs[parameter].abs().max())
            torch.testing.assert_close(ours[parameter], theirs[parameter], atol=2e-4 * scale + 1e-7, rtol=1e-3)
        if training and shared is None:
            weight = torch.from_numpy(client.read_tensor(head_name, "weight", "gradient"))
            torch.testing.assert_close(weight, stock.get_output_embeddings().weight.grad, atol=1e-5, rtol=1e-3)
        return "right"
    finally:
        client.delete_head(head_name)


def head_prefix(model):
    return next(name for name, module in model.named_modules() if module is model.get_output_embeddings()) + "."


def aliases(stock):
    """Names of parameters that are the head's bias, which the server steps."""
    bias = getattr(stock.get_output_embeddings(), "bias", None)
    return {name for name, each in stock.named_parameters(remove_duplicate=False) if each is bias}


@pytest.mark.parametrize("name", FEW)
def test_a_class_is_right(client, head_name, name):
    assert check(client, head_name, name) == "right"


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_is_refused(client, head_name, name):
    assert REFUSED[name] in check(client, head_name, name)


@pytest.mark.nightly
def test_every_class(client, head_name):
    """Classes of which no small model can be made are counted, so that these do not become all."""
    results = {}
    for name in class_names():
        try:
            small_model(name)
        except Exception as error:
            results[name] = f"not made: {type(error).__name__}: {error}"
            continue
        try:
            results[name] = check(client, head_name, name)
        except Exception as error:  # whatever it is, it is not an early word
            results[name] = f"WRONG: {type(error).__name__}: {error}"
    for name, result in results.items():
        print(name, " ".join(result.split())[:300])
    counts = {word: sum(each.startswith(word) for each in results.values()) for word in ("right", "refused", "not made", "WRONG")}
    print(counts)
    assert counts["WRONG"] == 0
    assert counts["right"] >= 250 and counts["not made"] <= 55
