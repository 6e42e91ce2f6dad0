# SPDX-License-Identifier: Apache-2.0
"""Clients that a server has to bear during a soak run: slow readers, silent writers, callers that go away, bad requests.

Each function of NEIGHBOURS does one thing to the server once and returns; failures of its calls are what it is for.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np

import lossd
from lossd.v1 import head_pb2, loss_pb2, types_pb2

HEAD, HIDDEN, VOCAB = "neighbours", 256, 4096  # its weight is 4 MiB
WRITTEN = "written"  # the same, for writers: while one writes, calls of others on its head fail
_MICROBATCHES_A_STEP = 64
_PATIENCE = 2.0  # seconds that a slow client sleeps; the run's server ends calls after less
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", 8 << 20),
            ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
_METHODS: dict[str, tuple[str, Any]] = {
    "ComputeLoss": ("stream_stream", loss_pb2.ComputeLossResponse),
    "WriteTensor": ("stream_unary", head_pb2.WriteTensorResponse),
    "ReadTensor": ("unary_stream", head_pb2.TensorSlice),
    "ApplyStep": ("unary_unary", head_pb2.ApplyStepResponse),
    "DescribeHead": ("unary_unary", head_pb2.HeadDescription),
}
_numbers = itertools.count()


@contextlib.contextmanager
def _connection(target: str) -> Iterator[Callable[..., Any]]:
    """Yields a function that makes a call of a method on a connection of its own, which is closed in the end."""
    with grpc.insecure_channel(target, options=_OPTIONS) as channel:
        def call(method: str, *request: Any, **options: Any) -> Any:
            kind, answer = _METHODS[method]
            service = "LossService" if method == "ComputeLoss" else "HeadService"
            return getattr(channel, kind)(
                f"/lossd.v1.{service}/{method}", request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=answer.FromString)(*request, **options)
        yield call


def _open(rows: int, **fields: Any) -> loss_pb2.ComputeLossRequest:
    return loss_pb2.ComputeLossRequest(open=loss_pb2.OpenMicrobatch(
        head=HEAD, microbatch_rows=rows, rows=types_pb2.RowRange(end=rows), hidden_dtype=types_pb2.DTYPE_FP32,
        reduction=loss_pb2.REDUCTION_SUM, targets=[1] * rows, **fields))


def _slice(begin: int, end: int) -> loss_pb2.ComputeLossRequest:
    return loss_pb2.ComputeLossRequest(slice=loss_pb2.SliceHeader(rows=types_pb2.RowRange(begin=begin, end=end)),
                                       payload=np.zeros((end - begin, HIDDEN), np.float32).tobytes())


def make_heads(client: lossd.Client) -> None:
    """The heads that neighbours work with, unless they are there."""
    for head in (HEAD, WRITTEN):
        client.create_head(head, hidden_size=HIDDEN, vocab_size=VOCAB, if_exists="keep")


def slow_reader_of_gradients(target: str) -> None:
    rows = 2048  # 2 MiB, and so much again to read

    def messages() -> Iterator[loss_pb2.ComputeLossRequest]:
        yield _open(rows, want_grad_hidden=True)
        for begin in range(0, rows, 64):
            yield _slice(begin, begin + 64)

    with _connection(target) as call:
        answers = call("ComputeLoss", messages(), timeout=30)
        next(answers)
        time.sleep(_PATIENCE)


def slow_reader_of_a_tensor(target: str) -> None:
    with _connection(target) as call:
        slices = call("ReadTensor", head_pb2.ReadTensorRequest(head=HEAD, param=head_pb2.PARAM_WEIGHT), timeout=30)
        next(slices)
        time.sleep(_PATIENCE)


def silent_writer(target: str) -> None:
    def messages() -> Iterator[head_pb2.WriteTensorRequest]:
        yield head_pb2.WriteTensorRequest(open=head_pb2.OpenTensor(head=WRITTEN, param=head_pb2.PARAM_WEIGHT),
                                          payload=np.zeros((16, HIDDEN), np.float32).tobytes())
        time.sleep(_PATIENCE)

    with _connection(target) as call:
        call("WriteTensor", messages(), timeout=30)


def abandoned_microbatch(target: str) -> None:
    number = next(_numbers)
    if number % _MICROBATCHES_A_STEP == 0:  # what was accumulated is in the open step's ledger until then
        with lossd.Client(target, channels=1) as client:
            client.zero_gradients(HEAD, 0)

    def messages() -> Iterator[loss_pb2.ComputeLossRequest]:
        yield _open(100_000, accumulate_gradients=True, step=0, microbatch_id=number)
        yield _slice(0, 64)
        time.sleep(0.5)

    with _connection(target) as call:
        answers = call("ComputeLoss", messages(), timeout=30)
        next(answers)
        answers.cancel()


def idle_call(target: str) -> None:
    def nothing() -> Iterator[Any]:
        time.sleep(_PATIENCE)
        yield from ()

    with _connection(target) as call:
        for _ in range(8):
            call("ComputeLoss", nothing(), timeout=30)
        call("WriteTensor", nothing(), timeout=30)


def refused_requests(target: str) -> None:
    with _connection(target) as call:
        for method, request in (("DescribeHead", head_pb2.DescribeHeadRequest(head="none")),
                                ("ApplyStep", head_pb2.ApplyStepRequest(head=HEAD, step=1 << 40)),
                                ("ApplyStep", head_pb2.ApplyStepRequest(head=HEAD, expected_microbatches=range(100_000)))):
            with contextlib.suppress(grpc.RpcError):
                call(method, request, timeout=30)


def heads_that_come_and_go(target: str) -> None:
    name = f"passing-{next(_numbers)}"
    with lossd.Client(target, channels=1, wait_for_server=True) as client:
        client.create_head(name, hidden_size=HIDDEN, vocab_size=256)
        try:
            client.compute_loss(name, np.ones((8, HIDDEN), np.float32), [1] * 8, retain=True, reduction="none", id=1)
        finally:
            client.delete_head(name)


def half_a_request(address: str) -> None:
    """On any port: silence, a TLS hello, another protocol, half a request."""
    host, port = address.rsplit(":", 1)
    for bytes_ in (b"", b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /metr"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(bytes_)


def scrape(address: str) -> None:
    """Raises unless the server is alive and its metrics can be read."""
    host, port = address.rsplit(":", 1)
    for path in ("/livez", "/metrics", "/"):
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                raise ConnectionError(f"GET {path}: {answer.status}")
        finally:
            connection.close()


NEIGHBOURS = (slow_reader_of_gradients, slow_reader_of_a_tensor, silent_writer, abandoned_microbatch, idle_call,
              refused_requests, heads_that_come_and_go)
EXPECTED_ERRORS = (grpc.RpcError, lossd.LossdError, OSError, http.client.HTTPException)
