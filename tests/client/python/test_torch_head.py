# SPDX-License-Identifier: Apache-2.0
"""LossHead against torch in double precision: as a citizen of autograd, with all options, shapes and dtypes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch  # noqa: E402
from softmax_rules import epsilon_among, filtered  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import LossHead  # noqa: E402
from lossd.torch._input import DTYPES  # noqa: E402


# The loss of docs/math.md in torch, double precision, with autograd: what LossHead is compared with.

Tensors = dict[str, torch.Tensor]


def parameters(client: lossd.Client, head: str) -> Tensors:
    """The head's tensors as double-precision leaves."""
    spec = client.describe_head(head).spec
    names = ["weight"] + ["bias"] * spec.bias + ["norm_gain"] * (spec.norm != "none") + \
        ["norm_shift"] * (spec.norm == "layernorm")
    return {name: torch.from_numpy(client.read_tensor(head, name)).double().requires_grad_() for name in names}


def gradients(client: lossd.Client, head: str, names: Any) -> Tensors:
    return {name: torch.from_numpy(client.read_tensor(head, name, "gradient")).double() for name in names}


def row_results(
        hidden: torch.Tensor, targets: torch.Tensor, p: Tensors, *, ignore_index: int = -100,
        label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0, logit_scale: float = 1.0,
        class_weights: torch.Tensor | None = None, epsilon: float = 1e-5) -> Tensors:
    """Per row: loss, lse, entropy, logprob, argmax, z_loss; `hidden` [N, D] double, `targets` [N]."""
    if "norm_shift" in p:
        hidden = torch.nn.functional.layer_norm(hidden, hidden.shape[-1:], p["norm_gain"], p["norm_shift"], epsilon)
    elif "norm_gain" in p:
        hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + epsilon) * p["norm_gain"]
    z = hidden @ p["weight"].T
    if "bias" in p:
        z = z + p["bias"]
    z = z * logit_scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    valid = targets != ignore_index
    lse = torch.logsumexp(z, -1)
    logp = z - lse[:, None]
    loss = torch.nn.functional.cross_entropy(z, targets, weight=class_weights, label_smoothing=label_smoothing,
                                             ignore_index=ignore_index, reduction="none")
    zero = torch.zeros_like(lse)
    extra = torch.where(valid, z_loss * lse.square(), zero)
    picked = logp.gather(1, torch.where(valid, targets, 0)[:, None])[:, 0]
    return {
        "loss": loss + extra, "z_loss": extra, "lse": torch.where(valid, lse, zero),
        "entropy": torch.where(valid, -(logp.exp() * logp).sum(-1), zero), "logprob": torch.where(valid, picked, zero),
        "argmax": torch.where(valid, z.argmax(-1), -1)}


# LossHead against torch in double precision, and as a citizen of autograd.

D, V, B, T = 20, 130, 3, 40


@pytest.fixture
def problem(seed):
    torch.manual_seed(seed % 2**31)
    hidden = torch.randn(B, T, D)
    targets = torch.randint(0, V, (B, T))
    targets[torch.rand(B, T) < 0.2] = -100
    return hidden, targets


def compare(got, expected, atol):
    torch.testing.assert_close(got.double(), expected.detach().double(), atol=atol, rtol=1e-4)


OPTIONS = {
    "plain": ({}, {}),
    "bias": ({}, {"bias": True}),
    "label smoothing": ({"label_smoothing": 0.15}, {}),
    "z-loss": ({"z_loss": 1e-2}, {}),
    "softcap": ({"softcap": 1.5}, {}),
    "logit scale": ({"logit_scale": 0.35}, {}),
    "class weights": ({"class_weights": True, "label_smoothing": 0.1}, {"class_weights": True}),
    "ignore index": ({"ignore_index": 7}, {}),
    "layernorm": ({}, {"norm": "layernorm", "bias": True}),
    "rmsnorm": ({}, {"norm": "rmsnorm", "norm_epsilon": 1e-3}),
    "all": ({"label_smoothing": 0.05, "z_loss": 1e-3, "softcap": 4.0, "logit_scale": 1.7, "class_weights": True},
            {"bias": True, "class_weights": True, "norm": "layernorm"}),
}


