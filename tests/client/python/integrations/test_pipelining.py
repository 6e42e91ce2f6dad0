# SPDX-License-Identifier: Apache-2.0
"""PipelineLoss in the schedules of torch.distributed.pipelining, each stage in a process of its own, against one process."""

import numpy as np
import pytest
import torch
from ranks import run_ranks
from servers import free_port
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import lossd
from lossd.torch import HeadOptimizer, LossHead, PipelineLoss, ServedEmbedding


# Two stages in two processes.

D, V, N, MICROBATCHES, STEPS = 12, 50, 32, 4, 2


def layers(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh()), torch.nn.Linear(D, D)


def data(seed):
    generator = torch.Generator().manual_seed(seed + 1)
    return (torch.randn(STEPS, N, D, generator=generator),
            torch.randint(0, V, (STEPS, N), generator=generator))


def schedule_class(name):
    from torch.distributed import pipelining

    from lossd.torch import schedules
    return getattr(schedules if name == "Overlapped1F1B" else pipelining, name)


def run_stage(rank, port, target, name, schedule_name, scale_grads, seed, results):
    from torch.distributed import pipelining
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    module = layers(seed)[rank]
    inputs, targets = data(seed)
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    with lossd.Client(target) as client:
        head = LossHead(client, name, normalizer=None if scale_grads else N, process_group=None)
        head_optimizer = HeadOptimizer(head, lr=0.5, algorithm="sgd")
        loss_fn = PipelineLoss(head, n_microbatches=MICROBATCHES, scale_grads=scale_grads)
        schedule = schedule_class(schedule_name)(stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=scale_grads)
        losses, order = [], []  # of forward and backward passes
        module.register_forward_hook(lambda *_: order.append("F"))
        next(module.parameters()).register_hook(lambda _: order.append("B"))
        for step in range(STEPS):
            of_step = []
            order.clear()
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(inputs[step])
            else:
                schedule.step(target=targets[step], losses=of_step)
                head_optimizer.step()
            optimizer.step()
            losses += (loss.item() for loss in of_step)
    results.put((rank, losses, [p.detach().numpy() for p in module.parameters()], "".join(order)))
    torch.distributed.destroy_process_group()


