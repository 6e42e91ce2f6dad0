# SPDX-License-Identifier: Apache-2.0
"""The first call on each connection of a client: whether a lossd is there, and what is there if not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from lossd import _diagnosis, errors
from lossd._cancellation import Cancellation
from lossd._interrupts import run_apart
from lossd._version import VERSION
from lossd.v1 import server_pb2

if TYPE_CHECKING:
    from lossd._connections import ConnectionOptions, Deadline

_METHOD = "/lossd.v1.ServerService/GetServer"
_PATIENCE = 0.5  # seconds without an answer, after which the reason is looked for
_ROUND = 5.0  # seconds between the next two looks
_PAUSE = 0.2  # seconds before the next call


def await_server(channel: Any, options: ConnectionOptions, deadline: Deadline) -> server_pb2.ServerDescription:
    """Returns when the server has answered on this channel, or raises what keeps it from answering.

    Unavailable if nobody is there, at once unless options.wait_for_server. What waiting cannot mend (TLS on one side
    only, another program, ...) is raised at once in any case. A server that takes connections but says nothing may be
    busy, so it has until the deadline.
    """
    again = False
    while True:
        try:
            return _ask(channel, options, min(deadline.left(), _ROUND if again else _PATIENCE), wait_for_ready=again)
        except (errors.DeadlineExceeded, errors.ResourceExhausted) as error:
            if isinstance(error, errors.ResourceExhausted) and not errors.is_transient(error):
                raise
            reason = _reason(options)
        except errors.Unavailable as error:
            # An error of the first call may be one of the connection, and of a server that has come up meanwhile.
            reason = _reason(options) or (_no_server(options, error) if again or not _can_tell(options) else None)
        if reason is not None and not (isinstance(reason, errors.Unavailable) and options.wait_for_server):
            raise reason
        if deadline.passed():
            raise _gave_up(reason, options)
        time.sleep(min(_PAUSE, deadline.left()))
        again = True


def _ask(channel: Any, options: ConnectionOptions, timeout: float, wait_for_ready: bool) -> server_pb2.ServerDescription:
    request = server_pb2.GetServerRequest().SerializeToString()
    ending = Cancellation()

    def exchange() -> bytes:
        under_way = channel.unary_unary(_METHOD).future(request, timeout=timeout, wait_for_ready=wait_for_ready)
        with ending.ends(under_way.cancel):
            answer: bytes = under_way.result()
            return answer

    try:
        return server_pb2.ServerDescription.FromString(run_apart(exchange, ending.cancel))
    except grpc.RpcError as error:
        raise errors.from_rpc(error, options.target) from None
    except DecodeError:
        raise errors.FailedPrecondition(
            f"the server at {options.target} describes itself in another protocol than that of this client (lossd "
            f"{VERSION}): use the same version of both") from None


def _reason(options: ConnectionOptions) -> errors.LossdError | None:
    return _diagnosis.diagnose(options.target, options.credentials)


def _can_tell(options: ConnectionOptions) -> bool:
    return _diagnosis.can_diagnose(options.target)


def _no_server(options: ConnectionOptions, error: errors.LossdError) -> errors.Unavailable:
    return errors.Unavailable(f"no server at {options.target}: {error.message}")


def _gave_up(reason: errors.LossdError | None, options: ConnectionOptions) -> errors.Unavailable:
    waited = f"{options.connect_timeout} s"
    if reason is not None:
        return errors.Unavailable(f"{reason.message}; waited {waited}")
    does = "takes connections but has" if _can_tell(options) else "has"
    return errors.Unavailable(f"the server at {options.target} {does} not answered within {waited}: it is busy, or it is "
                              "another program than lossd")
