# SPDX-License-Identifier: Apache-2.0
"""Shapes and data that have caught other implementations, in every dtype.

Criterion, element by element: our error against double precision is at most 1.5 times the largest error of torch on the
same inputs in the same dtype, plus a floor that grows with the loss, and for dL/dx with the weights it is a sum of.
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_reference as reference  # noqa: E402

from lossd.torch import LossHead  # noqa: E402
from lossd.torch._memory import DTYPES  # noqa: E402

SHAPES = [  # N, D, V
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
    p = reference.parameters(client, head)
    exact = hidden.double().requires_grad_()
    plain = hidden.clone().requires_grad_()
    count = max(1, int((targets != options.get("ignore_index", -100)).sum()))
    expected = reference.row_results(exact, targets, p, **options)["loss"].sum() / count
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
    gradient = reference.gradients(client, head, ["weight"])["weight"]
    assert_close(gradient, weight.grad, p["weight"].grad, 1.0)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
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
