# SPDX-License-Identifier: Apache-2.0
"""lossd.torch as people call it: signatures, copies, torch.compile, input that is unusual or wrong, losses that come late."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import subprocess
import sys
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from servers import ServerProcess  # noqa: E402

import lossd  # noqa: E402
import lossd.torch  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead  # noqa: E402


# lossd.torch as people read it: signatures, docstrings, what notebooks show, torch.compile.

D, V, N = 20, 130, 64


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
    """With the same default: LossOptions is where they are kept, and LossHead where people look for them. But for the teacher,
    which calls of distill() bring."""
    given = inspect.signature(LossHead).parameters
    assert inspect.signature(LossHead.policy_loss).parameters["objective"].default == lossd.Objective("ppo")
    for option in dataclasses.fields(lossd.LossOptions):
        if option.name in ("objective", "distillation", "rest"):  # of policy_loss, distill and soft_target_loss
            continue
        name = {"use_class_weights": "class_weights"}.get(option.name, option.name)
        assert given[name].default == option.default, name


def test_every_loss_option_arrives(client, make_head):
    options = {"ignore_index": -7, "label_smoothing": 0.1, "z_loss": 0.2, "softcap": 3.0, "logit_scale": 0.5,
               "gradients": "auto", "filter_epsilon": 0.01, "sample_threshold": 0.02, "max_gradient_error": 0.03,
               "refuse_unlisted": True}
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V, class_weights=True), class_weights=True, **options)
    assert head.options == lossd.LossOptions(use_class_weights=True, **options)
    assert len(options) + 4 == len(dataclasses.fields(lossd.LossOptions)), \
        "class weights, and what policy_loss, distill and soft_target_loss take"


def test_what_notebooks_show(client, make_head, problem):
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name, label_smoothing=0.1, reduction="sum", shift=True)
    assert repr(head) == f"LossHead('{name}' at {client.target}, D={D}, V={V}, reduction='sum', shift=True, " \
                         "label_smoothing=0.1)"
    assert repr(LossHead(client, name)) == f"LossHead('{name}' at {client.target}, D={D}, V={V})"
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


# PendingHeadLoss.lazy(): a loss whose value comes with its backward.


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


# LossHead with input that is unusual or wrong: no valid rows, every dtype, bad arguments, copies, closed clients.

B, T = 3, 40


@pytest.fixture
def sequences(seed):
    torch.manual_seed(seed % 2**31)
    return torch.randn(B, T, D), torch.randint(0, V, (B, T))


def test_bad_logits_and_gradients_of_a_head(client):
    with pytest.raises(lossd.InvalidArgument, match="logits is 'kept'; it must be one of stored, recomputed"):
        client.create_head("bad", hidden_size=D, vocab_size=V, logits="kept")
    with pytest.raises(lossd.InvalidArgument, match="gradients is 'approximate'; it must be one of "
                                                    "exact, filtered, sampled, auto"):
        client.create_head("bad", hidden_size=D, vocab_size=V, gradients="approximate")


@pytest.mark.parametrize("deferred", [False, True])
def test_second_derivatives_and_second_backwards_are_refused(client, make_head, sequences, deferred):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), deferred=deferred)
    hidden = sequences[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(hidden, sequences[1]), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.square().sum().backward()
    loss = module(hidden, sequences[1])
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


@pytest.mark.filterwarnings("ignore:.*no HeadOptimizer was made")
def test_several_losses_under_way(client, make_head, sequences):
    hidden, targets = sequences
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
def test_targets_of_every_dtype(client, make_head, sequences, dtype, shift):
    """With shift the last position is ignored, whether ignore_index fits into the dtype or not."""
    targets = torch.randint(0, 100, (B, T))
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), shift=shift, ignore_index=-1000)
    with torch.no_grad():
        torch.testing.assert_close(module(sequences[0], targets.to(dtype)), module(sequences[0], targets))


@pytest.mark.parametrize("change, error, text", [
    ({"hidden": torch.randn(B, T, D).double()}, TypeError, r"hidden.float\(\)"),
    ({"hidden": torch.ones(B, T, D, dtype=torch.int32)}, TypeError, "int32"),
    ({"hidden": torch.randn(B, T, D + 1)}, ValueError, rf"\(..., {D}\)"),
    ({"hidden": torch.tensor(1.0)}, ValueError, rf"\(..., {D}\)"),
    ({"targets": torch.zeros(B, T)}, TypeError, r"targets.long\(\)"),
    ({"targets": torch.zeros(B, T, requires_grad=True)}, ValueError, r"targets.detach\(\)"),
    ({"targets": torch.zeros(B, T + 1, dtype=torch.long)}, ValueError, "targets has shape"),
    ({"targets": torch.full((B, T), V)}, lossd.InvalidArgument, rf"open.targets\[0\].*{V}"),
    ({"hidden": [[0.0] * D]}, TypeError, r"hidden is a list; it must be a tensor: torch.as_tensor\(hidden\)"),
    ({"hidden": np.zeros((B, T, D), np.float32)}, TypeError, r"hidden is a numpy.ndarray; .*torch.as_tensor\(hidden\)"),
    ({"targets": [[0] * T] * B}, TypeError, r"targets is a list; it must be a tensor: torch.as_tensor\(targets\)"),
    ({"targets": np.zeros((B, T), np.int64)}, TypeError, "targets is a numpy.ndarray; it must be a tensor"),
    ({"targets": None}, TypeError, "targets is a NoneType; it must be a tensor"),
    ({"row_weights": [1.0] * B}, TypeError, "row_weights is a list; it must be a tensor"),
    ({"row_weights": 0.5}, TypeError, "row_weights is a float; it must be a tensor"),
    ({"row_weights": torch.ones(B)}, ValueError, "row_weights has shape"),
    ({"row_weights": torch.ones(B, T, requires_grad=True)}, ValueError, "row_weights requires a gradient"),
])
def test_bad_input(client, make_head, sequences, change, error, text):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    with pytest.raises(error, match=text):
        module(**{"hidden": sequences[0], "targets": sequences[1], **change})


def test_bad_construction(client, make_head):
    head = make_head(hidden_size=D, vocab_size=V)
    with pytest.raises(lossd.NotFound, match=r"missing.*client.create_head\('missing'"):
        LossHead(client, "missing")
    with pytest.raises(ValueError, match="perplexity"):
        LossHead(client, head, extras=("perplexity",))
    with pytest.raises(ValueError, match="filter_epsilon must be .*, got 1.5"):
        LossHead(client, head, gradients="filtered", filter_epsilon=1.5)
    with pytest.raises(ValueError, match="rank is 2"):
        LossHead(client, head, rank=2, world_size=2)
    with pytest.raises(TypeError, match="label_smothing"):
        LossHead(client, head, label_smothing=0.1)
    with pytest.raises(TypeError, match="client is a str; it must be a lossd.Client"):
        LossHead(head, client)
    with pytest.raises(TypeError, match="head is a .*HeadDescription; it must be the name"):
        LossHead(client, client.describe_head(head))


@pytest.mark.parametrize("option, error, text", [
    ({"reduction": "avg"}, ValueError, "reduction is 'avg'; it must be one of sum, mean, none"),
    ({"reduction": None}, ValueError, "reduction is None; it must be one of sum, mean, none"),
    ({"state": "all"}, ValueError, "state is 'all'"),
    ({"gradients": "approximate"}, ValueError, "gradients is 'approximate'"),
    ({"ignore_index": None}, TypeError, "ignore_index is None; it must be an integer"),
    ({"ignore_index": -100.5}, TypeError, "ignore_index is -100.5; it must be an integer"),
    ({"softcap": "30"}, TypeError, "softcap is '30'; it must be a number"),
    ({"softcap": None}, TypeError, "softcap is None; it must be a number"),
    ({"label_smoothing": "0.1"}, TypeError, "label_smoothing is '0.1'; it must be a number"),
    ({"z_loss": [1e-4]}, TypeError, r"z_loss is \[0.0001\]; it must be a number"),
    ({"logit_scale": True}, TypeError, "logit_scale is True; it must be a number"),
    ({"grad_output": "loss"}, TypeError, "grad_output is 'loss'; it must be a number"),
    ({"normalizer": "tokens"}, TypeError, "normalizer is 'tokens'; it must be a number or None"),
    ({"timeout": "1s"}, TypeError, "timeout is '1s'; it must be a number or None"),
    ({"filter_epsilon": "small"}, TypeError, "filter_epsilon is 'small'; it must be a number or None"),
    ({"extras": "lse"}, TypeError, r"extras is 'lse'; it must be a tuple or list of names: extras=\('lse',\)"),
    ({"extras": True}, TypeError, "extras is True; it must be a tuple"),
    ({"extras": ("perplexity",)}, ValueError, "extras names 'perplexity'; there are z_loss, accuracy"),
    ({"deferred": "yes"}, TypeError, "deferred is 'yes'; it must be True or False"),
    ({"class_weights": [1.0, 2.0]}, TypeError, r"class_weights is \[1.0, 2.0\]; it must be True or False"),
    ({"process_group": "world"}, TypeError, "process_group is 'world'; it must be a torch.distributed group"),
])
def test_arguments_of_other_types_are_refused_at_construction(client, make_head, option, error, text):
    with pytest.raises(error, match=text):
        LossHead(client, make_head(hidden_size=D, vocab_size=V), **option)


def test_function_transforms_are_refused(client, make_head, sequences):
    torch_func = pytest.importorskip("torch.func", reason="torch has no torch.func")
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    hidden, targets = sequences
    for transformed in (torch_func.grad(lambda x: module(x, targets)), torch_func.vmap(lambda x: module(x, targets[0])),
                        torch_func.jacrev(lambda x: module(x, targets))):
        with pytest.raises(RuntimeError, match="hidden is inside a function transform of torch.func.*loss.backward"):
            transformed(hidden)
    # Other parameters may be swapped under the head, which has none.
    trunk = torch.nn.Linear(D, D)
    model = torch.nn.ModuleDict({"trunk": trunk, "head": module})
    model.forward = lambda x: module(trunk(x), targets)
    with torch.no_grad():
        swapped = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
        torch.testing.assert_close(torch_func.functional_call(model, swapped, (hidden,)), module(hidden * 0, targets))


def test_closed_client(server, make_head, sequences):
    client = lossd.Client(server.target)
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V), deferred=True)
    loss = module(sequences[0].clone().requires_grad_(), sequences[1])
    client.close()
    for use in (lambda: module(*sequences), loss.backward):
        with pytest.raises(lossd.ClientClosed, match="make a new"):
            use()


def test_repr_names_the_head(client, make_head):
    module = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    with contextlib.closing(lossd.Client(client.target)):
        assert module.head_name in repr(module) and "V=130" in repr(module)
    assert not list(module.parameters()) and list(module.state_dict()) == ["_extra_state"]


def test_a_head_is_not_copied(client, make_head, tmp_path):
    module = torch.nn.Sequential(LossHead(client, make_head(hidden_size=D, vocab_size=V)))
    with pytest.raises(TypeError, match="has no weights of its own.*state_dict"):
        torch.save(module, tmp_path / "module")
    for attempt in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(TypeError, match=r"has no weights of its own.*AveragedModel\(model.trunk\).*EMA"):
            attempt(module)


def test_a_forgotten_rank_is_named(client, make_head, sequences):
    hidden, targets = sequences
    heads = [LossHead(client, name) for name in [make_head(hidden_size=D, vocab_size=V)] * 2]
    heads[0](hidden.clone().requires_grad_(), targets)
    with pytest.raises(lossd.FailedPrecondition, match="Several trainers|several trainers.*rank= and world_size="):
        heads[1](hidden.flip(0).clone().requires_grad_(), targets.flip(0))


# Two stacks of gRPC, protobuf and Abseil in one process: those of liblossd.so, and those of the others.
_TWO_STACKS = """
import sys, threading
import numpy as np
target, name, order = sys.argv[1:4]

