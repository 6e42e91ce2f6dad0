# SPDX-License-Identifier: Apache-2.0
"""LossHead against torch in double precision, and as a citizen of autograd."""


import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_reference as reference  # noqa: E402
from filtered_softmax import epsilon_among, filtered  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import LossHead  # noqa: E402

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
    p = reference.parameters(client, head)
    exact = hidden.reshape(-1, D).double().requires_grad_()
    plain = {k: v for k, v in options.items() if k != "class_weights"}
    rows = reference.row_results(exact, targets.reshape(-1), p, class_weights=weights,
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
    for name, gradient in reference.gradients(client, head, p).items():
        compare(gradient, p[name].grad, 5e-4 * scale)
    compare(extras.z_loss, rows["z_loss"].sum() * (1 / count if reduction == "mean" else 1), 1e-4)
    compare(extras.accuracy, (rows["argmax"] == targets.reshape(-1))[valid].double().mean(), 1e-6)
    assert (extras.argmax.reshape(-1) == rows["argmax"]).double().mean() > 0.99
    assert extras.lse is None


@pytest.mark.parametrize("deferred", [False, True])
def test_filtered_gradients(client, make_head, problem, deferred):
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V)
    p = reference.parameters(client, head)
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
    compare(reference.gradients(client, head, p)["weight"], p["weight"].grad, 5e-6)
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
    p = reference.parameters(client, head)
    exact = hidden.reshape(-1, D).double().requires_grad_()
    rows = reference.row_results(exact, targets.reshape(-1), p)
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
    compare(reference.gradients(client, head, p)["weight"], p["weight"].grad, 1e-6)


def test_only_one_of_the_row_outputs_is_used(client, make_head, problem):
    hidden, targets = problem
    head = make_head(hidden_size=D, vocab_size=V)
    p = reference.parameters(client, head)
    exact = hidden.reshape(-1, D).double().requires_grad_()
    reference.row_results(exact, targets.reshape(-1), p)["entropy"].sum().backward()
    ours = hidden.clone().requires_grad_()
    _, extras = LossHead(client, head, reduction="none", extras=("entropy",))(ours, targets)
    extras.entropy.sum().backward()
    compare(ours.grad.reshape(-1, D), exact.grad, 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_shift_is_that_of_language_models(client, make_head, problem, reduction):
    hidden, targets = problem
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), shift=True, reduction=reduction)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    p = reference.parameters(client, module.head_name)
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
    p = reference.parameters(client, module.head_name)
    ours = hidden.to(dtype).requires_grad_()
    exact = ours.detach().double().requires_grad_()
    expected = reference.row_results(exact.reshape(-1, D), targets.reshape(-1), p)["loss"].sum()
    expected.backward()
    loss = module(ours, targets)
    loss.backward()
    assert ours.grad.dtype is dtype
    compare(loss, expected, 1e-3)
    compare(ours.grad, exact.grad, atol)


def test_row_weights(client, make_head, problem):
    hidden, targets = problem
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    p = reference.parameters(client, module.head_name)
    weights = torch.rand(B, T)
    exact = hidden.double().requires_grad_()
    rows = reference.row_results(exact.reshape(-1, D), targets.reshape(-1), p)["loss"]
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
    p = reference.parameters(client, module.head_name)
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
