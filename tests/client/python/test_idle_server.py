# SPDX-License-Identifier: Apache-2.0
"""A server that waits takes no CPU time: with several devices, a head that is divided over them, and a call that sends nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import grpc
import lossd
from lossd.v1 import loss_pb2, types_pb2
from server_process import ServerProcess

WATCHED = 3.0  # seconds
MOST = 0.25  # cores; the threads of one GPU that asked every 50 us took more


def cpu_seconds(pid: int) -> float:
    fields = open(f"/proc/{pid}/stat", encoding="utf-8").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def no_rows() -> Iterator[loss_pb2.ComputeLossRequest]:
    message = loss_pb2.ComputeLossRequest()
    message.open.CopyFrom(loss_pb2.OpenMicrobatch(
        head="lm", microbatch_id=1, microbatch_rows=2, rows=types_pb2.RowRange(begin=0, end=2), hidden_dtype=types_pb2.DTYPE_FP32,
        reduction=loss_pb2.REDUCTION_SUM, targets=[0, 1]))
    yield message
    time.sleep(60.0)


def test_waiting_takes_no_cpu_time() -> None:
    server = ServerProcess("--backend=cpu", "--cpu_devices=4", "--split=vocabulary", "--threads=4")
    try:
        with lossd.Client(server.target) as client, grpc.insecure_channel(server.target) as channel:
            client.create_head("lm", hidden_size=8, vocab_size=64)
            call = channel.stream_stream(
                "/lossd.v1.LossService/ComputeLoss", request_serializer=loss_pb2.ComputeLossRequest.SerializeToString,
                response_deserializer=loss_pb2.ComputeLossResponse.FromString)(no_rows())
            assert next(call).HasField("accepted")
            before, begin = cpu_seconds(server.pid), time.monotonic()
            time.sleep(WATCHED)
            cores = (cpu_seconds(server.pid) - before) / (time.monotonic() - begin)
            call.cancel()
        assert cores < MOST
    finally:
        server.kill()
