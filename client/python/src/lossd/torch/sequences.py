# SPDX-License-Identifier: Apache-2.0
"""Training objectives for whole sequences: GSPO, DPO, SimPO, ORPO and KTO. They are computed from the losses of tokens, which
a deferred LossHead returns.

    head = lossd.torch.LossHead(client, "policy", reduction="none")
    mask = targets != -100
    chosen, rejected = sequences.sums(-head(hidden, targets), mask).chunk(2)
    sequences.dpo(chosen, rejected, reference_chosen, reference_rejected).backward()

In these objectives the gradient of a token depends on the other tokens of its sequence. So the server computes the losses
first, keeps the hidden states, and computes the gradients in backward. LossHead.policy_loss has objectives of single tokens.

The functions take and return tensors on any device. Their gradients are those of the published formulas. Each objective is a
mean over the sequences.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

__all__ = ["dpo", "gspo", "kto", "means", "orpo", "simpo", "sums"]


def sums(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of sequences [B]: the sum over their tokens' log-probabilities [B, T]. `mask` [B, T] is true where
    a token counts."""
    _check(mask, logprobs)
    return torch.where(mask, logprobs, torch.zeros_like(logprobs)).sum(-1)


def means(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """sums() divided by the number of tokens that count; 0 for a sequence without such tokens."""
    return sums(logprobs, mask) / mask.sum(-1).clamp(min=1)


def gspo(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *,
         clip_low: float = 3e-4, clip_high: float = 4e-4) -> torch.Tensor:
    """Group sequence policy optimization (Zheng et al., arXiv:2507.18071). It has one probability ratio for each sequence.

    Args:
      logprobs: [B, T], the present log-probabilities of tokens.
      old_logprobs: [B, T], their log-probabilities under the policy that sampled them.
      advantages: [B], the advantages of the sequences.
      mask: [B, T], true where a token counts.
      clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    """
    _check(advantages, logprobs[:, 0])
    ratio = torch.exp(means(logprobs - old_logprobs, mask))
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages).mean()


def dpo(chosen: torch.Tensor, rejected: torch.Tensor, reference_chosen: torch.Tensor, reference_rejected: torch.Tensor, *,
        beta: float = 0.1, label_smoothing: float = 0.0) -> torch.Tensor:
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290). All arguments are log-probabilities of sequences
    [B], as sums() returns them.

    `label_smoothing`: the probability that a preference is inverted (conservative DPO); in [0, 0.5).
    """
    margin = beta * ((chosen - rejected) - (reference_chosen - reference_rejected))
    return (-(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)).mean()


def simpo(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float = 2.0, gamma: float = 1.0) -> torch.Tensor:
    """Simple preference optimization (Meng et al., arXiv:2405.14734). `chosen` and `rejected` are mean log-probabilities of
    tokens [B], as means() returns them. There is no reference policy.

    `gamma`: the margin by which beta times the chosen value should exceed beta times the rejected value.
    """
    return -logsigmoid(beta * (chosen - rejected) - gamma).mean()


def orpo(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """Odds ratio preference optimization (Hong et al., arXiv:2403.07691). `chosen` and `rejected` are mean log-probabilities
    of tokens [B], as means() returns them. There is no reference policy.

    The loss is -log p of the chosen sequences, plus `beta` times -log sigmoid of the log odds ratio of chosen and rejected
    ones. The odds p / (1 - p) are unbounded as p approaches 1. So 1 - p is taken as at least the epsilon of the dtype
    (1.2e-7 for float32), and loss and gradients are finite.
    """
    log_odds = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
    return (-chosen - beta * logsigmoid(log_odds)).mean()


def kto(logprobs: torch.Tensor, reference: torch.Tensor, desirable: torch.Tensor, divergence: torch.Tensor | float, *,
        beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> torch.Tensor:
    """Kahneman-Tversky optimization (Ethayarajh et al., arXiv:2402.01306).

    Args:
      logprobs: [B], the present log-probabilities of sequences, as sums() returns them.
      reference: [B], their log-probabilities under the reference policy.
      desirable: [B], true where a sequence is good.
      divergence: an estimate of the KL divergence of the policy from the reference policy: the mean of logprobs - reference
        over mismatched sequences, which join a prompt with the answer to another prompt. A negative value counts as 0. The
        argument gets no gradient.
    """
    _check(desirable, logprobs)
    rest = torch.as_tensor(divergence, dtype=logprobs.dtype, device=logprobs.device).detach().clamp(min=0)
    reward = beta * (logprobs - reference - rest)
    good = desirable_weight * (1 - torch.sigmoid(reward))
    bad = undesirable_weight * (1 - torch.sigmoid(-reward))
    return torch.where(desirable, good, bad).mean()


def _log_of_rest(logprob: torch.Tensor) -> torch.Tensor:
    """log(1 - p) and its gradient. If 1 - p is below the epsilon of the dtype, both have their values at that epsilon."""
    most = -torch.finfo(logprob.dtype).eps
    bounded = logprob + (logprob.clamp(max=most) - logprob).detach()  # has a gradient, unlike a clamped value
    return torch.log(-torch.expm1(bounded))


def _check(per_sequence_or_token: torch.Tensor, other: torch.Tensor) -> None:
    if per_sequence_or_token.shape != other.shape:
        raise ValueError(f"shapes {tuple(per_sequence_or_token.shape)} and {tuple(other.shape)} differ, but both have one "
                         "number for each token, or each sequence")
