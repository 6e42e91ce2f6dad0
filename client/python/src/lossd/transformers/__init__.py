# SPDX-License-Identifier: Apache-2.0
"""lossd for Hugging Face transformers: moves the language-model head of a causal model to a lossd server. patch() and attach()
are for a Trainer, RemoteHeadCausalLM is for loops of your own."""

from lossd.transformers._patch import patch
from lossd.transformers._remote import RemoteHeadCausalLM
from lossd.transformers._trainer import attach

__all__ = ["RemoteHeadCausalLM", "attach", "patch"]
