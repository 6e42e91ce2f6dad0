# SPDX-License-Identifier: Apache-2.0
"""HeadOptimizer and LossHead in training loops: those that go well, and those in which something goes wrong."""

from __future__ import annotations

import copy
import gc
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conftest import EPS, delete_when_idle  # noqa: E402
from servers import CutProxy, ServerProcess  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead, TiedEmbedding  # noqa: E402


# HeadOptimizer and LossHead in training loops, against the same loops with a local head in torch.

D, V, N = 16, 90, 64


class Trunk(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(V, D)
        self.layer = torch.nn.Linear(D, D)

    def forward(self, tokens):
        return self.layer(torch.tanh(self.embedding(tokens)))


@pytest.fixture
def trunks(seed):
    """Two with the same weights."""
    torch.manual_seed(seed % 2**31)
    trunk = Trunk()
    return trunk, copy.deepcopy(trunk)


def local_head(client, head):
    layer = torch.nn.Linear(D, V, bias=False)
    layer.weight.data.copy_(torch.from_numpy(client.read_tensor(head)))
    return layer


def batches(count):
    return [(torch.randint(0, V, (4, N)), torch.randint(0, V, (4, N))) for _ in range(count)]


def local_loss(layer, hidden, targets):
    return torch.nn.functional.cross_entropy(layer(hidden).reshape(-1, V), targets.reshape(-1))


@pytest.mark.parametrize("algorithm", ["adamw", "sgd"])
def test_training_is_that_of_a_local_head(client, make_head, trunks, algorithm):
    """With a learning-rate schedule, gradient accumulation, and clipping of the global norm."""
    name = make_head(hidden_size=D, vocab_size=V)
    ours, theirs = trunks
    layer = local_head(client, name)
    head = LossHead(client, name, grad_output=0.5)
    if algorithm == "adamw":
        kind, options = torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": EPS}
    else:
        kind, options = torch.optim.SGD, {"lr": 0.3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    head_optimizer = HeadOptimizer(head, algorithm=algorithm, **options)
    optimizer = kind(ours.parameters(), **options)
    reference = kind([*theirs.parameters(), *layer.parameters()], **options)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step))
                 for each in (head_optimizer, optimizer, reference)]
    for step in range(6):
        for each in (optimizer, head_optimizer, reference):
            each.zero_grad()
        for tokens, targets in batches(2):
            (head(ours(tokens), targets) / 2).backward()
            (local_loss(layer, theirs(tokens), targets) / 2).backward()
        head_optimizer.load_grad_norm()
        norm = torch.nn.utils.clip_grad_norm_([*ours.parameters(), head_optimizer.stand_in], 0.05)
        expected = torch.nn.utils.clip_grad_norm_([*theirs.parameters(), *layer.parameters()], 0.05)
        assert float(norm) == pytest.approx(float(expected), rel=1e-3)
        for each in (optimizer, head_optimizer, reference, *schedules):
            each.step()
        assert head_optimizer.last.microbatches == 2 and head.step == step + 1
    np.testing.assert_allclose(client.read_tensor(name), layer.weight.detach().numpy(), atol=1e-3)
    for one, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-2)


def test_lazy_rows_are_a_hyper_parameter(client, make_head):
    """A class that its bias masks gets no gradient; its row stays until a step is dense."""
    name = make_head(hidden_size=D, vocab_size=V, bias=True)
    bias = np.zeros(V, np.float32)
    bias[3] = -np.inf
    client.write_tensor(name, "bias", bias)
    head = LossHead(client, name)
    optimizer = HeadOptimizer(head, lr=0.1, weight_decay=0.5, lazy_rows=True)
    assert "lazy_rows=True" in repr(optimizer)
    for lazy in (True, True, False, True):
        optimizer.param_groups[0]["lazy_rows"] = lazy
        before = client.read_tensor(name)
        head(torch.randn(64, D), torch.randint(4, V, (64,))).backward()
        optimizer.step()
        now = client.read_tensor(name)
        assert (before[3] == now[3]).all() == lazy
        assert (before[5] != now[5]).all()
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lazy_rows"] is True
    del state["param_groups"][0]["lazy_rows"]  # as of an earlier version
    optimizer.load_state_dict(state)
    assert "lazy_rows" not in repr(optimizer)
    head(torch.randn(64, D), torch.randint(4, V, (64,))).backward()
    optimizer.step()
    assert (client.read_tensor(name)[3] != now[3]).all()


