# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with their heads on a server: RemoteHeadCausalLM, what patch() makes of a model, programs that run again."""

import copy
import inspect
import math

import numpy as np
import pytest
import torch
import transformers
from tiny_models import assert_same_weights, both, make_model, patched, train_both, trainer_of
from torch.nn import functional

import lossd
import lossd.transformers
from lossd.torch import HeadOptimizer, LossHead
from lossd.transformers import RemoteHeadCausalLM
from lossd.transformers._head_module import ModelHead, head_options
from lossd.transformers._logits import HeadPath, HeadPlace, ProbeBatch, measure


# RemoteHeadCausalLM with tiny random models, against transformers' own loss; in fp32, on a GPU too.

V = 120
SMALL = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}


def make_varied_model(kind, **changes):
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
    # A model has all of its classes: no draft vocabulary.
    decided = {"client", "head", "shift", "class_weights", "ignore_index", "refuse_unlisted"}
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

    made = lossd.transformers.patch(make_varied_model("Llama"), client, head_name, verify=False, **given, **transport)
    check(made.get_output_embeddings().loss_head)
    client.delete_head(head_name)
    check(RemoteHeadCausalLM(make_varied_model("Llama"), client, head_name, verify=False, **given, **transport).loss_head)


def test_an_argument_that_does_not_exist(client, head_name):
    with pytest.raises(TypeError, match=r"patch\(\) has no argument 'frozen'; did you mean 'freeze'\?"):
        lossd.transformers.patch(make_varied_model("Llama"), client, head_name, frozen=True)
    with pytest.raises(TypeError, match=r"RemoteHeadCausalLM\(\) has no argument 'soft_cap'; did you mean 'softcap'\?"):
        RemoteHeadCausalLM(make_varied_model("Llama"), client, head_name, soft_cap=1.0)
    assert head_name not in [each.spec.name for each in client.list_heads()]


def test_the_head_may_recompute_its_logits(client, head_name, tokens):
    remote = RemoteHeadCausalLM(make_varied_model("Llama"), client, head_name, compute_dtype="fp32", logits="recomputed",
                                gradients="auto")  # compares losses with the model's
    assert client.describe_head(head_name).spec.logits == "recomputed"
    assert remote.loss_head.options.gradients == "auto"


@pytest.mark.parametrize("case, move_norm", [
    (case, move_norm) for case in CASES for move_norm in (False, True)
    if (case, move_norm) != ("cohere", True)])  # Cohere's norm has no shift
def test_loss_and_gradients_are_those_of_the_model(client, head_name, tokens, case, move_norm):
    kind, changes = CASES[case]
    ids, labels = tokens
    model = make_varied_model(kind, **changes)
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
    model = make_varied_model(kind, **changes)
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
    model = make_varied_model("GPT2")
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
    RemoteHeadCausalLM(make_varied_model("Llama"), client, head_name, compute_dtype=dtype)
    assert client.describe_head(head_name).spec.compute_dtype == dtype


def test_a_loss_of_an_unknown_kind_is_noticed(client, head_name):
    model = make_varied_model("Llama")
    forward = model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.loss = output.loss * 1.5
        return output

    model.forward = scaled
    with pytest.raises(ValueError, match="is not the mean cross-entropy of its labels"):
        RemoteHeadCausalLM(model, client, head_name)


def test_unknown_norm(client, head_name):
    model = make_varied_model("Llama")
    model.base_model.norm = torch.nn.Identity()
    with pytest.raises(ValueError, match="no final norm"):
        RemoteHeadCausalLM(model, client, head_name, move_norm=True)


# What patch() finds out of a model by a few tokens, and what it refuses; of models that do something else than Llama.


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


# A program that runs again: what becomes of a head that exists, and of its optimizer.


@pytest.mark.parametrize("if_exists, step", [("keep", 3), ("reset", 0)])
def test_what_becomes_of_a_head_that_exists(client, head_name, tmp_path, if_exists, step):
    train_both(both(client, head_name), tmp_path)
    with pytest.raises(lossd.AlreadyExists):
        patched(make_model("llama"), client, head_name)
    models = both(client, head_name, if_exists=if_exists)
    assert client.describe_head(head_name).state.step == step
    assert_same_weights(*models)
    train_both(models, tmp_path)  # as a new model with a new optimizer
    assert_same_weights(*models)
    assert client.describe_head(head_name).state.step == step + 3


@pytest.mark.parametrize("if_exists, step", [("keep", 1), ("reset", 0)])
def test_a_remote_head_that_exists(client, head_name, if_exists, step):
    remote = RemoteHeadCausalLM(make_model("llama"), client, head_name)
    optimizer = lossd.torch.HeadOptimizer(remote.loss_head, lr=0.1)
    tokens = torch.arange(3, 15)[None]
    remote(tokens, labels=tokens).backward()
    optimizer.step()
    with pytest.raises(lossd.AlreadyExists):
        RemoteHeadCausalLM(make_model("llama"), client, head_name)
    again = RemoteHeadCausalLM(make_model("llama"), client, head_name, if_exists=if_exists)
    assert again.loss_head.step == step
    np.testing.assert_allclose(client.read_tensor(head_name), make_model("llama").lm_head.weight.detach().numpy())


def test_a_second_trainer_begins_with_a_new_optimizer(client, head_name, tmp_path):
    models = both(client, head_name)
    for _ in range(2):
        train_both(models, tmp_path)
        assert_same_weights(*models)


def test_one_trainer_that_trains_twice(client, head_name, tmp_path):
    models = both(client, head_name)
    trainers = [trainer_of(model, tmp_path) for model in models]
    lossd.transformers.attach(trainers[0])
    for _ in range(2):
        for trainer in trainers:
            trainer.train()
    assert_same_weights(*models)
    assert client.describe_head(head_name).state.step == 6


def test_the_old_word(client, head_name):
    patched(make_model("llama"), client, head_name)
    with pytest.warns(DeprecationWarning, match="if_exists='keep' says the same"):
        patched(make_model("llama"), client, head_name, exist_ok=True)
    with pytest.raises(ValueError, match="old word for if_exists='keep'"):
        patched(make_model("llama"), client, head_name, exist_ok=True, if_exists="reset")
    with pytest.raises(ValueError, match="if_exists is 'new'"):
        patched(make_model("llama"), client, head_name, if_exists="new")
    with pytest.raises(lossd.AlreadyExists, match="frozen false instead of true"):
        patched(make_model("llama"), client, head_name, if_exists="reset", freeze=True)
