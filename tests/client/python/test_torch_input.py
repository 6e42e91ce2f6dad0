# SPDX-License-Identifier: Apache-2.0
"""LossHead with input that is unusual or wrong: no valid rows, every dtype, bad arguments, copies, closed clients."""

import contextlib
import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import lossd  # noqa: E402
from lossd.torch import LossHead  # noqa: E402

D, V, B, T = 20, 130, 3, 40


@pytest.fixture
def problem(seed):
    torch.manual_seed(seed % 2**31)
    return torch.randn(B, T, D), torch.randint(0, V, (B, T))


def test_bad_logits_and_gradients_of_a_head(client):
    with pytest.raises(lossd.InvalidArgument, match="logits is 'kept'; it must be one of stored, recomputed"):
        client.create_head("bad", hidden_size=D, vocab_size=V, logits="kept")
    with pytest.raises(lossd.InvalidArgument, match="gradients is 'approximate'; it must be one of "
                                                    "exact, filtered, sampled, auto"):
        client.create_head("bad", hidden_size=D, vocab_size=V, gradients="approximate")


@pytest.mark.parametrize("deferred", [False, True])
def test_second_derivatives_and_second_backwards_are_refused(client, make_head, problem, deferred):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), deferred=deferred)
    hidden = problem[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(hidden, problem[1]), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.square().sum().backward()
    loss = module(hidden, problem[1])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (5,)])
def test_no_valid_rows(client, make_head, deferred, shape):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), deferred=deferred)
    hidden = torch.randn(*shape, D, requires_grad=True)
    loss = module(hidden, torch.full(shape, -100))
    loss.backward()
    assert loss.item() == 0 and hidden.grad.shape == hidden.shape and not hidden.grad.any()


def test_one_row_without_batch(client, make_head):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    hidden = torch.randn(D, requires_grad=True)
    loss = module(hidden, torch.tensor(3))
    loss.backward()
    assert loss.shape == () and hidden.grad.shape == (D,)


def test_several_losses_under_way(client, make_head, problem):
    hidden, targets = problem
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), reduction="sum")
    inputs = [(hidden * i).requires_grad_() for i in range(1, 9)]
    pending = [module.start(x, targets) for x in inputs]
    losses = [each.wait() for each in pending]
    assert all(each.done() for each in pending) and pending[0].wait() is losses[0]
    torch.stack(losses).sum().backward()
    again = [(hidden * i).requires_grad_() for i in range(1, 9)]
    for x in again:
        module(x, targets).backward()
    for one, other in zip(inputs, again):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("shift", [False, True])
def test_targets_of_every_dtype(client, make_head, problem, dtype, shift):
    """With shift the last position is ignored, whether ignore_index fits into the dtype or not."""
    targets = torch.randint(0, 100, (B, T))
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), shift=shift, ignore_index=-1000)
    with torch.no_grad():
        torch.testing.assert_close(module(problem[0], targets.to(dtype)), module(problem[0], targets))


@pytest.mark.parametrize("change, error, text", [
    ({"hidden": torch.randn(B, T, D).double()}, TypeError, r"hidden.float\(\)"),
    ({"hidden": torch.ones(B, T, D, dtype=torch.int32)}, TypeError, "int32"),
    ({"hidden": torch.randn(B, T, D + 1)}, ValueError, rf"\(..., {D}\)"),
    ({"hidden": torch.tensor(1.0)}, ValueError, rf"\(..., {D}\)"),
    ({"targets": torch.zeros(B, T)}, TypeError, r"targets.long\(\)"),
    ({"targets": torch.zeros(B, T, requires_grad=True)}, ValueError, r"targets.detach\(\)"),
    ({"targets": torch.zeros(B, T + 1, dtype=torch.long)}, ValueError, "targets has shape"),
    ({"targets": torch.full((B, T), V)}, lossd.InvalidArgument, rf"open.targets\[0\].*{V}"),
    ({"row_weights": torch.ones(B)}, ValueError, "row_weights has shape"),
    ({"row_weights": torch.ones(B, T, requires_grad=True)}, ValueError, "row_weights requires a gradient"),
])
def test_bad_input(client, make_head, problem, change, error, text):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    with pytest.raises(error, match=text):
        module(**{"hidden": problem[0], "targets": problem[1], **change})


def test_bad_construction(client, make_head):
    head = make_head(hidden_size=D, vocab_size=V)
    with pytest.raises(lossd.NotFound, match=r"missing.*client.create_head\('missing'"):
        LossHead(client, "missing")
    with pytest.raises(ValueError, match="perplexity"):
        LossHead(client, head, extras=("perplexity",))
    with pytest.raises(ValueError, match="filter_epsilon is 1.5"):
        LossHead(client, head, gradients="filtered", filter_epsilon=1.5)
    with pytest.raises(ValueError, match="rank is 2"):
        LossHead(client, head, rank=2, world_size=2)
    with pytest.raises(TypeError, match="label_smothing"):
        LossHead(client, head, label_smothing=0.1)


def test_closed_client(server, make_head, problem):
    client = lossd.Client(server.target)
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), deferred=True)
    loss = module(problem[0].clone().requires_grad_(), problem[1])
    client.close()
    for use in (lambda: module(*problem), loss.backward):
        with pytest.raises(lossd.ClientClosed, match="make a new"):
            use()


def test_repr_names_the_head(client, make_head):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    with contextlib.closing(lossd.Client(client.target)):
        assert module.head_name in repr(module) and "V=130" in repr(module)
    assert not list(module.parameters()) and list(module.state_dict()) == ["_extra_state"]


def test_a_head_is_not_copied(client, make_head, tmp_path):
    module = torch.nn.Sequential(LossHead(client, make_head(hidden_size=D, vocab_size=V)))
    for attempt in (copy.deepcopy, lambda it: torch.save(it, tmp_path / "module")):
        with pytest.raises(TypeError, match="has no weights of its own.*state_dict"):
            attempt(module)


def test_a_forgotten_rank_is_named(client, make_head, problem):
    hidden, targets = problem
    heads = [LossHead(client, name) for name in [make_head(hidden_size=D, vocab_size=V)] * 2]
    heads[0](hidden.clone().requires_grad_(), targets)
    with pytest.raises(lossd.FailedPrecondition, match="Several trainers|several trainers.*rank= and world_size="):
        heads[1](hidden.flip(0).clone().requires_grad_(), targets.flip(0))