class Scaler:
    """What GradScaler does with an optimizer's gradients, on the CPU too."""

    def __init__(self, scale):
        self.scale = scale

    def unscale_(self, optimizer):
        finite = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= self.scale
                    finite = finite and bool(torch.isfinite(parameter.grad).all())
        return finite


def test_loss_scaling(client, make_head, trunks):
    """The stand-in is unscaled like any gradient, and unscales the server's."""
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name)
    layer = local_head(client, name)
    optimizer, scaler = HeadOptimizer(head, lr=0.5, algorithm="sgd"), Scaler(1024.0)
    ((tokens, targets),) = batches(1)
    head.grad_output = scaler.scale
    (head(trunks[0](tokens), targets) * scaler.scale).backward()
    optimizer.load_grad_norm()
    assert scaler.unscale_(optimizer)
    optimizer.step()
    local_loss(layer, trunks[1](tokens), targets).backward()
    expected = layer.weight - 0.5 * layer.weight.grad
    np.testing.assert_allclose(client.read_tensor(name), expected.detach().numpy(), atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_torch_grad_scaler(client, make_head, trunks):
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name)
    layer = local_head(client, name)
    optimizer = HeadOptimizer(head, lr=0.5, algorithm="sgd", device="cuda")
    scaler = torch.cuda.amp.GradScaler(init_scale=512.0)
    trunk = trunks[0].cuda()
    trunk_optimizer = torch.optim.AdamW(trunk.parameters())
    ((tokens, targets),) = batches(1)
    with torch.autocast("cuda", torch.float16):
        hidden = trunk(tokens.cuda())
    head.grad_output = scaler.get_scale()
    scaler.scale(head(hidden, targets)).backward()
    optimizer.load_grad_norm()
    for each in (optimizer, trunk_optimizer):
        scaler.step(each)
    scaler.update()
    assert head.step == 1
    local_loss(layer, trunks[1](tokens), targets).backward()
    expected = layer.weight - 0.5 * layer.weight.grad
    np.testing.assert_allclose(client.read_tensor(name), expected.detach().numpy(), atol=1e-3)  # hidden in fp16


def test_a_norm_that_is_not_finite_is_refused(client, make_head):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    optimizer = HeadOptimizer(head, lr=0.1)
    ((_, targets),) = batches(1)
    head(torch.randn(4, N, D, requires_grad=True), targets).backward()
    optimizer.load_grad_norm()
    optimizer.stand_in.grad.fill_(float("inf"))
    with pytest.raises(ArithmeticError, match="zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    assert client.grad_norm(head.head_name) == 0 and head.step == 0


def test_a_step_that_is_not_finite_may_be_skipped(client, make_head):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V), reduction="sum", grad_output=3e38)
    optimizer = HeadOptimizer(head, lr=0.1, skip_non_finite=True)
    ((_, targets),) = batches(1)
    (head(100 * torch.randn(4, N, D, requires_grad=True), targets) * 3e38).backward()
    optimizer.load_grad_norm()
    optimizer.step()
    assert optimizer.last.skipped and head.step == 1


def test_tied_embeddings(client, make_head, trunks):
    ours, theirs = trunks
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name)
    tied = TiedEmbedding(head, ours.embedding.weight)
    tied.push()
    options = {"lr": 0.01, "weight_decay": 0.1, "eps": EPS}
    optimizers = [torch.optim.AdamW(ours.layer.parameters(), **options), HeadOptimizer(head, **options)]
    reference = torch.optim.AdamW(theirs.parameters(), **options)
    for tokens, targets in batches(4):
        head(ours(tokens), targets).backward()
        tied.add_gradient()
        assert ours.embedding.weight.grad is None
        for each in optimizers:
            each.step()
            each.zero_grad()
        tied.pull()
        reference.zero_grad()
        logits = theirs(tokens) @ theirs.embedding.weight.T
        torch.nn.functional.cross_entropy(logits.reshape(-1, V), targets.reshape(-1)).backward()
        reference.step()
    assert optimizers[1].last.contributions == 1
    torch.testing.assert_close(ours.embedding.weight, theirs.embedding.weight, atol=1e-3, rtol=1e-2)
    with pytest.raises(ValueError, match="weight has shape"):
        TiedEmbedding(head, ours.layer.weight)


