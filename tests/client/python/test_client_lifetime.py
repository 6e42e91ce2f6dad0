# SPDX-License-Identifier: Apache-2.0
"""A lossd.Client from its connection to its end: servers that are not there, closing, cancelling, forks, copies."""

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

import lossd
from lossd.v1 import server_pb2

D, V, N = 24, 310, 800


@pytest.fixture
def problem(rng):
    return rng.standard_normal((N, D)).astype(np.float32), rng.integers(0, V, N)


def test_no_server():
    with pytest.raises(lossd.Unavailable, match="no server at 127.0.0.1:1") as caught:
        lossd.Client("127.0.0.1:1", wait_for_server=False)
    assert isinstance(caught.value, ConnectionError)
    with pytest.raises(lossd.Unavailable, match="no server at"):
        lossd.Client("127.0.0.1:1", connect_timeout=0.3)


def test_closed_client(server, problem):
    with lossd.Client(server.target) as client:
        client.get_server()
    client.close()
    for call in (client.get_server, lambda: client.compute_loss("a", *problem), lambda: client.read_tensor("a")):
        with pytest.raises(lossd.ClientClosed, match="make a new"):
            call()


def test_closing_ends_what_is_under_way(server, make_head, problem):
    head = make_head(hidden_size=D, vocab_size=V)
    client = lossd.Client(server.target)
    block = threading.Event()
    pending = client.compute_loss_async(head, *problem, ready=block.wait)
    threading.Timer(0.2, block.set).start()
    client.close()
    with pytest.raises((lossd.Cancelled, lossd.ClientClosed)):
        pending.wait()


def test_cancel_and_timeout_of_wait(client, make_head, problem):
    head = make_head(hidden_size=D, vocab_size=V)
    block = threading.Event()
    pending = client.compute_loss_async(head, *problem, ready=block.wait)
    with pytest.raises(TimeoutError, match="not there"):
        pending.wait(0.05)
    pending.cancel()
    block.set()
    with pytest.raises(lossd.Cancelled):
        pending.wait()


def test_cancelling_ends_the_question_for_limits(problem):
    """A computation asks for its head first; a server that does not answer does not hold it up."""
    asked, ended = threading.Event(), threading.Event()

    def describe(request, context):
        asked.set()
        context.add_callback(ended.set)
        ended.wait(120)

    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((
        grpc.method_handlers_generic_handler("lossd.v1.ServerService", {"GetServer": grpc.unary_unary_rpc_method_handler(
            lambda request, context: server_pb2.ServerDescription(incarnation=1).SerializeToString())}),
        grpc.method_handlers_generic_handler("lossd.v1.HeadService", {
            "DescribeHead": grpc.unary_unary_rpc_method_handler(describe)})))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with lossd.Client(f"127.0.0.1:{port}") as client:
        pending = client.compute_loss_async("a", *problem)
        assert asked.wait(120)
        pending.cancel()
        with pytest.raises(lossd.Cancelled, match="by the caller"):
            pending.wait()
    assert ended.wait(120)
    server.stop(None)


def _in_a_forked_child(client, connection):
    try:
        client.get_server()
    except lossd.ForkedClient as error:
        connection.send(str(error))
    finally:
        connection.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_noticed(client):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_in_a_forked_child, args=(client, there))
    child.start()
    assert here.poll(20) and f"process {os.getpid()}, before a fork" in here.recv()
    child.join()


def test_the_environment_names_the_server(server, monkeypatch):
    monkeypatch.setenv("LOSSD_SERVER", server.target)
    with lossd.Client() as client:
        assert client.target == server.target
        assert repr(client) == f"lossd.Client('{server.target}')"
    assert repr(client).endswith(", closed)")
    monkeypatch.setenv("LOSSD_SERVER", "127.0.0.1:1")
    with lossd.Client(server.target) as client:
        assert client.target == server.target


def test_the_version_is_the_packages():
    from importlib import metadata
    assert lossd.__version__ == metadata.version("lossd")


def test_a_client_is_not_copied(client):
    import copy
    import pickle
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="holds connections and threads"):
            attempt(client)
