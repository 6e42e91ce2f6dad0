# SPDX-License-Identifier: Apache-2.0
"""Training loops in which something goes wrong: a batch, a connection, the server, or the gradients of a step."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cut_proxy import CutProxy  # noqa: E402
from server_process import ServerProcess  # noqa: E402

import lossd  # noqa: E402
from lossd.torch import HeadOptimizer, LossHead  # noqa: E402

D, V, N = 16, 90, 64


def test_losses_that_are_looked_at_leave_no_gap():
    """A deterministic server wants the microbatches of a step without one."""
    server = ServerProcess("--deterministic")
    try:
        with lossd.Client(server.target) as client:
            client.create_head("a", hidden_size=D, vocab_size=V)
            head = LossHead(client, "a", timeout=60)
            optimizer = HeadOptimizer(head, lr=0.1)
            targets = torch.randint(0, V, (4, N))
            for _ in range(2):
                with torch.no_grad():
                    head(torch.randn(4, N, D), targets)
                head(torch.randn(4, N, D, requires_grad=True), targets).backward()
            optimizer.step()
            assert optimizer.last.microbatches == 2
    finally:
        server.stop()


def test_losses_without_backward_are_not_applied(client, make_head):
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    optimizer = HeadOptimizer(head, lr=0.1)
    hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
    loss = head(hidden, targets)
    for what in (optimizer.step, optimizer.load_grad_norm):
        with pytest.raises(RuntimeError, match="had no backward"):
            what()
    loss.backward()
    optimizer.step()
    for clear in (optimizer.discard, optimizer.zero_grad):
        loss = head(hidden, targets)
        clear()
        with pytest.raises(RuntimeError, match="between forward and backward"):
            loss.backward()
        head(hidden, targets).backward()
        optimizer.step()
        assert optimizer.last.microbatches == 1
    assert head.step == 3


def test_a_loop_goes_on_after_a_bad_batch(client, make_head):
    """The batch is refused before anything is booked, so that even a step without zero_grad() is right."""
    head = LossHead(client, make_head(hidden_size=D, vocab_size=V))
    optimizer = HeadOptimizer(head, lr=0.1)
    hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
    with pytest.raises(lossd.InvalidArgument, match=rf"targets\[3\] .* got {V}") as raised:
        head(hidden, targets.clone().index_fill_(0, torch.tensor([3]), V))
    assert (raised.value.field, raised.value.value) == ("open.targets[3]", str(V))
    head(hidden, targets).backward()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)


def test_a_cell_runs_again(client, make_head):
    """A new LossHead in a step that an interrupted one began."""
    name = make_head(hidden_size=D, vocab_size=V)
    hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
    for _ in range(2):
        head = LossHead(client, name)
        optimizer = HeadOptimizer(head, lr=0.1)
        optimizer.zero_grad()
        head(hidden, targets).backward()  # and is interrupted before step()
    optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)


def test_a_failed_microbatch_is_sent_again(server, client, make_head, seed):
    name = make_head(hidden_size=D, vocab_size=V)
    proxy = CutProxy(server.target, mean_bytes=30_000, seed=seed)
    hidden, targets = torch.randn(2000, D, requires_grad=True), torch.randint(0, V, (2000,))
    with lossd.Client(proxy.target, transport="grpc", retry=lossd.RetryOptions(max_attempts=1)) as shaky:
        head = LossHead(shaky, name, slice_bytes=4096)
        optimizer = HeadOptimizer(head, lr=0.1)
        with pytest.raises(lossd.Unavailable):
            head(hidden, targets)
        with pytest.raises(RuntimeError, match=r"microbatch 0 .* failed.*microbatch=0"):
            optimizer.step()
        proxy.close()
    with lossd.Client(server.target) as steady:
        head.client = steady
        head(hidden, targets, microbatch=0).backward()
        optimizer.step()
    assert (optimizer.last.rows, optimizer.last.microbatches) == (2000, 1)


def test_a_server_that_goes_before_backward():
    server = ServerProcess()
    with lossd.Client(server.target, retry=lossd.RetryOptions(max_attempts=2, initial_backoff=0.01)) as client:
        client.create_head("a", hidden_size=D, vocab_size=V)
        head = LossHead(client, "a", deferred=True)
        loss = head(torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,)))
        server.stop()
        with pytest.raises(lossd.Unavailable, match=server.target):
            loss.backward()


def test_a_step_lost_in_a_restart_is_trained_again():
    server = ServerProcess()
    try:
        retry = lossd.RetryOptions(max_attempts=30, initial_backoff=0.05)
        with lossd.Client(server.target, retry=retry) as client:
            client.create_head("a", hidden_size=D, vocab_size=V)
            head = LossHead(client, "a")
            optimizer = HeadOptimizer(head, lr=0.1)
            hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
            head(hidden, targets).backward()
            optimizer.step()
            saved = client.save_checkpoint("a").checkpoint
            head(hidden, targets).backward()
            server.kill()
            server.start()
            with pytest.raises(lossd.LossdError):
                optimizer.step()
            client.load_checkpoint(saved)
            head.sync()
            assert head.step == 1
            head(hidden, targets).backward()
            optimizer.step()
            assert head.step == 2
    finally:
        server.stop()


def test_a_step_that_somebody_zeroes_is_trained_again(server, make_head):
    name = make_head(hidden_size=D, vocab_size=V)
    with lossd.Client(server.target) as client, lossd.Client(server.target) as other:
        if client.describe_head(name).state.generation == 0:
            pytest.skip("this server says no generation")
        head = LossHead(client, name)
        optimizer = HeadOptimizer(head, lr=0.1)
        hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
        head(hidden, targets).backward()
        other.zero_gradients(name, 0)
        with pytest.raises(lossd.StepDiscarded, match="another caller has zeroed them"):
            head(hidden, targets)
        with pytest.raises(RuntimeError, match=r"step 0 is lost .*HeadOptimizer.discard\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        head(hidden, targets).backward()
        other.zero_gradients(name, 0)
        with pytest.raises(lossd.StepDiscarded):
            optimizer.step()
        head.sync()
        head(hidden, targets).backward()
        optimizer.step()
        assert (optimizer.last.rows, optimizer.last.microbatches) == (N, 1)