@pytest.fixture
def with_weights(client, rng):
    """Gives a head tensors that are not their initial values; returns class weights or None."""
    def fill(head):
        spec = client.describe_head(head).spec
        if spec.norm != "none":
            client.write_tensor(head, "norm_gain", rng.uniform(0.5, 1.5, D).astype(np.float32))
        if spec.norm == "layernorm":
            client.write_tensor(head, "norm_shift", rng.uniform(-0.5, 0.5, D).astype(np.float32))
        if not spec.class_weights:
            return None
        weights = rng.uniform(0.2, 2, V).astype(np.float32)
        client.write_tensor(head, "class_weights", weights)
        return torch.from_numpy(weights).double()
    return fill


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_against_double_precision(client, make_head, with_weights, problem, name, reduction, deferred):
    options, spec = OPTIONS[name]
    hidden, targets = problem
    if "ignore_index" in options:
        targets[targets == -100] = options["ignore_index"]
    head = make_head(hidden_size=D, vocab_size=V, **spec)
    weights = with_weights(head)
    p = parameters(client, head)
    exact = hidden.reshape(-1, D).double().requires_grad_()
    plain = {k: v for k, v in options.items() if k != "class_weights"}
    rows = row_results(exact, targets.reshape(-1), p, class_weights=weights,
                                 epsilon=spec.get("norm_epsilon", 1e-5), **plain)
    valid = targets.reshape(-1) != options.get("ignore_index", -100)
    count = valid.sum().double() if weights is None else weights[targets.reshape(-1)[valid]].sum()
    upstream = torch.randn(B * T) if reduction == "none" else torch.tensor(1.0)
    expected = {"mean": rows["loss"].sum() / count, "sum": rows["loss"].sum(), "none": rows["loss"]}[reduction]
    expected.backward(upstream.double())

    module = LossHead(client, head, reduction=reduction, deferred=deferred, extras=("z_loss", "accuracy", "argmax"),
                      **options)
    ours = hidden.clone().requires_grad_()
    loss, extras = module(ours, targets)
    assert loss.dtype is torch.float32 and loss.shape == (targets.shape if reduction == "none" else ())
    compare(loss.reshape(expected.shape), expected, 2e-5)
    loss.backward(upstream.reshape(loss.shape))
    scale = 1.0 if reduction != "mean" else 1.0 / float(count)
    compare(ours.grad.reshape(-1, D), exact.grad, 2e-5 * scale)
    for name, gradient in gradients(client, head, p).items():
        compare(gradient, p[name].grad, 5e-4 * scale)
    compare(extras.z_loss, rows["z_loss"].sum() * (1 / count if reduction == "mean" else 1), 1e-4)
    compare(extras.accuracy, (rows["argmax"] == targets.reshape(-1))[valid].double().mean(), 1e-6)
    assert (extras.argmax.reshape(-1) == rows["argmax"]).double().mean() > 0.99
    assert extras.lse is None


@pytest.mark.parametrize("deferred", [False, True])
def test_filtered_gradients(client, make_head, problem, deferred):
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V)
    p = parameters(client, head)
    exact = hidden.reshape(-1, D).double().requires_grad_()
    z, flat = exact @ p["weight"].T, targets.reshape(-1)
    valid = flat != -100
    softmax = z.detach().softmax(-1).numpy()
    epsilon = epsilon_among(softmax[valid])
    q = filtered(softmax, flat.numpy(), epsilon)
    lse = z.logsumexp(-1).detach() + (torch.from_numpy(q) * (z - z.detach())).sum(-1)  # its gradient is q
    expected = (lse - z.gather(1, flat.clamp(min=0)[:, None])[:, 0])[valid].mean()
    expected.backward()

    module = LossHead(client, head, gradients="filtered", filter_epsilon=epsilon, deferred=deferred,
                      extras=("dropped_mass",))
    ours = hidden.clone().requires_grad_()
    loss, extras = module(ours, targets)
    compare(loss, expected, 1e-5)
    assert extras.dropped_mass.isnan() == deferred
    loss.backward()
    compare(extras.dropped_mass, torch.tensor((softmax - q)[valid].sum(-1).mean()), 1e-5)
    compare(ours.grad.reshape(-1, D), exact.grad, 1e-7)
    compare(gradients(client, head, p)["weight"], p["weight"].grad, 5e-6)
    with torch.no_grad():
        assert module(hidden, targets)[1].dropped_mass == 0


