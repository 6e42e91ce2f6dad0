# SPDX-License-Identifier: Apache-2.0
"""Sampled gradients through lossd.Client, against the rule written down in Python; and those of auto."""

import numpy as np
import pytest
from sampled_softmax import clear_rows, row_numbers, sampled
from test_client import D, N, V, cross_entropy, logits, problem  # noqa: F401 (problem is a fixture)

import lossd


def test_sampled_gradients(client, make_head, problem):
    """In forward and in backward() against the rule with the same random numbers, which are written down in Python."""
    hidden, all_targets = problem
    head = make_head(hidden_size=D, vocab_size=V)
    threshold, smoothing, z_loss = 0.02, 0.1, 1e-2
    z = logits(client, head, hidden)
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    weight = client.read_tensor(head).astype(float)
    options = lossd.LossOptions(
        label_smoothing=smoothing, z_loss=z_loss, gradients="sampled", sample_threshold=threshold)

    def targets_of(omega):  # of rows in which rounding changes nothing
        clear = clear_rows(p, all_targets, threshold, omega)
        assert clear.mean() > 0.5
        return np.where(clear, all_targets, -100)

    def check(result, omega, gradient):
        targets = targets_of(omega)
        valid = targets != -100
        onehot = np.arange(V) == targets[:, None]
        _, lse, _ = cross_entropy(z, targets)
        slope = (1 + 2 * z_loss * lse)[:, None]
        dz = slope * sampled(p, targets, threshold, omega) - (1 - smoothing) * onehot - smoothing / V
        dz *= valid[:, None]
        np.testing.assert_allclose(result.grad_hidden, dz @ weight, atol=5e-6)
        np.testing.assert_allclose(gradient, dz.T @ hidden, atol=1e-4)
        below = (p < threshold) & ~onehot & valid[:, None]
        variance = (slope**2 * p * (threshold - p))[below].sum()
        square = ((slope * p - onehot * (1 - smoothing))**2)[valid].sum()
        assert result.gradient_error == pytest.approx(np.sqrt(variance / square), rel=0.05)

    omega = row_numbers(head, 0, 1, N)
    targets = targets_of(omega)
    forward = client.compute_loss(head, hidden, targets, reduction="sum", options=options, streams=3, slice_bytes=2048,
                                  step=0, id=1, accumulate=True, grad_hidden=True)
    check(forward, omega, client.read_tensor(head, "weight", "gradient"))
    again = client.compute_loss(head, hidden, targets, reduction="sum", options=options, streams=1, step=0, id=1,
                                accumulate=True, grad_hidden=True)
    assert again.repeated_rows == (targets != -100).sum()
    np.testing.assert_allclose(again.grad_hidden, forward.grad_hidden, atol=2e-6)
    client.zero_gradients(head, 0)
    omega = row_numbers(head, 0, 1000, N)
    client.compute_loss(head, hidden, targets_of(omega), step=0, id=1000, reduction="none", options=options, retain=True)
    backward = client.backward(head, 1000, np.ones(N), hidden_size=D, step=0, accumulate=True, grad_hidden=True)
    check(backward, omega, client.read_tensor(head, "weight", "gradient"))


@pytest.mark.parametrize("logits", ["stored", "recomputed"])
def test_auto_is_exact_where_the_error_would_be_too_large(client, make_head, problem, logits):
    head = make_head(hidden_size=D, vocab_size=V, logits=logits)

    def compute(gradients, **limits):
        options = lossd.LossOptions(gradients=gradients, sample_threshold=0.1, **limits)
        return client.compute_loss(head, *problem, options=options, grad_hidden=True, streams=1, step=0, id=5)

    exact, sampled_ = compute("exact"), compute("sampled")
    strict, lax = compute("auto", max_gradient_error=1e-6), compute("auto", max_gradient_error=10.0)
    assert exact.gradient_error == strict.gradient_error == 0 < sampled_.gradient_error < 1
    assert lax.gradient_error == pytest.approx(sampled_.gradient_error)
    np.testing.assert_allclose(strict.grad_hidden, exact.grad_hidden, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(lax.grad_hidden, sampled_.grad_hidden, rtol=1e-5, atol=1e-9)
    assert not np.allclose(exact.grad_hidden, sampled_.grad_hidden, rtol=1e-3, atol=0)
