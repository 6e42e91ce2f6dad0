# SPDX-License-Identifier: Apache-2.0
"""Trunks whose sequences or weights are sharded: context parallel, sequence parallel, tensor parallel, with data parallel.

Gradients of every parameter, and of the head, are those of one process.
"""

import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import lossd
from lossd.torch import HeadOptimizer, LossHead, TiedEmbedding

D, V, BATCH, LENGTH, MICROBATCHES = 16, 50, 4, 24, 2
KINDS = {  # ranks, of these tensor parallel, by the way in which the trunk is sharded
    "context parallel": (2, 1), "context parallel, FSDP2": (2, 1), "sequence parallel": (2, 2), "rows of each": (2, 2),
    "one sends": (2, 2), "data and context parallel": (4, 1), "data and sequence parallel": (4, 2)}


class AllGather(torch.autograd.Function):
    """The shards of all ranks, along dimension 1; what context parallelism does to keys and values."""

    @staticmethod
    def forward(ctx, shard, group):
        ctx.group = group
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        torch.distributed.all_gather(shards, shard.contiguous(), group=group)
        return torch.cat(shards, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class FromRank0(torch.autograd.Function):
    """Hidden states that every rank has; the loss of rank 0 alone counts."""

    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        torch.distributed.broadcast(gradient, group=ctx.group, group_src=0)
        return gradient, None


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = torch.nn.Embedding(V, D)
        self.q, self.k, self.v = (torch.nn.Linear(D, D, bias=False) for _ in range(3))
        self.group = None

    def forward(self, tokens):
        """`tokens` are a rank's shard of every sequence, in order."""
        hidden = self.embedding(tokens)
        q, k, v = self.q(hidden), self.k(hidden), self.v(hidden)
        first = 0
        if self.group is not None:
            k, v = AllGather.apply(k, self.group), AllGather.apply(v, self.group)
            first = tokens.shape[1] * self.group.rank()
        causal = torch.arange(k.shape[1]) <= torch.arange(first, first + q.shape[1])[:, None]
        return hidden + torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.embedding = torch.nn.Embedding(V, D)
        self.norm = torch.nn.RMSNorm(D)
        self.up, self.down = torch.nn.Linear(D, 2 * D, bias=False), torch.nn.Linear(2 * D, D, bias=False)
        self.last_norm = torch.nn.RMSNorm(D)

    def forward(self, tokens):
        return self.last_norm(self.down(torch.relu(self.up(self.norm(self.embedding(tokens))))))


def batch():
    """Tokens and targets of every microbatch; ever fewer targets are valid towards the end of a sequence."""
    generator = torch.Generator().manual_seed(9)
    tokens, targets = (torch.randint(0, V, (MICROBATCHES, BATCH, LENGTH), generator=generator) for _ in range(2))
    ignored = torch.rand(targets.shape, generator=generator) < torch.linspace(0.0, 0.9, LENGTH)
    return tokens, targets.masked_fill(ignored, -100)


def tensor_parallel(model, mesh, sequence_shards):
    """torch's own plan for a feed-forward layer; with `sequence_shards` the norms work on shards of each sequence."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence_shards:
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1)),
            "last_norm": SequenceParallel(use_local_output=True)}
    return parallelize_module(model, mesh, plan)


def shard(kind, rank):
    """Model, LossHead's arguments, and the parts [batch, sequence] of inputs and of targets that the rank has."""
    ranks, tensor = KINDS[kind]
    inner = 2 if ranks == 4 else ranks
    mesh = init_device_mesh("cpu", (ranks // inner, inner), mesh_dim_names=("dp", "inner"))
    group, whole = mesh["inner"].get_group(), slice(None)
    replica, position = mesh.get_coordinate()
    rows = slice(replica * BATCH * inner // ranks, (replica + 1) * BATCH * inner // ranks)
    columns = slice(position * LENGTH // inner, (position + 1) * LENGTH // inner)
    every_rank = mesh["dp", "inner"]._flatten("every_rank")
    if tensor == 1:
        model = Attention()
        model.group = group
        if "FSDP2" in kind:
            fully_shard(model, mesh=every_rank)
        else:
            model = DistributedDataParallel(model)
        return model, {"process_group": every_rank}, (rows, columns), (rows, columns)
    model = tensor_parallel(Mlp(), mesh["inner"], kind.endswith("sequence parallel"))
    if kind == "data and sequence parallel":
        fully_shard(model, mesh=mesh["dp"])
        return model, {"process_group": every_rank, "averaged_over": 2}, (rows, whole), (rows, columns)
    if kind == "one sends":
        model.register_forward_hook(lambda _1, _2, hidden: FromRank0.apply(hidden, group))
        return model, {"process_group": None}, (rows, whole), (rows, whole)
    if kind == "rows of each":
        model.register_forward_hook(
            lambda _1, _2, hidden: DTensor.from_local(hidden, mesh["inner"], [Replicate()]).redistribute(
                placements=[Shard(1)]).to_local())
    return model, {"process_group": every_rank, "averaged_over": 1}, (rows, whole), (rows, columns)


def train(client, name, model, options, inputs=(slice(None),) * 2, labels=(slice(None),) * 2, sends=True):
    """The step of all microbatches; their mean."""
    tokens, targets = batch()
    head = LossHead(client, name, **options)
    optimizer = HeadOptimizer(head, lr=0.5, algorithm="sgd")
    losses = []
    for microbatch in range(MICROBATCHES):
        hidden = model(tokens[microbatch][inputs])
        loss = head(hidden, targets[microbatch][labels]) if sends else 0.0 * hidden.sum()
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    results = {}
    if sends:
        results["norm"] = torch.tensor(optimizer.load_grad_norm())
        optimizer.step()
        results["weight"] = torch.from_numpy(client.read_tensor(name))
    for key, parameter in model.named_parameters():
        gradient = parameter.grad
        results[key.removeprefix("module.")] = (
            gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
    return results, torch.stack(losses), head.parallel.averaged_over / head.parallel.size


def train_rank(rank, target, names):
    results = {}
    with lossd.Client(target) as client:
        for kind, name in names.items():
            model, options, inputs, labels = shard(kind, rank)
            results[kind] = train(client, name, model, options, inputs, labels, sends=kind != "one sends" or rank == 0)
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_trunks_are_one_process(server, client, make_head, ranks):
    kinds = [kind for kind, (needed, _) in KINDS.items() if needed == ranks]
    names = {kind: make_head(hidden_size=D, vocab_size=V, seed=3) for kind in kinds}
    of_ranks = run_ranks(ranks, train_rank, server.target, names)
    for kind in kinds:
        model = Attention() if "context" in kind else Mlp()
        expected, losses, _ = train(client, make_head(hidden_size=D, vocab_size=V, seed=3), model, {})
        for rank, results in enumerate(of_ranks):
            got = results[kind][0]
            assert got.keys() == expected.keys() - ({"norm", "weight"} if kind == "one sends" and rank else set())
            for key, value in got.items():
                error = float((value - expected[key]).norm() / expected[key].norm())
                assert error <= 1e-6, (kind, rank, key, error)
        total = sum(results[kind][1] / (ranks * results[kind][2]) for results in of_ranks)
        torch.testing.assert_close(total if kind != "one sends" else of_ranks[0][kind][1], losses, rtol=1e-6, atol=0)


def tied_step(client, name, mesh=None):
    """A step of an embedding that is also the head; with a mesh each rank has the whole trunk and sends a part of the rows."""
    tokens, targets = (each[0] for each in batch())
    model = Mlp()
    options = {} if mesh is None else {"process_group": mesh, "averaged_over": 1}
    head = LossHead(client, name, **options)
    optimizer = HeadOptimizer(head, lr=0.5, algorithm="sgd")
    tied = TiedEmbedding(head, model.embedding.weight)
    if head.parallel.rank == 0:
        tied.push()
    head.parallel.barrier()
    hidden = model(tokens)
    if mesh is not None:
        hidden = DTensor.from_local(hidden, mesh, [Replicate()]).redistribute(placements=[Shard(1)]).to_local()
        targets = targets.chunk(mesh.size(), 1)[mesh.get_local_rank()]
    (head(hidden, targets) / 3).backward()
    tied.add_gradient()
    optimizer.step()
    tied.pull()
    return model.embedding.weight.detach()


def tied_rank(rank, target, name):
    with lossd.Client(target) as client:
        return tied_step(client, name, init_device_mesh("cpu", (2,)))


def test_tied_embeddings_of_ranks_whose_gradients_are_added_up(server, client, make_head):
    names = [make_head(hidden_size=D, vocab_size=V, seed=3) for _ in range(2)]
    expected = tied_step(client, names[0])
    for got in run_ranks(2, tied_rank, server.target, names[1]):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def with_wrong_numbers(rank, target, name):
    with lossd.Client(target) as client:
        for number in (0, 3):
            with pytest.raises(ValueError, match=rf"averaged_over is {number}; it must be in \[1, 2\]"):
                LossHead(client, name, process_group=torch.distributed.group.WORLD, averaged_over=number)


def test_averaged_over_is_checked(server, client, make_head):
    name = make_head(hidden_size=D, vocab_size=V)
    run_ranks(2, with_wrong_numbers, server.target, name)
    with pytest.raises(ValueError, match=r"averaged_over is 2; it must be in \[1, 1\]"):
        LossHead(client, name, averaged_over=2)