@pytest.mark.parametrize("logits", ["stored", "recomputed"])
def test_a_head_is_computed_as_it_was_created(client, make_head, problem, logits):
    hidden, targets = problem

    def run(head, **options):
        ours = hidden.clone().requires_grad_()
        loss, extras = LossHead(client, head, filter_epsilon=0.5, extras=("dropped_mass",), train_head=False,
                                **options)(ours, targets)
        loss.backward()
        return ours.grad, float(extras.dropped_mass)

    exact, filtered_ = (make_head(hidden_size=D, vocab_size=V, logits=logits, gradients=each, seed=3)
                        for each in ("exact", "filtered"))
    assert client.describe_head(filtered_).spec.gradients == "filtered"
    assert client.describe_head(filtered_).spec.logits == logits
    plain, nothing = run(exact)
    lax, dropped = run(filtered_)
    assert nothing == 0 < dropped
    for head in (exact, filtered_):  # requests that say are computed as they say
        torch.testing.assert_close(run(head, gradients="exact"), (plain, nothing))
        torch.testing.assert_close(run(head, gradients="filtered"), (lax, dropped))


def test_auto_stays_within_its_limit(client, make_head, problem):
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V)

    def run(**options):
        ours = hidden.clone().requires_grad_()
        loss, extras = LossHead(client, head, extras=("gradient_error",), streams=1, train_head=False, **options)(
            ours, targets)
        loss.backward()
        return ours.grad, float(extras.gradient_error)

    plain, none = run()
    strict, nothing = run(gradients="auto", sample_threshold=0.5, max_gradient_error=1e-6)
    torch.testing.assert_close(strict, plain)
    assert none == nothing == 0
    lax, error = run(gradients="auto", sample_threshold=0.5, max_gradient_error=10.0)
    assert 0 < error < 10 and not torch.allclose(lax, plain)


@pytest.mark.parametrize("deferred", [False, True])
def test_sampled_gradients_predict_their_error(client, make_head, problem, deferred):
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V)

    def run(**options):
        ours = hidden.clone().requires_grad_()
        loss, extras = LossHead(client, head, extras=("gradient_error",), train_head=False, deferred=deferred,
                                **options)(ours, targets)
        assert extras.gradient_error.isnan() == deferred
        loss.backward()
        return ours.grad, float(extras.gradient_error)

    exact, none = run()
    assert none == 0
    ours, error = run(gradients="sampled", sample_threshold=0.05)
    # Predicted for the gradient of the logits; a random W leaves it about as it is.
    assert 0.3 * error < (ours - exact).norm() / exact.norm() < 3 * error
    finer, smaller = run(gradients="sampled", sample_threshold=0.01)
    assert 0 < smaller < error


def test_deferred_gradients_of_lse_and_entropy(client, make_head, problem):
    """As a policy-gradient loss with an entropy bonus uses them."""
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V)
    p = parameters(client, head)
    exact = hidden.reshape(-1, D).double().requires_grad_()
    rows = row_results(exact, targets.reshape(-1), p)
    advantages, old = torch.randn(B * T), torch.randn(B * T)

    def objective(loss, lse, entropy):
        ratio = torch.exp(0.3 * (old.to(loss) - loss))
        clipped = torch.minimum(ratio * advantages.to(loss), ratio.clamp(0.8, 1.2) * advantages.to(loss))
        return -clipped.mean() - 0.01 * entropy.mean() + 1e-3 * lse.square().mean()

    expected = objective(rows["loss"], rows["lse"], rows["entropy"])
    expected.backward()
    module = LossHead(client, head, reduction="none", extras=("lse", "entropy", "logprob"))
    ours = hidden.clone().requires_grad_()
    loss, extras = module(ours, targets)
    total = objective(loss.reshape(-1), extras.lse.reshape(-1), extras.entropy.reshape(-1))
    compare(total, expected, 1e-5)
    compare(extras.logprob.reshape(-1), rows["logprob"], 1e-5)
    total.backward()
    compare(ours.grad.reshape(-1, D), exact.grad, 1e-6)
    compare(gradients(client, head, p)["weight"], p["weight"].grad, 1e-6)


def test_only_one_of_the_row_outputs_is_used(client, make_head, problem):
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V)
    p = parameters(client, head)
    exact = hidden.reshape(-1, D).double().requires_grad_()
    row_results(exact, targets.reshape(-1), p)["entropy"].sum().backward()
    ours = hidden.clone().requires_grad_()
    _, extras = LossHead(client, head, reduction="none", extras=("entropy",))(ours, targets)
    extras.entropy.sum().backward()
    compare(ours.grad.reshape(-1, D), exact.grad, 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_shift_is_that_of_language_models(client, make_head, problem, reduction):
    hidden, targets = problem
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), shift=True, reduction=reduction)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    p = parameters(client, module.head_name)
    logits = theirs[:, :-1].double() @ p["weight"].T
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, V), targets[:, 1:].reshape(-1), reduction=reduction)
    loss = module(ours, targets)
    assert loss.shape == ((B, T - 1) if reduction == "none" else ())
    compare(loss.reshape(expected.shape), expected, 1e-5)
    loss.sum().backward()
    expected.sum().backward()
    compare(ours.grad, theirs.grad, 1e-5)


