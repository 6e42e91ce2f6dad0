# SPDX-License-Identifier: Apache-2.0
"""LossHead in several ranks of data parallelism: its gradients, and the steps of the group."""

import contextlib
import functools
import warnings

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lossd
from lossd.torch import HeadOptimizer, LossHead, ServedEmbedding, TiedEmbedding


# LossHead under DistributedDataParallel and fully_shard: gradients of 1, 2 and 4 ranks are those of one process.

D, V, N, MICROBATCHES, LR = 12, 50, 32, 3, 0.5

# How a batch becomes losses: LossHead's options, what the loss of a microbatch is multiplied by, the microbatches.
CASES = {
    "mean": ({}, 1.0, 1),
    "sum": ({"reduction": "sum"}, 1.0, 1),
    "mean-accumulated": ({}, 1.0 / MICROBATCHES, MICROBATCHES),
    "mean-of-all-microbatches": ({"normalizer": "valid"}, 1.0, MICROBATCHES),
    "sum-accumulated": ({"reduction": "sum"}, 1.0, MICROBATCHES),
    "deferred": ({"deferred": True}, 1.0 / MICROBATCHES, MICROBATCHES),
    "deferred-sum": ({"deferred": True, "reduction": "sum"}, 1.0, 1),
    "announced": ({"grad_output": 1.0 / MICROBATCHES}, 1.0 / MICROBATCHES, MICROBATCHES),
    "class-weights": ({"class_weights": True}, 1.0, 1),
    "depths": ({}, 1.0 / MICROBATCHES, MICROBATCHES),
    "depths-sum": ({"reduction": "sum", "class_weights": True}, 1.0, 1),
    "depths-class-weights": ({"class_weights": True}, 1.0, 1),
    "policy-deferred": ({"deferred": True}, 1.0 / MICROBATCHES, MICROBATCHES),
    "policy-deferred-sum": ({"deferred": True, "reduction": "sum"}, 1.0, 1),
}
WRAPPERS = ("DDP", "DDP-no_sync", "FSDP2", "FSDP2-no_sync")


def trunk():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh(), torch.nn.Linear(D, D))


def batch():
    """Hidden states and targets of every microbatch; ever fewer rows are valid towards the end of each."""
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(MICROBATCHES, N, D, generator=generator)
    targets = torch.randint(0, V, (MICROBATCHES, N), generator=generator)
    ignored = torch.rand(MICROBATCHES, N, generator=generator) < torch.linspace(0.0, 0.9, N)
    return hidden, targets.masked_fill(ignored, -100)


def make_heads(client, prefix):
    """A head for each case; the same whatever the prefix."""
    for case in CASES:
        name = f"{prefix}{case}"
        client.create_head(name, hidden_size=D, vocab_size=V, seed=5, class_weights=True, compute_dtype="fp32",
                           optimizer_state="none")
        client.write_tensor(name, "class_weights", np.linspace(0.5, 2.0, V, dtype=np.float32))


def loss_of(head, case, hidden, targets):
    """Of two depths, of which the second one has other targets, and fewer."""
    if case.startswith("policy"):
        return head.policy_loss(hidden, targets, objective=lossd.Objective("dft"))
    if not case.startswith("depths"):
        return head(hidden, targets)
    second = torch.where(targets >= 0, (targets + 7) % V, targets).masked_fill(targets % 3 == 0, -100)
    return head.depth_losses([hidden, 0.5 * hidden], torch.stack([targets, second]), weights=[1.0, 0.3]).loss


def train(client, head_name, case, model, part, process_group, no_sync=contextlib.nullcontext):
    """Two steps on the rows `part` of each microbatch. What one process and several must have in common."""
    options, factor, microbatches = CASES[case]
    hidden, targets = batch()
    if options.get("normalizer") == "valid":
        options = {**options, "normalizer": float((targets[:microbatches] != -100).sum())}
    head = LossHead(client, head_name, process_group=process_group, **options)
    head_optimizer = HeadOptimizer(head, lr=LR, algorithm="sgd")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    results = {}
    for step in range(2):
        optimizer.zero_grad()
        head_optimizer.zero_grad()
        losses = []
        for each in range(microbatches):
            with no_sync() if each < microbatches - 1 else contextlib.nullcontext():
                loss = loss_of(head, case, model(hidden[each, part]), targets[each, part])
                (loss * factor).backward()
            losses.append(loss.detach())
        results[f"loss {step}"] = torch.stack(losses)
        results[f"head's norm {step}"] = torch.tensor(head_optimizer.load_grad_norm())
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            results[f"{name.removeprefix('module.')}'s gradient {step}"] = gradient.clone()
        results[f"head's gradient {step}"] = (
            torch.from_numpy(client.read_tensor(head_name, role="gradient")) * head.gradient_scale)
        head.parallel.barrier()  # before the first one that steps
        head_optimizer.step()
        optimizer.step()
    results["head's weight"] = torch.from_numpy(client.read_tensor(head_name))
    return results


