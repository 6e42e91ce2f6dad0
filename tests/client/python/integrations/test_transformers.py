# SPDX-License-Identifier: Apache-2.0
"""RemoteHeadCausalLM with tiny random models, against transformers' own loss; in fp32, on a GPU too."""

import copy
import inspect

import numpy as np
import pytest
import torch
import transformers

import lossd
import lossd.transformers
from lossd.torch import HeadOptimizer, LossHead
from lossd.transformers import RemoteHeadCausalLM

V = 120
SMALL = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}


def make_model(kind, **changes):
    if kind == "GPT2":
        config = transformers.GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2,
                                         **changes)
    else:
        config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norms that are not the identity
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_f" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


CASES = {
    "llama": ("Llama", {}), "granite": ("Granite", {"logits_scaling": 3.0}), "cohere": ("Cohere", {"logit_scale": 0.4}),
    "gemma2": ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 8}),
    "gpt2": ("GPT2", {"tie_word_embeddings": False})}


@pytest.fixture
def tokens(seed):
    torch.manual_seed(seed % 2**31)
    ids = torch.randint(3, V, (3, 20))
    labels = ids.clone()
    labels[0, :7] = -100
    return ids, labels


def test_nothing_hides_its_arguments():
    for name in lossd.transformers.__all__:
        function = getattr(lossd.transformers, name)
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds, name
        assert function.__doc__, name


def test_what_a_loss_head_takes_can_be_given():
    """With the same default, save what the model's configuration says and what transformers decides."""
    taken = inspect.signature(LossHead).parameters
    decided = {"client", "head", "shift", "class_weights", "ignore_index"}
    of_losses = {"reduction", "normalizer", "grad_output", "train_head", "extras", "rank", "world_size"}  # the trainer's
    for function, left_out in ((RemoteHeadCausalLM, decided), (lossd.transformers.patch, decided | of_losses)):
        given = inspect.signature(function).parameters
        for name in set(taken) - left_out:
            default = None if name in ("softcap", "logit_scale") else taken[name].default
            assert given[name].default == default, (function, name)


def test_what_is_given_arrives(client, head_name):
    given = {"deferred": True, "label_smoothing": 0.1, "z_loss": 0.2, "softcap": 3.0, "logit_scale": 0.5,
             "gradients": "auto", "filter_epsilon": 0.01, "sample_threshold": 0.02, "max_gradient_error": 0.03}
    transport = {"streams": 1, "slice_bytes": 1 << 16, "timeout": 100.0}

    def check(head):
        assert head.deferred and head.transport == transport
        options = {name: getattr(head.options, name) for name in given if name != "deferred"}
        assert {"deferred": True, **options} == given

    made = lossd.transformers.patch(make_model("Llama"), client, head_name, verify=False, **given, **transport)
    check(made.get_output_embeddings().loss_head)
    client.delete_head(head_name)
    check(RemoteHeadCausalLM(make_model("Llama"), client, head_name, verify=False, **given, **transport).loss_head)


def test_an_argument_that_does_not_exist(client, head_name):
    with pytest.raises(TypeError, match=r"patch\(\) has no argument 'frozen'; did you mean 'freeze'\?"):
        lossd.transformers.patch(make_model("Llama"), client, head_name, frozen=True)
    with pytest.raises(TypeError, match=r"RemoteHeadCausalLM\(\) has no argument 'soft_cap'; did you mean 'softcap'\?"):
        RemoteHeadCausalLM(make_model("Llama"), client, head_name, soft_cap=1.0)
    assert head_name not in [each.spec.name for each in client.list_heads()]


def test_the_head_may_recompute_its_logits(client, head_name, tokens):
    remote = RemoteHeadCausalLM(make_model("Llama"), client, head_name, compute_dtype="fp32", logits="recomputed",
                                gradients="auto")  # compares losses with the model's
    assert client.describe_head(head_name).spec.logits == "recomputed"
    assert remote.loss_head.options.gradients == "auto"


@pytest.mark.parametrize("case, move_norm", [
    (case, move_norm) for case in CASES for move_norm in (False, True)
    if (case, move_norm) != ("cohere", True)])  # Cohere's norm has no shift
