# SPDX-License-Identifier: Apache-2.0
"""Every class of transformers that computes losses of tokens: with its head on a server it is right, or patch() refuses it.

The long form, of all classes, is in the nightly suite (make test-integrations-nightly).
"""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

import lossd
import lossd.transformers


# Any class of transformers that computes losses of tokens, so small that it is made in a moment.
#
# A configuration class gets small values for all of its arguments whose names are known here, and so do the configurations
# inside it.

V, D = 104, 32
MAPPINGS = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
            "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
_VALUES: dict[tuple[str, ...], Any] = {
    ("vocab_size", "n_vocab", "src_vocab_size", "tgt_vocab_size", "decoder_vocab_size", "entity_vocab_size"): V,
    ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "hidden_dim", "attention_hidden_size",
     "embed_dim", "word_embed_proj_dim", "n_embed", "projection_dim", "model_dim", "pooler_hidden_size",
     "out_hidden_size", "lm_head_hidden_size", "width", "entity_emb_size", "block_width", "lru_width", "mm_hidden_size"): D,
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
     "num_encoder_layers", "depth", "depths", "num_blocks"): 2,
    ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads",
     "num_encoder_attention_heads", "num_decoder_attention_heads", "mamba_n_heads", "num_lightning_heads"): 4,
    ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num"): 2,
    ("intermediate_size", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "dim_ff", "d_inner", "ff_dim",
     "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size", "mlp_dim", "encoder_ff_dim",
     "feed_forward_size", "block_ff_dim", "intermediate_size_mlp", "mlp_hidden_size", "shared_intermediate_size"): 48,
    ("head_dim", "attention_head_size", "d_kv", "kv_channels", "qk_nope_head_dim", "v_head_dim", "d_head",
     "global_head_dim", "attention_head_dim"): 8,
    ("qk_rope_head_dim",): 8, ("qk_head_dim",): 16, ("q_lora_rank", "kv_lora_rank"): 16,
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions", "max_source_positions",
     "seq_length", "max_sequence_length", "context_length", "attention_window_size"): 64,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): 4,
    ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k", "top_k"): 2,
    ("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "num_shared_experts", "moe_layer_start_index"): 1,
    ("pad_token_id",): 0, ("bos_token_id", "decoder_start_token_id"): 1, ("eos_token_id", "sep_token_id"): 2,
    ("image_token_id", "image_token_index"): 3, ("video_token_id", "video_token_index"): 4,
    ("audio_token_id", "audio_token_index"): 5, ("vision_start_token_id", "boi_token_id", "boi_token_index"): 6,
    ("vision_end_token_id", "eoi_token_id", "eoi_token_index"): 7, ("mask_token_id",): 8,
    ("dropout", "attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout"): 0.0,
    ("image_size",): 16, ("patch_size",): 8, ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_layers"): 0,
    ("state_size", "mamba_d_state", "mamba_d_conv", "conv_kernel", "mamba_expand", "expand"): None,
    ("hidden_size_per_layer_input", "vocab_size_per_layer_input"): None,
}
_SMALL = {name: value for names, value in _VALUES.items() if value is not None for name in names}
# What a class needs besides, and what of the above it does not take (None).
_OWN: dict[str, dict[str, Any]] = {
    "MiniCPM3Config": {"hidden_size": 64, "dim_model_base": 16},
    "Gemma2Config": {"final_logit_softcapping": 2.0}, "CohereConfig": {"logit_scale": 0.4},
    "GraniteConfig": {"logits_scaling": 3.0}, "GPTJConfig": {"rotary_dim": 8}, "CodeGenConfig": {"rotary_dim": 8},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1}, "BambaConfig": {"attn_layer_indices": [1]},
    **{name: {"num_hidden_layers": 4} for name in (
        "Qwen3NextConfig", "Qwen3_5TextConfig", "Qwen3_5MoeTextConfig", "RecurrentGemmaConfig", "KimiLinearConfig")},
    **{name: {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}} for name in (
        "Qwen2VLTextConfig", "Qwen2_5_VLTextConfig", "Qwen2_5OmniTextConfig", "Glm4vTextConfig", "Glm4vMoeTextConfig",
        "PaddleOCRTextConfig", "GlmOcrTextConfig")},
}


def small_config(config_class: Any, depth: int = 0) -> Any:
    """Raises whatever the class does if it does not take small values."""
    arguments = inspect.signature(config_class.__init__).parameters
    known = {**{name: None for name in arguments}, **{name: None for name in getattr(config_class, "__annotations__", {})}}
    values = {name: value for name, value in _SMALL.items() if name in known}
    for name in getattr(config_class, "attribute_map", {}):
        if name in _SMALL and config_class.attribute_map[name] not in values:
            values[config_class.attribute_map[name]] = _SMALL[name]
    for name, kind in getattr(config_class, "sub_configs", {}).items():
        if depth < 3 and kind is not transformers.AutoConfig:
            values[name] = small_config(kind, depth + 1).to_dict()
        elif depth < 3:
            text = name in ("text_config", "decoder", "language_config", "llm_config")
            values[name] = small_config(transformers.LlamaConfig if text else transformers.CLIPVisionConfig,
                                        depth + 1).to_dict()
    if "qk_rope_head_dim" in values:
        values.pop("head_dim", None)  # follows from the parts
        if "num_key_value_heads" in values:
            values["num_key_value_heads"] = values["num_attention_heads"]
    values.update(_OWN.get(config_class.__name__, {}))
    config = config_class(**values)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


def class_names() -> list[str]:
    """Of all classes that compute losses of tokens."""
    found = set()
    for mapping in MAPPINGS:
        for names in getattr(modeling_auto, mapping).values():
            found.update([names] if isinstance(names, str) else names)
    return sorted(found)


def small_model(name: str) -> Any:
    """In fp32, with a head whose logits are as far apart as a trained model's, in evaluation mode."""
    model_class = getattr(transformers, name)
    torch.manual_seed(17)
    model = model_class(small_config(model_class.config_class)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases that do something
                parameter.add_(0.1 * torch.randn_like(parameter))
        layer = model.get_output_embeddings()
        if layer is not None and getattr(layer, "weight", None) is not None:
            layer.weight.mul_(3.0 / layer.weight.std() / D ** 0.5)
    return model


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
