# SPDX-License-Identifier: Apache-2.0
"""lossd.torch as people read it: signatures, docstrings, what notebooks show, torch.compile."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import lossd  # noqa: E402
import lossd.torch  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead  # noqa: E402

D, V, N = 16, 90, 64


@pytest.fixture
def problem(seed):
    torch.manual_seed(seed % 2**31)
    return torch.randn(N, D), torch.randint(0, V, (N,))


def test_nothing_hides_its_arguments():
    for name in lossd.torch.__all__:
        kind = getattr(lossd.torch, name)
        for function in (kind, *(member for key, member in vars(kind).items()
                                 if inspect.isfunction(member) and not key.startswith("_"))):
            kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
            assert inspect.Parameter.VAR_KEYWORD not in kinds, function
            assert function.__doc__, function


def test_an_argument_that_does_not_exist(client, make_head):
    name = make_head(hidden_size=D, vocab_size=V)
    with pytest.raises(TypeError, match=r"LossHead\(\) has no argument 'label_smothing'; did you mean 'label_smoothing'\?"):
        LossHead(client, name, label_smothing=0.1)
    with pytest.raises(TypeError, match=r"LossHead\(\) has no argument 'xyz'; there are client, head, reduction, "):
        LossHead(client, name, xyz=1)
    with pytest.raises(TypeError, match=r"HeadOptimizer\(\) has no argument 'learning_rate'; there are head, lr, "):
        HeadOptimizer(LossHead(client, name), learning_rate=1.0)


def test_a_head_takes_every_loss_option():
    """With the same default: LossOptions is where they are kept, and LossHead where people look for them."""
    given = inspect.signature(LossHead).parameters
    for option in dataclasses.fields(lossd.LossOptions):
        name = {"use_class_weights": "class_weights"}.get(option.name, option.name)
        assert given[name].default == option.default, name


def test_every_loss_option_arrives(client, make_head):
    options = {"ignore_index": -7, "label_smoothing": 0.1, "z_loss": 0.2, "softcap": 3.0, "logit_scale": 0.5,
               "gradients": "auto", "filter_epsilon": 0.01, "sample_threshold": 0.02, "max_gradient_error": 0.03}
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V, class_weights=True), class_weights=True, **options)
    assert head.options == lossd.LossOptions(use_class_weights=True, **options)
    assert len(options) + 1 == len(dataclasses.fields(lossd.LossOptions))


def test_what_notebooks_show(client, make_head, problem):
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name, label_smoothing=0.1, reduction="sum", shift=True)
    assert repr(head) == f"LossHead('{name}' at {client.target}, D=16, V=90, reduction='sum', shift=True, " \
                         "label_smoothing=0.1)"
    assert repr(LossHead(client, name)) == f"LossHead('{name}' at {client.target}, D=16, V=90)"
    pending = head.start(*problem)
    assert repr(pending) in ("<lossd.torch.PendingHeadLoss, under way>", "<lossd.torch.PendingHeadLoss, done>")
    pending.wait().backward()
    optimizer = HeadOptimizer(head, lr=0.25, weight_decay=0.5)
    assert repr(optimizer).startswith(f"HeadOptimizer('{name}', adamw, lr=0.25") and "\n" not in repr(optimizer)
    optimizer.zero_grad()


def test_what_is_alive_is_not_copied(client, make_head, problem):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    pending = head.start(*problem)
    with pytest.raises(TypeError, match=r"under way.*wait\(\)"):
        copy.deepcopy(pending)
    pending.wait()
    optimizer = HeadOptimizer(head, lr=0.1)
    for attempt in (copy.deepcopy, lambda it: torch.save(it, "/dev/null")):
        with pytest.raises(TypeError, match="HeadOptimizer.*cannot be copied or pickled.*state_dict"):
            attempt(optimizer)
    optimizer.zero_grad()


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="torch 1.13 has no compiler")
def test_a_compiled_model_is_as_the_other(client, make_head, problem, capfd):
    """The head stays outside of what is compiled: one break in front of it, no recompilation, nothing said."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = torch.nn.Linear(D, D)
            self.head = LossHead(client, make_head(hidden_size=D, vocab_size=V))

        def forward(self, hidden, targets):
            return self.head(torch.tanh(self.trunk(hidden)), targets)

    hidden, targets = problem
    model = Model()
    optimizer = HeadOptimizer(model.head, lr=0.0)
    model(hidden, targets).backward()
    expected = model.trunk.weight.grad.clone()
    optimizer.step()
    model.trunk.weight.grad = None

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            model.trunk.weight.grad = None
            compiled(hidden, targets).backward()
            optimizer.step()
    torch.testing.assert_close(model.trunk.weight.grad, expected)
    assert counter.frame_count == 1, f"{counter.frame_count} graphs were compiled"
    assert optimizer.last.microbatches == 1
    said = capfd.readouterr()
    assert "graph break" not in said.err.lower() and "recompil" not in said.err.lower()