def test_loss_and_gradients_are_those_of_the_model(client, head_name, tokens, case, move_norm):
    kind, changes = CASES[case]
    ids, labels = tokens
    model = make_model(kind, **changes)
    local = copy.deepcopy(model)
    expected = local(input_ids=ids, labels=labels).loss
    expected.backward()
    remote = RemoteHeadCausalLM(model, client, head_name, move_norm=move_norm, compute_dtype="fp32")
    loss = remote(ids, labels=labels)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    theirs = dict(local.named_parameters())
    for name, parameter in remote.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=2e-6, rtol=1e-3)
    np.testing.assert_allclose(client.read_tensor(head_name, "weight", "gradient"),
                               local.get_output_embeddings().weight.grad.numpy(), atol=2e-6)
    with pytest.raises(RuntimeError, match="on a lossd server"):
        remote.model(input_ids=ids)


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2"])
def test_weights_come_back_trained(client, head_name, tokens, case):
    kind, changes = CASES[case]
    ids, labels = tokens
    model = make_model(kind, **changes)
    local = copy.deepcopy(model)
    remote = RemoteHeadCausalLM(model, client, head_name, move_norm=True, compute_dtype="fp32")
    optimizers = [torch.optim.SGD(local.parameters(), lr=0.1),
                  torch.optim.SGD(remote.parameters(), lr=0.1),
                  HeadOptimizer(remote.loss_head, lr=0.1, algorithm="sgd")]
    for _ in range(2):
        for each in optimizers:
            each.zero_grad()
        local(input_ids=ids, labels=labels).loss.backward()
        remote(ids, labels=labels).backward()
        for each in optimizers:
            each.step()
    back = remote.save_back()
    with torch.no_grad():
        torch.testing.assert_close(back(input_ids=ids).logits, local(input_ids=ids).logits, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("tied", ["part", "share"])
def test_tied_embeddings(client, head_name, tokens, tied):
    model = make_model("GPT2")
    with pytest.raises(ValueError, match='tied="part"'):
        RemoteHeadCausalLM(model, client, head_name)
    local = copy.deepcopy(model)
    remote = RemoteHeadCausalLM(model, client, head_name, tied=tied, compute_dtype="fp32")
    reference = torch.optim.SGD(local.parameters(), lr=0.1)
    embedding = model.get_input_embeddings().weight
    optimizers = [
        torch.optim.SGD([p for p in remote.parameters() if p is not embedding or tied == "part"], lr=0.1),
        HeadOptimizer(remote.loss_head, lr=0.1, algorithm="sgd")]
    for _ in range(2):
        expected = local(input_ids=tokens[0], labels=tokens[1]).loss
        loss = remote(tokens[0], labels=tokens[1])
        if tied == "share":
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        expected.backward()
        loss.backward()
        if remote.tied is not None:
            remote.tied.add_gradient()
        for each in (reference, *optimizers):
            each.step()
            each.zero_grad()
        if remote.tied is not None:
            remote.tied.pull()
    back = remote.save_back()
    same = back.get_output_embeddings().weight is back.get_input_embeddings().weight
    assert same == (tied == "share")


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_compute_dtype_is_that_of_the_new_head(client, head_name, dtype):
    RemoteHeadCausalLM(make_model("Llama"), client, head_name, compute_dtype=dtype)
    assert client.describe_head(head_name).spec.compute_dtype == dtype


def test_a_loss_of_an_unknown_kind_is_noticed(client, head_name):
    model = make_model("Llama")
    forward = model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.loss = output.loss * 1.5
        return output

    model.forward = scaled
    with pytest.raises(ValueError, match="is not the mean cross-entropy of its labels"):
        RemoteHeadCausalLM(model, client, head_name)


def test_unknown_norm(client, head_name):
    model = make_model("Llama")
    model.base_model.norm = torch.nn.Identity()
    with pytest.raises(ValueError, match="no final norm"):
        RemoteHeadCausalLM(model, client, head_name, move_norm=True)
