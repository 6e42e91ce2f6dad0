# SPDX-License-Identifier: Apache-2.0
"""Causal language models of transformers that train in a second, with a tokenizer of as many words."""

from __future__ import annotations

from typing import Any

import torch
import transformers

V = 120
_SMALL = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen": ("Qwen3", {"tie_word_embeddings": False}),
    "gemma2": ("Gemma2", {"tie_word_embeddings": False, "final_logit_softcapping": 2.0}),
    "tied": ("Qwen2", {"tie_word_embeddings": True}),
}


def make_model(kind: str) -> Any:
    name, changes = MODELS[kind]
    torch.manual_seed(11)
    config = getattr(transformers, f"{name}Config")(**{**_SMALL, **changes}, attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_config(config).float()


def make_tokenizer() -> Any:
    """Its words are t0 to t119, with spaces between them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(V)}, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", bos_token="t1", eos_token="t2",
                                                unk_token="t3")
