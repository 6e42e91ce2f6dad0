# SPDX-License-Identifier: Apache-2.0
"""Resets of heads, optimizers that begin with a step, and what a head says of its runs and checkpoints."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cut_proxy import CutProxy
from server_process import ServerProcess

import lossd

D, V, N = 16, 40, 64
ADAMW, SGD = lossd.AdamW(lr=0.05, weight_decay=0.1), lossd.SGD(lr=0.1, momentum=0.9)


def rows(number: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(number)
    return random.standard_normal((N, D), np.float32), random.integers(0, V, N).astype(np.int32)


def train(client: lossd.Client, head: str, steps: range, optimizer=ADAMW, **first) -> None:
    for step in steps:
        client.compute_loss(head, *rows(step), step=step, id=1, accumulate=True)
        client.apply_step(head, step, optimizer, **(first if step == steps.start else {}))


def tensors(client: lossd.Client, head: str) -> list[np.ndarray]:
    return [client.read_tensor(head, param, role) for param in ("weight", "bias") for role in ("value", "moment1", "moment2")]


def assert_same(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


# ---- begin_optimizer ----

@pytest.mark.parametrize("optimizer", [ADAMW, SGD])
def test_an_optimizer_that_begins_is_as_a_new_one(client, make_head, optimizer):
    used, new = (make_head(hidden_size=D, vocab_size=V, bias=True) for _ in range(2))
    train(client, used, range(4), optimizer)
    for param in ("weight", "bias"):
        client.write_tensor(new, param, client.read_tensor(used, param))
    for step in range(4):  # steps without rows and rate: the count, and nothing else
        client.apply_step(new, step, lossd.SGD(lr=0.0))
    assert client.describe_head(new).updates == 4
    client.reset_head(new, "optimizer")
    assert client.describe_head(new).updates == 0 and client.describe_head(new).state.step == 4
    train(client, used, range(4, 7), optimizer, begin_optimizer=True)
    train(client, new, range(4, 7), optimizer)
    assert_same(tensors(client, used), tensors(client, new))
    assert client.describe_head(used).updates == 3


def test_a_step_that_is_refused_begins_nothing(client, make_head):
    head = make_head(hidden_size=D, vocab_size=V, bias=True)
    train(client, head, range(2))
    before = tensors(client, head)
    client.compute_loss(head, *rows(2), step=2, id=1, accumulate=True)
    with pytest.raises(lossd.FailedPrecondition):
        client.apply_step(head, 2, ADAMW, expected_microbatches=[1, 2], begin_optimizer=True)
    assert_same(tensors(client, head), before)
    assert client.describe_head(head).updates == 2


# ---- reset_head ----

def test_a_reset_head_is_a_new_head(client, make_head):
    used, new = (make_head(hidden_size=D, vocab_size=V, bias=True, seed=3) for _ in range(2))
    train(client, used, range(3))
    client.compute_loss(used, *rows(3), step=3, id=1, accumulate=True)
    reset = client.reset_head(used, "all", seed=3)
    assert (reset.state.step, reset.updates, reset.step_rows) == (0, 0, 0)
    assert reset.history == lossd.HeadHistory()
    assert_same(tensors(client, used), tensors(client, new))
    with pytest.raises(lossd.FailedPrecondition, match="the head was reset"):
        client.apply_step(used, 2, ADAMW)  # not answered with what that step was
    for head in (used, new):
        train(client, head, range(2))
    assert_same(tensors(client, used), tensors(client, new))
    assert not client.reset_head(used, "all", zeros=True).updates and not client.read_tensor(used).any()


def test_rows_of_this_client_are_forgotten(client, make_head):
    head = make_head(hidden_size=D, vocab_size=V)
    for scope in ("optimizer", "all"):
        client.compute_loss(head, *rows(0), step=0, id=1, accumulate=True)
        client.reset_head(head, scope)
        client.compute_loss(head, *rows(0), step=0, id=1, accumulate=True)
        assert client.describe_head(head).step_rows == N
        client.reset_head(head, "all")


def test_rows_of_another_client_are_discarded(server, client, make_head):
    head = make_head(hidden_size=D, vocab_size=V)
    with lossd.Client(server.target) as other:
        other.compute_loss(head, *rows(0), step=0, id=1, accumulate=True)
        client.reset_head(head, "optimizer")
        with pytest.raises(lossd.StepDiscarded, match="reset the head"):
            other.apply_step(head, 0, ADAMW)


@pytest.mark.parametrize("arguments, what", [
    ({"scope": "moments"}, "scope is 'moments'; it must be one of optimizer, all"),
    ({"scope": "optimizer", "seed": 1}, "scope is 'optimizer'; seed, zeros and tensor_file go with 'all'"),
    ({"scope": "optimizer", "zeros": True}, "go with 'all'"),
])
def test_bad_resets(client, make_head, arguments, what):
    head = make_head(hidden_size=D, vocab_size=V)
    with pytest.raises(lossd.InvalidArgument, match=what):
        client.reset_head(head, **arguments)


def test_heads_that_cannot_be_reset(client, make_head):
    with pytest.raises(lossd.NotFound, match="nobody"):
        client.reset_head("nobody", "all")
    frozen = make_head(hidden_size=D, vocab_size=V, frozen=True)
    with pytest.raises(lossd.FailedPrecondition, match="frozen"):
        client.reset_head(frozen, "optimizer")
    before = client.read_tensor(frozen)
    client.reset_head(frozen, "all", seed=5)
    assert (client.read_tensor(frozen) != before).any()


def test_a_reset_waits_for_nobody(deterministic_server, seed):
    """Calls that accumulate are open: nothing changes until they have ended."""
    with lossd.Client(deterministic_server.target) as client:
        client.create_head("waiting", hidden_size=D, vocab_size=V)
        client.compute_loss("waiting", *rows(0), step=0, id=0, accumulate=True)
        client.apply_step("waiting", 0, ADAMW)
        before = client.read_tensor("waiting", role="moment1")
        waits = client.compute_loss_async("waiting", *rows(1), step=1, id=1, accumulate=True)  # for id 0
        while client.describe_head("waiting").open_streams == 0:
            time.sleep(0.01)
        for scope in ("optimizer", "all"):
            with pytest.raises(lossd.FailedPrecondition, match="1 open accumulating ComputeLoss call"):
                client.reset_head("waiting", scope)
        np.testing.assert_array_equal(client.read_tensor("waiting", role="moment1"), before)
        client.compute_loss("waiting", *rows(0), step=1, id=0, accumulate=True)
        waits.wait()
        client.reset_head("waiting", "optimizer")
        assert not client.read_tensor("waiting", role="moment1").any()


def test_a_call_that_has_just_ended_is_not_in_the_way(client, make_head):
    head = make_head(hidden_size=D, vocab_size=V)
    for number in range(100):
        client.compute_loss(head, *rows(0), step=0, id=1, accumulate=True)
        client.add_gradient(head, "weight", np.ones((V, D), np.float32), step=0, id=2)
        client.reset_head(head, "optimizer" if number % 2 else "all")


def test_a_reset_is_done_once_through_a_cut_network(server, client, make_head, seed):
    head = make_head(hidden_size=D, vocab_size=V)
    proxy = CutProxy(server.target, mean_bytes=1500, seed=seed)
    retry = lossd.RetryOptions(max_attempts=200, initial_backoff=0.01, max_backoff=0.05)
    with lossd.Client(proxy.target, channels=1, retry=retry, transport="grpc", wait_for_server=True) as shaky:
        rounds = 0
        while proxy.cuts < 8 or rounds < 10:
            train(client, head, range(2))
            assert shaky.reset_head(head, "all").state.step == 0
            rounds += 1
    proxy.close()


def test_a_repeated_reset_leaves_what_was_trained_meanwhile(server, client, make_head, monkeypatch):
    """The answer is lost, and before the repeat somebody trains the head that was reset."""
    head = make_head(hidden_size=D, vocab_size=V)
    train(client, head, range(3))
    resets = []
    with lossd.Client(server.target, retry=lossd.RetryOptions(initial_backoff=0.01)) as other:
        unary, run = other._connections.unary, other._connections.run

        def watch(method, *arguments, **keywords):
            resets.append(method.endswith("ResetHead"))
            return unary(method, *arguments, **keywords)

        lost = []

        def lose_the_first_answer(call, cancel=None):
            answer = run(call, cancel)
            if resets[-1] and not lost:
                lost.append(answer)
                train(client, head, range(2))
                raise lossd.Unavailable("socket closed")
            return answer

        monkeypatch.setattr(other._connections, "unary", watch)
        monkeypatch.setattr(other._connections, "run", lose_the_first_answer)
        answer = other.reset_head(head, "all")
    assert lost and answer.state.step == 0  # the stored answer
    assert client.describe_head(head).state.step == 2


def is_loaded(client: lossd.Client, head: str) -> bool:
    """Whether a client of this program has loaded a checkpoint into the head."""
    return client._head_cache.loaded(head, client.describe_head(head).state.incarnation)


def test_a_reset_is_meant_for_the_process_that_has_the_head():
    server = ServerProcess()
    try:
        with lossd.Client(server.target, retry=lossd.RetryOptions(max_attempts=30, initial_backoff=0.05)) as client:
            found = client.create_head("a", hidden_size=D, vocab_size=V)
            train(client, "a", range(2))
            client.save_checkpoint("a", "two")
            server.kill()
            server.start()
            client.get_server()  # is repeated until the server is there
            client.load_checkpoint("a/two")
            assert is_loaded(client, "a")
            with pytest.raises(lossd.Restarted, match=f"{found.state.incarnation:016x} -> "):
                client._reset(found, "all", lossd._head_calls.InitialValues(0, False, None), None)
            assert client.describe_head("a").state.step == 2
            assert client.reset_head("a", "all").state.step == 0
            assert not is_loaded(client, "a")
    finally:
        server.stop()


# ---- create_head(if_exists=) ----

def test_what_becomes_of_a_head_that_exists(client, make_head):
    head = make_head(hidden_size=D, vocab_size=V, seed=5)
    created = client.read_tensor(head)
    train(client, head, range(2))
    trained = client.read_tensor(head)
    same = {"hidden_size": D, "vocab_size": V, "compute_dtype": "fp32"}
    for if_exists in (None, "error"):
        with pytest.raises(lossd.AlreadyExists, match='if_exists="keep" .* if_exists="reset"'):
            client.create_head(head, **same, if_exists=if_exists)
    assert client.create_head(head, **same, if_exists="keep").state.step == 2
    np.testing.assert_array_equal(client.read_tensor(head), trained)
    for if_exists in ("keep", "reset"):
        with pytest.raises(lossd.AlreadyExists, match=f"vocab_size {V} instead of {V + 1}"):
            client.create_head(head, hidden_size=D, vocab_size=V + 1, if_exists=if_exists)
    assert client.create_head(head, **same, seed=5, if_exists="reset").state.step == 0
    np.testing.assert_array_equal(client.read_tensor(head), created)
    with pytest.raises(lossd.InvalidArgument, match="if_exists is 'overwrite'; it must be one of error, keep, reset"):
        client.create_head(head, **same, if_exists="overwrite")
    fresh = f"{head}-new"
    assert client.create_head(fresh, **same, if_exists="reset").state.step == 0
    client.delete_head(fresh)


def test_exist_ok_is_the_earlier_name_of_keep(client, make_head):
    head = make_head(hidden_size=D, vocab_size=V)
    train(client, head, range(1))
    with pytest.warns(DeprecationWarning, match='if_exists="keep"') as caught:
        assert client.create_head(head, hidden_size=D, vocab_size=V, exist_ok=True).state.step == 1
    assert Path(caught[0].filename).name == Path(__file__).name
    with pytest.raises(lossd.AlreadyExists):
        client.create_head(head, hidden_size=D, vocab_size=V, exist_ok=False)
    for exist_ok in (True, False):
        with pytest.raises(ValueError, match=f"if_exists is 'reset' and exist_ok is {exist_ok}"):
            client.create_head(head, hidden_size=D, vocab_size=V, exist_ok=exist_ok, if_exists="reset")
    assert client.describe_head(head).state.step == 1


# ---- Runs and histories ----

def test_a_run_is_what_is_given_or_the_environment_or_a_name_of_its_own(server, monkeypatch):
    monkeypatch.delenv("LOSSD_RUN", raising=False)
    with lossd.Client(server.target) as one, lossd.Client(server.target) as other:
        assert one.run != other.run
        host, _, rest = one.run.rpartition(":")
        assert host and len(rest.rpartition("-")[2]) == 8
    with lossd.Client(server.target, run="mine") as client:
        assert client.run == "mine"
    with lossd.Client(server.target, run="") as client:
        assert client.run == ""
    monkeypatch.setenv("LOSSD_RUN", "job 17")
    with lossd.Client(server.target) as client:
        assert client.run == "job 17"
    monkeypatch.setenv("LOSSD_RUN", "a\nb")
    with pytest.raises(lossd.InvalidArgument, match=r"LOSSD_RUN is 'a\\nb'"):
        lossd.Client(server.target)
    for run in ("x" * 129, "tab\t", 17):
        with pytest.raises(lossd.InvalidArgument, match="^run is "):
            lossd.Client(server.target, run=run)


def test_a_head_tells_its_history(server, client, make_head):
    head = make_head(hidden_size=D, vocab_size=V)
    assert client.describe_head(head).history == lossd.HeadHistory()
    with lossd.Client(server.target, run="ä" * 128) as mine:
        mine.compute_loss(head, *rows(0), step=0, id=1, accumulate=True)
        assert client.describe_head(head).history.open_run == "ä" * 128
        mine.apply_step(head, 0, ADAMW)
        history = client.describe_head(head).history
        assert (history.run, history.open_run, history.checkpoint) == ("ä" * 128, "", "")
        assert abs(history.applied_unix_seconds - time.time()) < 60
        mine.save_checkpoint(head, "one")
        mine.add_gradient(head, "weight", np.ones((V, D), np.float32), step=1, id=2)
        assert client.describe_head(head).history.open_run == "ä" * 128
    train(client, head, range(1, 2))
    history = client.describe_head(head).history
    assert (history.run, history.checkpoint, history.checkpoint_step, history.loaded) == (client.run, f"{head}/one", 1, False)
    assert [each.run for each in client.list_checkpoints(head)] == ["ä" * 128]
    assert not is_loaded(client, head)
    client.load_checkpoint(f"{head}/one")
    assert is_loaded(client, head)
    client._head_cache.forget_loaded(head)
    assert not is_loaded(client, head)
    history = client.describe_head(head).history
    assert (history.run, history.checkpoint_step, history.loaded) == ("ä" * 128, 1, True)
    assert abs(history.checkpoint_unix_seconds - time.time()) < 60


def test_a_deferred_microbatch_has_a_run(client, make_head):
    head = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = rows(0)
    client.compute_loss(head, hidden, targets, step=0, id=1, reduction="none", retain=True)
    assert client.describe_head(head).history.open_run == ""
    client.backward(head, 1, np.ones(N, np.float32), hidden_size=D, step=0, accumulate=True)
    assert client.describe_head(head).history.open_run == client.run


def test_a_trainer_is_told_whose_step_it_has_met(server, client, make_head):
    head = make_head(hidden_size=D, vocab_size=V)
    with lossd.Client(server.target, run="the other one") as other:
        train(other, head, range(2))
        for call in (lambda: client.compute_loss(head, *rows(1), step=1, id=1, accumulate=True),
                     lambda: client.grad_norm(head, 1), lambda: client.zero_gradients(head, 1),
                     lambda: client.add_gradient(head, "weight", np.ones((V, D), np.float32), step=1, id=3),
                     lambda: client.apply_step(head, 5, ADAMW)):
            with pytest.raises(lossd.FailedPrecondition,
                               match="step is not the open step, which is 2, got ., *"
                                     "|another program trains this head: run the other one applied step 1 . seconds? ago"
                               ) as caught:
                call()
            assert "another program trains this head: run the other one applied step 1" in str(caught.value)
            assert caught.value.current_step == 2
        other.save_checkpoint(head, "two")
        train(other, head, range(2, 4))
        other.load_checkpoint(f"{head}/two")
        with pytest.raises(lossd.FailedPrecondition,
                           match=f"came back from a checkpoint: the server loaded {head}/two of step 2, saved . seconds? ago"):
            other.compute_loss(head, *rows(4), step=4, id=1, accumulate=True)


# ---- Many at once ----

def _reset_often(target: str, head: str, stop: threading.Event) -> None:
    with lossd.Client(target) as client:
        while not stop.is_set():
            try:
                client.reset_head(head, "all")
            except lossd.FailedPrecondition:
                pass


def test_resets_beside_a_training(server, client, make_head):
    """However they fall, each step is applied to a head of that step, and what is left is a head that trains as a new one."""
    head, new = (make_head(hidden_size=D, vocab_size=V, bias=True) for _ in range(2))
    stop = threading.Event()
    thread = threading.Thread(target=_reset_often, args=(server.target, head, stop))
    thread.start()
    applied = 0
    try:
        deadline = time.monotonic() + 30
        while applied < 20 and time.monotonic() < deadline:
            try:
                step = client.describe_head(head).state.step
                client.compute_loss(head, *rows(step), step=step, id=1, accumulate=True)
                assert client.apply_step(head, step, ADAMW, expected_microbatches=[1]).rows == N
                applied += 1
            except (lossd.FailedPrecondition, lossd.Aborted, lossd.Unavailable):
                client.acknowledge_restart(head)
    finally:
        stop.set()
        thread.join()
    assert applied
    client.reset_head(head, "all")
    for name in (head, new):
        train(client, name, range(2))
    assert_same(tensors(client, head), tensors(client, new))
