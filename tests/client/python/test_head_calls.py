# SPDX-License-Identifier: Apache-2.0
"""Calls on whole heads: resets, tensors that are read and written, checkpoints, shares."""

from __future__ import annotations

import collections
import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import CutProxy, ServerProcess

import lossd
from lossd import _head_calls
from lossd.v1 import head_pb2


# Resets of heads, optimizers that begin with a step, and what a head says of its runs and checkpoints.

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


# ---- lazy rows ----

@pytest.mark.parametrize("optimizer", [lossd.AdamW(lr=0.05, weight_decay=0.1, lazy_rows=True),
                                       lossd.SGD(lr=0.1, momentum=0.9, weight_decay=0.1, lazy_rows=True)])
def test_rows_without_a_gradient_keep_values_and_moments(client, make_head, optimizer):
    head = make_head(hidden_size=D, vocab_size=V, bias=True)
    train(client, head, range(2), optimizer)  # the loss gives every row a gradient
    random = np.random.default_rng()
    for step in range(2, 6):
        idle = random.random(V) < 0.5
        gradient = random.uniform(0.1, 1.0, (V, D)).astype(np.float32)
        gradient[idle] = random.choice([0.0, -0.0], (V, D)).astype(np.float32)[idle]
        before = tensors(client, head)
        client.add_gradient(head, "weight", gradient, step=step, id=1)
        client.apply_step(head, step, optimizer, expected_microbatches=[1])
        for was, now in zip(before[:3], tensors(client, head)[:3], strict=True):
            assert was[idle].tobytes() == now[idle].tobytes()
            if isinstance(optimizer, lossd.AdamW) or now.any():  # SGD has no second moment
                assert (was[~idle] != now[~idle]).all()
        if optimizer.weight_decay and isinstance(optimizer, lossd.SGD):
            assert (before[4] != tensors(client, head)[4]).all()  # the bias is not lazy: its momentum decays
    assert client.describe_head(head).updates == 6


def test_a_repeat_of_a_lazy_step_is_lazy(client, make_head):
    head = make_head(hidden_size=D, vocab_size=V)
    lazy, dense = (lossd.AdamW(lr=0.05, weight_decay=0.1, lazy_rows=each) for each in (True, False))
    start = client.read_tensor(head)
    client.apply_step(head, 0, lazy)
    np.testing.assert_array_equal(client.read_tensor(head), start)  # nothing was accumulated: nothing moves
    assert client.apply_step(head, 0, lazy).repeated_call
    with pytest.raises(lossd.FailedPrecondition, match="optimizer differs"):
        client.apply_step(head, 0, dense)
    client.apply_step(head, 1, dense)
    assert (client.read_tensor(head) != start).all()


# ---- residency ----

def test_a_head_in_host_memory(client, make_head):
    host, device = (make_head(hidden_size=D, vocab_size=V, frozen=True, seed=5, **where) for where in ({"residency": "host"}, {}))
    before = client.describe_head(host)
    assert before.spec.residency == "host" and not before.paging.on_device and before.paging.copies == 0
    assert before.memory.host_values > 0 and before.memory.weights == 0
    assert client.describe_head(device).spec.residency == "device" and client.describe_head(device).paging == lossd.Paging()
    hidden, targets = rows(2)
    assert client.compute_loss(host, hidden, targets).loss == client.compute_loss(device, hidden, targets).loss
    paging = client.describe_head(host).paging
    assert paging.on_device and (paging.copies, paging.hits) == (1, 0)
    assert paging.copied_bytes == paging.value_bytes > 0
    np.testing.assert_array_equal(client.read_tensor(host), client.read_tensor(device))
    client.write_tensor(host, "weight", np.zeros((V, D), np.float32))
    assert client.compute_loss(host, hidden, targets).loss == pytest.approx(np.log(V), rel=1e-5)
    assert client.describe_head(host).paging.copies == 2
    assert "in host memory" in repr(before)


@pytest.mark.parametrize("arguments, what", [
    ({"residency": "host"}, "residency must be device unless the head is frozen, got host"),
    ({"residency": "host", "frozen": True, "split": "vocabulary"}, "residency must be device for a head that is split by vocabulary"),
    ({"residency": "disk"}, "residency is 'disk'; it must be one of device, host"),
])
def test_residencies_that_are_refused(client, arguments, what):
    with pytest.raises(lossd.LossdError, match=what):
        client.create_head("refused", hidden_size=D, vocab_size=V, **arguments)
    assert "refused" not in {head.spec.name for head in client.list_heads()}


