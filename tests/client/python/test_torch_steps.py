# SPDX-License-Identifier: Apache-2.0
"""What a program's steps are to a head: those that it continues, those that it forgets, and heads that are not to be trained."""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conftest import EPS  # noqa: E402
from servers import ServerProcess  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead, TiedEmbedding, _step_tracker  # noqa: E402


# Heads that are there already: what a program says that it continues, and optimizers that begin as torch's do.

D, V, N = 16, 90, 48


@pytest.fixture(autouse=True)
def seeded(seed):
    torch.manual_seed(seed % 2**31)


@pytest.fixture
def used(server, make_head):
    """A head that another program has trained for three steps, and the name of its run."""
    def make(save=False, **spec):
        name, random = make_head(hidden_size=D, vocab_size=V, **spec), np.random.default_rng(3)
        with lossd.Client(server.target, run="night-3") as other:
            for step in range(3):
                hidden = random.standard_normal((N, D), np.float32)
                other.compute_loss(name, hidden, random.integers(0, V, N), step=step, id=0, accumulate=True)
                other.apply_step(name, step, lossd.AdamW(lr=1e-2), expected_microbatches=[0])
            if save:
                other.save_checkpoint(name, "kept")
        return name, "night-3"
    return make


def rows():
    return torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))


def test_the_first_forward_says_what_it_continues(client, used):
    name, run = used(save=True)
    head = LossHead(client, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            head(*rows())  # an evaluation
    with pytest.warns(UserWarning, match=rf"head '{name}' continues at step 3: run {run} applied the last step at 20.*"
                                         rf"saved as {name}/kept at 20.*if_exists='reset'") as said:
        head(*rows()).backward()
    assert len(said) == 1 and "\n" not in str(said[0].message) and said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head(*rows()).backward()
        HeadOptimizer(head, lr=0.1).step()
        again = LossHead(client, name)  # this program has trained it
        again(*rows()).backward()
        HeadOptimizer(again, lr=0.1).step()


@pytest.mark.parametrize("how", ["fresh", "load_checkpoint", "load_state", "load_state_dict", "frozen", "another rank"])
def test_who_says_nothing(client, make_head, used, how):
    """A program that has made the head or restored it, that does not train it, or that is not the first of several."""
    name = make_head(hidden_size=D, vocab_size=V) if how == "fresh" else used(save=True)[0]
    options = {"frozen": {"train_head": False}, "another rank": {"rank": 1, "world_size": 2}}.get(how, {})
    if how == "load_checkpoint":
        client.load_checkpoint(f"{name}/kept")
    head = LossHead(client, name, **options)
    if how == "load_state":
        head.load_state(head.save_state())
    elif how == "load_state_dict":
        head.load_state_dict(head.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head(*rows()).backward()


# ---- Optimizers ----

@pytest.fixture
def compare(client):
    def run(name, optimizer, local, steps, head):
        """Both train on the same rows; the largest difference of the weights."""
        weight = local.param_groups[0]["params"][0]
        for _ in range(steps):
            hidden, targets = rows()
            head(hidden.detach(), targets).backward()
            torch.nn.functional.cross_entropy(hidden.detach() @ weight.T, targets).backward()
            for each in (optimizer, local):
                each.step()
                each.zero_grad()
        return float((torch.from_numpy(client.read_tensor(name)) - weight.detach()).abs().max())
    return run


def local_adamw(client, name, **options):
    weight = torch.nn.Parameter(torch.from_numpy(client.read_tensor(name)))
    return torch.optim.AdamW([weight], lr=1e-2, eps=EPS, weight_decay=0.1, **options)


@pytest.mark.filterwarnings("ignore:head")
@pytest.mark.parametrize("steps", [1, 20])
def test_a_new_optimizer_begins(client, used, compare, steps):
    """Neither moments nor the count of steps of another program's optimizer are left."""
    name, _ = used()
    head = LossHead(client, name)
    optimizer = HeadOptimizer(head, lr=1e-2, eps=EPS, weight_decay=0.1)
    assert compare(name, optimizer, local_adamw(client, name), steps, head) < 2e-5
    assert client.describe_head(name).updates == steps and client.describe_head(name).state.step == 3 + steps


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.filterwarnings("ignore:head")
def test_a_new_sgd_begins(client, used, compare, momentum):
    name, _ = used()
    head = LossHead(client, name)
    optimizer = HeadOptimizer(head, lr=0.1, algorithm="sgd", momentum=momentum)
    weight = torch.nn.Parameter(torch.from_numpy(client.read_tensor(name)))
    assert compare(name, optimizer, torch.optim.SGD([weight], lr=0.1, momentum=momentum), 3, head) < 1e-6


def test_a_second_optimizer_of_one_program_begins(client, make_head, compare):
    """As a second phase of training, or a notebook's cell, makes it."""
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name)
    for _ in range(2):
        optimizer = HeadOptimizer(head, lr=1e-2, eps=EPS, weight_decay=0.1)
        assert compare(name, optimizer, local_adamw(client, name), 3, head) < 2e-5


@pytest.mark.filterwarnings("ignore:head")
@pytest.mark.parametrize("how", [
    "continues", "load_checkpoint", "load_state_dict", "load_state", "client made before", "another client"])
def test_an_optimizer_that_continues(client, used, how):
    """The moments are those of the earlier program: with no gradient the weights move on."""
    name, _ = used(save=True)
    if how == "client made before":
        client.load_checkpoint(f"{name}/kept")
    head = LossHead(client, name)
    optimizer = HeadOptimizer(head, lr=1e-2, continues=how == "continues")
    if how == "load_checkpoint":
        client.load_checkpoint(f"{name}/kept")
        head.sync()
    elif how == "another client":  # of this program
        with lossd.Client(client.target) as other:
            other.load_checkpoint(f"{name}/kept")
        head.sync()
    elif how == "load_state_dict":
        optimizer.load_state_dict(HeadOptimizer(head, lr=1e-2, continues=True).state_dict())
    elif how == "load_state":
        head.load_state(head.save_state())
    before = client.read_tensor(name)
    head(torch.randn(N, D), torch.full((N,), -100)).backward()
    optimizer.step()
    assert client.describe_head(name).updates == 4
    assert abs(client.read_tensor(name) - before).max() > 1e-4
    begun = HeadOptimizer(head, lr=1e-2)  # nothing was loaded since the last step
    head(torch.randn(N, D), torch.full((N,), -100)).backward()
    before = client.read_tensor(name)
    begun.step()
    assert client.describe_head(name).updates == 1 and (client.read_tensor(name) == before).all()


@pytest.mark.parametrize("kept", ["checkpoint", "none"])
def test_a_state_that_is_taken_and_given_back_continues_nothing(client, used, compare, kept):
    """As Accelerate's prepare() does with every optimizer."""
    name, _ = used()
    head = LossHead(client, name, state=kept)
    optimizer = HeadOptimizer(head, lr=1e-2, eps=EPS, weight_decay=0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.warns(UserWarning, match="continues at step 3"):
        assert compare(name, optimizer, local_adamw(client, name), 2, head) < 2e-5
    optimizer.load_state_dict(optimizer.state_dict())  # it has begun, and goes on
    head(torch.randn(N, D), torch.full((N,), -100)).backward()
    optimizer.step()
    assert client.describe_head(name).updates == 3


@pytest.mark.filterwarnings("ignore:head")
def test_a_first_step_that_fails_is_the_first_again(client, used, compare, monkeypatch):
    name, _ = used()
    head = LossHead(client, name)
    optimizer = HeadOptimizer(head, lr=1e-2, eps=EPS, weight_decay=0.1)
    head(*rows()).backward()
    apply_step = client.apply_step
    with monkeypatch.context() as lost:
        def refuse(*arguments, **options):
            raise lossd.Unavailable("no connection")
        lost.setattr(client, "apply_step", refuse)
        with pytest.raises(lossd.Unavailable):
            optimizer.step()
    optimizer.zero_grad()
    assert compare(name, optimizer, local_adamw(client, name), 3, head) < 2e-5
    assert client.apply_step == apply_step


@pytest.mark.filterwarnings("ignore:head")
def test_a_step_whose_answer_was_lost_is_done_once(client, used, compare, monkeypatch):
    name, _ = used()
    head = LossHead(client, name)
    optimizer = HeadOptimizer(head, lr=1e-2, eps=EPS, weight_decay=0.1)
    local = local_adamw(client, name)
    apply_step = client.apply_step

    def lose(*arguments, **options):
        apply_step(*arguments, **options)
        raise lossd.Unavailable("no answer")

    hidden, targets = rows()
    head(hidden.detach(), targets).backward()
    torch.nn.functional.cross_entropy(hidden.detach() @ local.param_groups[0]["params"][0].T, targets).backward()
    monkeypatch.setattr(client, "apply_step", lose)
    with pytest.raises(lossd.Unavailable):
        optimizer.step()
    monkeypatch.undo()
    optimizer.step()
    local.step()
    local.zero_grad()
    assert compare(name, optimizer, local, 3, head) < 2e-5


@pytest.mark.filterwarnings("ignore:head")
def test_trainers_without_a_group_begin_together(client, used):
    """Each sends the same; the server does it once."""
    name, _ = used(save=True)
    for restored in (False, True):
        if restored:
            client.load_checkpoint(f"{name}/kept")
        with lossd.Client(client.target) as other:
            heads = [LossHead(each, name, rank=rank, world_size=2) for rank, each in enumerate((client, other))]
            optimizers = [HeadOptimizer(head, lr=1e-2) for head in heads]
            for step in range(2):
                for head in heads:
                    head(*rows()).backward()
                for optimizer in optimizers:
                    optimizer.step()
        assert client.describe_head(name).updates == (5 if restored else 2)


# ---- States and steps of others ----

@pytest.mark.parametrize("backwards", [0, 1, 2])
@pytest.mark.parametrize("kept", ["checkpoint", "none"])
def test_a_state_that_is_loaded_within_a_step_discards_it(client, make_head, backwards, kept):
    """On the server too: the next step has the rows that come after it, and no others."""
    name = make_head(hidden_size=D, vocab_size=V)
    head = LossHead(client, name, state=kept)
    optimizer = HeadOptimizer(head, lr=0.1)
    state = head.state_dict()
    for _ in range(backwards):
        head(*rows()).backward()
    head.load_state_dict(state)
    assert client.describe_head(name).step_rows == 0
    head(*rows()).backward()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)


@pytest.mark.filterwarnings("ignore:head")
@pytest.mark.parametrize("call", ["forward", "step"])
def test_a_step_that_another_program_has_moved(client, used, call):
    name, _ = used()
    head = LossHead(client, name)
    optimizer = HeadOptimizer(head, lr=0.1)
    if call == "step":
        head(*rows()).backward()
    with lossd.Client(client.target, run="day-1") as other:
        other.compute_loss(name, rows()[0].detach().numpy(), rows()[1].numpy(), step=3, id=7, accumulate=True)
        for step in range(3, 5):
            other.apply_step(name, step, lossd.AdamW(lr=0.1))
    with pytest.raises(lossd.LossdError, match=rf"another program trains this head: run day-1.*this one is run {client.run}.*"
                                               "process_group="):
        if call == "step":
            optimizer.step()
        else:
            head(*rows())


def test_a_step_that_was_restored(client, used):
    name, _ = used(save=True)
    head = LossHead(client, name, train_head=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head(*rows()).backward()
        HeadOptimizer(head, lr=0.1).step()
    with lossd.Client(client.target) as other:
        other.load_checkpoint(f"{name}/kept")
    with pytest.raises(lossd.FailedPrecondition, match=rf"the server loaded {name}/kept of step 3.*LossHead.sync"):
        head(*rows())
    head.sync()
    head(*rows()).backward()


# Loops that never apply a head's steps are told so, and others are not; heads that are not to be trained.

TOLD_OF_STEPS = hasattr(torch.optim.Optimizer, "register_step_post_hook")


@pytest.fixture
def head(client, make_head):
    return LossHead(client, make_head(hidden_size=D, vocab_size=V))


class Loop:
    """A trunk, its optimizer, and losses of a head."""

    def __init__(self, head):
        self.head = head
        self.trunk = torch.nn.Linear(D, D)
        self.optimizer = torch.optim.SGD(self.trunk.parameters(), lr=0.1)

    def backward(self, times=1):
        for _ in range(times):
            self.head(self.trunk(torch.randn(N, D)), torch.randint(0, V, (N,))).backward()


@contextlib.contextmanager
def silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_no_optimizer_was_made(head):
    loop = Loop(head)
    with silence():
        loop.backward(3)
    with pytest.warns(UserWarning, match=r"4 losses of head .* no HeadOptimizer was made.*"
                                         r"head_optimizer = lossd.torch.HeadOptimizer\(head, lr=...\)") as said:
        loop.backward()
    assert said[0].filename == __file__
    with silence():
        loop.backward(4)


@pytest.mark.parametrize("deferred", [False, True])
def test_no_optimizer_of_a_deferred_loss(client, make_head, deferred):
    loop = Loop(LossHead(client, make_head(hidden_size=D, vocab_size=V), deferred=deferred))
    with pytest.warns(UserWarning, match="no HeadOptimizer"):
        loop.backward(4)


@pytest.mark.skipif(not TOLD_OF_STEPS, reason="torch does not tell of steps")
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("zeroed", [False, True])
def test_the_head_is_never_stepped(head, accumulated, zeroed):
    loop, optimizer = Loop(head), HeadOptimizer(head, lr=0.1)

    def step():
        loop.backward(accumulated)
        loop.optimizer.step()
        if zeroed:
            optimizer.zero_grad()

    with silence():
        step()
    with pytest.warns(UserWarning, match=r"SGD has made 2 steps.*add head_optimizer.step\(\)") as said:
        step()
    assert said[0].filename == __file__
    with silence():
        step()


def test_a_head_alone_is_never_stepped(head):
    """There is no other optimizer that could tell."""
    HeadOptimizer(head, lr=0.1)
    hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
    with silence():
        for _ in range(63):
            head(hidden, targets).backward()
    with pytest.warns(UserWarning, match=r"has 64 microbatches.*head_optimizer.step\(\) is missing"):
        head(hidden, targets).backward()


def test_every_step_is_discarded(head):
    optimizer = HeadOptimizer(head, lr=0.1)
    with silence():
        for _ in range(3):
            head(torch.randn(N, D), torch.randint(0, V, (N,))).backward()
            optimizer.zero_grad()
        optimizer.zero_grad()
        head(torch.randn(N, D), torch.randint(0, V, (N,))).backward()
    with pytest.warns(UserWarning, match=r"discarded 4 steps.*add head_optimizer.step\(\) before"):
        optimizer.zero_grad()


@pytest.mark.skipif(not TOLD_OF_STEPS, reason="torch does not tell of steps")
def test_a_step_of_very_many_microbatches(head):
    loop, optimizer = Loop(head), HeadOptimizer(head, lr=0.1)
    with silence():
        loop.backward(150)
        loop.optimizer.step()
        optimizer.step()


def test_the_head_is_never_stepped_under_an_older_torch(head, monkeypatch):
    monkeypatch.setattr(_step_tracker, "_HOOK", None)  # as torch 1.13 has it
    loop = Loop(head)
    HeadOptimizer(head, lr=0.1)
    with silence():
        loop.backward(63)
    with pytest.warns(UserWarning, match=r"has 64 microbatches.*head_optimizer.step\(\) is missing"):
        loop.backward()


@pytest.mark.parametrize("first", ["head", "trunk"])
def test_loops_that_step_are_told_nothing(head, first):
    loop, optimizer = Loop(head), HeadOptimizer(head, lr=0.1)
    both = [optimizer, loop.optimizer]
    with silence():
        for accumulated in (1, 2, 20):
            for _ in range(3):
                loop.backward(accumulated)
                for each in both if first == "head" else both[::-1]:
                    each.step()
                    each.zero_grad()


def test_several_optimizers_of_a_trunk(head):
    """Each makes its step before the head's, and an optimizer of another model makes many."""
    loop, optimizer = Loop(head), HeadOptimizer(head, lr=0.1)
    others = [torch.optim.SGD(loop.trunk.parameters(), lr=0.1) for _ in range(3)]
    elsewhere = Loop(None)
    with silence():
        for _ in range(3):
            loop.backward()
            for _ in range(3):
                elsewhere.optimizer.step()
            for each in others:
                each.step()
            optimizer.step()


def test_evaluation_and_frozen_heads_are_told_nothing(client, head):
    with silence():
        Loop(LossHead(client, head.head_name, train_head=False)).backward(6)
        for _ in range(6):
            with torch.no_grad():
                head(torch.randn(N, D), torch.randint(0, V, (N,)))


def test_a_program_that_steps_by_itself_is_told_nothing(client, head):
    """With Client.apply_step, or where another process does; sync() takes the head as it is then."""
    loop = Loop(head)
    with silence():
        for step in range(4):
            loop.backward(2)
            client.apply_step(head.head_name, step, lossd.AdamW(lr=0.1))
            head.sync()


def test_a_full_ledger_names_the_step_that_is_missing():
    server = ServerProcess("--ledger_bytes", "64KiB")
    try:
        with lossd.Client(server.target) as client:
            client.create_head("lm", hidden_size=D, vocab_size=V)
            head = LossHead(client, "lm")
            with pytest.raises(lossd.ResourceExhausted, match=r"no step\(\): if the loop never calls step\(\)"), \
                    warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(3000):
                    Loop(head).backward()
    finally:
        server.stop()


# ---- Heads that are not to be trained ----

def bits(client, head):
    return client.read_tensor(head.head_name).view(np.uint32)


@pytest.mark.parametrize("how", ["head", "model", "outer model", "constructor"])
def test_requires_grad_freezes_the_head(client, make_head, how):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V), train_head=how != "constructor")
    model = torch.nn.ModuleDict({"inner": torch.nn.Sequential(torch.nn.Linear(D, D), head)})
    loop, optimizer = Loop(head), HeadOptimizer(head, lr=0.1)
    if how != "constructor":
        {"head": head, "model": model["inner"], "outer model": model}[how].requires_grad_(False)
    before = bits(client, head)
    for _ in range(2):
        loop.backward()
        assert optimizer.load_grad_norm() == 0.0 and optimizer.stand_in.grad is None
        torch.nn.utils.clip_grad_norm_([*loop.trunk.parameters(), optimizer.stand_in], 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert (bits(client, head) == before).all() and client.describe_head(head.head_name).state.step == 0
    assert loop.trunk.weight.grad.abs().sum() > 0
    (head if how == "head" else model).requires_grad_(True)
    loop.backward()
    optimizer.step()
    assert (bits(client, head) != before).any()


def test_requires_grad_of_another_module_changes_nothing(client, head):
    model = torch.nn.Sequential(torch.nn.Linear(D, D), head)
    model[0].requires_grad_(False)
    assert head.train_head
    list(model.parameters())
    list(model.named_modules())
    assert head.train_head
    model.requires_grad_()
    assert head.train_head


def test_a_tied_embedding_of_a_frozen_head(client, head):
    """The matrix that the two share stays as it is."""
    embedding = torch.nn.Embedding(V, D)
    tied, optimizer = TiedEmbedding(head, embedding.weight), HeadOptimizer(head, lr=0.1)
    tied.pull()
    head.requires_grad_(False)
    before = bits(client, head)
    head(embedding(torch.arange(N)), torch.arange(N)).backward()
    tied.add_gradient()
    optimizer.step()
    tied.pull()
    assert (bits(client, head) == before).all() and (embedding.weight.detach().numpy().view(np.uint32) == before).all()
    assert client.describe_head(head.head_name).step_contributions == 0 and embedding.weight.grad is None


def test_a_head_that_was_created_frozen(client, make_head):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V, frozen=True))
    with pytest.raises(ValueError, match="was created with frozen=True"):
        head.requires_grad_(True)
    torch.nn.Sequential(torch.nn.Linear(D, D), head).requires_grad_(True)
    assert not head.train_head
    optimizer = HeadOptimizer(head, lr=0.1)
    Loop(head).backward(5)
    optimizer.step()