def test_losses_that_are_divided_after_forward(client, make_head, trunks):
    """(loss / 4).backward(), which other tools do without being asked, trains as grad_output=1/4 does."""
    heads = [LossHead(client, make_head(hidden_size=D, vocab_size=V), grad_output=announced) for announced in (1, 0.25)]
    optimizers = [HeadOptimizer(head, lr=0.5, algorithm="sgd") for head in heads]
    for tokens, targets in batches(4):
        for head, trunk in zip(heads, trunks):
            (head(trunk(tokens), targets) / 4).backward()
    norms = [optimizer.load_grad_norm() for optimizer in optimizers]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for optimizer in optimizers:
        optimizer.step()
    weights = [client.read_tensor(head.head_name) for head in heads]
    np.testing.assert_allclose(*weights, atol=1e-7)
    for one, other in zip(*(trunk.parameters() for trunk in trunks)):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-7, rtol=1e-6)
    # The next step may be divided by another number.
    tokens, targets = batches(1)[0]
    heads[0](trunks[0](tokens), targets).backward()
    assert heads[0].gradient_scale == 1.0


def test_losses_of_a_step_that_are_divided_differently(client, make_head):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
    (head(hidden, targets) / 4).backward()
    with pytest.raises(RuntimeError, match=r"is 0.5, .*earlier losses of step 0 met 0.25 times.*grad_output = 0.5"):
        (head(hidden, targets) / 2).backward()
    HeadOptimizer(head, lr=0.1).zero_grad()
    (head(hidden, targets) / 2).backward()
    assert head.gradient_scale == 0.5


def test_a_deferred_loss_belongs_to_its_step(client, make_head):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V), deferred=True)
    optimizer = HeadOptimizer(head, lr=0.1)
    hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
    late = head(hidden, targets)
    head(hidden, targets).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="step 0, but step 1 is open"):
        late.backward()


def test_hyper_parameters_are_checked(client, make_head):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    with pytest.raises(ValueError, match="adagrad"):
        HeadOptimizer(head, lr=0.1, algorithm="adagrad")
    head(torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))).backward()
    with pytest.raises(lossd.InvalidArgument, match="learning_rate"):
        HeadOptimizer(head, lr=-1.0).step()


def test_state_is_that_of_an_optimizer(client, make_head):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    optimizer, other = HeadOptimizer(head, lr=0.1, weight_decay=0.3), HeadOptimizer(head, lr=9.0)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.1 and other.param_groups[0]["weight_decay"] == 0.3


def _train(rank, world_size, target, name, seed, barrier):
    torch.manual_seed(seed)
    hidden, targets = torch.randn(3, world_size, N, D), torch.randint(0, V, (3, world_size, N))
    with lossd.Client(target) as client:
        head = LossHead(client, name, rank=rank, world_size=world_size, normalizer=N * world_size)
        optimizer = HeadOptimizer(head, lr=0.5, algorithm="sgd")
        for step in range(3):
            head(hidden[step, rank].clone().requires_grad_(), targets[step, rank]).backward()
            barrier.wait(60)
            optimizer.step()
        assert head.step == 3


def test_trainers_in_several_processes(server, client, make_head, seed):
    name = make_head(hidden_size=D, vocab_size=V)
    layer = local_head(client, name)
    context = torch.multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    trainers = [context.Process(target=_train, args=(rank, 2, server.target, name, seed, barrier)) for rank in (0, 1)]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.join(120)
        assert trainer.exitcode == 0
    torch.manual_seed(seed)
    hidden, targets = torch.randn(3, 2, N, D), torch.randint(0, V, (3, 2, N))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        local_loss(layer, hidden[step], targets[step]).backward()
        optimizer.step()
    np.testing.assert_allclose(client.read_tensor(name), layer.weight.detach().numpy(), atol=1e-5)


