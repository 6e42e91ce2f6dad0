# SPDX-License-Identifier: Apache-2.0
"""Megatron-core, torchtitan, DeepSpeed, Lightning and Accelerate: the code blocks of docs/training, and what they compute."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import PREPARATIONS, run_ranks
from servers import ServerProcess

import lossd
from lossd.torch import HeadOptimizer, LossHead


# Every code block of docs/training runs, from the top of its page to the end, in as many ranks as the page is for.

PAGES = Path(__file__).parents[4] / "docs" / "training"
RANKS = {  # of pages that are for several
    "accelerate.md": 2, "colocated.md": 2, "data-parallel.md": 2, "deepspeed.md": 2, "deepspeed-zero.md": 2, "fsdp2.md": 2, "lightning.md": 2,
    "megatron.md": 2, "pipeline.md": 2, "pipeline-data-parallel.md": 4, "sharded-sequences.md": 2, "torchtitan.md": 2}
# Flags of a server of the page's own.
FLAGS = {"colocated.md": ("--cpu_devices=2", "--split=vocabulary")}
INDEX = "README.md"


def blocks_of(page):
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks, page
    return blocks


def run_page(rank, page, target, variables):
    """Of each head that the page leaves: the step, and whether it is frozen."""
    names = {"__name__": page, **variables}
    PREPARATIONS.get(page, lambda: None)()
    for number, block in enumerate(blocks_of(page)):
        code = block.replace("127.0.0.1:7070", target)
        exec(compile(code, f"{page}, block {number + 1}", "exec"), names)
    heads = [(each.state.step, each.spec.frozen) for each in names["client"].list_heads()]
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # a server in the ranks ends with the first of them
    names["client"].close()
    return heads


def tokenizer():
    import transformers
    from tokenizers import Tokenizer, models
    words = {f"t{i}": i for i in range(500)}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t3")),
                                                pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t3")


@pytest.fixture
def page_server(request, page):
    """The server that a page's code is run against: its own where the page starts it with other flags."""
    if page not in FLAGS:
        yield request.getfixturevalue("server")
        return
    own = ServerProcess("--backend=cpu", *FLAGS[page])
    yield own
    own.stop()


@pytest.mark.parametrize("page", sorted(each.name for each in PAGES.glob("*.md") if each.name != INDEX))
def test_page(page_server, tmp_path, monkeypatch, page):
    monkeypatch.chdir(tmp_path)
    server, client = page_server, lossd.Client(page_server.target)
    try:
        if page in RANKS:
            heads = run_ranks(RANKS[page], run_page, page, server.target, {})[0]
        else:
            heads = run_page(0, page, server.target, {"tokenizer": tokenizer()} if "tokenizer" in "".join(blocks_of(page)) else {})
        assert heads and all(step > 0 or frozen for step, frozen in heads)
    finally:
        for head in client.list_heads():
            client.delete_head(head.spec.name)
        client.close()


def test_the_index_names_every_page():
    linked = re.findall(r"\]\(([\w-]+\.md)\)", (PAGES / INDEX).read_text())
    assert sorted(set(linked)) == sorted(each.name for each in PAGES.glob("*.md") if each.name != INDEX)


# Megatron-core, torchtitan, DeepSpeed, Lightning and Accelerate with a head on a server, in two ranks, against one process.
#
# The seams are those of docs/training: their first code blocks are what is tested. Optimizers are SGD, whose steps show a
# gradient that is too large by a factor.

D, V, N, MICROBATCHES, STEPS, LR = 16, 50, 8, 2, 2, 0.5


def first_block(page, target, before=""):
    """What the first code block of a page defines; the block may be cut off `before` some text."""
    names = {"__name__": page}
    code = blocks_of(page)[0].replace("127.0.0.1:7070", target)
    exec(compile(code.split(before)[0] if before else code, page, "exec"), names)
    return names


def layers():
    torch.manual_seed(4)
    return [torch.nn.Embedding(V, D), torch.nn.Linear(D, D), torch.nn.Tanh(), torch.nn.Linear(D, D)]