def test_a_head_with_another_residency_is_no_same_head(client, make_head):
    head = make_head(hidden_size=D, vocab_size=V, frozen=True)
    with pytest.raises(lossd.AlreadyExists, match="residency device instead of host"):
        client.create_head(head, hidden_size=D, vocab_size=V, frozen=True, residency="host", if_exists="keep")


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


def is_loaded(client: lossd.Client, head: str) -> bool:
    """Whether a client of this program has loaded a checkpoint into the head."""
    return _head_calls.has_loaded(head, client.describe_head(head).state)


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
                request = head_pb2.ResetHeadRequest(head="a", scope="RESET_SCOPE_ALL", incarnation=found.state.incarnation)
                client._call("ResetHead", request, head_pb2.ResetHeadResponse, None)
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
    for run in ("x" * 129, "tab\t", "no\0end", 17):
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
    _head_calls.forget_loaded(head)
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


# Heads that are deleted and made again with another shape while a call moves a tensor of them; of calls that send one,
# tests/client/cpp/faults_test.cc has cases.

FORMER = (4, 6)  # D, V
LATTER = [(8, 10), (4, 10), (4, 5)]  # with the same D, the rows of one fit into the other


@pytest.fixture(params=LATTER)
def between(request, server, client, make_head, monkeypatch):
    """Has the head be made again with another shape between what a call asks first and the transfer."""
    name = make_head(hidden_size=FORMER[0], vocab_size=FORMER[1], bias=True)
    describe = client._describe
    asked: list[Any] = []

    shape = request.param

    def describe_and_change(head: str, *arguments: Any, **named: Any) -> Any:
        description = describe(head, *arguments, **named)
        if not asked:
            asked.append(head)
            with lossd.Client(server.target) as other:
                other.delete_head(name)
                other.create_head(name, hidden_size=shape[0], vocab_size=shape[1], bias=True)
        return description

    monkeypatch.setattr(client, "_describe", describe_and_change)
    return name


@pytest.mark.parametrize("param", ["weight", "bias"])
@pytest.mark.parametrize("rows", [None, (2, 5)])
def test_a_read_says_that_the_head_is_another_one(client, between, param, rows):
    with pytest.raises(lossd.Aborted, match=r"made again during the call: its tensor has .*(, and|is not what it) had"):
        client.read_tensor(between, param, rows=rows)


def test_errors_of_the_head_that_is_meant_stay(client, make_head):
    name = make_head(hidden_size=FORMER[0], vocab_size=FORMER[1])
    with pytest.raises(lossd.FailedPrecondition, match="not the open step"):
        client.add_gradient(name, "weight", np.ones(FORMER[::-1], np.float32), step=3, id=1)


@pytest.mark.parametrize("param", ["weight", "bias"])
def test_a_head_that_is_the_former_one_again_when_it_is_asked_for(server, make_head, monkeypatch, param):
    """The shape is another one during the transfer alone: a repeat finds what was described."""
    name = make_head(hidden_size=FORMER[0], vocab_size=FORMER[1], bias=True)
    begun = threading.Event()

    def make_again(shape: tuple[int, int]) -> None:
        with lossd.Client(server.target) as other:
            other.delete_head(name)
            other.create_head(name, hidden_size=shape[0], vocab_size=shape[1], bias=True)

    def make_the_former_one() -> None:
        begun.wait()
        time.sleep(0.2)  # a read or two meet the other one
        make_again(FORMER)

    retry = lossd.RetryOptions(max_attempts=200, initial_backoff=0.05, max_backoff=0.1)
    with lossd.Client(server.target, retry=retry) as reader:
        request = reader._call

        def of_another(method: str, *arguments: Any, **keywords: Any) -> Any:
            if method == "ReadTensor":
                make_again(LATTER[0])
                begun.set()
            return request(method, *arguments, **keywords)

        monkeypatch.setattr(reader, "_call", of_another)
        thread = threading.Thread(target=make_the_former_one)
        thread.start()
        assert len(reader.read_tensor(name, param)) == FORMER[1]
        thread.join()


