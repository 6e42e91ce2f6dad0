# SPDX-License-Identifier: Apache-2.0
"""Objectives of whole sequences over a deferred LossHead, against each paper's formula in torch, in double precision."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch  # noqa: E402

from lossd.torch import HeadOptimizer, LossHead, sequences  # noqa: E402

D, V, B, T = 20, 90, 6, 17


def formulas(logprobs, mask, given):
    """By name: the loss of log-probabilities of tokens [B, T], written out sequence by sequence."""
    total = [logprobs[b][mask[b]].sum() for b in range(B)]
    mean = [total[b] / mask[b].sum() for b in range(B)]
    half = B // 2
    pairs = [(b, b + half) for b in range(half)]
    reference = [given["reference"][b][mask[b]].sum() for b in range(B)]

    def sigmoid(x):
        return 1 / (1 + torch.exp(-x))

    def gspo():
        terms = []
        for b in range(B):
            ratio = torch.exp((logprobs[b] - given["old"][b])[mask[b]].mean())
            clipped = ratio.clamp(0.9, 1.2)
            terms.append(torch.max(-ratio * given["advantages"][b], -clipped * given["advantages"][b]))
        return sum(terms) / B

    def dpo():
        margins = [0.3 * ((total[c] - reference[c]) - (total[r] - reference[r])) for c, r in pairs]
        return -sum(0.9 * sigmoid(m).log() + 0.1 * sigmoid(-m).log() for m in margins) / half

    def simpo():
        return -sum(sigmoid(2 * mean[c] - 2 * mean[r] - 0.7).log() for c, r in pairs) / half

    def orpo():
        odds = [torch.exp(m) / (1 - torch.exp(m)) for m in mean]
        return sum(-mean[c] - 0.4 * sigmoid((odds[c] / odds[r]).log()).log() for c, r in pairs) / half

    def kto():
        losses = []
        for b in range(B):
            reward = 0.2 * (total[b] - reference[b])
            point = 0.2 * max(0.0, float(given["divergence"]))
            losses.append(1.5 * (1 - sigmoid(reward - point)) if given["desirable"][b] else 0.8 * (1 - sigmoid(point - reward)))
        return sum(losses) / B

    return {"gspo": gspo, "dpo": dpo, "simpo": simpo, "orpo": orpo, "kto": kto}


def computed(name, logprobs, mask, given):
    total, mean = sequences.sums(logprobs, mask), sequences.means(logprobs, mask)
    reference = sequences.sums(given["reference"].to(logprobs.dtype), mask)
    if name == "gspo":
        return sequences.gspo(logprobs, given["old"].to(logprobs.dtype), given["advantages"].to(logprobs.dtype), mask,
                              clip_low=0.1, clip_high=0.2)
    if name == "dpo":
        return sequences.dpo(*total.chunk(2), *reference.chunk(2), beta=0.3, label_smoothing=0.1)
    if name == "simpo":
        return sequences.simpo(*mean.chunk(2), beta=2.0, gamma=0.7)
    if name == "orpo":
        return sequences.orpo(*mean.chunk(2), beta=0.4)
    return sequences.kto(total, reference, given["desirable"], given["divergence"], beta=0.2, desirable_weight=1.5,
                         undesirable_weight=0.8)


@pytest.mark.parametrize("divergence", [0.8, -0.5])
@pytest.mark.parametrize("name", ["gspo", "dpo", "simpo", "orpo", "kto"])
def test_objectives_of_sequences(client, make_head, seed, name, divergence):
    torch.manual_seed(seed % 2**31)
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V), reduction="none")
    optimizer = HeadOptimizer(head, lr=0.0)
    weight = torch.from_numpy(client.read_tensor(head.head_name, "weight")).double().requires_grad_()
    hidden = torch.randn(B, T, D) * 0.5
    targets = torch.randint(0, V, (B, T))
    targets[torch.rand(B, T) < 0.3] = -100
    targets[:, 0] = 1  # no sequence is empty
    mask = targets != -100
    exact = hidden.double().requires_grad_()
    logp = torch.log_softmax(exact @ weight.T, -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    noise = torch.randn(2, B, T).double()
    given = {"reference": logp.detach() + 0.1 * noise[0], "old": logp.detach() + 0.1 * noise[1], "advantages": torch.randn(B).double(),
             "desirable": torch.arange(B) % 2 == 0, "divergence": divergence}
    expected = formulas(logp, mask, given)[name]()
    expected.backward()
    ours = hidden.clone().requires_grad_()
    loss = computed(name, -head(ours, targets), mask, given)
    loss.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-3, atol=1e-6)
    gradient = torch.from_numpy(client.read_tensor(head.head_name, "weight", "gradient")).double()
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-3, atol=1e-6)
    optimizer.zero_grad()


def test_shapes_that_differ_are_refused():
    logprobs = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(2, 3\) differ"):
        sequences.sums(logprobs, torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"shapes \(2, 3\) and \(2,\) differ"):
        sequences.gspo(logprobs, logprobs, torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"shapes \(3,\) and \(2,\) differ"):
        sequences.kto(torch.zeros(2), torch.zeros(2), torch.ones(3, dtype=torch.bool), 0.0)


def test_a_sequence_without_tokens_is_0():
    mask = torch.tensor([[True, True], [False, False]])
    assert sequences.means(torch.tensor([[-1.0, -3.0], [-5.0, -7.0]]), mask).tolist() == [-2.0, 0.0]


@pytest.mark.parametrize("chosen", [0.0, 1e-9, -1e-9, -1e-8, -1e-6, -1e-3])
def test_orpo_of_sequences_that_are_certain(chosen):
    """The mean of log-probabilities may round to 0 in float32, or above it; the gradients are those of the formula there."""
    c, r = torch.tensor([chosen], requires_grad=True), torch.tensor([-1.5], requires_grad=True)
    loss = sequences.orpo(c, r, beta=0.4)
    loss.backward()
    # log sigmoid(log(odds_c / odds_r)) is -log(1 + odds_r (1 - p_c) / p_c), which has a limit where p_c is 1.
    x, y = (torch.tensor([min(value, 0.0)], dtype=torch.float64, requires_grad=True) for value in (chosen, -1.5))
    odds = y.exp() / (1 - y.exp())
    expected = (-x + 0.4 * torch.log1p(odds * -torch.expm1(x) / x.exp())).mean()
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(c.grad.double(), x.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(r.grad.double(), y.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])  # old torches lack float16 on a CPU
@pytest.mark.parametrize("chosen, rejected", [(0.0, 0.0), (-1.0, 0.0), (0.0, -1.0), (0.0, -200.0), (-200.0, 0.0)])
def test_orpo_is_finite_at_the_ends(dtype, chosen, rejected):
    c, r = (torch.tensor([value], dtype=dtype, requires_grad=True) for value in (chosen, rejected))
    loss = sequences.orpo(c, r)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(c.grad).all() and torch.isfinite(r.grad).all()
    assert c.grad < 0 <= r.grad