def batch():
    """Inputs and targets [STEPS, MICROBATCHES, ranks, N]; the second rank has fewer valid targets."""
    generator = torch.Generator().manual_seed(6)
    inputs, targets = (torch.randint(0, V, (STEPS, MICROBATCHES, 2, N), generator=generator) for _ in range(2))
    targets[:, :, 1, ::3] = -100
    return inputs, targets


def train_alone(weight, microbatches=MICROBATCHES, one_mean=False):
    """SGD on the rows of both ranks; `one_mean` is over the whole step, else over each microbatch."""
    trunk, head = torch.nn.Sequential(*layers()), torch.nn.Linear(D, V, bias=False)
    head.weight.data.copy_(torch.from_numpy(weight))
    optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=LR)
    inputs, targets = batch()
    losses = []
    for step in range(STEPS):
        groups = [slice(0, microbatches)] if one_mean else range(microbatches)
        loss = sum(torch.nn.functional.cross_entropy(head(trunk(inputs[step, each].flatten())), targets[step, each].flatten())
                   for each in groups) / len(groups)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [each.detach() for each in trunk.parameters()], head.weight.detach().numpy()


def assert_same(results, expected, weight, stages=False):
    losses, parameters, head_weight = expected
    for result in results:
        got, mine = result
        if got:
            np.testing.assert_allclose(got, losses, rtol=1e-6)
        for index, value in mine.items():
            torch.testing.assert_close(value, parameters[index], atol=1e-6, rtol=1e-5)
    assert {index for _, mine in results for index in mine} == set(range(len(parameters)))
    np.testing.assert_allclose(weight, head_weight, atol=1e-6)


def numbered(parameters, first=0):
    return {first + index: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
            for index, each in enumerate(parameters)}


def mean_over_ranks(loss):
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    return total.item() / torch.distributed.get_world_size()


# torchtitan

def titan_rank(rank, target, name, weight):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
    names = first_block("torchtitan.md", target)
    mesh = init_device_mesh("cpu", (2,))
    trunk, lm_head = torch.nn.Sequential(*layers()), torch.nn.Linear(D, V, bias=False)
    lm_head.weight.data.copy_(torch.from_numpy(weight))
    for each in (trunk, lm_head):
        fully_shard(each, mesh=mesh)
    disable_fsdp_gradient_division(trunk)
    trunk.set_force_sum_reduction_for_comms(True)
    loss_fn = names["RemoteLoss"].Config(server=target, head=name).build(compile_config=None)
    loss_fn.set_lm_head(lm_head)
    head_optimizer = HeadOptimizer(loss_fn.head, lr=LR, algorithm="sgd")
    optimizer = torch.optim.SGD(trunk.parameters(), lr=LR)
    inputs, targets = batch()
    losses = []
    for step in range(STEPS):
        valid = (targets[step] != -100).sum()
        total = 0.0
        for each in range(MICROBATCHES):
            loss, _ = loss_fn(trunk(inputs[step, each, rank]), targets[step, each, rank], valid)
            loss.backward()
            total += loss.detach()
        head_optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(2 * mean_over_ranks(total))  # the ranks' shares add up
    loss_fn.client.close()
    return losses, numbered(trunk.parameters())


def test_torchtitan(server, client):
    weight = torch.nn.Linear(D, V, bias=False).weight.detach().numpy()
    results = run_ranks(2, titan_rank, server.target, "titan", weight)
    assert_same(results, train_alone(weight, one_mean=True), client.read_tensor("titan"))
    client.delete_head("titan")


# DeepSpeed