@pytest.mark.parametrize("dtype, atol", [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
def test_sixteen_bit_hidden_states(client, make_head, problem, dtype, atol):
    hidden, targets = problem
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), reduction="sum")
    p = parameters(client, module.head_name)
    ours = hidden.to(dtype).requires_grad_()
    exact = ours.detach().double().requires_grad_()
    expected = row_results(exact.reshape(-1, D), targets.reshape(-1), p)["loss"].sum()
    expected.backward()
    loss = module(ours, targets)
    loss.backward()
    assert ours.grad.dtype is dtype
    compare(loss, expected, 1e-3)
    compare(ours.grad, exact.grad, atol)


def test_row_weights(client, make_head, problem):
    hidden, targets = problem
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    p = parameters(client, module.head_name)
    weights = torch.rand(B, T)
    exact = hidden.double().requires_grad_()
    rows = row_results(exact.reshape(-1, D), targets.reshape(-1), p)["loss"]
    expected = (rows * weights.reshape(-1)).sum() / (targets != -100).sum()
    expected.backward()
    for deferred in (False, True):
        module.deferred = deferred
        ours = hidden.clone().requires_grad_()
        loss = module(ours, targets, row_weights=weights)
        compare(loss, expected, 1e-5)
        loss.backward()
        compare(ours.grad, exact.grad, 1e-7)


def test_normalizer_of_a_whole_batch(client, make_head, problem):
    hidden, targets = problem
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    valid = int((targets != -100).sum())
    whole = module(hidden.clone().requires_grad_(), targets)
    parts = [module(hidden[b].clone().requires_grad_(), targets[b], normalizer=valid) for b in range(B)]
    compare(sum(part.detach() for part in parts), whole, 1e-6)


def test_announced_gradient(client, make_head, problem):
    hidden, targets = problem
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    plain = hidden.clone().requires_grad_()
    module(plain, targets).backward()
    module.grad_output = 0.25
    scaled = hidden.clone().requires_grad_()
    (module(scaled, targets) / 4).backward()
    compare(scaled.grad, plain.grad / 4, 1e-9)
    with pytest.raises(RuntimeError, match=r"is 1.0, 4.0 times the announced 0.25.*grad_output = 1.0"):
        module(hidden.clone().requires_grad_(), targets).backward()
    with pytest.raises(RuntimeError, match=r"is 1.0, but 0.25 was announced.*float16.*grad_output = 1.0"):
        module(hidden.half().requires_grad_(), targets).backward()
    module.deferred = True
    free = hidden.clone().requires_grad_()
    (3 * module(free, targets)).backward()
    compare(free.grad, 3 * plain.grad, 1e-7)


@pytest.mark.parametrize("deferred", [False, True])
def test_frozen_input_still_trains_the_head(client, make_head, problem, deferred):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), deferred=deferred)
    loss = module(problem[0], problem[1])
    assert loss.requires_grad
    loss.backward()
    assert client.grad_norm(module.head_name) > 0 and problem[0].grad is None


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("spec, options", [({"frozen": True}, {}), ({}, {"train_head": False})])
def test_frozen_head_still_gives_input_gradients(client, make_head, problem, deferred, spec, options):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V, **spec), deferred=deferred, **options)
    hidden = problem[0].clone().requires_grad_()
    module(hidden, problem[1]).backward()
    assert hidden.grad.abs().sum() > 0
    assert client.describe_head(module.head_name).step_rows == 0
    assert not module(problem[0], problem[1]).requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_without_gradients_nothing_is_accumulated(client, make_head, problem, mode, reduction):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), reduction=reduction)
    with mode():
        loss = module(problem[0].clone(), problem[1])
    assert not loss.requires_grad and torch.isfinite(loss).all()
    description = client.describe_head(module.head_name)
    assert description.step_microbatches == 0 and description.retained_microbatches == 0


