# SPDX-License-Identifier: Apache-2.0
"""Exactly once through a network that cuts connections, and what a restarted server looks like."""

import multiprocessing

import numpy as np
import pytest
from servers import CutProxy, ForwardingServer, ServerProcess

import lossd
from lossd.v1 import head_pb2

D, V, N = 64, 200, 3000


@pytest.fixture
def problem(rng):
    targets = rng.integers(0, V, N)
    targets[rng.random(N) < 0.1] = -100
    return rng.standard_normal((N, D)).astype(np.float32), targets


@pytest.mark.parametrize(("transport", "mean_bytes"), [("grpc", 700_000), ("shared_memory", 15_000)])
def test_every_row_counts_once_through_a_cut_network(server, client, make_head, problem, seed, transport, mean_bytes):
    plain, cut = (make_head(hidden_size=D, vocab_size=V) for _ in range(2))
    proxy = CutProxy(server.target, mean_bytes=mean_bytes, seed=seed)
    # Without shared memory rows travel in messages, which connections that last for 15,000 bytes never let through. A client whose
    # question for it was cut asks again after some seconds, and repeats until then.
    retry = lossd.RetryOptions(max_attempts=1000, initial_backoff=0.01, max_backoff=0.05)
    repeats = 0
    with lossd.Client(proxy.target, channels=2, retry=retry, transport=transport) as shaky:
        for id in range(4):
            expected = client.compute_loss(plain, *problem, step=0, id=id, accumulate=True, grad_hidden=True)
            result = shaky.compute_loss(cut, *problem, step=0, id=id, accumulate=True, grad_hidden=True,
                                        slice_bytes=1 << 14)
            assert result.accumulated_rows + result.repeated_rows == expected.valid_rows
            np.testing.assert_allclose(result.grad_hidden, expected.grad_hidden, atol=1e-7)
            repeats += result.repeats
        shaky.apply_step(cut, 0, lossd.SGD(lr=1.0), expected_microbatches=range(4))
    client.apply_step(plain, 0, lossd.SGD(lr=1.0), expected_microbatches=range(4))
    proxy.close()
    assert repeats > 0 and proxy.cuts > 0
    np.testing.assert_allclose(client.read_tensor(cut), client.read_tensor(plain), atol=1e-6)


def test_every_row_counts_once_over_connections_that_come_and_go(server, client, make_head, problem, seed):
    """A further connection is tried, until that is decided, in a network that cuts connections."""
    plain, cut = (make_head(hidden_size=D, vocab_size=V) for _ in range(2))
    proxy = CutProxy(server.target, mean_bytes=3_000_000, seed=seed)
    retry = lossd.RetryOptions(max_attempts=200, initial_backoff=0.01, max_backoff=0.05)
    with lossd.Client(proxy.target, retry=retry, transport="grpc") as shaky:
        assert shaky.connections == (1, "little was sent in messages so far")
        id = 0
        while "2 moved" not in shaky.connections[1] or proxy.cuts < 3:
            assert id < 2000, shaky.connections
            pending = [shaky.compute_loss_async(cut, *problem, step=0, id=id + i, accumulate=True, grad_hidden=True,
                                                slice_bytes=1 << 15) for i in range(4)]
            for result in (each.wait() for each in pending):
                expected = client.compute_loss(plain, *problem, step=0, id=id, accumulate=True, grad_hidden=True)
                assert result.accumulated_rows + result.repeated_rows == expected.valid_rows
                np.testing.assert_allclose(result.grad_hidden, expected.grad_hidden, atol=1e-7)
                id += 1
        shaky.apply_step(cut, 0, lossd.SGD(lr=1.0), expected_microbatches=range(id))
    client.apply_step(plain, 0, lossd.SGD(lr=1.0), expected_microbatches=range(id))
    proxy.close()
    np.testing.assert_allclose(client.read_tensor(cut), client.read_tensor(plain), atol=1e-3)


@pytest.mark.parametrize("broken", [0, 1])
def test_goes_on_over_the_connections_that_stand(server, client, make_head, problem, seed, broken):
    """One of several has broken and is not to be had again, as where a limit has been reached meanwhile."""
    head = make_head(hidden_size=D, vocab_size=V)
    expected = client.compute_loss(head, *problem, grad_hidden=True)
    proxy = CutProxy(server.target, mean_bytes=0, seed=seed)
    with lossd.Client(proxy.target, channels=2, transport="grpc", retry=lossd.RetryOptions(initial_backoff=0.01)) as shaky:
        shaky.compute_loss(head, *problem, streams=2)
        proxy.cut_one(broken)
        for _ in range(5):
            result = shaky.compute_loss(head, *problem, streams=2, grad_hidden=True)
            np.testing.assert_allclose(result.grad_hidden, expected.grad_hidden, atol=1e-7)
            assert result.streams == 2
    proxy.close()


