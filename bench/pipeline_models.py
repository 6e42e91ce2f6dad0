# SPDX-License-Identifier: Apache-2.0
"""Models that pipeline_bench.py knows by name (MODELS): published sizes, and layers from the code of Hugging Face transformers
(4.5x or 5.x).

Weights are random, and nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

STD = 0.02  # the standard deviation of the initial weights of embedding and layers


@dataclass(frozen=True)
class Parts:
    """Functions that make the parts of a model. The weights of a part depend only on torch's seed."""

    embedding: Callable[[], nn.Module]  # takes ids, returns hidden states; its attribute `token` is a torch.nn.Embedding
    layer: Callable[[], nn.Module]  # takes and returns hidden states
    norm: Callable[[], nn.Module]  # the final norm, before the head


@dataclass(frozen=True)
class Llama:
    """The sizes of a model with the architecture of Llama 3."""

    layers: int
    vocab_size: int
    hidden_size: int
    heads: int  # the number of heads of queries
    kv_heads: int  # the number of heads of keys and values
    intermediate_size: int  # the width of the MLP
    rope_factor: float  # the low frequencies of the rotary embedding are divided by this
    tied: bool  # whether the embedding is the head's matrix

    def config(self, vocab_size: int, hidden_size: int, heads: int) -> Any:
        """A LlamaConfig with these sizes, which may differ from the model's. The number of heads of keys and values, and the width
        of the MLP, are changed in proportion. ValueError if `heads` or `hidden_size` cannot be divided accordingly."""
        queries = self.heads // self.kv_heads
        if heads % queries:
            raise ValueError(f"heads is {heads}; the model has {queries} heads of queries for each of keys, so it must be a multiple")
        if hidden_size % (2 * heads):
            raise ValueError(f"hidden_size is {hidden_size}; it must be a multiple of twice the number of heads, {heads}")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import LlamaConfig
        rope = {"rope_type": "llama3", "factor": self.rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}
        config = LlamaConfig(
            vocab_size=vocab_size, hidden_size=hidden_size, num_attention_heads=heads, num_key_value_heads=heads // queries,
            intermediate_size=self.intermediate_size * hidden_size // self.hidden_size, num_hidden_layers=self.layers,
            max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=rope,
            tie_word_embeddings=self.tied)
        config._attn_implementation = "sdpa"
        return config

    def parts(self, vocab_size: int, hidden_size: int, heads: int) -> Parts:
        """Functions that make the parts of one stage. Its layers share their rotary embeddings."""
        config = self.config(vocab_size, hidden_size, heads)
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
        rotary = Rotary(config)
        return Parts(lambda: TokenEmbedding(vocab_size, hidden_size), lambda: LlamaLayer(config, rotary),
                     lambda: LlamaRMSNorm(hidden_size, eps=config.rms_norm_eps))


MODELS = {
    "llama-3.2-1b": Llama(16, 128256, 2048, 32, 8, 8192, 32.0, True),
    "llama-3.2-3b": Llama(28, 128256, 3072, 24, 8, 8192, 32.0, True),
    "llama-3.1-8b": Llama(32, 128256, 4096, 32, 8, 14336, 8.0, False),
}


class TokenEmbedding(nn.Module):
    """A token embedding without positions."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, hidden_size)
        nn.init.normal_(self.token.weight, std=STD)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.token(tokens)
        return rows


class Rotary:
    """Cosines and sines of the positions of a sequence, made once for each length, device and dtype."""

    def __init__(self, config: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
        self.embedding = LlamaRotaryEmbedding(config=config)
        self.made: dict[tuple[int, torch.device, torch.dtype], Any] = {}

    def __call__(self, hidden: torch.Tensor) -> Any:
        key = (hidden.shape[1], hidden.device, hidden.dtype)
        if key not in self.made:
            self.made[key] = self.embedding(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])
        return self.made[key]


class LlamaLayer(nn.Module):
    """A decoder layer of transformers with causal attention over whole sequences: hidden states [B, T, D] in and out."""

    def __init__(self, config: Any, rotary: Rotary) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer
        self.layer = LlamaDecoderLayer(config, 0)  # 0: the layer's number, which only caches of keys and values use
        self.rotary = rotary
        for each in self.layer.modules():
            if isinstance(each, nn.Linear):
                nn.init.normal_(each.weight, std=STD)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self.layer(hidden, position_embeddings=self.rotary(hidden))
        return found[0] if isinstance(found, tuple) else found  # a tuple before transformers 4.54
