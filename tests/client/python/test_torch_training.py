# SPDX-License-Identifier: Apache-2.0
"""HeadOptimizer and LossHead in training loops, against the same loops with a local head in torch."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead, TiedEmbedding  # noqa: E402

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
        kind, options = torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}
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
    options = {"lr": 0.01, "weight_decay": 0.1}
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
