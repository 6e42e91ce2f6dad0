# SPDX-License-Identifier: Apache-2.0
"""ServedEmbedding, against torch.nn.Embedding and local tied models."""

from __future__ import annotations

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.utils.checkpoint  # noqa: E402
from conftest import EPS  # noqa: E402
from servers import CutProxy, ServerProcess  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead, PipelineLoss, ServedEmbedding, embedding as module_of_embedding  # noqa: E402

D, V, B, T = 16, 90, 3, 24


@pytest.fixture(autouse=True)
def seeded(seed):
    torch.manual_seed(seed % 2**31)


@pytest.fixture
def name(make_head):
    return make_head(hidden_size=D, vocab_size=V)


def batch():
    """Ids, of which some come often, and targets."""
    ids = torch.randint(0, V, (B, T))
    ids[torch.rand(B, T) < 0.3] = 7
    targets = torch.randint(0, V, (B, T))
    targets[torch.rand(B, T) < 0.1] = -100
    return ids, targets


class Local(torch.nn.Module):
    """A tied model in double precision with the weights of a head and of a trunk."""

    def __init__(self, client, name, trunk, scale=1.0, padding_idx=None):
        super().__init__()
        self.embedding = torch.nn.Embedding(V, D, padding_idx=padding_idx)
        self.embedding.weight.data = torch.from_numpy(client.read_tensor(name)).double()
        self.trunk = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh()).double()
        self.trunk.load_state_dict({key: value.double() for key, value in trunk.state_dict().items()})
        self.scale = scale

    def loss(self, ids, targets):
        logits = self.trunk(self.embedding(ids) * self.scale) @ self.embedding.weight.T
        return torch.nn.functional.cross_entropy(logits.reshape(-1, V), targets.reshape(-1))


def make_trunk():
    return torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh())


def gradient_of(client, name):
    return torch.from_numpy(client.read_tensor(name, role="gradient"))


@pytest.mark.parametrize("scale, padding_idx", [(1.0, None), (4.0, 7), (-0.5, -1)])
def test_a_tied_model(client, name, scale, padding_idx):
    """Losses and gradients of several steps of AdamW, with two microbatches each, are those of the local model."""
    head, trunk = LossHead(client, name, grad_output=0.5), make_trunk()
    embedding = ServedEmbedding(head, scale=scale, padding_idx=padding_idx)
    local = Local(client, name, trunk, scale, padding_idx)
    options = {"lr": 0.01, "weight_decay": 0.1, "eps": EPS}
    optimizers = [torch.optim.AdamW(trunk.parameters(), **options), HeadOptimizer(head, **options)]
    reference = torch.optim.AdamW(local.parameters(), **options)
    for step in range(4):
        for _ in range(2):
            ids, targets = batch()
            rows = embedding(ids)
            assert rows.shape == (B, T, D) and rows.requires_grad and rows.dtype is torch.float32
            loss = head(trunk(rows), targets)
            expected = local.loss(ids, targets)
            assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
            (loss * 0.5).backward()
            (expected * 0.5).backward()
        torch.testing.assert_close(gradient_of(client, name), local.embedding.weight.grad.float(), atol=2e-6, rtol=1e-3)
        assert client.describe_head(name).step_microbatches == 4
        for one, other in zip(trunk.parameters(), local.trunk.parameters()):
            torch.testing.assert_close(one.grad, other.grad.float(), atol=2e-6, rtol=1e-3)
        for each in (*optimizers, reference):
            each.step()
            each.zero_grad()
        assert head.step == step + 1 and embedding.head.step == step + 1
    assert not list(embedding.parameters()) and not embedding.state_dict()


