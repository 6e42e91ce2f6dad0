# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of torch, torch.distributed.checkpoint, Accelerate and Lightning that include the head: bit-identical."""

import accelerate
import lightning
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from servers import ServerProcess
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import lossd
from lossd.torch import HeadOptimizer, LossHead

D, V, N = 16, 60, 24
PARTS = ("value", "moment1", "moment2")


class Model(torch.nn.Module):
    """A trunk with its head: forward is the loss."""

    def __init__(self, client, name, **options):
        super().__init__()
        torch.manual_seed(1)
        self.trunk = torch.nn.Linear(D, D)
        self.head = LossHead(client, name, **options)

    def forward(self, hidden, targets):
        return self.head(self.trunk(hidden), targets)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(N, D, generator=generator), torch.randint(0, V, (N,), generator=generator)


def optimizers(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2), HeadOptimizer(model.head, lr=1e-2, weight_decay=0.1)


def train(model, each, steps, backward=torch.Tensor.backward):
    for step in steps:
        backward(model(*batch(step)))
        for optimizer in each:
            optimizer.step()
            optimizer.zero_grad()


def everything(model, name, client):
    return [model.trunk.weight.detach().numpy().copy(), *(client.read_tensor(name, role=part) for part in PARTS)]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def name(make_head):
    return make_head(hidden_size=D, vocab_size=V)


@pytest.fixture
def expected(client, make_head):
    """After five steps without interruption."""
    name = make_head(hidden_size=D, vocab_size=V)
    model = Model(client, name)
    train(model, optimizers(model), range(5))
    return everything(model, name, client)


def test_torch_save(client, name, expected, tmp_path):
    model = Model(client, name)
    each = optimizers(model)
    train(model, each, range(3))
    torch.save({"model": model.state_dict(), "optimizers": [one.state_dict() for one in each]}, tmp_path / "state")
    train(model, each, range(3, 4))  # lost
    state = torch.load(tmp_path / "state", weights_only=True)
    resumed = Model(client, name)
    each = optimizers(resumed)
    assert str(resumed.load_state_dict(state["model"])) == "<All keys matched successfully>"
    for one, saved in zip(each, state["optimizers"]):
        one.load_state_dict(saved)
    assert resumed.head.step == 3
    train(resumed, each, range(3, 5))
    assert_same(everything(resumed, name, client), expected)


def test_distributed_checkpoint(client, name, expected, tmp_path):
    model = Model(client, name)
    each = optimizers(model)
    train(model, each, range(3))
    dcp.save({"model": get_model_state_dict(model), "optimizer": each[0].state_dict(), "head": each[1].state_dict()},
             checkpoint_id=tmp_path)
    train(model, each, range(3, 4))
    state = {"model": get_model_state_dict(model), "optimizer": each[0].state_dict(), "head": each[1].state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(model, state["model"])
    each[0].load_state_dict(state["optimizer"])
    each[1].load_state_dict(state["head"])
    train(model, each, range(3, 5))
    assert_same(everything(model, name, client), expected)


def test_accelerate(client, name, expected, tmp_path):
    def prepared():
        accelerator = accelerate.Accelerator(cpu=True)
        model = Model(client, name)
        return accelerator, *accelerator.prepare(model, *optimizers(model))
    accelerator, model, *each = prepared()
    train(model, each, range(3), accelerator.backward)
    accelerator.save_state(tmp_path)
    train(model, each, range(3, 4), accelerator.backward)
    accelerator, model, *each = prepared()
    accelerator.load_state(tmp_path)
    train(model, each, range(3, 5), accelerator.backward)
    assert_same(everything(model, name, client), expected)


def test_accelerate_divides_losses(client, make_head):
    """Its gradient accumulation divides the loss behind the LossHead."""
    weights = []
    for accumulation in (1, 2):
        name = make_head(hidden_size=D, vocab_size=V)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model = Model(client, name)
        each = torch.optim.SGD(model.parameters(), lr=0.5), HeadOptimizer(model.head, lr=0.5, algorithm="sgd")
        model, *each = accelerator.prepare(model, *each)
        hidden, targets = batch(0)
        for part in range(accumulation):
            rows = slice(part * N // accumulation, (part + 1) * N // accumulation)
            with accelerator.accumulate(model):
                accelerator.backward(model(hidden[rows], targets[rows]))
                for one in each:
                    one.step()
                    one.zero_grad()
        weights.append(client.read_tensor(name))
    np.testing.assert_allclose(*weights, atol=1e-6)


class Module(lightning.LightningModule):
    def __init__(self, client, name):
        super().__init__()
        self.automatic_optimization = False
        self.model = Model(client, name)

    def configure_optimizers(self):
        return list(optimizers(self.model))

    def training_step(self, rows, _):
        self.manual_backward(self.model(*rows))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def loader(steps):
    return torch.utils.data.DataLoader([batch(step) for step in steps], batch_size=None)


def test_lightning(client, name, expected, tmp_path):
    def fit(steps, **options):
        module = Module(client, name)
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                                    enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path)
        trainer.fit(module, loader(steps), **options)
        return trainer, module
    trainer, module = fit(range(3))
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    train(module.model, optimizers(module.model), range(3, 4))
    resumed = Module(client, name)
    state = torch.load(tmp_path / "three.ckpt", weights_only=True)
    each = optimizers(resumed.model)
    resumed.load_state_dict(state["state_dict"])
    for one, saved in zip(each, state["optimizer_states"]):
        one.load_state_dict(saved)
    train(resumed.model, each, range(3, 5))
    assert_same(everything(resumed.model, name, client), expected)
    # The way of Lightning's own: another epoch after the third step.
    module = Module(client, name)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path)
    trainer.fit(module, loader(range(3, 5)), ckpt_path=tmp_path / "three.ckpt")
    assert_same(everything(module.model, name, client), expected)