def test_autocast_sends_its_dtype(client, make_head, problem):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    hidden = problem[0].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(hidden, problem[1])
    loss.backward()
    rounded = problem[0].bfloat16().requires_grad_()
    module(rounded, problem[1]).backward()
    assert hidden.grad.dtype is torch.float32
    torch.testing.assert_close(hidden.grad, rounded.grad.float())


def test_non_contiguous_hidden_states(client, make_head, problem):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    straight = problem[0].clone().requires_grad_()
    module(straight, problem[1]).backward()
    turned = problem[0].permute(2, 1, 0).contiguous().requires_grad_()
    module(turned.permute(2, 1, 0), problem[1]).backward()
    torch.testing.assert_close(turned.grad.permute(2, 1, 0), straight.grad)
    part = torch.randn(B, T, 3 * D)
    part[..., D:2 * D] = problem[0]
    part.requires_grad_()
    module(part[..., D:2 * D], problem[1]).backward()
    torch.testing.assert_close(part.grad[..., D:2 * D], straight.grad)


def test_non_leaf_hidden_states_and_chain_rule(client, make_head, problem):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    layer = torch.nn.Linear(D, D)
    loss = module(torch.tanh(layer(problem[0])), problem[1])
    loss.backward()
    p = parameters(client, module.head_name)
    exact = torch.nn.Linear(D, D).double()
    exact.load_state_dict(layer.state_dict())
    z = torch.tanh(exact(problem[0].double())) @ p["weight"].T
    torch.nn.functional.cross_entropy(z.reshape(-1, V), problem[1].reshape(-1)).backward()
    compare(layer.weight.grad, exact.weight.grad, 1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("targets_on_cpu", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_cuda_tensors(client, make_head, problem, targets_on_cpu, deferred):
    hidden, targets = problem
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), deferred=deferred)
    ours = hidden.clone().requires_grad_()
    module(ours, targets).backward()
    theirs = hidden.cuda().requires_grad_()
    loss = module(theirs, targets if targets_on_cpu else targets.cuda())
    loss.backward()
    assert loss.is_cuda and theirs.grad.is_cuda
    torch.testing.assert_close(theirs.grad.cpu(), ours.grad)


# Shapes and data that have caught other implementations, in every dtype.
#
# Criterion, element by element: our error against double precision is at most 1.5 times the largest error of torch on the
# same inputs in the same dtype, plus a floor that grows with the loss, and for dL/dx with the weights it is a sum of.

AWKWARD_SHAPES = [  # N, D, V
    (1, 1, 1), (1, 7, 5), (9, 1, 11), (33, 5, 1), (8, 8, 8), (8, 8, 2048), (8, 2048, 8), (188, 31, 123), (80, 64, 125),
    (256, 128, 512), (252, 123, 507), (257, 127, 513), (129, 512, 3200), (1024, 520, 2049)]
FLOORS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
ALL_ON = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "ignore_index": 42}


def torch_loss(hidden, weight, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=0.0):
    """As an eager trainer computes it: products summed in fp32 and rounded to the dtype, the loss in fp32."""
    z = (hidden.float() @ weight.float().T).to(hidden.dtype).float()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    count = max(1, int((targets != ignore_index).sum()))
    loss = torch.nn.functional.cross_entropy(z, targets, ignore_index=ignore_index, label_smoothing=label_smoothing,
                                             reduction="sum")
    return (loss + z_loss * (torch.logsumexp(z, -1).square() * (targets != ignore_index)).sum()) / count


def check(client, head, hidden, targets, options):
    dtype = hidden.dtype
    p = parameters(client, head)
    exact = hidden.double().requires_grad_()
    plain = hidden.clone().requires_grad_()
    count = max(1, int((targets != options.get("ignore_index", -100)).sum()))
    expected = row_results(exact, targets, p, **options)["loss"].sum() / count
    expected.backward()
    weight = p["weight"].detach().to(dtype).requires_grad_()
    torchs = torch_loss(plain, weight, targets, **options)
    torchs.backward()
    ours = hidden.clone().requires_grad_()
    loss = LossHead(client, head, **options)(ours, targets)
    loss.backward()

    def assert_close(got, other, truth, scale):
        allowed = 1.5 * (other.double() - truth).abs().max() + FLOORS[dtype] * scale
        error = (got.double() - truth).abs().max()
        assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"

    assert_close(loss.detach(), torchs.detach(), expected.detach(), 1.0 + float(expected))
    assert_close(ours.grad, plain.grad, exact.grad, float(1 + weight.detach().abs().max()) / count)
    gradient = gradients(client, head, ["weight"])["weight"]
    assert_close(gradient, weight.grad, p["weight"].grad, 1.0)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", AWKWARD_SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, ALL_ON], ids=["plain", "all on"])