def test_losses_that_are_divided_after_forward(client, name):
    """(loss / 4).backward(): what the server multiplies the head's gradient by at the step is in the rows' gradient already."""
    head, trunk = LossHead(client, name), make_trunk()
    embedding, optimizer = ServedEmbedding(head), HeadOptimizer(head, lr=0.1, algorithm="sgd")
    local = Local(client, name, trunk)
    for _ in range(4):
        ids, targets = batch()
        (head(trunk(embedding(ids)), targets) / 4).backward()
        (local.loss(ids, targets) / 4).backward()
    norm = optimizer.load_grad_norm()
    assert norm == pytest.approx(float(local.embedding.weight.grad.norm()), rel=1e-3)
    optimizer.step()
    wanted = local.embedding.weight - 0.1 * local.embedding.weight.grad
    torch.testing.assert_close(torch.from_numpy(client.read_tensor(name)), wanted.float().detach(), atol=1e-5, rtol=1e-3)
    # A loss of rows that no LossHead has multiplied comes first: then the others have to be as it is.
    embedding(ids).sum().backward()
    with pytest.raises(RuntimeError, match="earlier losses of step 1 met 1.0 times"):
        (head(trunk(embedding(ids)), targets) / 4).backward()


def test_losses_times_0(client, name):
    head, trunk = LossHead(client, name), make_trunk()
    embedding, optimizer = ServedEmbedding(head), HeadOptimizer(head, lr=0.1)
    ids, targets = batch()
    (head(trunk(embedding(ids)), targets) * 0).backward()
    with pytest.raises(RuntimeError, match="multiplied by 0"):
        embedding(ids).sum().backward()
    optimizer.zero_grad()
    embedding(ids).sum().backward()
    optimizer.step()


def test_an_embedding_of_its_own(client, make_head):
    """An untied model: a head that is an embedding alone, with its optimizer, next to a local output layer."""
    name = make_head(hidden_size=D, vocab_size=V)
    embedding = ServedEmbedding(client, name, padding_idx=7)
    local = torch.nn.Embedding(V, D, padding_idx=7).double()
    local.weight.data.copy_(torch.from_numpy(client.read_tensor(name)))
    layer = torch.nn.Linear(D, 1)
    optimizer, reference = HeadOptimizer(embedding, lr=0.1, algorithm="sgd", momentum=0.9), torch.optim.SGD(
        local.parameters(), lr=0.1, momentum=0.9)
    assert optimizer.head is embedding.head
    for _ in range(3):
        ids, _ = batch()
        layer(embedding(ids)).square().mean().backward()
        torch.nn.functional.linear(local(ids), layer.weight.double(), layer.bias.double()).square().mean().backward()
        optimizer.load_grad_norm()
        norms = [torch.nn.utils.clip_grad_norm_([each], 1e-3) for each in (optimizer.stand_in, local.weight)]
        assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-4)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    torch.testing.assert_close(torch.from_numpy(client.read_tensor(name)), local.weight.float().detach(), atol=1e-6, rtol=1e-5)
    # The state of a model that holds it has the head's.
    model = torch.nn.ModuleDict({"embedding": embedding})
    state, before = model.state_dict(), client.read_tensor(name)
    embedding(ids).sum().backward()
    optimizer.step()
    assert (client.read_tensor(name) != before).any()
    model.load_state_dict(state)
    assert (client.read_tensor(name) == before).all() and embedding.head.step == 3


def test_without_gradients(client, name):
    head = LossHead(client, name)
    embedding, (ids, _) = ServedEmbedding(head), batch()
    with torch.no_grad():
        assert not embedding(ids).requires_grad
    embedding.eval()
    with torch.no_grad():
        wanted = embedding(ids)
    rows = embedding(ids)
    assert torch.equal(rows, wanted) and torch.equal(rows, torch.from_numpy(client.read_tensor(name))[ids])
    with pytest.raises(RuntimeError, match="evaluation mode.*call .train\\(\\) on the ServedEmbedding"):
        rows.sum().backward()
    embedding.train()
    for change in (lambda: embedding.requires_grad_(False), lambda: setattr(head, "train_head", False),
                   lambda: torch.nn.Sequential(embedding).requires_grad_(False)):
        change()
        assert not head.train_head and not embedding(ids).requires_grad
        torch.nn.Sequential(embedding).requires_grad_(True)
        assert head.train_head and embedding(ids).requires_grad
    frozen = ServedEmbedding(client, name, train_head=False)
    assert not frozen(ids).requires_grad
    description = client.describe_head(name)
    assert description.step_microbatches == 0 and not gradient_of(client, name).any()