# Training loops in which something goes wrong: a batch, a connection, the server, or the gradients of a step.


def test_losses_that_are_looked_at_leave_no_gap():
    """A deterministic server wants the microbatches of a step without one."""
    server = ServerProcess("--deterministic")
    try:
        with lossd.Client(server.target) as client:
            client.create_head("a", hidden_size=D, vocab_size=V)
            head = LossHead(client, "a", timeout=60)
            optimizer = HeadOptimizer(head, lr=0.1)
            targets = torch.randint(0, V, (4, N))
            for _ in range(2):
                with torch.no_grad():
                    head(torch.randn(4, N, D), targets)
                head(torch.randn(4, N, D, requires_grad=True), targets).backward()
            optimizer.step()
            assert optimizer.last.microbatches == 2
    finally:
        server.stop()


def test_losses_without_backward_are_not_applied(client, make_head):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    optimizer = HeadOptimizer(head, lr=0.1)
    hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
    loss = head(hidden, targets)
    for what in (optimizer.step, optimizer.load_grad_norm):
        with pytest.raises(RuntimeError, match="had no backward"):
            what()
    loss.backward()
    optimizer.step()
    for clear in (optimizer.discard, optimizer.zero_grad):
        loss = head(hidden, targets)
        clear()
        with pytest.raises(RuntimeError, match="between forward and backward"):
            loss.backward()
        head(hidden, targets).backward()
        optimizer.step()
        assert optimizer.last.microbatches == 1
    assert head.step == 3


def test_a_loop_goes_on_after_a_bad_batch(client, make_head):
    """The batch is refused before anything is booked, so that even a step without zero_grad() is right."""
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    optimizer = HeadOptimizer(head, lr=0.1)
    hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
    with pytest.raises(lossd.InvalidArgument, match=rf"targets\[3\] .* got {V}") as raised:
        head(hidden, targets.clone().index_fill_(0, torch.tensor([3]), V))
    assert (raised.value.field, raised.value.value) == ("open.targets[3]", str(V))
    head(hidden, targets).backward()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)


def test_a_cell_runs_again(client, make_head):
    """A new LossHead in a step that an interrupted one began."""
    name = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
    for _ in range(2):
        head = LossHead(client, name)
        optimizer = HeadOptimizer(head, lr=0.1)
        optimizer.zero_grad()
        head(hidden, targets).backward()  # and is interrupted before step()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)


def test_a_failed_microbatch_is_sent_again(server, client, make_head, seed):
    name = make_head(hidden_size=D, vocab_size=V)
    proxy = CutProxy(server.target, mean_bytes=30_000, seed=seed)
    hidden, targets = torch.randn(2000, D, requires_grad=True), torch.randint(0, V, (2000,))
    with lossd.Client(proxy.target, transport="grpc", retry=lossd.RetryOptions(max_attempts=1)) as shaky:
        head = LossHead(shaky, name, slice_bytes=4096)
        optimizer = HeadOptimizer(head, lr=0.1)
        with pytest.raises(lossd.Unavailable):
            head(hidden, targets)
        with pytest.raises(RuntimeError, match=r"microbatch 0 .* failed.*microbatch=0"):
            optimizer.step()
        proxy.close()
    with lossd.Client(server.target) as steady:
        head.client = steady
        head(hidden, targets, microbatch=0).backward()
        optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (2000, 1)


def test_a_server_that_goes_before_backward():
    server = ServerProcess()
    with lossd.Client(server.target, retry=lossd.RetryOptions(max_attempts=2, initial_backoff=0.01)) as client:
        client.create_head("a", hidden_size=D, vocab_size=V)
        head = LossHead(client, "a", deferred=True)
        loss = head(torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,)))
        server.stop()
        with pytest.raises(lossd.Unavailable, match=server.target):
            loss.backward()


