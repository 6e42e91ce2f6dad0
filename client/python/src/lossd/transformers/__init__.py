# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: the language-model head of a causal model on a lossd server."""

from lossd.transformers._patch import patch
from lossd.transformers._remote import RemoteHeadCausalLM
from lossd.transformers._trainer import attach

__all__ = ["RemoteHeadCausalLM", "attach", "patch"]