@functools.cache
def alone():
    """The rows of all ranks in one process, by case."""
    from servers import ServerProcess
    server = ServerProcess()
    try:
        with lossd.Client(server.target) as client:
            make_heads(client, "alone-")
            return {case: train(client, f"alone-{case}", case, trunk(), slice(None), None) for case in CASES}
    finally:
        server.stop()


def of_rank(rank, world_size, target, prefix):
    """Every case under every wrapper."""
    part = slice(rank * N // world_size, (rank + 1) * N // world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    results = {}
    with lossd.Client(target) as client:
        for wrapper in WRAPPERS:
            for case in CASES:
                model, no_sync = trunk(), contextlib.nullcontext
                if wrapper.startswith("DDP"):
                    model = DistributedDataParallel(model)
                    no_sync = model.no_sync if wrapper.endswith("no_sync") else no_sync
                    group = torch.distributed.group.WORLD
                else:
                    group = mesh
                    for layer in (model[0], model[2], model):
                        fully_shard(layer, mesh=mesh)
                    if wrapper.endswith("no_sync"):
                        no_sync = functools.partial(fsdp_without_sync, model)
                results[wrapper, case] = train(client, f"{prefix}{wrapper}-{case}", case, model, part, group, no_sync)
    return results


@contextlib.contextmanager
def fsdp_without_sync(model):
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.nightly), 4])
def ranks(request, server, client):
    """By rank: what of_rank returned."""
    prefix = f"dp{request.param}-"
    for wrapper in WRAPPERS:
        make_heads(client, f"{prefix}{wrapper}-")
    yield run_ranks(request.param, of_rank, request.param, server.target, prefix)
    for wrapper in WRAPPERS:
        for case in CASES:
            client.delete_head(f"{prefix}{wrapper}-{case}")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_several_ranks_are_one_process(ranks, wrapper, case):
    expected = alone()[case]
    for name, value in expected.items():
        got = [results[wrapper, case][name] for results in ranks]
        if name.startswith("loss"):
            got = [torch.stack(got).mean(0)]
        for each in got:
            assert float((each - value).norm()) <= 1e-6 * float(value.norm()), name