def pipeline_rank(rank, target, name):
    PREPARATIONS["deepspeed.md"]()
    import deepspeed
    from deepspeed.pipe import PipelineModule
    deepspeed.init_distributed(dist_backend="gloo")
    inputs, targets = batch()
    with lossd.Client(target) as client:
        head = LossHead(client, name, process_group=None) if rank == 1 else None
        model = PipelineModule(layers(), num_stages=2, loss_fn=lambda hidden, labels: head(hidden, labels),
                               partition_method="uniform")
        parameters = list(model.parameters())
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(parameters, lr=LR),
            config={"train_micro_batch_size_per_gpu": 2 * N, "gradient_accumulation_steps": MICROBATCHES})
        head_optimizer = HeadOptimizer(head, lr=LR, algorithm="sgd") if head else None
        rows = iter([(inputs[step, each].flatten(), targets[step, each].flatten())
                     for step in range(STEPS) for each in range(MICROBATCHES)])
        losses = []
        for _ in range(STEPS):
            losses.append(float(engine.train_batch(rows)))
            if head_optimizer:
                head_optimizer.step()
                head_optimizer.zero_grad()
        return losses, numbered(parameters, first=0 if rank == 0 else 3)  # of Embedding and Linear, or of the last Linear


def test_deepspeed_pipeline(server, client, make_head):
    name = make_head(hidden_size=D, vocab_size=V)
    expected = train_alone(client.read_tensor(name))
    assert_same(run_ranks(2, pipeline_rank, server.target, name), expected, client.read_tensor(name))


def zero_rank(rank, target, name):
    PREPARATIONS["deepspeed-zero.md"]()
    import deepspeed
    deepspeed.init_distributed(dist_backend="gloo")
    inputs, targets = batch()
    trunk = torch.nn.Sequential(*layers())
    engine, *_ = deepspeed.initialize(
        model=trunk, model_parameters=list(trunk.parameters()),
        config={"train_micro_batch_size_per_gpu": N, "gradient_accumulation_steps": MICROBATCHES,
                "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
                "optimizer": {"type": "SGD", "params": {"lr": LR}}})
    with lossd.Client(target) as client:
        head = LossHead(client, name, process_group=torch.distributed.group.WORLD)
        head_optimizer = HeadOptimizer(head, lr=LR, algorithm="sgd")
        losses = []
        for step in range(STEPS):
            total = 0.0
            for each in range(MICROBATCHES):
                loss = head(engine(inputs[step, each, rank]), targets[step, each, rank])
                engine.backward(loss)
                engine.step()
                total += loss.detach() / MICROBATCHES
            head_optimizer.step()
            head_optimizer.zero_grad()
            losses.append(mean_over_ranks(total))
        return losses, numbered(trunk.parameters())


def test_deepspeed_zero(server, client, make_head):
    name = make_head(hidden_size=D, vocab_size=V)
    expected = train_alone(client.read_tensor(name))
    assert_same(run_ranks(2, zero_rank, server.target, name), expected, client.read_tensor(name))


# Accelerate

def accelerate_rank(rank, target, name):
    import accelerate
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=MICROBATCHES)
    assert accelerator.num_processes == 2
    inputs, targets = batch()
    with lossd.Client(target) as client:
        head = LossHead(client, name, process_group=torch.distributed.group.WORLD)
        trunk = torch.nn.Sequential(*layers())
        parameters = list(trunk.parameters())
        trunk, *optimizers = accelerator.prepare(
            trunk, torch.optim.SGD(parameters, lr=LR), HeadOptimizer(head, lr=LR, algorithm="sgd"))
        losses = []
        for step in range(STEPS):
            total = 0.0
            for each in range(MICROBATCHES):
                with accelerator.accumulate(trunk):
                    loss = head(trunk(inputs[step, each, rank]), targets[step, each, rank])
                    accelerator.backward(loss)
                    total += loss.detach() / MICROBATCHES
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            losses.append(mean_over_ranks(total))
        return losses, numbered(parameters)


def test_accelerate(server, client, make_head):
    name = make_head(hidden_size=D, vocab_size=V)
    expected = train_alone(client.read_tensor(name))
    assert_same(run_ranks(2, accelerate_rank, server.target, name), expected, client.read_tensor(name))


# Lightning