def test_a_step_lost_in_a_restart_is_trained_again():
    server = ServerProcess()
    try:
        retry = lossd.RetryOptions(max_attempts=30, initial_backoff=0.05)
        with lossd.Client(server.target, retry=retry) as client:
            client.create_head("a", hidden_size=D, vocab_size=V)
            head = LossHead(client, "a")
            optimizer = HeadOptimizer(head, lr=0.1)
            hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
            head(hidden, targets).backward()
            optimizer.step()
            saved = client.save_checkpoint("a").checkpoint
            head(hidden, targets).backward()
            server.kill()
            server.start()
            with pytest.raises(lossd.LossdError):
                optimizer.step()
            client.load_checkpoint(saved)
            head.sync()
            assert head.step == 1
            head(hidden, targets).backward()
            optimizer.step()
            assert head.step == 2
    finally:
        server.stop()


def test_a_step_that_somebody_zeroes_is_trained_again(server, make_head):
    name = make_head(hidden_size=D, vocab_size=V)
    with lossd.Client(server.target) as client, lossd.Client(server.target) as other:
        if client.describe_head(name).state.generation == 0:
            pytest.skip("this server says no generation")
        head = LossHead(client, name)
        optimizer = HeadOptimizer(head, lr=0.1)
        hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
        head(hidden, targets).backward()
        other.zero_gradients(name, 0)
        with pytest.raises(lossd.StepDiscarded, match="another caller has zeroed them"):
            head(hidden, targets)
        with pytest.raises(RuntimeError, match=r"step 0 is lost .*HeadOptimizer.discard\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        head(hidden, targets).backward()
        other.zero_gradients(name, 0)
        with pytest.raises(lossd.StepDiscarded):
            optimizer.step()
        head.sync()
        head(hidden, targets).backward()
        optimizer.step()
        assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)


# Loops that are interrupted, begun again, or leave things unfinished: what they find, and how they get on.


@pytest.fixture
def problem(seed):
    torch.manual_seed(seed % 2**31)
    return torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))


def other_rows():
    return torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))


# ---- A cell that makes its LossHead and runs again ----

@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_new_head_takes_over(client, make_head, problem, stage, forgotten):
    """The loop calls zero_grad() after step(), so nothing has discarded what the interrupted one left."""
    name = make_head(hidden_size=D, vocab_size=V)
    earlier = LossHead(client, name)
    loss = earlier(*problem)
    if stage == "backward":
        loss.backward()
    if forgotten:
        del earlier, loss
        gc.collect()
    again = LossHead(client, name)
    optimizer = HeadOptimizer(again, lr=0.1)
    with pytest.warns(RuntimeWarning, match=rf"earlier LossHead of '{name}' left in step 0 \(microbatches: 1\)"):
        again(*other_rows()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again(*other_rows()).backward()
        optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (2 * N, 2)
    if forgotten:
        return
    if stage == "forward":
        with pytest.raises(RuntimeError, match="discarded the weight gradient"):
            loss.backward()
    with pytest.raises(RuntimeError, match="step 0 is lost .*another LossHead"):
        HeadOptimizer(earlier, lr=0.1).step()


def test_looking_takes_nothing_over(client, make_head, problem):
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name)
    head(*problem).backward()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        LossHead(client, name)(*problem)
    optimizer = HeadOptimizer(head, lr=0.1)
    optimizer.step()
    assert optimizer.last.microbatches == 1


def test_what_another_program_left_is_not_taken_over(client, make_head, problem):
    """It may go on with its step. The message says what to do."""
    name = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = problem
    client.compute_loss(name, hidden.detach().numpy(), targets.numpy(), step=0, id=7, accumulate=True)
    head = LossHead(client, name)
    with pytest.raises(RuntimeError, match=r"1 microbatches of another LossHead.*zero_grad\(\)"):
        head(*problem)
    HeadOptimizer(head, lr=0.1).zero_grad()
    head(*problem).backward()
    # Nor is what an earlier LossHead of this program left together with another program.
    client.compute_loss(name, hidden.detach().numpy(), targets.numpy(), step=0, id=7, accumulate=True)
    with pytest.raises(RuntimeError, match="2 microbatches of another LossHead"):
        LossHead(client, name)(*problem)