def test_dtypes(client, name):
    head = LossHead(client, name)
    ids, _ = batch()
    weight = torch.from_numpy(client.read_tensor(name))
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        rows = ServedEmbedding(head, dtype=dtype)(ids)
        assert rows.dtype is dtype and torch.equal(rows, weight.to(dtype)[ids])
        rows.double().sum().backward()
    counts = torch.bincount(ids.flatten(), minlength=V).float()
    torch.testing.assert_close(gradient_of(client, name), 4 * counts[:, None].expand(V, D))
    embedding = ServedEmbedding(head)
    with torch.autocast("cpu", torch.bfloat16):
        assert embedding(ids).dtype is torch.bfloat16
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert embedding(ids).dtype is torch.float64
    finally:
        torch.set_default_dtype(before)
    assert embedding(ids.int()).dtype is torch.float32
    assert embedding(torch.tensor(3)).shape == (D,) and embedding(torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2, D)


def test_rows_may_be_changed_in_place(client, name):
    """As models do that scale them."""
    embedding, (ids, _) = ServedEmbedding(LossHead(client, name)), batch()
    embedding(ids).mul_(3.0).sum().backward()
    counts = torch.bincount(ids.flatten(), minlength=V).float()
    torch.testing.assert_close(gradient_of(client, name), 3 * counts[:, None].expand(V, D))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(client, name, reentrant):
    """Forward runs twice; gradients join the step once."""
    head, trunk = LossHead(client, name), make_trunk()
    embedding, optimizer = ServedEmbedding(head), HeadOptimizer(head, lr=0.1)
    local, (ids, targets) = Local(client, name, trunk), batch()
    calls = []
    embedding.register_forward_hook(lambda *_: calls.append(1))

    def stage(ids, dummy):
        return trunk(embedding(ids)) + 0 * dummy

    dummy = torch.zeros((), requires_grad=True)  # what reentrant checkpoints ask for
    hidden = torch.utils.checkpoint.checkpoint(stage, ids, dummy, use_reentrant=reentrant)
    head(hidden, targets).backward()
    local.loss(ids, targets).backward()
    assert len(calls) == 2
    torch.testing.assert_close(gradient_of(client, name), local.embedding.weight.grad.float(), atol=2e-6, rtol=1e-3)
    assert client.describe_head(name).step_microbatches == 2
    optimizer.step()


def wait_for_prefetched(embedding):
    for each in embedding._prefetched._coming.values():
        each.pending.wait()


