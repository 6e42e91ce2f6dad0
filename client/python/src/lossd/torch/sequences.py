# SPDX-License-Identifier: Apache-2.0
"""Objectives of whole sequences: GSPO, DPO, SimPO, ORPO and KTO, of the losses of tokens that a deferred LossHead gives.

    head = lossd.torch.LossHead(client, "policy", reduction="none")
    mask = targets != -100
    chosen, rejected = sequences.sums(-head(hidden, targets), mask).chunk(2)
    sequences.dpo(chosen, rejected, reference_chosen, reference_rejected).backward()

A gradient of a token depends on the other tokens of its sequence here, so the server computes the losses first, keeps the hidden
states, and takes the gradients in backward. What depends on one token alone is LossHead.policy_loss. Functions take and return
tensors, of any device, and have the gradients of the published formulas; they mean over the sequences.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

__all__ = ["dpo", "gspo", "kto", "means", "orpo", "simpo", "sums"]


def sums(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of sequences [B], of those of their tokens [B, T]; `mask` [B, T] is true where a token counts."""
    _check(mask, logprobs)
    return torch.where(mask, logprobs, torch.zeros_like(logprobs)).sum(-1)


def means(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """sums() divided by the number of tokens that count; 0 for a sequence in which none counts."""
    return sums(logprobs, mask) / mask.sum(-1).clamp(min=1)


def gspo(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *,
         clip_low: float = 3e-4, clip_high: float = 4e-4) -> torch.Tensor:
    """Group sequence policy optimization (Zheng et al., arXiv:2507.18071), whose ratio is one of the sequence.

    Args:
      logprobs, old_logprobs: [B, T], of tokens, now and under the policy that sampled them.
      advantages: [B], of sequences.
      mask: [B, T], true where a token counts.
      clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    """
    _check(advantages, logprobs[:, 0])
    ratio = torch.exp(means(logprobs - old_logprobs, mask))
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages).mean()


def dpo(chosen: torch.Tensor, rejected: torch.Tensor, reference_chosen: torch.Tensor, reference_rejected: torch.Tensor, *,
        beta: float = 0.1, label_smoothing: float = 0.0) -> torch.Tensor:
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290) of log-probabilities of sequences [B], sums() of tokens.

    `label_smoothing`: the probability that a preference is the wrong way round (conservative DPO); in [0, 0.5).
    """
    margin = beta * ((chosen - rejected) - (reference_chosen - reference_rejected))
    return (-(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)).mean()


def simpo(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float = 2.0, gamma: float = 1.0) -> torch.Tensor:
    """Simple preference optimization (Meng et al., arXiv:2405.14734) of means() of tokens [B]; there is no reference.

    `gamma`: the margin by which beta times the chosen one is to be above beta times the rejected one.
    """
    return -logsigmoid(beta * (chosen - rejected) - gamma).mean()


def orpo(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """Odds ratio preference optimization (Hong et al., arXiv:2403.07691) of means() of tokens [B]; there is no reference.

    The likelihood of the chosen sequences and, times `beta`, the ratio of the odds of both. The odds p / (1 - p) have no bound as
    p nears 1: 1 - p counts as the epsilon of the dtype (1.2e-7 for float32) where it is less, so that loss and gradients are finite.
    """
    log_odds = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
    return (-chosen - beta * logsigmoid(log_odds)).mean()


def kto(logprobs: torch.Tensor, reference: torch.Tensor, desirable: torch.Tensor, divergence: torch.Tensor | float, *,
        beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> torch.Tensor:
    """Kahneman-Tversky optimization (Ethayarajh et al., arXiv:2402.01306) of log-probabilities of sequences [B], sums().

    Args:
      desirable: [B], true where a sequence is good.
      divergence: the divergence from the reference of the batch, estimated from mismatched sequences: the mean of their
        logprobs - reference. Below 0 it counts as 0, and it gets no gradient.
    """
    _check(desirable, logprobs)
    rest = torch.as_tensor(divergence, dtype=logprobs.dtype, device=logprobs.device).detach().clamp(min=0)
    reward = beta * (logprobs - reference - rest)
    good = desirable_weight * (1 - torch.sigmoid(reward))
    bad = undesirable_weight * (1 - torch.sigmoid(-reward))
    return torch.where(desirable, good, bad).mean()


def _log_of_rest(logprob: torch.Tensor) -> torch.Tensor:
    """log(1 - p) and its gradient. Where 1 - p is below the epsilon of the dtype: their values at that epsilon."""
    most = -torch.finfo(logprob.dtype).eps
    bounded = logprob + (logprob.clamp(max=most) - logprob).detach()  # unlike a clamped value it has a gradient
    return torch.log(-torch.expm1(bounded))


def _check(per_sequence_or_token: torch.Tensor, other: torch.Tensor) -> None:
    if per_sequence_or_token.shape != other.shape:
        raise ValueError(f"shapes {tuple(per_sequence_or_token.shape)} and {tuple(other.shape)} differ, but both have one "
                         "number for each token, or each sequence")
