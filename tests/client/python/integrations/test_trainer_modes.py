# SPDX-License-Identifier: Apache-2.0
"""Smoothed labels, evaluation and prediction with logits, and models that are moved after patch()."""

import copy

import numpy as np
import pytest
import torch
import transformers
import trl
from tiny_models import make_model, make_tokenizer
from tiny_trainers import both, patched, rows, train_both, trainer_of

import lossd.transformers


@pytest.mark.parametrize("kind, more", [
    ("llama", {}), ("llama", {"gradient_accumulation_steps": 2}), ("gemma2", {"eval_strategy": "steps", "eval_steps": 2})])
def test_smoothed_labels(client, head_name, tmp_path, kind, more):
    ours, stock = train_both(both(client, head_name, kind), tmp_path, label_smoothing_factor=0.1, **more)
    for got, expected in zip(ours.state.log_history, stock.state.log_history):
        if "eval_loss" in expected:
            assert got["eval_loss"] == pytest.approx(expected["eval_loss"], abs=2e-5)
    assert (len(more) == 2) == any("eval_loss" in log for log in ours.state.log_history)


def test_smoothed_labels_of_sft(client, head_name, tmp_path):
    train_both(both(client, head_name), tmp_path, label_smoothing_factor=0.1, trainer=trl.SFTTrainer, config=trl.SFTConfig,
               gradient_checkpointing=False, bf16=False, of_trainer={"processing_class": make_tokenizer()})


def test_smoothed_labels_without_attach(client, head_name, tmp_path):
    trainer = trainer_of(both(client, head_name)[0], tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(RuntimeError, match=r"attach\(trainer\)"):
        trainer.train()
    assert client.describe_head(head_name).state.step == 0


def test_a_loss_of_logits_is_refused(client, head_name, tmp_path):
    trainer = trainer_of(both(client, head_name)[0], tmp_path, of_trainer={"compute_loss_func": lambda *_, **__: None})
    with pytest.raises(ValueError, match="compute_loss_func is given logits, and these are on the server"):
        lossd.transformers.attach(trainer)


def accuracy(predictions):
    logits, labels = predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"right": float((logits.argmax(-1)[:, :-1] == labels[:, 1:]).mean()), "sum": float(np.abs(logits).sum())}


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_metrics_and_predictions(client, head_name, tmp_path, kind, attached):
    results = []
    for index, model in enumerate(both(client, head_name, kind)):
        seen = []
        trainer = trainer_of(model, tmp_path, of_trainer={
            "compute_metrics": accuracy, "preprocess_logits_for_metrics": lambda logits, labels: (seen.append(logits), logits)[1]})
        if index == 0 and attached:
            lossd.transformers.attach(trainer)
        metrics, predicted = trainer.evaluate(), trainer.predict(rows(8))
        results.append((metrics, predicted.predictions, seen))
    (ours, our_logits, our_seen), (theirs, their_logits, their_seen) = results
    for key in ("eval_loss", "eval_right", "eval_sum"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key
    np.testing.assert_allclose(our_logits, their_logits, atol=1e-4)
    assert len(our_seen) == len(their_seen) > 0


def test_an_evaluation_of_losses_alone_makes_no_logits(client, head_name, tmp_path, monkeypatch):
    model, _ = both(client, head_name)
    trainer = trainer_of(model, tmp_path)
    lossd.transformers.attach(trainer)
    monkeypatch.setattr(type(client), "read_tensor", lambda *_, **__: pytest.fail("the weight was read"))
    assert trainer.evaluate()["eval_loss"] > 0
    seen = trainer.prediction_step(model.eval(), dict(rows(2).with_format("torch")[:]), prediction_loss_only=True)
    assert seen[0] > 0 and seen[1:] == (None, None)


def test_logits_of_a_loop_of_ones_own(client, head_name):
    model, stock = both(client, head_name, "gemma2")
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        ours, theirs = (each.eval()(input_ids=tokens, labels=tokens) for each in (model, stock))
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-5, rtol=1e-4)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5) and list(ours.keys())[:2] == list(theirs.keys())[:2]
    client.delete_head(head_name)
    without = patched(copy.deepcopy(stock), client, head_name, evaluation_logits=False).eval()
    with torch.no_grad():
        assert without(input_ids=tokens, labels=tokens).logits is None
        torch.testing.assert_close(without(input_ids=tokens).logits, theirs.logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("move", [lambda model: model.to(torch.bfloat16), lambda model: model.half(), lambda model: model.to("cpu")])
def test_models_that_are_moved_after_patch(client, head_name, move):
    model, stock = (move(each).eval() for each in both(client, head_name))
    tokens = torch.arange(3, 15)[None]
    ours, theirs = (each.generate(tokens, max_new_tokens=4, do_sample=False) for each in (model, stock))
    assert torch.equal(ours, theirs)
    got, expected = model.state_dict()["lm_head.weight"], stock.state_dict()["lm_head.weight"]
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected)


def test_a_tied_model_stays_tied(client, head_name):
    """Whatever ties weights again, as transformers does after loading."""
    model, stock = (each.eval() for each in both(client, head_name, "tied", tied="share"))
    model.tie_weights()
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens).logits, stock(input_ids=tokens).logits, atol=1e-5, rtol=1e-4)
    assert set(model.state_dict()) == set(stock.state_dict())


def test_copies_follow_the_device_and_dtype_of_hidden_states(client, head_name):
    model, _ = both(client, head_name)
    head = model.get_output_embeddings()
    with torch.no_grad():
        assert head(torch.ones(2, 32, dtype=torch.bfloat16)).dtype is torch.bfloat16
        assert head(torch.ones(2, 32)).dtype is torch.float32
    head.to("meta")
    assert head.device.type == "meta"


def test_an_encoder_decoder(client, head_name, tmp_path):
    """Labels are not shifted, and the decoder reads them."""
    torch.manual_seed(2)
    config = transformers.BartConfig(
        vocab_size=120, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, dropout=0.0, tie_word_embeddings=False)
    stock = transformers.BartForConditionalGeneration(config)
    model = patched(copy.deepcopy(stock), client, head_name)
    assert not model.get_output_embeddings().loss_head.shift
    trainers = train_both((model, stock), tmp_path, gradient_accumulation_steps=2)
    assert len(trainers[0].state.log_history) >= 3