def test_a_new_head_of_several_trainers(client, make_head, problem):
    """zero_grad() of the new one discards what the earlier one of this trainer left."""
    name = make_head(hidden_size=D, vocab_size=V)
    loss = LossHead(client, name, rank=1, world_size=2)(*problem)
    head = LossHead(client, name, rank=1, world_size=2)
    optimizer = HeadOptimizer(head, lr=0.1)
    with pytest.raises(RuntimeError, match=r"another LossHead.*zero_grad\(\)"):
        head(*other_rows())
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="discarded the weight gradient"):
        loss.backward()
    head(*other_rows()).backward()
    assert client.describe_head(name).step_microbatches == 1
    assert LossHead(client, name, rank=0, world_size=2).left_over == 0


@pytest.mark.parametrize("options", [{}, {"rank": 1, "world_size": 2}])
def test_a_new_head_after_a_reset(client, make_head, problem, options):
    """A script, or a cell, that begins with a reset finds nothing of what it left."""
    name = make_head(hidden_size=D, vocab_size=V)
    for _ in range(2):
        client.create_head(name, hidden_size=D, vocab_size=V, compute_dtype="fp32", if_exists="reset")
        head = LossHead(client, name, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = head(*problem)
            loss.backward()
        assert client.describe_head(name).step_microbatches == 1


# ---- Losses that get no backward ----

def test_a_deferred_loss_without_backward(client, make_head, problem):
    """The server keeps its hidden states; zero_grad() lets it have its memory back."""
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name, deferred=True)
    optimizer = HeadOptimizer(head, lr=0.1)
    for _ in range(3):
        loss = head(*problem)
        optimizer.zero_grad()
        assert client.describe_head(name).retained_microbatches == 0
    with pytest.raises(RuntimeError, match="between forward and backward"):
        loss.backward()
    head(*problem).backward()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)


def test_a_deferred_loss_without_backward_holds_nothing_up(deterministic_server, problem):
    """Of a deterministic server the next microbatch would wait for it."""
    with lossd.Client(deterministic_server.target) as client:
        client.create_head("held-up", hidden_size=D, vocab_size=V)
        head = LossHead(client, "held-up", deferred=True, timeout=120)
        optimizer = HeadOptimizer(head, lr=0.1)
        head(*problem)
        optimizer.zero_grad()
        head(*problem).backward()
        optimizer.step()
        assert optimizer.last.microbatches == 1
        client.delete_head("held-up")


def test_zero_grad_of_a_step_without_anything_asks_nobody(client, make_head, problem, monkeypatch):
    """It is called in every step of every loop."""
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    optimizer = HeadOptimizer(head, lr=0.1)
    head(*problem).backward()
    optimizer.step()
    monkeypatch.setattr(client, "zero_gradients", lambda *_: pytest.fail("it discarded"))
    monkeypatch.setattr(client, "describe_head", lambda *_: pytest.fail("it asked"))
    optimizer.zero_grad()


# ---- Losses that are divided ----

@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_divided_losses_add_up(client, make_head, seed, deferred, reduction):
    """(loss / n).backward() over n microbatches, with a remainder of fewer, is what torch has."""
    torch.manual_seed(seed % 2**31)
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name, deferred=deferred, reduction=reduction)
    optimizer = HeadOptimizer(head, lr=0.25, algorithm="sgd")
    linear = torch.nn.Linear(D, V, bias=False)
    local = torch.optim.SGD(linear.parameters(), lr=0.25)
    for microbatches in (4, 4, 2):
        linear.weight.data.copy_(torch.from_numpy(client.read_tensor(name)))
        for _ in range(microbatches):
            hidden, targets = other_rows()
            ours, theirs = hidden.detach().requires_grad_(), hidden.detach().requires_grad_()
            (head(ours, targets) / 4).backward()
            (torch.nn.functional.cross_entropy(linear(theirs), targets, reduction=reduction) / 4).backward()
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        for each in (optimizer, local):
            each.step()
            each.zero_grad()
        torch.testing.assert_close(torch.from_numpy(client.read_tensor(name)), linear.weight.data, rtol=1e-4, atol=1e-5)


# ---- Servers that begin again ----

