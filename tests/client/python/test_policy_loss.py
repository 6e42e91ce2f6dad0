# SPDX-License-Identifier: Apache-2.0
"""Objectives in the place of the cross-entropy, against torch in double precision: lossd.Client and LossHead.policy_loss."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead  # noqa: E402

D, V, B, T = 20, 130, 3, 40
Numbers = dict[str, torch.Tensor]

OBJECTIVES = [
    lossd.Objective("reinforce"),
    lossd.Objective("importance_sampling"),
    lossd.Objective("ppo"),
    lossd.Objective("ppo", clip_low=0.1, clip_high=0.28, dual_clip=3.0),
    lossd.Objective("ppo", kl_coef=0.04),
    lossd.Objective("ppo", kl="k1", kl_coef=0.3),
    lossd.Objective("ppo", kl="k2", kl_coef=0.3),
    lossd.Objective("cispo"),
    lossd.Objective("cispo", clip_low=0.2, clip_high=0.3),
    lossd.Objective("dft"),
    lossd.Objective("reinforce", entropy_bonus=0.1),
    lossd.Objective("dft", entropy_bonus=-0.05, kl_coef=0.1),
]


def row_losses(objective: lossd.Objective, z: torch.Tensor, actions: torch.Tensor, numbers: Numbers) -> dict[str, torch.Tensor]:
    """The formulas of the papers, row by row, with torch's autograd; `z` [N, V] double, `actions` [N]."""
    logp = torch.log_softmax(z, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    new = logp.gather(1, actions.clamp(min=0)[:, None])[:, 0]
    advantages = numbers.get("advantages", torch.zeros_like(new))
    ratio = torch.exp(new - numbers["old_logprobs"]) if "old_logprobs" in numbers else torch.zeros_like(new)
    default_low, default_high = (1.0, 4.0) if objective.kind == "cispo" else (0.2, 0.2)
    low = 1 - (default_low if objective.clip_low is None else objective.clip_low)
    high = 1 + (default_high if objective.clip_high is None else objective.clip_high)
    clipped = torch.zeros_like(new, dtype=torch.bool)
    if objective.kind == "reinforce":
        loss = -advantages * new
    elif objective.kind == "importance_sampling":
        loss = -ratio * advantages
    elif objective.kind == "ppo":
        surrogate = torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
        clipped = (ratio.clamp(low, high) * advantages) < (ratio * advantages)
        if objective.dual_clip:
            bounded = torch.max(surrogate, objective.dual_clip * advantages)
            clipped |= (advantages < 0) & (bounded > surrogate)
            surrogate = torch.where(advantages < 0, bounded, surrogate)
        loss = -surrogate
    elif objective.kind == "cispo":
        clipped = (ratio < low) | (ratio > high)
        loss = -ratio.clamp(low, high).detach() * advantages * new
    else:
        loss = -new.exp().detach() * new
    kl = torch.zeros_like(new)
    if objective.kl_coef:
        d = numbers["ref_logprobs"] - new
        kl = {"k1": -d, "k2": d.square() / 2, "k3": torch.exp(d) - 1 - d}[objective.kl]
    loss = loss + objective.kl_coef * kl - objective.entropy_bonus * entropy
    old_kl = ratio - 1 - (new - numbers["old_logprobs"]) if "old_logprobs" in numbers else torch.zeros_like(new)
    return {"loss": loss, "ratio": ratio, "clipped": clipped.double(), "old_kl": old_kl, "ref_kl": kl, "logprob": new}


@dataclasses.dataclass
class Rows:
    hidden: torch.Tensor
    actions: torch.Tensor
    weight: torch.Tensor
    numbers: Numbers

    def named(self, objective: lossd.Objective) -> Numbers:
        return {name: self.numbers[name] for name in objective.numbers}


@pytest.fixture
def rows(client, make_head, seed) -> tuple[str, Rows]:
    torch.manual_seed(seed % 2**31)
    head = make_head(hidden_size=D, vocab_size=V)
    weight = torch.from_numpy(client.read_tensor(head, "weight")).double()
    hidden = torch.randn(B, T, D)
    actions = torch.randint(0, V, (B, T))
    actions[torch.rand(B, T) < 0.2] = -100
    logp = torch.log_softmax(hidden.double() @ weight.T, -1).gather(-1, actions.clamp(min=0)[..., None])[..., 0]
    log_ratio = torch.randn(B, T).double() * 0.5
    # Rounding decides of no row whether it is clipped.
    bounds = torch.tensor([0.7, 0.8, 0.9, 1.2, 1.28, 1.3, 3.0, 5.0]).double().log()
    near = (log_ratio[..., None] - bounds).abs().min(-1).values < 1e-3
    log_ratio = torch.where(near, torch.zeros_like(log_ratio), log_ratio)
    numbers = {"advantages": torch.randn(B, T), "old_logprobs": (logp - log_ratio).float(),
               "ref_logprobs": (logp + torch.randn(B, T) * 0.3).float()}
    return head, Rows(hidden, actions, weight, numbers)


def expected(objective: lossd.Objective, rows: Rows, weights: torch.Tensor, normalizer: float
             ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, the gradients of hidden states and weight, and means over the rows that count."""
    hidden, weight = rows.hidden.double().requires_grad_(), rows.weight.clone().requires_grad_()
    flat = {name: values.double().reshape(-1) for name, values in rows.named(objective).items()}
    results = row_losses(objective, hidden.reshape(-1, D) @ weight.T, rows.actions.reshape(-1), flat)
    valid = rows.actions.reshape(-1) != -100
    loss = (results["loss"] * weights.double().reshape(-1))[valid].sum() / normalizer
    loss.backward()
    counted = valid & (weights.reshape(-1) != 0)
    means = {name: results[name][counted].mean() for name in ("ratio", "clipped", "old_kl", "ref_kl")}
    return loss.detach(), hidden.grad, weight.grad, means


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_policy_loss_is_torch_s(client, rows, objective):
    head, given = rows
    module = LossHead(client, head, extras=("ratio", "clipped", "old_kl", "ref_kl", "logprob"))
    optimizer = HeadOptimizer(module, lr=0.0)
    weights = torch.rand(B, T)
    weights[torch.rand(B, T) < 0.2] = 0.0
    normalizer = 57.0
    loss, dx, dw, means = expected(objective, given, weights, normalizer)
    ours = given.hidden.clone().requires_grad_()
    got, extras = module.policy_loss(ours, given.actions, **given.named(objective), objective=objective,
                                     row_weights=weights, normalizer=normalizer)
    got.backward()
    torch.testing.assert_close(got.double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), dx, rtol=1e-4, atol=1e-7)
    gradient = torch.from_numpy(client.read_tensor(head, "weight", "gradient")).double()
    torch.testing.assert_close(gradient, dw, rtol=1e-4, atol=1e-6)
    for name, mean in means.items():
        torch.testing.assert_close(getattr(extras, name).double(), mean, rtol=1e-4, atol=1e-5)
    optimizer.zero_grad()


@pytest.mark.parametrize("gradients", ["filtered", "sampled", "auto"])
def test_gradients_of_other_kinds(client, rows, gradients):
    """With thresholds that keep every class they are the exact ones."""
    head, given = rows
    module = LossHead(client, head, gradients=gradients, filter_epsilon=0.0, sample_threshold=1e-30)
    objective = lossd.Objective("ppo", kl_coef=0.1)
    weights, normalizer = torch.ones(B, T), float((given.actions != -100).sum())
    loss, dx, _, _ = expected(objective, given, weights, normalizer)
    ours = given.hidden.clone().requires_grad_()
    got = module.policy_loss(ours, given.actions, **given.named(objective), objective=objective)
    got.backward()
    torch.testing.assert_close(got.double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), dx, rtol=1e-4, atol=1e-7)


def test_evaluation_has_the_loss_alone(client, rows):
    head, given = rows
    module = LossHead(client, head)
    objective = lossd.Objective("cispo")
    normalizer = float((given.actions != -100).sum())
    with torch.no_grad():
        got = module.policy_loss(given.hidden, given.actions, **given.named(objective), objective=objective)
    torch.testing.assert_close(got.double(), expected(objective, given, torch.ones(B, T), normalizer)[0], rtol=1e-5, atol=1e-6)
    assert not got.requires_grad


def test_client_adds_up_over_streams_and_repeats(client, rows):
    """Numbers are cut as rows are; the same microbatch again adds nothing, with another advantage it is refused."""
    head, given = rows
    objective = lossd.Objective("ppo", kl_coef=0.1)
    arrays = {name: values.reshape(-1).numpy() for name, values in given.named(objective).items()}
    call: dict[str, Any] = {"step": 0, "id": 5, "accumulate": True, "reduction": "sum", "streams": 3, "slice_bytes": 800,
                            "grad_hidden": True, "options": lossd.LossOptions(objective=objective), **arrays}
    hidden, actions = given.hidden.reshape(-1, D).numpy(), given.actions.reshape(-1).numpy()
    first = client.compute_loss(head, hidden, actions, **call)
    loss, dx, dw, means = expected(objective, given, torch.ones(B, T), 1.0)
    assert first.loss == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_allclose(first.grad_hidden, dx.reshape(-1, D).numpy(), rtol=1e-4, atol=1e-5)
    assert first.objective.rows == int((given.actions != -100).sum())
    assert first.objective.mean("ratio") == pytest.approx(float(means["ratio"]), rel=1e-4)
    again = client.compute_loss(head, hidden, actions, **call)
    assert (again.accumulated_rows, again.repeated_rows) == (0, first.accumulated_rows)
    np.testing.assert_allclose(client.read_tensor(head, "weight", "gradient"), dw.numpy(), rtol=1e-4, atol=1e-4)
    for name in ("advantages", "old_logprobs", "ref_logprobs"):
        other = arrays[name].copy()
        other[int(np.flatnonzero(actions != -100)[3])] += 1
        with pytest.raises(lossd.FailedPrecondition):
            client.compute_loss(head, hidden, actions, **(call | {name: other}))
    other_objective = lossd.LossOptions(objective=dataclasses.replace(objective, clip_high=0.3))
    with pytest.raises(lossd.FailedPrecondition):
        client.compute_loss(head, hidden, actions, **(call | {"options": other_objective}))


def test_a_ratio_that_overflows_is_refused(client, rows):
    head, given = rows
    old = given.numbers["old_logprobs"].reshape(-1).numpy().copy()
    actions = given.actions.reshape(-1).numpy()
    row = int(np.flatnonzero(actions != -100)[7])
    old[row] = -200.0
    with pytest.raises(lossd.NonFinite, match=str(row)):
        client.compute_loss(head, given.hidden.reshape(-1, D).numpy(), actions, step=0, accumulate=True,
                            advantages=given.numbers["advantages"].reshape(-1).numpy(), old_logprobs=old,
                            options=lossd.LossOptions(objective=lossd.Objective("ppo")))
    assert not client.read_tensor(head, "weight", "gradient").any()


def test_a_policy_learns(client, make_head, seed):
    """Two epochs over each batch of samples: the actions that are worth something become likely."""
    torch.manual_seed(seed % 2**31)
    head = LossHead(client, make_head(hidden_size=16, vocab_size=12), extras=("ratio", "clipped", "old_kl", "logprob"))
    trunk = torch.nn.Embedding(4, 16)
    optimizers = [torch.optim.Adam(trunk.parameters(), lr=0.02), HeadOptimizer(head, lr=0.02)]
    objective = lossd.Objective("ppo", entropy_bonus=0.01)
    good = torch.tensor([2, 5, 7, 11])
    weight = torch.from_numpy(client.read_tensor(head.head_name, "weight"))
    for _ in range(30):
        states = torch.randint(0, 4, (64,))
        weight = torch.from_numpy(client.read_tensor(head.head_name, "weight"))
        with torch.no_grad():
            logp = torch.log_softmax(trunk(states) @ weight.T, -1)
        actions = torch.multinomial(logp.exp(), 1)[:, 0]
        old = logp.gather(1, actions[:, None])[:, 0]
        advantages = (actions == good[states]).float() - 0.1
        for epoch in range(2):
            loss, extras = head.policy_loss(trunk(states), actions, advantages, old, objective=objective)
            if epoch == 0:
                torch.testing.assert_close(extras.ratio, torch.tensor(1.0), rtol=1e-4, atol=0)
                assert extras.clipped == 0
            loss.backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
    weight = torch.from_numpy(client.read_tensor(head.head_name, "weight"))
    probabilities = torch.softmax(trunk(torch.arange(4)).detach() @ weight.T, -1).gather(1, good[:, None])
    assert probabilities.mean() > 0.5


@pytest.mark.parametrize(("arguments", "error", "text"), [
    ({"kind": "grpo"}, lossd.InvalidArgument, "objective.kind is 'grpo'; it must be one of reinforce"),
    ({"kind": "ppo", "clip_low": 1.5}, lossd.InvalidArgument, "objective.clip_low must be in [0, 1], got 1.5"),
    ({"kind": "ppo", "clip_high": -0.1}, lossd.InvalidArgument, "objective.clip_high must be finite and >= 0, got -0.1"),
    ({"kind": "reinforce", "clip_high": 0.1}, lossd.InvalidArgument, "objective.clip_high must be 0 with reinforce, got 0.1"),
    ({"kind": "cispo", "dual_clip": 3.0}, lossd.InvalidArgument, "objective.dual_clip must be 0 with cispo, got 3"),
    ({"kind": "ppo", "dual_clip": 0.5}, lossd.InvalidArgument, "objective.dual_clip must be 0 (none), or finite and > 1, got 0.5"),
    ({"kind": "ppo", "kl": "k4"}, lossd.InvalidArgument, "objective.kl is 'k4'"),
    ({"kind": "ppo", "kl_coef": -1.0}, lossd.InvalidArgument, "objective.kl_coef must be finite and >= 0, got -1"),
    ({"kind": "ppo", "entropy_bonus": float("inf")}, lossd.InvalidArgument, "objective.entropy_bonus must be finite, got inf"),
    ({"kind": "ppo", "kl_coef": "much"}, TypeError, "objective.kl_coef is 'much'; it must be a number"),
])
def test_objectives_that_make_no_sense(arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        lossd.Objective(**arguments)


def test_combinations_that_make_no_sense(client, rows):
    head, given = rows
    ppo = lossd.Objective("ppo")
    with pytest.raises(lossd.InvalidArgument, match="label_smoothing must be 0 with an objective, got 0.1"):
        lossd.LossOptions(label_smoothing=0.1, objective=ppo)
    with pytest.raises(lossd.InvalidArgument, match="use_class_weights must be false with an objective, got true"):
        lossd.LossOptions(use_class_weights=True, objective=ppo)
    with pytest.raises(TypeError, match="objective is 'ppo'; it must be a lossd.Objective"):
        lossd.LossOptions(objective="ppo")
    named = given.named(ppo)
    with pytest.raises(ValueError, match="shift=True"):
        LossHead(client, head, shift=True).policy_loss(given.hidden, given.actions, **named)
    module = LossHead(client, head)
    with pytest.raises(ValueError, match="old_logprobs is None"):
        module.policy_loss(given.hidden, given.actions, given.numbers["advantages"])
    with pytest.raises(ValueError, match="ref_logprobs is given"):
        module.policy_loss(given.hidden, given.actions, **given.numbers)
    with pytest.raises(ValueError, match="advantages has shape"):
        module.policy_loss(given.hidden, given.actions, torch.ones(B), named["old_logprobs"])
    with pytest.raises(ValueError, match="old_logprobs requires a gradient"):
        module.policy_loss(given.hidden, given.actions, named["advantages"], named["old_logprobs"].requires_grad_())
    with pytest.raises(TypeError, match="objective is 'ppo'"):
        module.policy_loss(given.hidden, given.actions, objective="ppo")
    hidden, actions = given.hidden.reshape(-1, D).numpy(), given.actions.reshape(-1).numpy()
    with pytest.raises(lossd.InvalidArgument, match="open.advantages must be empty with open.options.objective cross_entropy"):
        client.compute_loss(head, hidden, actions, advantages=np.ones(B * T))
    with pytest.raises(lossd.InvalidArgument, match="open.reduction must be sum or mean with open.options.objective"):
        client.compute_loss(head, hidden, actions, reduction="none", options=lossd.LossOptions(objective=lossd.Objective("dft")))
    with pytest.raises(lossd.InvalidArgument, match="advantages has 3 entries"):
        client.compute_loss(head, hidden, actions, advantages=np.ones(3),
                            options=lossd.LossOptions(objective=lossd.Objective("reinforce")))
    with pytest.raises(lossd.InvalidArgument, match=r"open.advantages\[2\]"):
        client.compute_loss(head, hidden, actions, advantages=np.where(np.arange(B * T) == 2, np.nan, 1.0), streams=1,
                            options=lossd.LossOptions(objective=lossd.Objective("reinforce")))
