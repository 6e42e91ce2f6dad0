# SPDX-License-Identifier: Apache-2.0
"""PendingHeadLoss.lazy(): a loss whose value comes with its backward."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from server_process import ServerProcess  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead  # noqa: E402

D, V, N = 20, 70, 90


@pytest.fixture
def problem(seed):
    torch.manual_seed(seed % 2**31)
    return torch.randn(N, D), torch.randint(0, V, (N,))


@pytest.mark.filterwarnings("ignore:.*no HeadOptimizer was made")
def test_lazy_losses_are_those_of_wait(client, make_head, problem):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    hidden, targets = problem
    inputs = [(hidden * i).requires_grad_() for i in (1, 2, 3)]
    pending = [module.start(x, targets) for x in inputs]
    losses = [each.lazy() for each in pending]
    assert all(loss.isnan() for loss in losses) and pending[0].lazy() is losses[0]
    for loss in losses:
        loss.backward()
    for x, loss in zip(inputs, losses):
        again = x.detach().clone().requires_grad_()
        expected = module(again, targets)
        expected.backward()
        torch.testing.assert_close(loss.detach(), expected.detach())
        torch.testing.assert_close(x.grad, again.grad)


def test_a_frozen_input_still_trains_the_head(client, make_head, problem):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    optimizer = HeadOptimizer(module, lr=0.1)
    loss = module.start(*problem).lazy()
    with pytest.raises(RuntimeError, match="microbatch 0 of step 0 failed, or is not finished"):
        optimizer.step()
    loss.backward()
    optimizer.step()
    assert optimizer.last.microbatches == 1 and loss.isfinite()


def test_without_a_backward_to_come_it_waits(client, make_head, problem):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    with torch.no_grad():
        assert module.start(*problem).lazy().isfinite()


@pytest.mark.parametrize("options", [{"extras": ("accuracy",)}, {"deferred": True}, {"reduction": "none"}])
def test_results_that_are_needed_before_are_refused(client, make_head, problem, options):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), **options)
    pending = module.start(problem[0].clone().requires_grad_(), problem[1])
    with pytest.raises(RuntimeError, match=r"use wait\(\)"):
        pending.lazy()
    pending.wait()


def test_a_server_that_goes_before_backward(problem):
    server = ServerProcess()
    retry = lossd.RetryOptions(max_attempts=2, initial_backoff=0.01)
    with lossd.Client(server.target, retry=retry) as client:
        client.create_head("a", hidden_size=D, vocab_size=V, compute_dtype="fp32")
        module = LossHead(client, "a")
        server.stop()
        loss = module.start(problem[0].clone().requires_grad_(), problem[1]).lazy()
        with pytest.raises(lossd.Unavailable, match=server.target):
            loss.backward()
        with pytest.raises(RuntimeError, match="microbatch 0 of step 0 failed"):
            HeadOptimizer(module, lr=0.1).step()