def test_a_timeout_that_is_used_up_is_not_the_default_one(client, make_head, monkeypatch):
    """The description of the head has taken all of it."""
    name = make_head(hidden_size=D, vocab_size=V)
    describe = client._describe

    def slow(head: str, timeout: float | None = None) -> Any:
        found = describe(head)
        time.sleep(0.2)
        return found

    monkeypatch.setattr(client, "_describe", slow)
    with pytest.raises(lossd.DeadlineExceeded):
        client.read_tensor(name, timeout=0.1)


def test_a_head_has_a_number_of_its_own(client, make_head):
    """It stays with steps, resets and writes; a head that is made again has another one."""
    name, other = make_head(hidden_size=D, vocab_size=V), make_head(hidden_size=D, vocab_size=V)
    first = client.describe_head(name).state.creation
    assert first not in (0, client.describe_head(other).state.creation)
    train(client, name, range(2))
    client.reset_head(name, "all")
    assert client.write_tensor(name, "weight", np.ones((V, D), np.float32)).creation == first
    client.save_checkpoint(name, "here")
    assert client.load_checkpoint(f"{name}/here").state.creation == first
    client.delete_head(name)
    assert client.load_checkpoint(f"{name}/here").state.creation not in (0, first)


def test_a_head_that_is_gone_when_it_is_asked_for(server, client, between_and_gone):
    with pytest.raises(lossd.NotFound, match=between_and_gone):
        client.read_tensor(between_and_gone, "weight")


@pytest.fixture
def between_and_gone(server, client, monkeypatch):
    """Has the head be deleted between what a call asks first and the transfer; it comes back before the next call."""
    name = "gone-between"
    describe = client._describe
    asked: list[Any] = []

    def describe_and_delete(head: str, *arguments: Any, **named: Any) -> Any:
        asked.append(head)
        if len(asked) % 2 == 0:
            return describe(head, *arguments, **named)
        with lossd.Client(server.target) as other:
            other.create_head(name, hidden_size=FORMER[0], vocab_size=FORMER[1])
            description = describe(head, *arguments, **named)
            other.delete_head(name)
        return description

    monkeypatch.setattr(client, "_describe", describe_and_delete)
    yield name
    if any(head.spec.name == name for head in client.list_heads()):
        client.delete_head(name)