def test_retries_end(server, client, make_head, problem, seed):
    head = make_head(hidden_size=D, vocab_size=V)
    proxy = CutProxy(server.target, mean_bytes=10_000, seed=seed)
    retry = lossd.RetryOptions(max_attempts=3, initial_backoff=0.01)
    with lossd.Client(proxy.target, retry=retry) as shaky:
        with pytest.raises(lossd.Unavailable, match="tried 3 times"):
            for id in range(20):
                shaky.compute_loss(head, *problem, step=0, id=id, accumulate=True)
    proxy.close()


def restart(server):
    """Restores head "a" in the new process."""
    server.kill()
    server.start()
    with lossd.Client(server.target) as client:
        client.load_checkpoint("a/start")


def test_a_restart_is_noticed(problem):
    server = ServerProcess()
    try:
        with lossd.Client(server.target, retry=lossd.RetryOptions(max_attempts=30, initial_backoff=0.05)) as client:
            client.create_head("a", hidden_size=D, vocab_size=V)
            client.save_checkpoint("a", "start")
            client.compute_loss("a", *problem, step=0, id=1, accumulate=True)
            restart(server)
            with pytest.raises(lossd.Restarted, match="gradients of step 0 are lost"):
                client.compute_loss("a", *problem, step=0, id=2, accumulate=True)
            with pytest.raises(lossd.Restarted):
                client.apply_step("a", 0, lossd.SGD(lr=1.0), expected_microbatches=[1])
            with pytest.raises(lossd.Restarted):
                client.add_gradient("a", "weight", np.ones((V, D), np.float32), step=0, id=3)
            assert client.describe_head("a").step_contributions == 0
            client.acknowledge_restart("a")
            client.compute_loss("a", *problem, step=0, id=1, accumulate=True)
            assert client.apply_step("a", 0, lossd.SGD(lr=1.0), expected_microbatches=[1]).state.step == 1
    finally:
        server.stop()


def test_another_server_than_the_expected_one(problem):
    server = ServerProcess()
    retry = lossd.RetryOptions(max_attempts=30, initial_backoff=0.05)
    try:
        with lossd.Client(server.target) as client:
            before = client.get_server().incarnation
            client.create_head("a", hidden_size=D, vocab_size=V)
            client.save_checkpoint("a", "start")
        with lossd.Client(server.target, retry=retry, expected_incarnation=before) as client:
            restart(server)
            with pytest.raises(lossd.Restarted, match=f"{before:016x} -> .*gradients of step 0 are lost"):
                client.compute_loss("a", *problem, step=0, id=1, accumulate=True)
            with pytest.raises(lossd.Restarted):
                client.apply_step("a", 0, lossd.SGD(lr=1.0))
            client.compute_loss("a", *problem)
            client.acknowledge_restart("a")
            client.compute_loss("a", *problem, step=0, id=1, accumulate=True)
        with pytest.raises(lossd.Restarted, match=f"incarnation {before:016x} -> "):
            lossd.Client(server.target, expected_incarnation=before)
    finally:
        server.stop()


def test_a_repeated_step_does_not_forget_the_next_one(problem):
    server = ServerProcess()
    retry = lossd.RetryOptions(max_attempts=30, initial_backoff=0.05)
    try:
        with lossd.Client(server.target, retry=retry) as client:
            client.create_head("a", hidden_size=D, vocab_size=V)
            for step in (0, 1):
                client.compute_loss("a", *problem, step=step, id=1, accumulate=True)
                client.apply_step("a", 0, lossd.SGD(lr=1.0), expected_microbatches=[1])
                if step == 0:
                    client.save_checkpoint("a", "one")
            server.kill()
            server.start()
            with lossd.Client(server.target) as other:
                other.load_checkpoint("a/one")
            with pytest.raises(lossd.Restarted, match="gradients of step 1 are lost"):
                client.compute_loss("a", *problem, step=1, id=2, accumulate=True)
    finally:
        server.stop()


def test_a_repeated_contribution_names_the_process_that_meanwhile_has_rows(server, make_head):
    """Another thread's rows are accumulated before the repeat."""
    head = make_head(hidden_size=D, vocab_size=V)
    named = []

    class Breaking(ForwardingServer):
        def request(self, method, data):
            if method.endswith("/AddGradient") and (message := head_pb2.AddGradientRequest.FromString(data)).HasField("open"):
                named.append(message.open.incarnation if message.open.HasField("incarnation") else None)
                if len(named) == 1:
                    client.compute_loss(head, np.ones((3, D), np.float32), [1, 2, 3], step=0, id=1, accumulate=True)
                    raise ConnectionError("socket closed")
            return data

    breaking = Breaking(server.target)
    with lossd.Client(breaking.target, transport="grpc") as client:
        answer = client.add_gradient(head, "weight", np.ones((V, D), np.float32), step=0, id=2)
    breaking.stop()
    assert answer.added_rows == V
    assert named == [None, answer.state.incarnation]


