"""The first call on each connection of a client: whether a lossd is there, and what is there if not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from lossd import _diagnosis, errors
from lossd._version import VERSION
from lossd.v1 import server_pb2

if TYPE_CHECKING:
    from lossd._connections import ConnectionOptions, Deadline

_METHOD = "/lossd.v1.ServerService/GetServer"
_PATIENCE = 0.5  # seconds without an answer, after which the reason is looked for while the call goes on
_ROUND = 5.0  # seconds between two looks at why the server is still not there
_PAUSE = 0.2  # seconds before the next call


def await_server(channel: Any, options: ConnectionOptions, deadline: Deadline) -> server_pb2.ServerDescription:
    """Returns when the server has answered on this channel, or raises what keeps it from answering.

    Unavailable if nobody is there, at once unless options.wait_for_server. What waiting cannot mend (TLS on one side
    only, another program, ...) is raised at once in any case. A server that takes connections but says nothing may be
    busy, so it has until the deadline.
    """
    again = False
    while True:
        left = deadline.left()
        call = channel.unary_unary(_METHOD).future(
            server_pb2.GetServerRequest().SerializeToString(), timeout=min(left, _ROUND) if again else left,
            wait_for_ready=again)
        try:
            return _answer(call, options)
        except errors.DeadlineExceeded:
            reason = _reason(options)
        except errors.Unavailable as error:
            # An error of the first call may be one of the connection, and of a server that has come up meanwhile.
            reason = _reason(options) or (_no_server(options, error) if again or not _can_tell(options) else None)
        _raise_if_final(reason, options)
        if deadline.passed():
            raise _gave_up(reason, options)
        time.sleep(min(_PAUSE, deadline.left()))
        again = True


def _answer(call: Any, options: ConnectionOptions) -> server_pb2.ServerDescription:
    """What the server is. While that takes long, the reason is looked for, and raised if waiting is no use."""
    try:
        try:
            answer = call.result(timeout=_PATIENCE)
        except grpc.FutureTimeoutError:
            _raise_if_final(_reason(options), options)
            answer = call.result()
    except grpc.RpcError as error:
        raise errors.from_rpc(error, options.target) from None
    finally:
        call.cancel()
    try:
        return server_pb2.ServerDescription.FromString(answer)
    except DecodeError:
        raise errors.FailedPrecondition(
            f"the server at {options.target} describes itself in another protocol than that of this client (lossd "
            f"{VERSION}): use the same version of both") from None


def _reason(options: ConnectionOptions) -> errors.LossdError | None:
    return _diagnosis.diagnose(options.target, options.credentials.ca, options.credentials.cert)


def _can_tell(options: ConnectionOptions) -> bool:
    return _diagnosis.can_diagnose(options.target)


def _raise_if_final(reason: errors.LossdError | None, options: ConnectionOptions) -> None:
    """Raises what waiting does not mend, and what it may mend if nobody wants to wait."""
    if reason is not None and not (isinstance(reason, errors.Unavailable) and options.wait_for_server):
        raise reason


def _no_server(options: ConnectionOptions, error: errors.LossdError) -> errors.Unavailable:
    return errors.Unavailable(f"no server at {options.target}: {error.message}")


def _gave_up(reason: errors.LossdError | None, options: ConnectionOptions) -> errors.Unavailable:
    waited = f"{options.connect_timeout} s"
    if reason is not None:
        return errors.Unavailable(f"{reason.message}; waited {waited}")
    does = "takes connections but has" if _can_tell(options) else "has"
    return errors.Unavailable(f"the server at {options.target} {does} not answered within {waited}: it is busy, or it is "
                              "another program than lossd")
