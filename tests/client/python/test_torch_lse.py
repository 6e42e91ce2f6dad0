# SPDX-License-Identifier: Apache-2.0
"""The log-sum-exp of rows through the service, judged as CCE's tests judge theirs.

Criterion, element by element: our error against fp32 is at most that of torch, which rounds logits to the dtype of its
inputs, plus 1e-5. Half of the rows that can are copied into the weight, so that they are peaked. The backend is what the
server takes: a GPU if there is one.
"""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from lossd.torch import LossHead  # noqa: E402
from lossd.torch._memory import DTYPES  # noqa: E402

SHAPES = [(256, 128, 512), (252, 128, 507), (252, 123, 507)]  # N, D, V
CASES = list(itertools.product(SHAPES, (torch.float32, torch.float16, torch.bfloat16), (0.0, 20.0), (False, True)))


def lse_of(logits, softcap):
    return torch.logsumexp(softcap * torch.tanh(logits / softcap) if softcap else logits, -1)


@pytest.mark.parametrize("shape, dtype, softcap, bias", CASES, ids=str)
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
