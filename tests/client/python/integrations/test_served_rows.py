# SPDX-License-Identifier: Apache-2.0
"""Tied models of transformers whose one matrix is the server's alone: patch(tied="rows")."""

import copy

import numpy as np
import peft
import pytest
import torch
import transformers
from ranks import run_ranks
from tiny_models import assert_same_weights, make_model, patched, train_both

import lossd
from lossd.torch import HeadOptimizer
from lossd.transformers import RemoteHeadCausalLM
from lossd.transformers._served_rows import ServedRows

SMALL = {"vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}
OTHERS = {
    "Gemma": SMALL, "Gemma2": {**SMALL, "final_logit_softcapping": 2.0},
    "Gemma3Text": {**SMALL, "layer_types": ["full_attention", "sliding_attention"]}, "Llama": SMALL, "Qwen3": SMALL,
    "GPT2": {"vocab_size": 120, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
             "resid_pdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def other(kind):
    torch.manual_seed(4)
    config = getattr(transformers, f"{kind}Config")(**OTHERS[kind])
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()


def tokens(seed=1):
    return torch.randint(3, 120, (3, 14), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", OTHERS)
def test_models_with_scales_of_their_own(client, head_name, kind):
    """What gemma multiplies its embeddings by stays the model's; losses and gradients of two steps are the local model's."""
    stock = other(kind)
    model = patched(copy.deepcopy(stock), client, head_name, tied="rows")
    rows = model.get_input_embeddings()
    assert isinstance(rows, ServedRows) and rows.scale == pytest.approx(32 ** 0.5 if kind.startswith("Gemma") else 1.0)
    assert all(each.shape != (120, 32) for each in model.parameters()), "the matrix is not here"
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01), torch.optim.AdamW(stock.parameters(), lr=0.01)]
    head_optimizer = HeadOptimizer(model.get_output_embeddings().loss_head, lr=0.01, weight_decay=0.01)
    for step in range(2):
        ids = tokens(step)
        losses = [each(input_ids=ids, labels=ids).loss for each in (model, stock)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
        for each in losses:
            each.backward()
        embedding = stock.get_input_embeddings().weight
        torch.testing.assert_close(torch.from_numpy(client.read_tensor(head_name, role="gradient")), embedding.grad,
                                   atol=1e-5, rtol=1e-3)
        head_optimizer.step()
        for each in optimizers:
            each.step()
            each.zero_grad()
    torch.testing.assert_close(torch.from_numpy(client.read_tensor(head_name)), embedding.detach(), atol=1e-3, rtol=1e-2)


def test_a_bf16_model(client, head_name):
    """Rows are the ones that the model's own embedding would give, to the bit."""
    stock = other("Gemma3Text").bfloat16()
    model = patched(copy.deepcopy(stock), client, head_name, tied="rows")
    ids = tokens()
    rows, wanted = (each.get_input_embeddings()(ids) for each in (model, stock))
    assert rows.dtype is torch.bfloat16 and torch.equal(rows, wanted)
    assert torch.equal(model.float().get_input_embeddings()(ids), model.get_input_embeddings()(ids).float())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trainer(client, head_name, tmp_path, accumulation):
    """Losses, norms and weights are the stock model's."""
    stock = make_model("tied")
    model = patched(copy.deepcopy(stock), client, head_name, tied="rows")
    train_both((model, stock), tmp_path, gradient_accumulation_steps=accumulation)
    assert_same_weights(model, stock)
    assert client.describe_head(head_name).step_contributions == 0


def test_checkpoints_and_pretrained_folders(client, head_name, tmp_path):
    """Folders are those of the stock model, and a state_dict that is loaded reaches the server."""
    stock = make_model("tied").eval()
    model = patched(copy.deepcopy(stock), client, head_name, tied="rows").eval()
    state = model.state_dict()
    assert set(state) == set(stock.state_dict())
    assert state["model.embed_tokens.weight"] is state["lm_head.weight"]
    model.save_pretrained(tmp_path / "ours")
    stock.save_pretrained(tmp_path / "theirs")
    files = [transformers.utils.hub.cached_file(str(tmp_path / each), "model.safetensors") for each in ("ours", "theirs")]
    from safetensors import safe_open
    names = [sorted(safe_open(each, "pt").keys()) for each in files]
    assert names[0] == names[1] and "lm_head.weight" not in names[0]
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    ids = tokens()
    torch.testing.assert_close(back(input_ids=ids).logits, stock(input_ids=ids).logits)
    changed = {key: value + 0.5 for key, value in stock.state_dict().items() if key != "lm_head.weight"}
    assert not model.load_state_dict(changed, strict=False).missing_keys
    np.testing.assert_array_equal(client.read_tensor(head_name), changed["model.embed_tokens.weight"].numpy())
    model.load_state_dict(state)
    np.testing.assert_array_equal(client.read_tensor(head_name), stock.get_input_embeddings().weight.detach().numpy())
    lacking = {key: value for key, value in state.items() if not key.endswith(("embed_tokens.weight", "lm_head.weight"))}
    assert model.load_state_dict(lacking, strict=False).missing_keys == ["model.embed_tokens.weight"]
    torch.save(state, tmp_path / "state.pt")
    model.load_state_dict(torch.load(tmp_path / "state.pt"))
    model.tie_weights()
    with pytest.raises(RuntimeError, match="resize_token_embeddings"):
        model.resize_token_embeddings(130)


def test_generation_and_evaluation(client, head_name):
    stock = make_model("tied").eval()
    model = patched(copy.deepcopy(stock), client, head_name, tied="rows").eval()
    ours, theirs = (each.generate(tokens(), max_new_tokens=8, do_sample=False) for each in (model, stock))
    assert torch.equal(ours, theirs)
    beams = [each.generate(tokens(), max_new_tokens=4, num_beams=3, do_sample=False) for each in (model, stock)]
    assert torch.equal(*beams)
    with torch.no_grad():
        outputs = [each(input_ids=tokens(), labels=tokens()) for each in (model, stock)]
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, atol=1e-5, rtol=1e-4)
    assert client.describe_head(head_name).step_microbatches == 0


@pytest.mark.parametrize("way", ["argument", "embedding", "model"])
def test_a_matrix_that_is_not_trained(client, head_name, way):
    model = patched(make_model("tied"), client, head_name, tied="rows", freeze=way == "argument").train()
    if way == "embedding":
        model.get_input_embeddings().requires_grad_(False)
    elif way == "model":
        model.requires_grad_(False)
        model.model.layers.requires_grad_(True)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None
    assert client.describe_head(head_name).step_microbatches == 0
    if way == "embedding":
        model.get_input_embeddings().requires_grad_(True)
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        assert client.describe_head(head_name).step_microbatches == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_and_lora(client, head_name, reentrant, tmp_path):
    stock = make_model("tied")
    model = patched(copy.deepcopy(stock), client, head_name, tied="rows")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=True)
    torch.manual_seed(1)
    ours = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    theirs = peft.get_peft_model(stock, config)
    for each in (ours, theirs):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        each.enable_input_require_grads()
        each.train()
    losses = [each(input_ids=tokens(), labels=tokens()).loss for each in (ours, theirs)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for each in losses:
        each.backward()
    gradients = [{key: value.grad for key, value in each.named_parameters() if value.grad is not None} for each in (ours, theirs)]
    for key, value in gradients[1].items():
        torch.testing.assert_close(gradients[0][key], value, atol=1e-6, rtol=1e-4)
    assert client.describe_head(head_name).step_microbatches == 0
    ours.save_pretrained(tmp_path)


def test_checkpointing_of_the_whole_model(client, head_name):
    """The embedding is inside what runs twice; its gradient joins the step once."""
    stock = make_model("tied")
    model = patched(copy.deepcopy(stock), client, head_name, tied="rows")

    def forward(ids):
        return model(input_ids=ids, labels=ids).loss

    torch.utils.checkpoint.checkpoint(forward, tokens(), use_reentrant=False).backward()
    stock(input_ids=tokens(), labels=tokens()).loss.backward()
    assert client.describe_head(head_name).step_microbatches == 2
    torch.testing.assert_close(torch.from_numpy(client.read_tensor(head_name, role="gradient")),
                               stock.get_input_embeddings().weight.grad, atol=1e-5, rtol=1e-3)


def test_autocast(client, head_name):
    """The embedding is not among what autocast changes, and gives what the model's own would."""
    model = patched(make_model("tied"), client, head_name, tied="rows")
    with torch.autocast("cpu", torch.bfloat16):
        assert model.get_input_embeddings()(tokens()).dtype is torch.float32
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert client.describe_head(head_name).step_microbatches == 2


def test_encoder_and_decoder_share_the_matrix(client, head_name):
    """Two embeddings and the head: three microbatches."""
    config = transformers.T5Config(vocab_size=120, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
                                   decoder_start_token_id=0, tie_word_embeddings=True)
    torch.manual_seed(2)
    stock = transformers.T5ForConditionalGeneration(config)
    model = patched(copy.deepcopy(stock), client, head_name, tied="rows")
    for each in (model, stock):
        each(input_ids=tokens(), labels=tokens(2)).loss.backward()
    torch.testing.assert_close(torch.from_numpy(client.read_tensor(head_name, role="gradient")), stock.shared.weight.grad,
                               atol=2e-5, rtol=1e-3)
    assert client.describe_head(head_name).step_microbatches == 3
    assert set(model.state_dict()) == set(stock.state_dict())


def test_what_is_refused(client, head_name):
    with pytest.raises(ValueError, match='choose tied="part", "share" or "rows"'):
        patched(make_model("tied"), client, head_name)
    with pytest.raises(ValueError, match='tied is "rows"; that is for lossd.transformers.patch'):
        RemoteHeadCausalLM(make_model("tied"), client, head_name, tied="rows")

    class Odd(torch.nn.Embedding):
        def forward(self, ids):
            return super().forward(ids).tanh()

    model = make_model("tied")
    odd = Odd(120, 32)
    odd.weight = model.lm_head.weight
    model.set_input_embeddings(odd)
    with pytest.raises(ValueError, match="Odd, that does more than multiply rows of the weight by a number"):
        patched(model, client, head_name, tied="rows")
    model.set_input_embeddings(torch.nn.Embedding(120, 32, max_norm=1.0, _weight=model.lm_head.weight))
    model.get_input_embeddings().weight = model.lm_head.weight
    with pytest.raises(ValueError, match="is no plain embedding"):
        patched(model, client, head_name, tied="rows")
    assert head_name not in [each.spec.name for each in client.list_heads()]
    model = patched(make_model("tied"), client, head_name, tied="rows")
    with pytest.raises(TypeError, match="is on a lossd server, so a copy of the model cannot have it"):
        copy.deepcopy(model)
    with pytest.raises(lossd.InvalidArgument, match=r"ids\[0, 1\] .* got 120"):
        model(input_ids=torch.tensor([[1, 120]]))


def test_models_that_are_not_tied_keep_their_embedding(client, head_name):
    model = patched(make_model("llama"), client, head_name, tied="rows")
    assert type(model.get_input_embeddings()) is torch.nn.Embedding and len(model.get_input_embeddings().weight) == 120


def test_a_model_whose_loss_is_another_one_stays_as_it_was(client, head_name, monkeypatch):
    model = make_model("tied")
    losses = iter((3.0, 9.0))  # before and after
    monkeypatch.setattr(lossd.transformers._patch, "random_tokens_loss", lambda *_: next(losses))
    with pytest.raises(ValueError, match="computes its loss in a way"):
        patched(model, client, head_name, tied="rows")
    assert type(model.get_input_embeddings()) is torch.nn.Embedding
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert "tie_weights" not in vars(model) and "forward" not in vars(model)


def train_data_parallel(rank, target, name):
    with lossd.Client(target) as client:
        stock = make_model("tied")
        model = lossd.transformers.patch(stock, client, name, tied="rows", compute_dtype="fp32",
                                         process_group=torch.distributed.group.WORLD)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        head_optimizer = HeadOptimizer(model.get_output_embeddings().loss_head, lr=0.1, algorithm="sgd")
        for step in range(2):
            ids = tokens(step)[[0, 1] if rank == 0 else [2]]
            wrapped(input_ids=ids, labels=ids, num_items_in_batch=3 * 13 / 2).loss.backward()
            head_optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        return {key: value.detach().clone() for key, value in model.named_parameters() if value.numel() > 1}


def test_data_parallel_ranks(server, client, head_name):
    """Each sends the gradients of its rows; the step is that of one process on all rows."""
    found = run_ranks(2, train_data_parallel, server.target, head_name)
    stock = make_model("tied")
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    for step in range(2):
        stock(input_ids=tokens(step), labels=tokens(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for of_rank in found:
        for key, value in of_rank.items():
            torch.testing.assert_close(value, stock.get_parameter(key).detach(), atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(torch.from_numpy(client.read_tensor(head_name)), stock.lm_head.weight.detach(), atol=1e-5, rtol=1e-3)
