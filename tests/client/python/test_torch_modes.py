# SPDX-License-Identifier: Apache-2.0
"""What is not part of a step: evaluation, rows that do not count, and second passes of torch.utils.checkpoint."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from lossd.torch import HeadOptimizer, LossHead  # noqa: E402

D, V, N = 16, 90, 48


@pytest.fixture
def problem(seed):
    torch.manual_seed(seed % 2**31)
    return torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))


@pytest.fixture
def pair(client, make_head):
    """A head on the server, and one of torch with the same weights."""
    def make(**options):
        name = make_head(hidden_size=D, vocab_size=V)
        layer = torch.nn.Linear(D, V, bias=False)
        layer.weight.data.copy_(torch.from_numpy(client.read_tensor(name)))
        return LossHead(client, name, **options), layer
    return make


def gradient_of(client, head):
    return torch.from_numpy(client.read_tensor(head.head_name, "weight", "gradient"))


def close(got, expected, atol=1e-6):
    torch.testing.assert_close(got, expected, atol=atol, rtol=1e-4)


def cross_entropy(layer, hidden, targets, **options):
    return torch.nn.functional.cross_entropy(layer(hidden).flatten(0, -2), targets.flatten(), **options)


# ---- Evaluation ----

@pytest.mark.parametrize("deferred", [False, True])
def test_an_evaluation_is_not_part_of_the_step(client, pair, problem, deferred):
    head, layer = pair(deferred=deferred)
    optimizer = HeadOptimizer(head, lr=0.1)
    head(*problem).backward()
    head.eval()
    for _ in range(3):
        close(head(*problem).detach(), cross_entropy(layer, *problem).detach())
    head.train()
    description = client.describe_head(head.head_name)
    assert (description.step_microbatches, description.retained_microbatches) == (1, 0)
    optimizer.step()
    assert optimizer.last.rows == N
    head(*problem).backward()
    optimizer.step()
    assert optimizer.last.microbatches == 1


def test_a_lazy_loss_of_an_evaluation_is_there(pair, problem):
    head, layer = pair()
    head.eval()
    close(head.start(*problem).lazy().detach(), cross_entropy(layer, *problem).detach())


@pytest.mark.parametrize("reduction, deferred", [("mean", False), ("mean", True), ("none", False)])
def test_a_backward_in_evaluation_mode_is_refused(client, pair, problem, reduction, deferred):
    """A local head would get a gradient there, and nobody would know that this one gets none."""
    head, _ = pair(reduction=reduction, deferred=deferred)
    head.eval()
    for hidden in (problem[0], problem[0].detach()):
        with pytest.raises(RuntimeError, match=rf"'{head.head_name}' was computed in evaluation mode.*call \.train\(\)"):
            head(hidden, problem[1]).sum().backward()
    assert client.describe_head(head.head_name).step_rows == 0
    head.train()
    head(*problem).sum().backward()
    assert client.describe_head(head.head_name).step_rows == N


def test_gradients_of_hidden_states_alone_in_evaluation_mode(client, pair, problem):
    head, layer = pair()
    head.eval()
    expected, = torch.autograd.grad(cross_entropy(layer, *problem), problem[0])
    close(torch.autograd.grad(head(*problem), problem[0])[0], expected)
    head(*problem).backward(inputs=[problem[0]])
    close(problem[0].grad, expected)
    assert client.describe_head(head.head_name).step_rows == 0


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_frozen_head_in_evaluation_mode_has_gradients(pair, problem, reduction):
    """As a trunk that is trained in evaluation mode, without dropout, needs them."""
    head, layer = pair(train_head=False, reduction=reduction)
    head.eval()
    head(*problem).sum().backward()
    close(problem[0].grad, torch.autograd.grad(cross_entropy(layer, *problem, reduction=reduction).sum(), problem[0])[0],
          1e-5)


# ---- Rows that do not count ----

@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("factor", [0.0, 0.25, float("inf"), float("nan")])
@pytest.mark.parametrize("first", [True, False])
def test_a_microbatch_of_ignored_rows_is_as_if_absent(client, pair, problem, deferred, factor, first):
    head, layer = pair(deferred=deferred)
    optimizer = HeadOptimizer(head, lr=0.1, algorithm="sgd")
    nothing = torch.randn(N, D, requires_grad=True)
    for absent in (first, not first):
        if absent:
            (head(nothing, torch.full((N,), -100)) * factor).backward()
        else:
            (head(*problem) * 0.5).backward()
    assert not nothing.grad.any()
    (cross_entropy(layer, *problem) * 0.5).backward()
    optimizer.step()
    close(torch.from_numpy(client.read_tensor(head.head_name)), layer.weight.detach() - 0.1 * layer.weight.grad)


def test_a_mean_of_rows_that_are_all_masked(client, pair, problem):
    """Its own mean divides 0 by 0; an ignored row has no gradient all the same, as in torch."""
    head, _ = pair(reduction="none")
    loss = head(problem[0], torch.full((N,), -100))
    (loss.sum() / torch.tensor(0.0)).backward()
    assert not problem[0].grad.any() and not gradient_of(client, head).any()


def test_rows_of_weight_0_are_as_if_absent(client, pair, problem):
    head, _ = pair()
    optimizer = HeadOptimizer(head, lr=0.1)
    (head(*problem, row_weights=torch.zeros(N)) * 0.0).backward()
    head(*problem).backward()
    optimizer.step()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("reduction, deferred", [("none", False), ("mean", True), ("sum", True), ("mean", False)])
@pytest.mark.parametrize("shift", [False, True])
def test_no_rows_have_empty_gradients(client, pair, shape, reduction, deferred, shift):
    head, _ = pair(reduction=reduction, deferred=deferred, shift=shift, extras=("lse", "entropy"))
    optimizer = HeadOptimizer(head, lr=0.1)
    hidden = torch.randn(*shape, D, requires_grad=True)
    loss, extras = head(hidden, torch.zeros(shape, dtype=torch.long))
    (loss.sum() + extras.lse.sum()).backward()
    assert hidden.grad.shape == hidden.shape
    optimizer.step()


# ---- Checkpoints of torch ----

def trunk():
    return torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(D, D),
                               torch.nn.Tanh())


def run(model, loss, wrap, factor, inputs, targets):
    """Gradients of the trunk after a step of two microbatches, and the losses."""
    model.zero_grad()
    losses = []
    for k in range(2):
        torch.manual_seed(5 + k)
        total = wrap(lambda x, t: loss(model(x), t) * factor, inputs[k], targets)
        total.backward()
        losses.append(total.detach())
    return [each.grad.clone() for each in model.parameters()], losses


def reentrant(function, x, targets):
    return checkpoint(function, x.clone().requires_grad_(), targets, use_reentrant=True)


def once(function, x, targets):
    return checkpoint(function, x, targets, use_reentrant=False)


WRAPS = {
    "once": once,
    "reentrant": reentrant,
    "without its random state": lambda f, x, t: checkpoint(f, x, t, use_reentrant=False, preserve_rng_state=False),
    "nested": lambda f, x, t: once(lambda y, u: once(f, y, u), x, t),
    "reentrant in reentrant": lambda f, x, t: reentrant(lambda y, u: reentrant(f, y, u), x, t),
    "once in reentrant": lambda f, x, t: reentrant(lambda y, u: once(f, y, u), x, t),
    "reentrant in once": lambda f, x, t: once(lambda y, u: checkpoint(f, y, u, use_reentrant=True), x, t),
}

if hasattr(torch.utils.checkpoint, "create_selective_checkpoint_contexts"):
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def keeps(context, operation, *arguments, **named):
        kept = operation in (torch.ops.aten.full.default, torch.ops.aten.addmm.default)  # `full` makes the loss of a head
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    WRAPS["selective"] = lambda f, x, t: checkpoint(f, x, t, use_reentrant=False,
                                                    context_fn=lambda: create_selective_checkpoint_contexts(keeps))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", WRAPS)
def test_a_checkpoint_around_trunk_and_head(client, pair, seed, name, tensor, deferred):
    """The weight gradient is accumulated once. What the second pass saves is as in the first one: a factor that has a
    gradient itself saves the loss."""
    torch.manual_seed(seed % 2**31)
    head, layer = pair(deferred=deferred, reduction="sum")
    optimizer = HeadOptimizer(head, lr=0.1, algorithm="sgd")
    model, targets = trunk(), torch.randint(0, V, (N,))
    if name == "without its random state":
        model[2].p = 0.0
    inputs = torch.randn(2, N, D)
    if "reentrant" in name:
        inputs.requires_grad_()
    factor = torch.nn.Parameter(torch.tensor(0.5)) if tensor else 0.5
    wanted, losses = run(model, lambda h, t: cross_entropy(layer, h, t, reduction="sum"), WRAPS[name], factor, inputs,
                         targets)
    of_factor, of_layer = (factor.grad.clone() if tensor else None), layer.weight.grad.clone()
    if tensor:
        factor.grad = None
    got, ours = run(model, head, WRAPS[name], factor, inputs, targets)
    close(torch.stack(ours), torch.stack(losses), 1e-3)
    for one, other in zip(got, wanted):
        close(one, other, 1e-4)
    if tensor:
        close(factor.grad, of_factor, 1e-3)
    assert client.describe_head(head.head_name).step_rows == 2 * N
    optimizer.step()
    close(torch.from_numpy(client.read_tensor(head.head_name)), layer.weight.detach() - 0.1 * of_layer, 1e-5)