class WithRows(torch.nn.Module):
    """Rows of a head's weight, and the layers behind them."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.behind = embedding, trunk()

    def forward(self, tokens):
        return self.behind(self.embedding(tokens))


def steps_of_tied_model(client, name, part, process_group, wrap):
    """Two steps of two microbatches, whose losses are divided after forward, clipped by the norm of everything."""
    head = LossHead(client, name, process_group=process_group)
    model = WithRows(ServedEmbedding(head, scale=2.0, padding_idx=3))
    wrapped = wrap(model)
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR), HeadOptimizer(head, lr=LR, algorithm="sgd")]
    _, targets = batch()
    tokens = torch.randint(0, V, (2, N), generator=torch.Generator().manual_seed(9))
    for _ in range(2):
        for each in range(2):
            (head(wrapped(tokens[each, part]), targets[each, part]) / 2).backward()
        optimizers[1].load_grad_norm()
        torch.nn.utils.clip_grad_norm_(optimizers[1].stand_in, 0.1)
        head.parallel.barrier()
        for each in optimizers:
            each.step()
            each.zero_grad()
    found = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in model.named_parameters()}
    return {**{key: value.detach().clone() for key, value in found.items()}, "matrix": torch.from_numpy(client.read_tensor(name))}


def rank_of_tied_model(rank, target, names):
    part, results = slice(rank * N // 2, (rank + 1) * N // 2), {}
    with lossd.Client(target) as client:
        for wrapper, name in names.items():
            mesh = init_device_mesh("cpu", (2,))
            wrap = DistributedDataParallel if wrapper == "DDP" else functools.partial(fully_shard, mesh=mesh)
            results[wrapper] = steps_of_tied_model(client, name, part, torch.distributed.group.WORLD, wrap)
    return results


def test_rows_of_a_tied_matrix(server, client, make_head):
    """Under DistributedDataParallel and fully_shard both ends get the gradients of one process."""
    names = {wrapper: make_head(hidden_size=D, vocab_size=V, seed=5) for wrapper in ("DDP", "FSDP2", "alone")}
    expected = steps_of_tied_model(client, names.pop("alone"), slice(None), None, lambda model: model)
    for results in run_ranks(2, rank_of_tied_model, server.target, names):
        for found in results.values():
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert float((found[key] - value).norm()) <= 2e-6 * float(value.norm()), key


def without_a_word(rank, target, name):
    with lossd.Client(target) as client:
        messages = []
        for options in ({}, {"rank": rank, "world_size": 2}):
            with pytest.raises(ValueError) as raised:
                LossHead(client, name, **options)
            messages.append(str(raised.value))
        LossHead(client, name, process_group=None)
        with pytest.raises(ValueError, match="2 dimensions"):
            LossHead(client, name, process_group=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp")))
    return messages


def test_several_ranks_have_to_be_explained(server, make_head):
    for messages in run_ranks(2, without_a_word, server.target, make_head(hidden_size=D, vocab_size=V)):
        for message in messages:
            assert "2 ranks" in message and "process_group=None" in message
            assert "process_group=torch.distributed.group.WORLD" in message


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(V, D)
        self.layer = torch.nn.Linear(D, D)

    def forward(self, tokens):
        return self.layer(self.embedding(tokens))


def tied_step(client, name, part, process_group, wrap, factor=1.0):
    model = Tied()
    tokens = torch.arange(N) * 7 % V
    wrapped = wrap(model)
    head = LossHead(client, name, process_group=process_group)
    optimizer = HeadOptimizer(head, lr=LR, algorithm="sgd")
    tied = TiedEmbedding(head, model.embedding.weight)
    if head.parallel.rank == 0:
        tied.push()
    head.parallel.barrier()
    (factor * head(wrapped(tokens[part]), tokens[part].flip(0))).backward()
    tied.add_gradient()
    optimizer.load_grad_norm()
    torch.nn.utils.clip_grad_norm_([*model.layer.parameters(), optimizer.stand_in], 0.1)
    optimizer.step()
    tied.pull()
    return model.embedding.weight.detach()


def tied_rank(rank, target, name):
    with lossd.Client(target) as client:
        return tied_step(client, name, slice(rank * N // 2, (rank + 1) * N // 2), torch.distributed.group.WORLD,
                         DistributedDataParallel)


def test_tied_embeddings(server, client, make_head):
    heads = [make_head(hidden_size=D, vocab_size=V) for _ in range(2)]
    # Targets of a rank are its own tokens from back to front, so the batch is put together by halves.
    model = Tied()
    tokens = torch.arange(N) * 7 % V
    targets = torch.cat([half.flip(0) for half in tokens.chunk(2)])
    loss = torch.nn.functional.cross_entropy(model(tokens) @ model.embedding.weight.T, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = model.embedding.weight - LR * model.embedding.weight.grad
    for got in run_ranks(2, tied_rank, server.target, heads[0]):
        torch.testing.assert_close(got, expected.detach(), atol=1e-6, rtol=1e-5)


def test_a_tied_gradient_of_a_divided_loss(client, make_head):
    whole, halved = (tied_step(client, make_head(hidden_size=D, vocab_size=V), slice(None), None, lambda model: model,
                               factor) for factor in (1.0, 0.5))
    torch.testing.assert_close(whole, halved, atol=1e-6, rtol=1e-5)  # both clipped to the same norm


def with_a_failure(rank, target, name):
    """One rank's rows do not arrive; both discard the step and do it again."""
    with lossd.Client(target) as client:
        head = LossHead(client, name, process_group=torch.distributed.group.WORLD)
        optimizer = HeadOptimizer(head, lr=LR, algorithm="sgd")
        hidden, targets = batch()
        part = slice(rank * N // 2, (rank + 1) * N // 2)
        wrong = targets[0, part].clone()
        if rank == 0:
            wrong[0] = V
        with pytest.raises(ValueError if rank == 0 else RuntimeError, match="targets" if rank == 0 else "another rank"):
            head(hidden[0, part].requires_grad_(), wrong)
        head(hidden[0, part].requires_grad_(), targets[0, part])  # interrupted before its backward
        optimizer.zero_grad()
        head(hidden[0, part].requires_grad_(), targets[0, part]).backward()
        optimizer.step()
        return torch.from_numpy(client.read_tensor(name))


def test_zero_grad_after_a_failure_in_one_rank(server, client, make_head):
    name, reference = (make_head(hidden_size=D, vocab_size=V, seed=1) for _ in range(2))
    weights = run_ranks(2, with_a_failure, server.target, name)
    head = LossHead(client, reference)
    hidden, targets = batch()
    head(hidden[0].requires_grad_(), targets[0]).backward()
    HeadOptimizer(head, lr=LR, algorithm="sgd").step()
    for weight in weights:
        torch.testing.assert_close(weight, torch.from_numpy(client.read_tensor(reference)), atol=1e-6, rtol=1e-5)


# Steps of a process group: ranks without rows, clips, and optimizers that begin or continue; two ranks, one process.


def data():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(3, 2, N, D, generator=generator), torch.randint(0, V, (3, 2, N), generator=generator)


def run_rank(rank, target, names):
    """What is compared with one process: norms and numbers of steps that updated the head."""
    hidden, targets = data()
    found = {}
    with lossd.Client(target) as client, warnings.catch_warnings():
        warnings.simplefilter("error")
        group = torch.distributed.group.WORLD
        # Nobody has rows, then one rank has, then both.
        head = LossHead(client, names["rows"], reduction="sum", process_group=group)
        optimizer = HeadOptimizer(head, lr=LR, algorithm="sgd")
        optimizer.step()
        assert head.step == 0 and optimizer.last is None and optimizer.stand_in.grad is None
        for ranks in ([0], [1], [0, 1]):
            if rank in ranks:
                (head(hidden[head.step, rank], targets[head.step, rank]) / N).backward()
            optimizer.step()
        assert head.step == 3
        # A clip, which reads the stand-in's gradient on each rank.
        head = LossHead(client, names["clipped"], process_group=group)
        optimizer = HeadOptimizer(head, lr=LR, algorithm="sgd")
        for step in range(2):
            head(hidden[step, rank], targets[step, rank]).backward()
            found["norm"] = float(torch.nn.utils.clip_grad_norm_([optimizer.stand_in], 0.05))
            optimizer.step()
        # A clip by another norm stops every rank.
        head(hidden[2, rank], targets[2, rank]).backward()
        if rank == 1:
            torch.nn.utils.clip_grad_norm_([optimizer.stand_in], 0.05, norm_type=float("inf"))
        else:
            optimizer.load_grad_norm()
        try:
            optimizer.step()
        except RuntimeError as error:
            found["refused"] = str(error)
        # One rank restores the head; the optimizers of all continue.
        for restored in (False, True):
            if rank == 0 and restored:
                client.load_checkpoint(f"{names['begun']}/kept")
            torch.distributed.barrier()
            head_again = LossHead(client, names["begun"], process_group=group)
            optimizer = HeadOptimizer(head_again, lr=1e-2)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                head_again(hidden[0, rank], targets[0, rank]).backward()
            found[f"said {restored}"] = len(said)
            optimizer.step()
            found[f"updates {restored}"] = client.describe_head(names["begun"]).updates
            head_again.parallel.barrier()
    return found


def test_steps_of_two_ranks(server, client, make_head):
    names = {name: make_head(hidden_size=D, vocab_size=V) for name in ("rows", "clipped", "begun")}
    hidden, targets = data()
    with lossd.Client(server.target, run="night-3") as other:
        for step in range(3):
            other.compute_loss(names["begun"], hidden[step, 0].numpy(), targets[step, 0].numpy(), step=step, id=0,
                               accumulate=True)
            other.apply_step(names["begun"], step, lossd.AdamW(lr=1e-2))
        other.save_checkpoint(names["begun"], "kept")
    local = {name: torch.nn.Parameter(torch.from_numpy(client.read_tensor(names[name]))) for name in ("rows", "clipped")}
    for step, ranks in enumerate(([0], [1], [0, 1])):
        loss = sum(torch.nn.functional.cross_entropy(hidden[step, rank] @ local["rows"].T, targets[step, rank])
                   for rank in ranks)
        local["rows"].grad = None
        loss.backward()  # the ranks' losses average to that of all rows
        local["rows"].data -= LR * local["rows"].grad
    norms = []
    for step in range(2):
        local["clipped"].grad = None
        logits = hidden[step].flatten(0, 1) @ local["clipped"].T
        torch.nn.functional.cross_entropy(logits, targets[step].flatten()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_([local["clipped"]], 0.05)))
        local["clipped"].data -= LR * local["clipped"].grad
    found = run_ranks(2, run_rank, server.target, names)
    for name, weight in local.items():
        torch.testing.assert_close(torch.from_numpy(client.read_tensor(names[name])), weight.data, atol=1e-6, rtol=1e-5)
    for each in found:
        assert abs(each["norm"] - norms[-1]) < 1e-5
        assert (each["updates False"], each["updates True"]) == (1, 4)
    assert "norm_type=inf" in found[1]["refused"] and "another rank failed" in found[0]["refused"]
    assert [each["said False"] for each in found] == [1, 0] and [each["said True"] for each in found] == [0, 0]