def test_shapes(client, make_head, seed, shape, dtype, options):
    n, d, v = shape
    torch.manual_seed(seed % 2**31)
    head = make_head(hidden_size=d, vocab_size=v, compute_dtype=DTYPES[dtype])
    targets = torch.randint(0, v, (n,))
    targets[torch.rand(n) < 0.2] = options.get("ignore_index", -100)
    check(client, head, torch.randn(n, d).to(dtype), targets, options)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_targets_on_tile_edges(client, make_head, seed, dtype):
    torch.manual_seed(seed % 2**31)
    targets = torch.tensor([0, 79, 80, 127, 128, 159, 160, 239, 240, 255, 256, 319, 330] * 4)
    head = make_head(hidden_size=40, vocab_size=331, compute_dtype=DTYPES[dtype])
    check(client, head, torch.randn(len(targets), 40).to(dtype), targets, {})


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("logits", ["peaked", "one-sided", "all at -20", "offset by 1000"])
def test_hard_logits(client, make_head, seed, dtype, logits):
    torch.manual_seed(seed % 2**31)
    n, d, v = 60, 32, 200
    weight = torch.randn(v, d) / 8
    hidden = torch.randn(n, d)
    targets = torch.randint(0, v, (n,))
    if logits == "peaked":  # rows that are their target's weight
        hidden = 60 * weight[targets]
    else:
        # One hidden element is 1; its column of the weight sets the logits.
        hidden = torch.zeros(n, d)
        hidden[:, 0] = 1
        weight = torch.randn(v, d) * 1e-2
        weight[:, 0] = {"one-sided": -15.0, "all at -20": -20.0, "offset by 1000": 1000.0}[logits]
        if logits == "one-sided":
            weight[3, 0] = 3.0
    head = make_head(hidden_size=d, vocab_size=v, compute_dtype=DTYPES[dtype])
    client.write_tensor(head, "weight", weight.numpy())
    check(client, head, hidden.to(dtype), targets, {})


# The log-sum-exp of rows through the service, judged as CCE's tests judge theirs.
#
# Criterion, element by element: our error against fp32 is at most that of torch, which rounds logits to the dtype of its
# inputs, plus 1e-5. Half of the rows that can are copied into the weight, so that they are peaked. The backend is what the
# server takes: a GPU if there is one.

LSE_SHAPES = [(256, 128, 512), (252, 128, 507), (252, 123, 507)]  # N, D, V
LSE_CASES = list(itertools.product(LSE_SHAPES, (torch.float32, torch.float16, torch.bfloat16), (0.0, 20.0), (False, True)))


def lse_of(logits, softcap):
    return torch.logsumexp(softcap * torch.tanh(logits / softcap) if softcap else logits, -1)


@pytest.mark.parametrize("shape, dtype, softcap, bias", LSE_CASES, ids=str)
def test_lse_is_at_most_1e_5_worse_than_torchs(client, make_head, seed, shape, dtype, softcap, bias):
    n, d, v = shape
    torch.manual_seed(seed % 2**31)
    hidden = (torch.randn(n, d) / d**0.5).to(dtype)
    weight = torch.randn(v, d).to(dtype)
    weight[:min(n, v) // 2] = hidden[:min(n, v) // 2]
    shift = torch.randn(v).to(dtype) if bias else torch.zeros(v, dtype=dtype)
    exact = lse_of(hidden.double() @ weight.double().T + shift.double(), softcap)
    torchs = lse_of((hidden.float() @ weight.float().T + shift.float()).to(dtype).float(), softcap)

    head = make_head(hidden_size=d, vocab_size=v, bias=bias, compute_dtype=DTYPES[dtype])
    client.write_tensor(head, "weight", weight.float().numpy())
    if bias:
        client.write_tensor(head, "bias", shift.float().numpy())
    rows = hidden.clone().requires_grad_()  # the way of a training step
    loss, extras = LossHead(client, head, softcap=softcap, extras=("lse",))(rows, torch.randint(0, v, (n,)))
    loss.backward()
    error = (extras.lse.double() - exact).abs()
    excess = error - (torchs.double() - exact).abs()
    assert excess.max() <= 1e-5, f"row {int(excess.argmax())}: off by {error[excess.argmax()]:.3g}"