def test_an_empty_server(expected, tmp_path):
    """One that was started anew on the same checkpoint folder restores the head that it does not have."""
    server = ServerProcess()
    try:
        with lossd.Client(server.target) as client:
            client.create_head("lm", hidden_size=D, vocab_size=V, compute_dtype="fp32")
            model = Model(client, "lm")
            each = optimizers(model)
            train(model, each, range(3))
            saved = model.state_dict(), [one.state_dict() for one in each]
        server.kill()
        server.start()
        with lossd.Client(server.target) as client:
            client.create_head("lm", hidden_size=D, vocab_size=V, compute_dtype="fp32", seed=9)
            model = Model(client, "lm")
            each = optimizers(model)
            model.load_state_dict(saved[0])
            for one, state in zip(each, saved[1]):
                one.load_state_dict(state)
            train(model, each, range(3, 5))
            assert_same(everything(model, "lm", client), expected)
    finally:
        server.stop()


def test_nothing_passes_silently(client, name, make_head):
    model = Model(client, name)
    each = optimizers(model)
    state = model.state_dict()
    without = {key: value for key, value in state.items() if not key.startswith("head")}
    with pytest.raises(RuntimeError, match="Missing key.*head._extra_state"):
        model.load_state_dict(without)
    with pytest.raises(KeyError, match="does not say where head"):
        each[1].load_state_dict({key: value for key, value in each[1].state_dict().items() if key != "head"})
    head_state = model.head.save_state()
    with pytest.raises(lossd.NotFound, match="checkpoint 'lm/gone'.*--checkpoint_dir"):
        model.head.load_state({**head_state, "checkpoint": "lm/gone"})
    with pytest.raises(RuntimeError, match="version 7"):
        model.head.load_state({**head_state, "version": 7})
    other = make_head(hidden_size=D, vocab_size=V + 1)
    with pytest.raises(lossd.LossdError):
        Model(client, other).load_state_dict(state)
    apart = Model(client, name, state="none")
    apart.load_state_dict(apart.state_dict())
    with pytest.raises(RuntimeError, match="state='none'"):
        model.load_state_dict(apart.state_dict())


def test_a_state_is_saved_once(client, name):
    model = Model(client, name)
    each = optimizers(model)
    train(model, each, range(1))
    numbered = client.describe_head(name).state.weights_version != 0  # else the server does not say what changed
    states = [state() for state in (model.head.save_state, model.head.save_state)]
    assert (states[0]["checkpoint"] == states[1]["checkpoint"]) == numbered
    assert len(client.list_checkpoints(name)) == (1 if numbered else 2)
    train(model, each, range(1, 2))
    assert model.head.save_state()["checkpoint"] not in [state["checkpoint"] for state in states]


def test_what_was_written_since_is_undone(client, name):
    """In the same step, too."""
    head = LossHead(client, name)
    weight = client.read_tensor(name)
    state = head.save_state()
    client.write_tensor(name, "weight", np.zeros_like(weight))
    head.load_state(state)
    np.testing.assert_array_equal(client.read_tensor(name), weight)