def test_whatever_meets_a_head_that_is_made_again_is_told_why(server, seed):
    """Calls of every kind while one thread deletes the head and makes it again, each time with another shape."""
    name = "unsteady"
    end = time.monotonic() + 6
    fine = (lossd.Aborted, lossd.NotFound, lossd.FailedPrecondition, lossd.InvalidArgument, lossd.AlreadyExists,
            lossd.ResourceExhausted)
    outcomes: collections.Counter[str] = collections.Counter()
    wrong: list[BaseException] = []

    def change() -> None:
        with lossd.Client(server.target) as own:
            turn = 0
            while time.monotonic() < end:
                turn += 1
                shape = [FORMER, *LATTER][turn % 4]
                try:
                    own.create_head(name, hidden_size=shape[0], vocab_size=shape[1], bias=turn % 3 > 0)
                    time.sleep(0.002)
                    own.delete_head(name)
                except fine:
                    time.sleep(0.001)

    def calls(client: lossd.Client, turn: int) -> list[Callable[[], Any]]:
        d, v = [FORMER, *LATTER][turn % 4]
        ones = np.ones((v, d), np.float32)
        return [lambda: client.read_tensor(name, "weight"), lambda: client.read_tensor(name, "bias", dtype="bf16"),
                lambda: client.read_tensor(name, "weight", "gradient", rows=(1, 4)),
                lambda: client.read_tensor(name, "weight", "moment1"),
                lambda: client.write_tensor(name, "weight", ones),
                lambda: client.write_tensor(name, "weight", ones[1:3], rows=(1, 3)),
                lambda: client.add_gradient(name, "weight", ones, step=0, id=turn),
                lambda: client.save_checkpoint(name, f"s{turn}"), lambda: client.save_checkpoint(name),
                lambda: client.load_checkpoint(f"{name}/s{max(0, turn - 3)}"),
                lambda: client.reset_head(name, "all", seed=1), lambda: client.zero_gradients(name, 0),
                lambda: client.apply_step(name, 0, lossd.SGD(lr=0.1)), lambda: client.grad_norm(name)]

    def use(numbers: Any) -> None:
        with lossd.Client(server.target) as own:
            turn = 0
            while time.monotonic() < end and not wrong:
                turn += 1
                which = int(numbers.integers(14))
                try:
                    calls(own, turn)[which]()
                    outcomes["done"] += 1
                except fine as error:
                    outcomes[type(error).__name__] += 1
                except lossd.Unavailable as error:  # another thread creates it for longer than calls are repeated
                    if "is being created" not in str(error):
                        wrong.append(error)
                except BaseException as error:
                    wrong.append(error)

    threads = [threading.Thread(target=change)]
    threads += [threading.Thread(target=use, args=(numbers,)) for numbers in
                (np.random.default_rng((seed, i)) for i in range(3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(dict(outcomes))
    if wrong:
        raise wrong[0]
    assert outcomes["done"] > 20 and outcomes["NotFound"] > 5


# Deleting checkpoints, and heads whose values come from files that hold numbers that are none.


def write_safetensors(path, **tensors):
    header, data = {}, b""
    for name, values in tensors.items():
        values = np.asarray(values, np.float32)
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def folder(server):
    return server.folder / "checkpoints"


@pytest.fixture
def weight(rng):
    return rng.standard_normal((V, D)).astype(np.float32)


def create(client, make_head_name, **file):
    client.create_head(make_head_name, hidden_size=D, vocab_size=V, bias="bias" in file,
                       tensor_file=lossd.TensorFile(**{"weight": "w", **file}))
    try:
        return client.read_tensor(make_head_name)
    finally:
        client.delete_head(make_head_name)


def test_a_checkpoint_is_deleted(client, make_head):
    head = make_head(hidden_size=D, vocab_size=V)
    saved = client.save_checkpoint(head, "best")
    client.save_checkpoint(head, "last")
    assert client.delete_checkpoint(saved.checkpoint) == saved.bytes > 0
    assert [each.checkpoint for each in client.list_checkpoints(head)] == [f"{head}/last"]
    with pytest.raises(lossd.NotFound, match="best") as error:
        client.delete_checkpoint(saved.checkpoint)
    assert error.value.field == "checkpoint"
    for name in ("", head, f"{head}/", f"../{head}/last", f"{head}/../{head}/last"):
        with pytest.raises(lossd.InvalidArgument):
            client.delete_checkpoint(name)
    client.load_checkpoint(f"{head}/last")
    client.delete_checkpoint(f"{head}/last")
    assert client.list_checkpoints(head) == []


def test_a_load_keeps_what_is_deleted_under_it(client, make_head, rng):
    head = make_head(hidden_size=256, vocab_size=20_000)
    weight = rng.standard_normal((20_000, 256)).astype(np.float32)
    client.write_tensor(head, "weight", weight)
    for round in range(5):
        client.save_checkpoint(head, f"x{round}")
        outcome = []

        def load(name=f"{head}/x{round}"):
            try:
                outcome.append(client.load_checkpoint(name, head))
            except lossd.NotFound as error:
                outcome.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        client.delete_checkpoint(f"{head}/x{round}")
        thread.join()
        assert isinstance(outcome[0], (lossd.HeadDescription, lossd.NotFound))
        np.testing.assert_array_equal(client.read_tensor(head), weight)
    assert client.list_checkpoints(head) == []


def test_an_index_with_shards_in_subfolders(client, folder, weight):
    write_safetensors(folder / "sharded/shards/model-00001.safetensors", w=weight)
    (folder / "sharded/model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "shards/model-00001.safetensors"}}))
    np.testing.assert_array_equal(create(client, "from-shards", path="sharded"), weight)


def test_links_that_lead_astray(client, folder, weight, tmp_path):
    write_safetensors(tmp_path / "model.safetensors", w=weight)
    (folder / "linked").mkdir(parents=True)
    link = folder / "linked/model.safetensors"
    link.symlink_to(tmp_path / "model.safetensors")
    with pytest.raises(lossd.InvalidArgument, match="linked/model.safetensors' leads outside .* symbolic link; copy"):
        create(client, "linked", path="linked")
    link.unlink()
    link.symlink_to("nothing")
    with pytest.raises(lossd.NotFound, match="symbolic link to something that is not there"):
        create(client, "linked", path="linked")
    link.unlink()
    link.symlink_to("model.safetensors")
    with pytest.raises(lossd.InvalidArgument, match="loop of links"):
        create(client, "linked", path="linked")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(client, folder, weight, bad):
    bias = np.zeros(V, np.float32)
    weight[7, 3] = weight[9, 0] = bad
    write_safetensors(folder / "bad.safetensors", w=weight, b=bias)
    with pytest.raises(lossd.InvalidArgument, match=r"allow_non_finite is set, got -?(nan|inf) at \[7, 3\] of 'w'") as error:
        create(client, "bad", path="bad.safetensors")
    assert error.value.field == "tensor_file.weight"
    with pytest.raises(lossd.NotFound):
        client.describe_head("bad")
    taken = create(client, "bad", path="bad.safetensors", allow_non_finite=True)
    np.testing.assert_array_equal(taken, weight)


def test_a_bias_may_mask_classes(client, folder, weight):
    bias = np.zeros(V, np.float32)
    bias[10:] = -np.inf
    write_safetensors(folder / "masked.safetensors", w=weight, b=bias)
    np.testing.assert_array_equal(create(client, "masked", path="masked.safetensors", bias="b"), weight)


def test_a_reset_from_a_file_that_is_refused_changes_nothing(client, make_head, folder, weight):
    head = make_head(hidden_size=D, vocab_size=V)
    client.compute_loss(head, np.ones((3, D), np.float32), [1, 2, 3], step=0, id=0, accumulate=True)
    client.apply_step(head, 0, lossd.AdamW(lr=0.1))
    before = {role: client.read_tensor(head, role=role) for role in ("value", "moment1", "moment2")}
    weight[V - 1, D - 1] = np.nan  # the last one
    write_safetensors(folder / "late.safetensors", w=weight)
    file = lossd.TensorFile(path="late.safetensors", weight="w")
    with pytest.raises(lossd.InvalidArgument, match=rf"nan at \[{V - 1}, {D - 1}\] of 'w'"):
        client.reset_head(head, "all", tensor_file=file)
    assert client.describe_head(head).state.step == 1
    for role, values in before.items():
        np.testing.assert_array_equal(client.read_tensor(head, role=role), values)
    client.reset_head(head, "all", tensor_file=lossd.TensorFile(path="late.safetensors", weight="w", allow_non_finite=True))
    np.testing.assert_array_equal(client.read_tensor(head), weight)


# Shares of a head that lies on several devices by vocabulary: changed between steps, once, without a bit lost.


@pytest.fixture
def several_devices() -> Iterator[ServerProcess]:
    process = ServerProcess("--backend=cpu", "--cpu_devices=3", "--split=vocabulary")
    yield process
    process.stop()


def train_lm(client: lossd.Client, steps: range) -> None:
    for step in steps:
        random = np.random.default_rng(step)
        client.compute_loss("lm", random.standard_normal((N, D), np.float32), random.integers(0, V, N).astype(np.int32),
                            step=step, id=1, accumulate=True)
        client.apply_step("lm", step, ADAMW)


def tensors_of_lm(client: lossd.Client) -> list[np.ndarray]:
    return [client.read_tensor("lm", param, role) for param in ("weight", "bias") for role in ("value", "moment1", "moment2")]


def test_shares_change_between_steps(several_devices: ServerProcess) -> None:
    with lossd.Client(several_devices.target) as client:
        client.create_head("lm", hidden_size=D, vocab_size=V, bias=True)
        train_lm(client, range(3))
        before = tensors_of_lm(client)
        head = client.set_shares("lm", (2, 0, 3))
        assert head.spec.shares == (2, 0, 3)
        assert [device.share for device in head.devices] == [2, 0, 3]
        assert head.devices[1].classes == 0 and sum(device.classes for device in head.devices) == V
        assert all(device.busy_seconds >= device.exchange_seconds for device in head.devices)
        for got, wanted in zip(tensors_of_lm(client), before, strict=True):
            np.testing.assert_array_equal(got, wanted)
        train_lm(client, range(3, 5))
        assert client.set_shares("lm", ()).spec.shares == ()
        train_lm(client, range(5, 6))


def test_within_a_step_they_stay(several_devices: ServerProcess) -> None:
    with lossd.Client(several_devices.target) as client:
        client.create_head("lm", hidden_size=D, vocab_size=V)
        client.compute_loss("lm", np.zeros((2, D), np.float32), np.zeros(2, np.int32), step=0, id=1, accumulate=True)
        with pytest.raises(lossd.FailedPrecondition, match="shares change between steps; at step 0 .* accumulated rows: 2"):
            client.set_shares("lm", (2, 0, 3))
        client.zero_gradients("lm", 0)
        client.set_shares("lm", (2, 0, 3))
        with pytest.raises(lossd.InvalidArgument, match=r"shares\[1\] is .*; it must be a whole number"):
            client.set_shares("lm", (1, -1, 1))
        with pytest.raises(lossd.InvalidArgument, match="shares must have one entry for each"):
            client.set_shares("lm", (1, 1))
        assert client.describe_head("lm").spec.shares == (2, 0, 3)


def test_shares_are_kept_in_checkpoints_and_a_restart_has_those(several_devices: ServerProcess) -> None:
    with lossd.Client(several_devices.target) as client:
        client.create_head("lm", hidden_size=D, vocab_size=V, bias=True)
        train_lm(client, range(2))
        client.set_shares("lm", (2, 0, 3))
        client.save_checkpoint("lm", "saved")
        saved = tensors_of_lm(client)
        client.set_shares("lm", (0, 1, 0))
    several_devices.kill()
    several_devices.start()
    with lossd.Client(several_devices.target) as client:
        assert client.load_checkpoint("lm/saved").spec.shares == (2, 0, 3)
        for got, wanted in zip(tensors_of_lm(client), saved, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("optimizer", "field"), [
    (lossd.AdamW(lr=None), "lr is None"), (lossd.AdamW(0.1, betas=(0.9, None)), "betas is None"),
    (lossd.AdamW(0.1, betas=0.9), "betas is 0.9"),
    (lossd.AdamW(0.1, eps="1"), "eps is '1'"), (lossd.AdamW(0.1, lazy_rows=2), "lazy_rows is 2"), (lossd.AdamW(True), "lr is True"),
    (lossd.SGD(0.1, momentum=None), "momentum is None"), (lossd.SGD(0.1, nesterov="no"), "nesterov is 'no'"),
    (lossd.SGD(0.1, weight_decay=[1]), "weight_decay is")])  # type: ignore[arg-type]
def test_a_step_whose_options_are_no_numbers_is_not_taken(client, make_head, optimizer, field):
    name = make_head(hidden_size=D, vocab_size=V)
    client.compute_loss(name, *rows(1), step=0, id=1, accumulate=True)
    with pytest.raises(TypeError, match=field):
        client.apply_step(name, 0, optimizer)
    assert client.describe_head(name).step_rows == N
    client.apply_step(name, 0, lossd.AdamW(lr=np.float32(0.1), betas=[0.9, 0.99], lazy_rows=np.True_))


@pytest.mark.parametrize(("given", "field"), [
    ({"normalizer": "4"}, "normalizer is '4'"), ({"grad_output": None}, "grad_output is None"),
    ({"accumulate": "yes"}, "accumulate is 'yes'"),
    ({"grad_hidden": "x"}, "grad_hidden is 'x'"), ({"grad_hidden": 1}, "grad_hidden is 1")])
def test_arguments_of_another_type_are_named(client, make_head, given, field):
    name = make_head(hidden_size=D, vocab_size=V)
    with pytest.raises(TypeError, match=field):
        client.compute_loss(name, *rows(1), step=0, id=1, **given)
    assert client.compute_loss(name, *rows(1), grad_hidden=np.True_).grad_hidden is not None


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_timeout_is_positive(client, make_head, timeout):
    name = make_head(hidden_size=D, vocab_size=V)

    def step(head: str, **options: Any) -> None:
        client.apply_step(head, 0, ADAMW, **options)

    for call in (client.grad_norm, client.describe_head, client.read_tensor, step):
        with pytest.raises(lossd.InvalidArgument, match="timeout is"):
            call(name, timeout=timeout)
    with pytest.raises(lossd.InvalidArgument, match="expected_rows must be below 2\\^63, got 18446744073709551615"):
        client.apply_step(name, 0, ADAMW, expected_rows=2**64 - 1)


def test_gradients_of_rows_have_a_scale_that_float32_has(client, make_head):
    name = make_head(hidden_size=D, vocab_size=V)
    for scale, error in ((1e39, lossd.InvalidArgument), (float("nan"), lossd.InvalidArgument), (None, TypeError), ("1", TypeError)):
        with pytest.raises(error, match="scale is"):
            client.add_row_gradients(name, [1], np.ones((1, D), np.float32), step=0, id=1, scale=scale)