def test_a_deterministic_server_gives_the_same_bits(rng, seed):
    hidden, targets = rng.standard_normal((5, 700, D)).astype(np.float32), rng.integers(-1, V, (5, 700))
    targets[targets < 0] = -100
    server = ServerProcess("--deterministic")
    proxy = CutProxy(server.target, mean_bytes=600_000, seed=seed)
    retry = lossd.RetryOptions(max_attempts=200, initial_backoff=0.01, max_backoff=0.05)
    try:
        gradients = []
        with lossd.Client(server.target) as client, lossd.Client(proxy.target, retry=retry) as shaky:
            for name, order in (("a", range(5)), ("b", [3, 1, 4, 0, 2])):
                client.create_head(name, hidden_size=D, vocab_size=V)
                assert client.describe_head(name).slice_limits.row_grid > 0
                pending = [shaky.compute_loss_async(name, hidden[i], targets[i], step=0, id=i, accumulate=True,
                                                    grad_hidden=True) for i in order]
                for each in pending:
                    each.wait()
                gradients.append(client.read_tensor(name, "weight", "gradient"))
        np.testing.assert_array_equal(*gradients)
    finally:
        proxy.close()
        server.stop()


def test_a_server_that_is_gone(problem):
    server = ServerProcess()
    with lossd.Client(server.target, retry=lossd.RetryOptions(max_attempts=2, initial_backoff=0.01)) as client:
        client.create_head("a", hidden_size=D, vocab_size=V)
        server.stop()
        with pytest.raises(lossd.Unavailable, match=server.target):
            client.compute_loss("a", *problem)
        with pytest.raises(lossd.Unavailable, match=server.target):
            client.grad_norm("a")


def _train(target, head, rank, ranks, seed):
    rng = np.random.default_rng(seed)
    with lossd.Client(target) as client:
        for round_ in range(3):
            hidden, targets = rng.standard_normal((300, D)).astype(np.float32), rng.integers(0, V, 300)
            client.compute_loss(head, hidden, targets, step=0, id=round_ * ranks + rank, accumulate=True,
                                reduction="sum", grad_hidden=True)


def test_a_checkpoint_is_deleted_once_through_a_cut_network(server, client, make_head, seed):
    head = make_head(hidden_size=D, vocab_size=V)
    proxy = CutProxy(server.target, mean_bytes=6000, seed=seed)
    retry = lossd.RetryOptions(max_attempts=200, initial_backoff=0.01, max_backoff=0.05)
    with lossd.Client(proxy.target, channels=1, retry=retry, transport="grpc", wait_for_server=True) as shaky:
        rounds = 0
        while proxy.cuts < 8 or rounds < 20:
            saved = client.save_checkpoint(head, "best")
            assert shaky.delete_checkpoint("/".join([head, "best"])) == saved.bytes
            assert client.list_checkpoints(head) == []
            rounds += 1
    proxy.close()


def test_a_repeated_deletion_leaves_what_was_saved_meanwhile(server, client, make_head):
    """The answer is lost, and before the repeat somebody saves another checkpoint of that name."""
    head = make_head(hidden_size=D, vocab_size=V)
    client.save_checkpoint(head, "best")
    answers = []

    class Losing(ForwardingServer):
        def answer(self, method, data):
            if method.endswith("/DeleteCheckpoint"):
                answers.append(data)
                if len(answers) == 1:
                    client.save_checkpoint(head, "best")
                    raise ConnectionError("socket closed")
            return data

    losing = Losing(server.target)
    with lossd.Client(losing.target, retry=lossd.RetryOptions(initial_backoff=0.01)) as other:
        other.delete_checkpoint(f"{head}/best")
    losing.stop()
    assert len(answers) == 2
    assert [each.checkpoint for each in client.list_checkpoints(head)] == [f"{head}/best"]
    client.delete_checkpoint(f"{head}/best")
    with pytest.raises(lossd.NotFound, match=f"{head}/best"):
        client.delete_checkpoint(f"{head}/best")
    with pytest.raises(lossd.InvalidArgument, match="checkpoint"):
        client.delete_checkpoint("../secrets")


def test_several_trainers_feed_one_step(server, client, make_head, seed):
    head = make_head(hidden_size=D, vocab_size=V)
    context = multiprocessing.get_context("spawn")
    trainers = [context.Process(target=_train, args=(server.target, head, rank, 3, seed + rank)) for rank in range(3)]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.join(60)
        assert trainer.exitcode == 0
    alone = make_head(hidden_size=D, vocab_size=V)
    for rank in range(3):
        _train(server.target, alone, rank, 3, seed + rank)
    np.testing.assert_allclose(client.read_tensor(head, "weight", "gradient"),
                               client.read_tensor(alone, "weight", "gradient"), atol=1e-3)
    answer = client.apply_step(head, 0, lossd.SGD(lr=1.0), expected_microbatches=range(9), expected_rows=2700)
    assert answer.microbatches == 9