def lightning_rank(rank, target, name, automatic, folder):
    import lightning
    inputs, targets = batch()
    rows = [(inputs[step, each, rank], targets[step, each, rank]) for step in range(STEPS) for each in range(MICROBATCHES)]
    with lossd.Client(target) as client:
        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = automatic
                self.trunk, self.losses = torch.nn.Sequential(*layers()), []
                self.head = LossHead(client, name, process_group=torch.distributed.group.WORLD)
                self.head_optimizer = HeadOptimizer(self.head, lr=LR, algorithm="sgd")

            def configure_optimizers(self):
                optimizer = torch.optim.SGD(self.trunk.parameters(), lr=LR)
                return optimizer if automatic else [optimizer, self.head_optimizer]

            def training_step(self, part, index):
                loss = self.head(self.trunk(part[0]), part[1])
                self.losses.append(mean_over_ranks(loss))
                if automatic:
                    return loss
                self.manual_backward(loss / MICROBATCHES)
                if index % MICROBATCHES == MICROBATCHES - 1:
                    for each in self.optimizers():
                        each.step()
                        each.zero_grad()

            def on_before_optimizer_step(self, optimizer):
                if automatic:
                    self.head_optimizer.step()

        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu", strategy="ddp", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, default_root_dir=folder,
            accumulate_grad_batches=MICROBATCHES if automatic else 1)
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=None))
        assert trainer.world_size == 2
        losses = np.array(module.losses).reshape(STEPS, MICROBATCHES).mean(1).tolist()
        return losses, numbered(module.trunk.parameters())


@pytest.mark.parametrize("automatic", [False, True])
def test_lightning(server, client, make_head, tmp_path, automatic):
    name = make_head(hidden_size=D, vocab_size=V)
    expected = train_alone(client.read_tensor(name))
    results = run_ranks(2, lightning_rank, server.target, name, automatic, str(tmp_path))
    assert_same(results, expected, client.read_tensor(name))


# Megatron-core

def megatron_model():
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    config = TransformerConfig(
        num_layers=2, hidden_size=D, num_attention_heads=2, normalization="RMSNorm", use_cpu_initialization=True,
        tensor_model_parallel_size=2, attention_dropout=0.0, hidden_dropout=0.0)
    torch.manual_seed(0)
    return GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=V, max_sequence_length=N)


def gathered(shard):
    shards = [torch.empty_like(shard) for _ in range(2)]
    torch.distributed.all_gather(shards, shard.detach().contiguous())
    return torch.cat(shards)


def megatron_rank(rank, target, name):
    from megatron.core import parallel_state
    PREPARATIONS["megatron.md"]()
    put_loss_on_server = first_block("megatron.md", target)["put_loss_on_server"]
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    stock, model = megatron_model(), megatron_model()
    tokens, targets = (each[0, 0] for each in batch())  # (2 sequences, N)
    inputs = tokens, torch.arange(N).expand(2, N), torch.triu(torch.ones(N, N, dtype=torch.bool), 1)[None, None]
    mask = targets != -100
    expected = (stock(*inputs, labels=targets.clamp(min=0)) * mask).sum() / mask.sum()
    expected.backward()
    weight, gradient = gathered(stock.output_layer.weight), gathered(stock.output_layer.weight.grad)
    with lossd.Client(target) as client:
        if rank == 0:
            client.write_tensor(name, "weight", weight.numpy())
        torch.distributed.barrier()
        head = put_loss_on_server(model, client, name)
        loss = model(*inputs, labels=targets)
        loss.backward()
        head.parallel.barrier()
        got = torch.from_numpy(client.read_tensor(name, role="gradient")) * head.gradient_scale
        of_model = dict(model.named_parameters())
        assert "output_layer.weight" not in of_model
        gradients = {key: (of_model[key].grad, each.grad) for key, each in stock.named_parameters()
                     if key != "output_layer.weight"}
        return 2 * mean_over_ranks(loss), expected.item(), {**gradients, "head": (got, gradient)}


def test_megatron(server, make_head):
    for loss, expected, gradients in run_ranks(2, megatron_rank, server.target, make_head(hidden_size=D, vocab_size=V)):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert len(gradients) > 10
        for key, (got, of_stock) in gradients.items():
            assert float((got - of_stock).norm()) <= 2e-6 * float(of_stock.norm()), key