def test_zero_grad_after_a_restart_that_restored_the_head(problem):
    """Whoever restored it. Without a head zero_grad() says so."""
    server = ServerProcess()
    try:
        with lossd.Client(server.target, retry=lossd.RetryOptions(max_attempts=30, initial_backoff=0.05)) as client:
            client.create_head("a", hidden_size=D, vocab_size=V)
            head = LossHead(client, "a")
            optimizer = HeadOptimizer(head, lr=0.1)
            head(*problem).backward()
            optimizer.step()
            saved = client.save_checkpoint("a").checkpoint
            head(*problem).backward()
            server.kill()
            server.start()
            with pytest.raises(lossd.NotFound):
                optimizer.zero_grad()
            with lossd.Client(server.target) as other:
                other.load_checkpoint(saved)
            with pytest.raises(lossd.Restarted):
                head(*problem)
            optimizer.zero_grad()
            head(*problem).backward()
            optimizer.step()
            assert (optimizer.last.rows, optimizer.last.microbatches, head.step) == (N, 1, 2)
    finally:
        server.stop()


# ---- Batches that fail ----

def test_a_batch_of_which_nothing_was_accumulated_is_passed_over(client, make_head, problem):
    """The loop catches the error and goes on, as it would with a loss of its own that is not finite."""
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    optimizer = HeadOptimizer(head, lr=0.1)
    hidden, targets = problem
    for microbatch in range(4):
        bad = hidden.detach().clone()
        if microbatch % 2 == 0:
            bad[3, 1] = torch.inf
        try:
            head(bad.requires_grad_(), targets).backward()
        except lossd.NonFinite:
            assert microbatch % 2 == 0
    optimizer.load_grad_norm()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (2 * N, 2)
    head(hidden, targets).backward()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)


def test_a_batch_of_which_something_was_accumulated_is_not(client, make_head, problem):
    """Some of its slices were accumulated before one was refused."""
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V), slice_bytes=D * 4 * 8, streams=1)
    optimizer = HeadOptimizer(head, lr=0.1)
    hidden, targets = problem
    bad = hidden.detach().clone()
    bad[N - 1, 1] = torch.inf
    with pytest.raises(lossd.NonFinite):
        head(bad.requires_grad_(), targets)
    head(hidden, targets).backward()
    for what in (optimizer.load_grad_norm, optimizer.step):
        with pytest.raises(RuntimeError, match="microbatch 0 .* failed"):
            what()
    optimizer.zero_grad()
    head(hidden, targets).backward()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)


def test_a_batch_that_was_passed_over_does_not_come_back(client, make_head, problem):
    """Rows of it that come late, after step() has looked, are noticed by the server."""
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name)
    optimizer = HeadOptimizer(head, lr=0.1)
    hidden, targets = problem
    bad = hidden.detach().clone()
    bad[3, 1] = torch.inf
    with pytest.raises(lossd.NonFinite):
        head(bad.requires_grad_(), targets)
    with pytest.raises(RuntimeError, match="microbatch 0 .* failed"):  # a step of nothing is not applied
        optimizer.step()
    head(hidden, targets).backward()
    optimizer.load_grad_norm()
    client.compute_loss(name, hidden.detach().numpy(), targets.numpy(), step=0, id=9, accumulate=True)
    with pytest.raises(lossd.FailedPrecondition, match="rows"):
        optimizer.step()
    optimizer.zero_grad()
    head(hidden, targets).backward()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)


# Microbatches on a deterministic server in any order, and calls that are refused: no id is left out.

TIMEOUT = 300  # seconds; a call that waits for an id which never comes ends with an error then


@pytest.fixture
def ordered_client(deterministic_server):
    with lossd.Client(deterministic_server.target) as made:
        made.create_head("a", hidden_size=D, vocab_size=V)
        yield made
        delete_when_idle(made, "a")


@pytest.fixture
def head(ordered_client):
    return LossHead(ordered_client, "a", timeout=TIMEOUT)


@pytest.mark.parametrize("streams", [None, 1, 5])
def test_the_first_microbatch_may_come_last(ordered_client, rng, streams):
    """More computations wait for it than the client has threads to spare."""
    hidden, targets = rng.standard_normal((1200, D)).astype(np.float32), rng.integers(0, V, 1200)
    last = 63  # max_pending of them are under way at once
    order = [*range(last, 0, -1), 0]
    pending = [ordered_client.compute_loss_async("a", hidden, targets, step=0, id=id, accumulate=True, streams=streams,
                                         timeout=TIMEOUT) for id in order]
    assert [each.wait().accumulated_rows for each in pending] == [1200] * len(order)
    assert ordered_client.apply_step("a", 0, lossd.SGD(lr=0.1), expected_microbatches=order).microbatches == len(order)