def ours():
    import lossd
    client = lossd.Client(target)
    client.describe_head(name)
    return client

def theirs():
    import grpc
    from lossd.v1 import server_pb2
    try:
        import pyarrow  # with all three in its wheel
    except ImportError:
        pass
    call = grpc.insecure_channel(target).unary_unary(
        "/lossd.v1.ServerService/GetServer", server_pb2.GetServerRequest.SerializeToString, server_pb2.ServerDescription.FromString)
    assert call(server_pb2.GetServerRequest(), timeout=60).incarnation
    return call, server_pb2.GetServerRequest()

if order == "ours first":
    client = ours()
    call, request = theirs()
else:
    call, request = theirs()
    client = ours()
hidden, targets = np.ones((400, 16), np.float32), np.zeros(400, int)
thread = threading.Thread(target=lambda: [call(request, timeout=60) for _ in range(200)])
thread.start()
for _ in range(50):
    assert client.compute_loss(name, hidden, targets, grad_hidden=True).valid_rows == 400
thread.join()
client.close()
print("both work")
"""


@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_beside_other_libraries_with_grpc_of_their_own(client, make_head, order):
    name = make_head(hidden_size=16, vocab_size=40)
    done = subprocess.run([sys.executable, "-c", _TWO_STACKS, client.target, name, order], capture_output=True, text=True,
                          timeout=300, check=False)
    assert done.returncode == 0 and done.stdout == "both work\n", done.stderr