def test_prefetch(client, name, monkeypatch):
    head = LossHead(client, name)
    embedding, optimizer = ServedEmbedding(head), HeadOptimizer(head, lr=0.1, algorithm="sgd")
    asked = []
    embed = type(client).embed_async
    monkeypatch.setattr(type(client), "embed_async", lambda self, *args, **options: (
        asked.append(options["step"]), embed(self, *args, **options))[1])
    ids, _ = batch()
    embedding.prefetch(ids)
    rows = embedding(ids.clone())
    assert asked == [None], "forward took what was there"
    rows.sum().backward()
    assert embedding(ids).requires_grad and asked == [None, 0], "it is taken once"
    # Across a step the weights change.
    asked.clear()
    embedding.prefetch(ids)
    wait_for_prefetched(embedding)
    optimizer.step()
    new = embedding(ids)
    assert asked == [None, 1] and torch.equal(new, torch.from_numpy(client.read_tensor(name))[ids])
    # So they do where they are written, with the step as it is.
    asked.clear()
    embedding.prefetch(ids)
    wait_for_prefetched(embedding)
    client.write_tensor(name, "weight", np.ones((V, D), np.float32))
    assert (embedding(ids) == 1).all() and asked == [None, 1]
    # Other ids, another dtype: other rows.
    asked.clear()
    embedding.prefetch(ids)
    embedding(ids.flip(0))
    with torch.autocast("cpu", torch.bfloat16):
        embedding(ids)
    assert asked == [None, 1, 1]
    # A handful is kept, and any thread may ask.
    asked.clear()
    several = [torch.randint(0, V, (5,)) for _ in range(7)]
    threads = [threading.Thread(target=embedding.prefetch, args=(each,)) for each in several for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(embedding._prefetched._coming) == 4
    asked.clear()
    for each in several:
        assert torch.equal(embedding(each), torch.from_numpy(client.read_tensor(name))[each])
    assert len(asked) == 3 and not embedding._prefetched._coming


def test_prefetched_rows_of_a_client_that_fails(server, client, name):
    """Errors are forward's, which asks again."""
    proxy = CutProxy(server.target, mean_bytes=0, seed=1)
    retry = lossd.RetryOptions(max_attempts=1)
    with lossd.Client(proxy.target, retry=retry, transport="grpc") as shaky:
        embedding, (ids, _) = ServedEmbedding(shaky, name), batch()
        embedding.prefetch(ids)
        proxy.cut_all()
        for _ in range(20):
            try:
                rows = embedding(ids)
                break
            except lossd.Unavailable:
                continue
        assert torch.equal(rows, torch.from_numpy(client.read_tensor(name))[ids])
    proxy.close()


def test_what_is_refused(client, make_head, name):
    head = LossHead(client, name)
    embedding, (ids, _) = ServedEmbedding(head), batch()
    wrong = ids.clone()
    wrong[1, 5] = V
    with pytest.raises(lossd.InvalidArgument, match=rf"ids\[1, 5\] must be in \[0, {V}\), got {V}"):
        embedding(wrong)
    wrong[1, 5] = -100
    with pytest.raises(lossd.InvalidArgument, match=r"ids\[1, 5\] .* got -100"):
        embedding.prefetch(wrong)
    for value, match in ((ids.float(), "ids is torch.float32"), ([1, 2], "ids is a list"), (ids > 3, "ids is torch.bool")):
        with pytest.raises(TypeError, match=match):
            embedding(value)
    for options, kind, match in (
            ({"rank": 0}, ValueError, "rank is 0; the LossHead of"), ({"head_name": name}, ValueError, "head_name is"),
            ({"state": "none"}, ValueError, "state is 'none'"), ({"scale": float("inf")}, ValueError, "scale is inf"),
            ({"scale": "x"}, TypeError, "scale is 'x'"), ({"padding_idx": V}, ValueError, f"padding_idx is {V}"),
            ({"padding_idx": 1.5}, TypeError, "padding_idx is 1.5"), ({"dtype": torch.int8}, TypeError, "dtype is torch.int8"),
            ({"sparse": True}, TypeError, "has no argument 'sparse'")):
        with pytest.raises(kind, match=match):
            ServedEmbedding(head, **options)
    with pytest.raises(TypeError, match="head_name is None"):
        ServedEmbedding(client)
    with pytest.raises(TypeError, match="head is a str"):
        ServedEmbedding("lm", name)
    with pytest.raises(ValueError, match="n_microbatches is 0"):
        ServedEmbedding(client, name, n_microbatches=0)
    with pytest.raises(lossd.NotFound, match="create it with"):
        ServedEmbedding(client, "nothing")
    draft = make_head(hidden_size=D, vocab_size=4, class_list=[1, 5, 6, 8], full_vocab_size=V)
    with pytest.raises(ValueError, match="has a draft vocabulary"):
        ServedEmbedding(client, draft)
    with pytest.raises(TypeError, match="has no weight of its own"):
        __import__("copy").deepcopy(embedding)
    assert repr(ServedEmbedding(head, scale=2.0)) == (
        f"ServedEmbedding({V}, {D}, {name!r} at {client.target}, scale=2.0)")
    rows = embedding(ids)
    gradient, = torch.autograd.grad(rows.square().sum(), rows, create_graph=True)
    assert gradient.shape == rows.shape


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="this torch has no compiler")
def test_torch_compile(client, name):
    """The graph is cut at the embedding, once, and gradients reach the server."""
    graphs = []
    embedding, trunk, (ids, _) = ServedEmbedding(LossHead(client, name)), make_trunk(), batch()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.trunk = embedding, trunk

        def forward(self, ids):
            return self.trunk(torch.tanh(self.embedding(ids)))

    def count(module, inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(Model(), backend=count)
    compiled(ids).sum().backward()
    assert len(graphs) == 1 and client.describe_head(name).step_microbatches == 1


def test_a_gradient_that_fails(client, name):
    """The step says what is lost, and is discarded."""
    head = LossHead(client, name)
    embedding, optimizer = ServedEmbedding(head), HeadOptimizer(head, lr=0.1)
    ids, targets = batch()
    head(embedding(ids), targets).backward()
    with pytest.raises(lossd.NonFinite):
        (embedding(ids) * float("nan")).sum().backward()
    with pytest.raises(RuntimeError, match="a gradient of rows of the embedding, microbatch 2 of step 0, failed to be added"):
        optimizer.step()
    optimizer.discard()
    head(embedding(ids), targets).backward()
    optimizer.step()
    assert head.step == 1


def test_gradients_that_are_on_their_way(client, name, monkeypatch):
    """As of a GPU, where backward does not wait: steps and norms do, and a failure is noticed."""
    monkeypatch.setattr(module_of_embedding, "_waits_in_backward", lambda device: False)
    head = LossHead(client, name)
    embedding, optimizer = ServedEmbedding(head), HeadOptimizer(head, lr=0.1, algorithm="sgd")
    ids, _ = batch()
    for _ in range(10):
        embedding(ids).sum().backward()
    counts = torch.bincount(ids.flatten(), minlength=V).double()[:, None].expand(V, D)
    assert optimizer.load_grad_norm() == pytest.approx(10 * float(counts.norm()), rel=1e-6)
    optimizer.step()
    assert not head.row_gradients._sent
    (embedding(ids) * float("inf")).sum().backward()
    with pytest.raises(lossd.NonFinite):
        optimizer.step()
    with pytest.raises(RuntimeError, match="failed to be added"):
        optimizer.step()
    for _ in range(5):
        embedding(ids).sum().backward()
    optimizer.discard()
    assert not head.row_gradients._sent and not gradient_of(client, name).any()
    embedding(ids).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("lazy", [False, True])
def test_a_deterministic_server(deterministic_server, lazy):
    """Its microbatches have the ids 0, 1, 2, ...: both kinds are counted together, also where losses are begun before."""
    def train(name):
        torch.manual_seed(5)
        with lossd.Client(deterministic_server.target) as client:
            client.create_head(name, hidden_size=D, vocab_size=V, seed=3)
            head, trunk = LossHead(client, name), make_trunk()
            embedding, optimizer = ServedEmbedding(head), HeadOptimizer(head, lr=0.1)
            loss_of = PipelineLoss(head, n_microbatches=3) if lazy else head
            for _ in range(2):
                batches = [batch() for _ in range(3)]
                if lazy:
                    losses = [loss_of(trunk(embedding(ids)), targets) for ids, targets in batches]
                    for loss in losses:
                        loss.backward()
                else:
                    for ids, targets in batches:
                        head(trunk(embedding(ids)), targets).backward()
                optimizer.step()
            found = client.read_tensor(name).view(np.uint32)
            client.delete_head(name)
        return found

    np.testing.assert_array_equal(train("one"), train("two"))


def test_two_trainers_that_are_stages_of_a_pipeline(server, client, name):
    """One has the embedding, the other the loss; each has its client, its ids and its HeadOptimizer."""
    trunk = make_trunk()
    local = Local(client, name, trunk)
    with lossd.Client(server.target) as one, lossd.Client(server.target) as other:
        head = LossHead(one, name, rank=0, world_size=2)
        loss_fn = PipelineLoss(head, n_microbatches=2)
        embedding = ServedEmbedding(other, name, rank=1, world_size=2, n_microbatches=2)
        optimizers = [HeadOptimizer(each, lr=0.1, eps=EPS) for each in (head, embedding)]
        reference = torch.optim.AdamW(local.parameters(), lr=0.1, eps=EPS, weight_decay=0.0)
        for step in range(2):
            for _ in range(2):
                ids, targets = batch()
                loss_fn(trunk(embedding(ids)), targets).backward()
                (local.loss(ids, targets) / 2).backward()
            norms = [each.load_grad_norm() for each in optimizers]
            assert norms[0] == norms[1] == pytest.approx(float(local.embedding.weight.grad.norm()), rel=1e-3)
            for each in (*optimizers, reference):
                each.step()
            reference.zero_grad()
            trunk.load_state_dict({key: value.float() for key, value in local.trunk.state_dict().items()})
            assert (head.step, embedding.head.step) == (step + 1, step + 1)
        found = torch.from_numpy(client.read_tensor(name))
        torch.testing.assert_close(found, local.embedding.weight.float().detach(), atol=2e-4, rtol=1e-3)


def test_two_trainers_that_do_not_say_so(server, client, name):
    """The other one has the microbatch already: the error says what is missing."""
    with lossd.Client(server.target) as other:
        head, embedding, (ids, targets) = LossHead(client, name), ServedEmbedding(other, name), batch()
        rows = embedding(ids)
        head(rows.detach().requires_grad_(), targets).backward()
        with pytest.raises(lossd.FailedPrecondition, match="several trainers of one head need process_group=, or rank="):
            rows.sum().backward()
        before = client.describe_head(name)
        assert (before.step_microbatches, before.step_rows) == (1, int((targets != -100).sum()))


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_a_network_that_is_cut(server, client, name, seed, transport):
    """Each gradient of a row counts once."""
    proxy = CutProxy(server.target, mean_bytes=60_000, seed=seed)
    retry = lossd.RetryOptions(max_attempts=200, initial_backoff=0.01, max_backoff=0.05)
    weight = torch.from_numpy(client.read_tensor(name)).double().requires_grad_()
    with lossd.Client(proxy.target, retry=retry, transport=transport) as shaky:
        head = LossHead(shaky, name, reduction="sum")
        embedding, optimizer = ServedEmbedding(head), HeadOptimizer(head, lr=0.001, algorithm="sgd")
        for _ in range(12):
            ids, targets = batch()
            head(embedding(ids) * 2, targets).backward()
            torch.nn.functional.cross_entropy(
                (weight[ids] * 2 @ weight.T).reshape(-1, V), targets.reshape(-1), reduction="sum").backward()
        optimizer.step()
    proxy.close()
    wanted = weight.detach() - 0.001 * weight.grad
    torch.testing.assert_close(torch.from_numpy(client.read_tensor(name)), wanted.float(), atol=1e-5, rtol=1e-4)


def test_a_server_that_is_killed():
    """The step is lost, and the trainer is told; after sync() it goes on."""
    server = ServerProcess()
    try:
        with lossd.Client(server.target, retry=lossd.RetryOptions(max_attempts=30, initial_backoff=0.05)) as client:
            client.create_head("e", hidden_size=D, vocab_size=V)
            client.save_checkpoint("e", "start")
            embedding, (ids, _) = ServedEmbedding(client, "e"), batch()
            optimizer = HeadOptimizer(embedding, lr=0.1)
            rows = embedding(ids)
            rows.sum().backward()
            second = embedding(ids)
            server.kill()
            server.start()
            with lossd.Client(server.target) as other:
                other.load_checkpoint("e/start")
            with pytest.raises(lossd.Restarted):
                second.sum().backward()
            with pytest.raises(RuntimeError, match="step 0 is lost"):
                optimizer.step()
            embedding.head.sync()
            embedding(ids).sum().backward()
            optimizer.step()
            assert embedding.head.step == 1
    finally:
        server.stop()