def train_alone(client, name, seed):
    first, second = layers(seed)
    inputs, targets = data(seed)
    head = torch.nn.Linear(D, V, bias=False)
    head.weight.data.copy_(torch.from_numpy(client.read_tensor(name)))
    modules = torch.nn.ModuleList([first, second, head])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(head(second(first(inputs[step]))), targets[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [first, second, head]


@pytest.mark.parametrize("schedule, scale_grads, order", [
    ("ScheduleGPipe", True, "FFFFBBBB"), ("Schedule1F1B", True, "FBFBFBFB"), ("Schedule1F1B", False, "FBFBFBFB"),
    ("Overlapped1F1B", True, "FFBFBFBB")])
def test_schedules(server, client, make_head, seed, schedule, scale_grads, order):
    name = make_head(hidden_size=D, vocab_size=V)
    losses, modules = train_alone(client, name, seed)
    port = free_port()
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    stages = [context.Process(target=run_stage,
                              args=(rank, port, server.target, name, schedule, scale_grads, seed, results))
              for rank in (0, 1)]
    for stage in stages:
        stage.start()
    for stage in stages:
        stage.join(1200)
        assert stage.exitcode == 0
    by_rank = {rank: rest for rank, *rest in (results.get(), results.get())}
    got = np.array(by_rank[1][0]).reshape(STEPS, MICROBATCHES)
    np.testing.assert_allclose(got.mean(1) if scale_grads else got.sum(1), losses, rtol=1e-5)
    assert by_rank[1][2] == order
    for rank in (0, 1):
        for ours, theirs in zip(by_rank[rank][1], modules[rank].parameters()):
            np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(client.read_tensor(name), modules[2].weight.detach().numpy(), atol=1e-5)


STAGES_OF = {"ScheduleInterleavedZeroBubble": ((0, 2), (1, 3)), "ScheduleZBVZeroBubble": ((0, 3), (1, 2))}


def four_layers(seed):
    torch.manual_seed(seed)
    return [torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh()) for _ in range(4)]


def run_stages_of_tied_model(rank, target, name, schedule_name, seed):
    """In the shape of a V rank 0 has both ends, which share a LossHead; else each of two ranks has one."""
    from torch.distributed import pipelining
    mine, modules = STAGES_OF[schedule_name][rank], four_layers(seed)
    (_, targets), ids = data(seed), token_ids(seed)
    of_ranks = {} if mine == (0, 3) else {"rank": 1 - rank, "world_size": 2}  # the rank of the loss is 0
    with lossd.Client(target) as client:
        head, heads, loss_fn = None, [], torch.nn.functional.cross_entropy
        if 3 in mine:
            head = LossHead(client, name, process_group=None, **of_ranks)
            loss_fn = PipelineLoss(head, n_microbatches=MICROBATCHES)
        parts = {index: modules[index] for index in mine}
        if 0 in mine:
            embedding = ServedEmbedding(head) if head is not None else ServedEmbedding(
                client, name, n_microbatches=MICROBATCHES, process_group=None, **of_ranks)
            parts[0], heads = FirstStage(embedding, modules[0]), [HeadOptimizer(embedding, lr=0.5, algorithm="sgd")]
        elif head is not None:
            heads = [HeadOptimizer(head, lr=0.5, algorithm="sgd")]
        stages = [pipelining.PipelineStage(part, index, 4, torch.device("cpu")) for index, part in parts.items()]
        schedule = getattr(pipelining, schedule_name)(stages, MICROBATCHES, loss_fn=loss_fn)
        optimizer = torch.optim.SGD([each for index in mine for each in modules[index].parameters()], lr=0.5)
        for step in range(STEPS):
            optimizer.zero_grad()
            schedule.step(*([ids[step]] if rank == 0 else []), **({"target": targets[step]} if 3 in mine else {}))
            torch.distributed.barrier()
            for each in (*heads, optimizer):
                each.step()
    return {index: [each.detach() for each in modules[index].parameters()] for index in mine}


@pytest.mark.parametrize("schedule", STAGES_OF)
def test_a_tied_model_of_several_stages_on_a_rank(server, client, make_head, seed, schedule):
    """Schedules that compute gradients of weights apart from those of inputs too."""
    name = make_head(hidden_size=D, vocab_size=V)
    modules, (_, targets), ids = four_layers(seed), data(seed), token_ids(seed)
    weight = torch.nn.Parameter(torch.from_numpy(client.read_tensor(name)))
    optimizer = torch.optim.SGD([weight, *(each for module in modules for each in module.parameters())], lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        hidden = torch.nn.Sequential(*modules)(torch.nn.functional.embedding(ids[step], weight))
        torch.nn.functional.cross_entropy(hidden @ weight.T, targets[step]).backward()
        optimizer.step()
    found = {}
    for of_rank in run_ranks(2, run_stages_of_tied_model, server.target, name, schedule, seed):
        found.update(of_rank)
    for index, module in enumerate(modules):
        for ours, theirs in zip(found[index], module.parameters()):
            np.testing.assert_allclose(ours, theirs.detach(), atol=1e-5)
    np.testing.assert_allclose(client.read_tensor(name), weight.detach(), atol=1e-5)


class FirstStage(torch.nn.Module):
    """Rows of the head's weight for token ids, and layers behind them."""

    def __init__(self, embedding, behind):
        super().__init__()
        self.embedding, self.behind = embedding, behind

    def forward(self, ids):
        return self.behind(self.embedding(ids))


def token_ids(seed):
    return torch.randint(0, V, (STEPS, N), generator=torch.Generator().manual_seed(seed + 2))


def run_stage_of_tied_model(rank, target, name, schedule_name, scale_grads, seed):
    """The first stage has the embedding, the last one the loss, of one matrix that the server owns."""
    from torch.distributed import pipelining
    module = layers(seed)[rank]
    (_, targets), ids = data(seed), token_ids(seed)
    with lossd.Client(target) as client:
        if rank == 0:
            head = ServedEmbedding(client, name, rank=1, world_size=2, n_microbatches=MICROBATCHES, scale_grads=scale_grads,
                                   process_group=None)
            stage_module, loss_fn = FirstStage(head, module), torch.nn.functional.cross_entropy  # which this stage does not call
        else:
            head = LossHead(client, name, normalizer=None if scale_grads else N, rank=0, world_size=2, process_group=None)
            stage_module, loss_fn = module, PipelineLoss(head, n_microbatches=MICROBATCHES, scale_grads=scale_grads)
        stage = pipelining.PipelineStage(stage_module, rank, 2, torch.device("cpu"))
        schedule = schedule_class(schedule_name)(stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=scale_grads)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        head_optimizer = HeadOptimizer(head, lr=0.5, algorithm="sgd")
        losses, norms = [], []
        for step in range(STEPS):
            of_step = []
            optimizer.zero_grad()
            if rank == 0:
                for part in ids[step].chunk(MICROBATCHES):
                    head.prefetch(part)
                schedule.step(ids[step])
            else:
                schedule.step(target=targets[step], losses=of_step)
            torch.distributed.barrier()  # both have had their backward passes
            norms.append(head_optimizer.load_grad_norm())
            torch.distributed.barrier()  # both have read the norm
            head_optimizer.step()
            optimizer.step()
            losses.append(sum(loss.item() for loss in of_step) / (MICROBATCHES if scale_grads else 1))
    return losses, norms, [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("schedule, scale_grads", [
    ("ScheduleGPipe", True), ("Schedule1F1B", True), ("Schedule1F1B", False), ("Overlapped1F1B", True)])
def test_a_tied_model_whose_rows_are_served(server, deterministic_server, seed, schedule, scale_grads, deterministic):
    target, name = (deterministic_server if deterministic else server).target, f"tied-{schedule}-{scale_grads}"
    with lossd.Client(target) as client:
        client.create_head(name, hidden_size=D, vocab_size=V, compute_dtype="fp32", if_exists="reset")
        first, second = layers(seed)
        (_, targets), ids = data(seed), token_ids(seed)
        weight = torch.nn.Parameter(torch.from_numpy(client.read_tensor(name)))
        optimizer = torch.optim.SGD([weight, *first.parameters(), *second.parameters()], lr=0.5)
        losses, norms = [], []
        for step in range(STEPS):
            optimizer.zero_grad()
            hidden = second(first(torch.nn.functional.embedding(ids[step], weight)))
            loss = torch.nn.functional.cross_entropy(hidden @ weight.T, targets[step])
            loss.backward()
            norms.append(weight.grad.norm().item())
            optimizer.step()
            losses.append(loss.item())
        found = run_ranks(2, run_stage_of_tied_model, target, name, schedule, scale_grads, seed)
        np.testing.assert_allclose(found[1][0], losses, rtol=1e-5)
        for (_, norms_of_rank, parameters), module in zip(found, (first, second)):
            np.testing.assert_allclose(norms_of_rank, norms, rtol=1e-4)
            for ours, theirs in zip(parameters, module.parameters()):
                np.testing.assert_allclose(ours, theirs.detach(), atol=1e-5)
        np.testing.assert_allclose(client.read_tensor(name), weight.detach(), atol=1e-5)
        client.delete_head(name)


def test_bad_arguments(client, make_head):
    name = make_head(hidden_size=D, vocab_size=V)
    with pytest.raises(ValueError, match="n_microbatches is 0"):
        PipelineLoss(LossHead(client, name), n_microbatches=0)
    with pytest.raises(ValueError, match="one number"):
        PipelineLoss(LossHead(client, name, reduction="none"), n_microbatches=2)


def test_a_step_with_a_microbatch_too_many_is_refused(client, make_head):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    optimizer, loss_fn = HeadOptimizer(head, lr=0.1), PipelineLoss(head, n_microbatches=2)
    for _ in range(3):
        loss_fn(torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))).backward()
    with pytest.raises(RuntimeError, match="3 microbatches.*groups of 2"):
        optimizer.step()


def run_stage_of_replica(rank, target, name, schedule_name, seed):
    """Rank 2 r + s is stage s of replica r; each replica has every second microbatch."""
    from torch.distributed import pipelining
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    replica, stage_index = mesh.get_coordinate()
    module = DistributedDataParallel(layers(seed)[stage_index], process_group=mesh.get_group("replica"))
    stage = pipelining.PipelineStage(module, stage_index, 2, torch.device("cpu"), group=mesh.get_group("stage"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    inputs, targets = replicated_data(seed)
    with lossd.Client(target) as client:
        loss_fn = torch.nn.functional.cross_entropy  # of stages that are not the last, which do not call it
        if stage_index == 1:
            head = LossHead(client, name, process_group=mesh["replica"])
            head_optimizer = HeadOptimizer(head, lr=0.5, algorithm="sgd")
            loss_fn = PipelineLoss(head, n_microbatches=MICROBATCHES)
        schedule = schedule_class(schedule_name)(stage, MICROBATCHES, loss_fn=loss_fn)
        for step in range(STEPS):
            optimizer.zero_grad()
            if stage_index == 0:
                schedule.step(inputs[step, replica])
            else:
                schedule.step(target=targets[step, replica])
                head_optimizer.load_grad_norm()
                head_optimizer.step()
            optimizer.step()
    return stage_index, [parameter.detach() for parameter in module.parameters()]


def replicated_data(seed):
    """[STEPS, 2 replicas, N, ...]; the second replica has fewer valid targets."""
    generator = torch.Generator().manual_seed(seed + 2)
    targets = torch.randint(0, V, (STEPS, 2, N), generator=generator)
    targets[:, 1, ::3] = -100
    return torch.randn(STEPS, 2, N, D, generator=generator), targets


@pytest.mark.parametrize("schedule", [pytest.param("Schedule1F1B", marks=pytest.mark.nightly), "Overlapped1F1B"])
def test_a_pipeline_in_two_replicas(server, client, make_head, seed, schedule):
    name = make_head(hidden_size=D, vocab_size=V)
    layer = torch.nn.Linear(D, V, bias=False)
    layer.weight.data.copy_(torch.from_numpy(client.read_tensor(name)))
    first, second = layers(seed)
    optimizer = torch.optim.SGD(torch.nn.ModuleList([first, second, layer]).parameters(), lr=0.5)
    inputs, targets = (each.reshape(STEPS, 2, MICROBATCHES, N // MICROBATCHES, *each.shape[3:]).transpose(1, 2)
                       for each in replicated_data(seed))
    for step in range(STEPS):
        optimizer.zero_grad()
        for microbatch in range(MICROBATCHES):  # that of both replicas together
            logits = layer(second(first(inputs[step, microbatch].flatten(0, 1))))
            loss = torch.nn.functional.cross_entropy(logits, targets[step, microbatch].flatten())
            (loss / MICROBATCHES).backward()
        optimizer.step()
    for stage, parameters in run_ranks(4, run_stage_of_replica, server.target, name, schedule, seed):
        for got, expected in zip(parameters, (first, second)[stage].parameters()):
            torch.testing.assert_close(got, expected.detach(), atol=1e-6, rtol=1e-5)
    np.testing.assert_allclose(client.read_tensor(name), layer.weight.detach().numpy(), atol=1e-6)


# Steps of PipelineLoss whose microbatches are uneven, and evaluations, against one process; two stages, two processes.

ROWS, UNEVEN_STEPS, LR = 16, 3, 0.5
VALID = [[0, 3, 4, 4], [1, 0, 0, 0], [4, 4, 4, 4]]  # targets of each microbatch that count, of each step
CASES = [("ScheduleGPipe", True, False), ("Schedule1F1B", True, False), ("Schedule1F1B", False, False),
         ("Overlapped1F1B", True, False), ("Schedule1F1B", True, True)]


def uneven_data(seed):
    generator = torch.Generator().manual_seed(seed + 1)
    inputs = torch.randn(UNEVEN_STEPS, ROWS, D, generator=generator)
    targets = torch.randint(0, V, (UNEVEN_STEPS, MICROBATCHES, ROWS // MICROBATCHES), generator=generator)
    for step, counts in enumerate(VALID):
        for microbatch, count in enumerate(counts):
            targets[step, microbatch, count:] = -100
    return inputs, targets.flatten(1)


def run_uneven_stage(rank, target, names, seed):
    """For each case: the losses of its steps, those of its evaluations, and the stage's parameters."""
    from torch.distributed import pipelining

    from lossd.torch import schedules
    found = []
    with lossd.Client(target) as client:
        for name, (schedule_name, scale_grads, deferred) in zip(names, CASES):
            module = layers(seed)[rank]
            inputs, targets = uneven_data(seed)
            stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
            optimizer = torch.optim.SGD(module.parameters(), lr=LR)
            step = 0
            head = LossHead(client, name, process_group=None, deferred=deferred)
            head_optimizer = HeadOptimizer(head, lr=LR, algorithm="sgd")
            loss_fn = PipelineLoss(head, n_microbatches=MICROBATCHES, scale_grads=scale_grads,
                                   normalizer=lambda: (targets[step] != -100).sum())
            kind = getattr(schedules if schedule_name == "Overlapped1F1B" else pipelining, schedule_name)
            schedule = kind(stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=scale_grads)
            losses, evaluations = [], []
            for step in range(UNEVEN_STEPS):
                optimizer.zero_grad()
                of_step, of_evaluation = [], []
                if rank == 0:
                    schedule.eval(inputs[step])  # which would divide gradients that are there
                    schedule.step(inputs[step])
                else:
                    schedule.eval(target=targets[step], losses=of_evaluation)
                    after = client.describe_head(name)
                    assert (after.step_rows, after.step_microbatches) == (0, 0)
                    schedule.step(target=targets[step], losses=of_step)
                    head_optimizer.step()
                optimizer.step()
                losses.append([float(each) for each in of_step])
                evaluations.append([float(each) for each in of_evaluation])
            found.append((losses, evaluations, [each.detach() for each in module.parameters()]))
    return found


def train_uneven_alone(client, name, seed):
    first, second = layers(seed)
    inputs, targets = uneven_data(seed)
    head = torch.nn.Linear(D, V, bias=False)
    head.weight.data.copy_(torch.from_numpy(client.read_tensor(name)))
    model = torch.nn.Sequential(first, second, head).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(UNEVEN_STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs[step].double()), targets[step])  # over all that count
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, (first, second, head)


def test_a_mean_over_the_targets_of_a_step(server, client, make_head, seed):
    names = [make_head(hidden_size=D, vocab_size=V) for _ in CASES]
    expected = [train_uneven_alone(client, name, seed) for name in names]
    ranks = run_ranks(2, run_uneven_stage, server.target, names, seed)
    for case, name, stages, (losses, modules) in zip(CASES, names, zip(*ranks), expected):
        for (_, _, got), module in zip(stages, modules):
            for ours, theirs in zip(got, module.parameters()):
                torch.testing.assert_close(ours.double(), theirs.detach(), atol=1e-6, rtol=1e-5, msg=lambda m: f"{case}: {m}")
        torch.testing.assert_close(torch.from_numpy(client.read_tensor(name)).double(), modules[2].weight.detach(),
                                   atol=1e-6, rtol=1e-5)
        for of_steps in stages[1][:2]:  # an evaluation before the step has the losses of the step
            whole = torch.tensor(of_steps).double().sum(1) / (MICROBATCHES if case[1] else 1)
            torch.testing.assert_close(whole, torch.tensor(losses).double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normalizer, error, text", [
    ("tokens", TypeError, "normalizer is 'tokens'; it must be a number, or a function"), (-3, ValueError, "normalizer is -3"),
    (float("nan"), ValueError, "normalizer is nan")])
def test_bad_normalizers(client, make_head, normalizer, error, text):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    with pytest.raises(error, match=text):
        PipelineLoss(head, n_microbatches=2, normalizer=normalizer)
    with pytest.raises(error, match=text):
        PipelineLoss(head, n_microbatches=2, normalizer=lambda: normalizer)(
            torch.randn(ROWS, D, requires_grad=True), torch.zeros(ROWS, dtype=torch.long))
    with pytest.raises(ValueError, match="normalizer is for means"):
        PipelineLoss(LossHead(client, head.head_name, reduction="sum"), n_microbatches=2, normalizer=3)


def test_an_evaluation_outside_of_schedules(client, make_head):
    """A LossHead in evaluation mode under torch.no_grad() gives the loss at once."""
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    head.eval()
    with torch.no_grad():
        assert PipelineLoss(head, n_microbatches=2)(torch.randn(ROWS, D), torch.zeros(ROWS, dtype=torch.long)) > 0


# PipelineLoss in schedules with several stages on a rank: interleaved 1F1B and zero-bubble ones, against one process.

STAGES = 4
SCHEDULES = {  # the stages of either rank
    "ScheduleInterleaved1F1B": ((0, 2), (1, 3)), "ScheduleLoopedBFS": ((0, 2), (1, 3)),
    "ScheduleInterleavedZeroBubble": ((0, 2), (1, 3)), "ScheduleZBVZeroBubble": ((0, 3), (1, 2)),
    "ScheduleDualPipeV": ((0, 3), (1, 2))}
OVERLAPPED = "overlapped "  # with a slack of 2
SCHEDULES |= {OVERLAPPED + name: SCHEDULES[name]
              for name in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")}


def layers_of_stages():
    torch.manual_seed(4)
    return [torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh()) for _ in range(STAGES)]


def data_of_stages():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(STEPS, N, D, generator=generator), torch.randint(0, V, (STEPS, N), generator=generator)


def train_rank(rank, target, names):
    with lossd.Client(target) as client:
        return {name: train_stages(rank, client, name, head_name) for name, head_name in names.items()}


def train_stages(rank, client, name, head_name):
    from torch.distributed import pipelining

    from lossd.torch.schedules import overlapped
    mine = SCHEDULES[name][rank]
    modules = layers_of_stages()
    stages = [pipelining.PipelineStage(modules[each], each, STAGES, torch.device("cpu")) for each in mine]
    optimizer = torch.optim.SGD([p for each in mine for p in modules[each].parameters()], lr=0.5)
    inputs, targets = data_of_stages()
    last = STAGES - 1 in mine
    head_optimizer, loss_fn = None, torch.nn.functional.cross_entropy  # of a rank that does not call it
    if last:
        head = LossHead(client, head_name, process_group=None)
        head_optimizer = HeadOptimizer(head, lr=0.5, algorithm="sgd")
        loss_fn = PipelineLoss(head, n_microbatches=MICROBATCHES)
    kind = getattr(pipelining, name.removeprefix(OVERLAPPED))
    schedule = (overlapped(kind, slack=2) if name.startswith(OVERLAPPED) else kind)(stages, MICROBATCHES, loss_fn=loss_fn)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        of_step = []
        given = {"target": targets[step], "losses": of_step} if last else {}
        schedule.step(*([inputs[step]] if 0 in mine else []), **given)
        if last:
            losses.append(torch.stack(of_step).mean().item())
            head_optimizer.load_grad_norm()
            head_optimizer.step()
        optimizer.step()
    return losses, {each: [p.detach() for p in modules[each].parameters()] for each in mine}


def train_stages_alone(weight):
    head = torch.nn.Linear(D, V, bias=False)
    head.weight.data.copy_(weight)
    modules = torch.nn.ModuleList([*layers_of_stages(), head])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.5)
    inputs, targets = data_of_stages()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = inputs[step]
        for module in modules:
            logits = module(logits)
        loss = torch.nn.functional.cross_entropy(logits, targets[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, modules


def test_schedules_with_several_stages_on_a_rank(server, client, make_head):
    names = {schedule: make_head(hidden_size=D, vocab_size=V, seed=1) for schedule in SCHEDULES}
    losses, modules = train_stages_alone(torch.from_numpy(client.read_tensor(next(iter(names.values())))))
    ranks = run_ranks(2, train_rank, server.target, names)
    for schedule, name in names.items():
        for rank in ranks:
            means, parameters = rank[schedule]
            for stage, values in parameters.items():
                for got, expected in zip(values, modules[stage].parameters()):
                    torch.testing.assert_close(got, expected.detach(), atol=1e-5, rtol=1e-5, msg=f"{schedule}, stage {stage}")
            if means:
                np.testing.assert_allclose(means, losses, rtol=1e-5, err_msg=schedule)
        np.testing.assert_allclose(client.read_tensor(name), modules[-1].weight.detach().numpy(), atol=1e-5, err_msg=schedule)