def test_a_wait_for_a_place_among_the_pending_ends(deterministic_server):
    hidden, targets = np.ones((N, D), np.float32), np.zeros(N, int)
    with lossd.Client(deterministic_server.target, max_pending=2) as ordered_client:
        ordered_client.create_head("a", hidden_size=D, vocab_size=V)
        pending = [ordered_client.compute_loss_async("a", hidden, targets, step=0, id=id, accumulate=True, timeout=TIMEOUT)
                   for id in (1, 2)]
        with pytest.raises(lossd.DeadlineExceeded, match="max_pending is 2"):
            ordered_client.compute_loss_async("a", hidden, targets, step=0, id=0, accumulate=True, timeout=0.5)
        for each in pending:
            each.cancel()
        for each in pending:
            with pytest.raises(lossd.Cancelled):
                each.wait()
        delete_when_idle(ordered_client, "a")


REFUSED_BY_THE_CLIENT = {
    "a normalizer below 0": {"normalizer": -1.0},
    "a target beyond 32 bits": {"targets": torch.full((N,), 2**40)},
}


@pytest.mark.parametrize("what, deferred", [
    ("a normalizer below 0", False), ("a target beyond 32 bits", False), ("a target beyond 32 bits", True)])
@pytest.mark.parametrize("zero_grad", [False, True])
def test_a_call_that_the_client_refuses_takes_no_number(ordered_client, what, deferred, zero_grad):
    hidden, targets = other_rows()
    head = LossHead(ordered_client, "a", timeout=TIMEOUT, deferred=deferred)
    optimizer = HeadOptimizer(head, lr=0.1)
    for _ in range(2):
        with pytest.raises(lossd.InvalidArgument):
            head(**{"hidden": hidden, "targets": targets, **REFUSED_BY_THE_CLIENT[what]})
        if zero_grad:
            optimizer.zero_grad()
    head(hidden, targets).backward()
    optimizer.step()
    assert (optimizer.last.microbatches, optimizer.last.rows) == (1, N)


def test_a_refused_repeat_is_not_forgotten(ordered_client, head):
    hidden, targets = other_rows()
    head(hidden, targets).backward()
    with pytest.raises(lossd.InvalidArgument):
        head(hidden, targets, microbatch=0, normalizer=-1.0)
    assert head.steps.expected() == [0]
    optimizer = HeadOptimizer(head, lr=0.1)
    optimizer.step()
    assert optimizer.last.microbatches == 1


def test_after_a_failed_microbatch_the_next_one_does_not_wait_for_it(ordered_client, head):
    hidden, targets = other_rows()
    with pytest.raises(lossd.NonFinite):
        head(torch.full_like(hidden, float("inf")).requires_grad_(), targets)  # the server refuses it
    with pytest.raises(RuntimeError, match="microbatch 0 of step 0 failed.*microbatch=0"):
        head(hidden, targets)
    head(hidden, targets, microbatch=0).backward()
    head(hidden, targets).backward()
    optimizer = HeadOptimizer(head, lr=0.1)
    optimizer.step()
    assert optimizer.last.microbatches == 2


def test_after_a_failed_contribution_the_next_microbatch_does_not_wait_for_it(ordered_client, head):
    hidden, targets = other_rows()
    weight = torch.nn.Parameter(torch.zeros(V, D))
    tied = TiedEmbedding(head, weight)
    weight.grad = torch.full((V, D), float("nan"))
    with pytest.raises(lossd.NonFinite):
        tied.add_gradient()
    with pytest.raises(RuntimeError, match="a gradient for step 0 failed to be added"):
        head(hidden, targets)
    weight.grad = torch.ones(V, D)
    tied.add_gradient()
    head(hidden, targets).backward()
    optimizer = HeadOptimizer(head, lr=0.1)
    optimizer.step()
    assert (optimizer.last.contributions, optimizer.last.microbatches) == (1, 1)
