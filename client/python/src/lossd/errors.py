# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the client: one class per status code of the protocol, with the server's structured detail.

Every exception is a LossdError. Where Python has a class for the same thing, ours derives from it too, so
`except ValueError` and `except ConnectionError` work as expected.
"""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError

from lossd._version import VERSION, compared
from lossd.v1 import types_pb2

_DETAILS_KEY = "grpc-status-details-bin"


class LossdError(Exception):
    """Base of all errors of this package.

    Attributes:
      message:       what was wrong, in words.
      field:         path of the offending field, e.g. "open.targets[17]"; empty if there is none.
      value:         the value found there, as text; may be empty.
      incarnation:   of the server that answered; 0 if none did.
      current_step:  the head's open step, where the server said so.
      missing:       what ApplyStep misses, e.g. ("microbatch 7: rows [128, 256)",).
    """

    def __init__(self, message: str, detail: types_pb2.ErrorDetail | None = None) -> None:
        super().__init__(message)
        self._has_detail = detail is not None  # as all errors have that the server itself has sent
        detail = detail or types_pb2.ErrorDetail()
        self.message = message
        self.field: str = detail.field
        self.value: str = detail.value
        self.incarnation: int = detail.incarnation
        self.current_step: int | None = detail.current_step if detail.HasField("current_step") else None
        self.missing: tuple[str, ...] = tuple(detail.missing)

    def add(self, more: str) -> None:
        """Continues the message."""
        self.message += more
        self.args = (self.message,)

    def __str__(self) -> str:
        return "; ".join((self.message, *(f"missing: {what}" for what in self.missing if what not in self.message)))


class InvalidArgument(LossdError, ValueError):
    """A field or a value breaks a rule; nothing changed."""


class NonFinite(LossdError, ArithmeticError):
    """A row's loss or gradient is not finite; nothing of its slice was accumulated. Skip the step or lower the loss scale."""


class NotFound(LossdError, LookupError):
    """No such head, tensor, checkpoint or retained row."""


class AlreadyExists(LossdError):
    """The name is taken."""


class FailedPrecondition(LossdError):
    """Wrong step, frozen head, same microbatch id with other contents, or rows missing (see `missing`)."""


class ResourceExhausted(LossdError):
    """Too many calls, too large a message, or no memory for it on the server."""


class Unavailable(LossdError, ConnectionError):
    """No connection, the server is draining, or the connection broke and repeating did not help."""


class DeadlineExceeded(LossdError, TimeoutError):
    """The call's timeout passed."""


class Cancelled(LossdError):
    """The caller cancelled the call, or closed the client under it."""


class Aborted(LossdError):
    """What the call works with was changed under it: the gradients of its step, or the weights."""


class Restarted(Aborted):
    """The server is another process than before: gradients of the open step are lost.

    Restore the head from a checkpoint, or repeat the step after Client.acknowledge_restart().
    """


class StepDiscarded(Aborted):
    """Another caller has zeroed the gradients of the open step, reset the head, or loaded a checkpoint: rows of this client
    are lost.

    Calls of the step fail until the trainer starts it again: after zero_gradients, reset_head or load_checkpoint of this
    client, or Client.acknowledge_restart().
    """


class Unauthenticated(LossdError, PermissionError):
    """The server does not know who this client is, or the client does not trust the server's certificate."""


class PermissionDenied(LossdError, PermissionError):
    """This client's role is too low for the call; the message names method, role and identity."""


class DataLoss(LossdError, OSError):
    """A checkpoint does not hold what was saved; the tensor or file is named."""


class Internal(LossdError, RuntimeError):
    """A device or disk failed, or the server sent something that the protocol does not allow."""


class Unimplemented(LossdError, NotImplementedError):
    """The server does not know the call: it is of another version, or no lossd."""


class ClientClosed(LossdError):
    """The client was closed."""


class ForkedClient(LossdError, RuntimeError):
    """The client was made before a fork; connections do not survive one. Connect in the child, or use spawn."""


_CLASSES: dict[grpc.StatusCode, type[LossdError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: NonFinite,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.DATA_LOSS: DataLoss,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}
_NAME_THE_SERVER = (Unavailable, DeadlineExceeded)
_TOO_LARGE = "essage larger than max"  # in what gRPC says of a message beyond a limit of one side


def from_rpc(error: grpc.RpcError, target: str, server_version: str | None = None) -> LossdError:
    """The exception for a call that gRPC ended with an error; `target` is named where the connection is at fault.

    `server_version`: what the server says of itself; None: nothing yet.
    """
    code, message = error.code(), error.details() or ""
    kind = _CLASSES.get(code, Internal)
    if kind is Internal and code is not grpc.StatusCode.INTERNAL:
        message = f"{code.name}: {message}"
    if issubclass(kind, _NAME_THE_SERVER):
        message = f"{message} (server {target})"
    detail = _detail(error)
    if kind is Unimplemented and detail is None:  # who says what it does not take knows the call
        message = _unimplemented(message, target, server_version)
    return kind(message, detail)


def from_code(code: int, message: str) -> LossdError:
    """The exception for one of gRPC's status codes, as a number."""
    return next((kind for status, kind in _CLASSES.items() if status.value[0] == code), Internal)(message)


def _unimplemented(message: str, target: str, server_version: str | None) -> str:
    if server_version is None:
        return (f"the gRPC server at {target} does not know lossd.v1, the protocol of this client (lossd {VERSION}): it is "
                f"another program, or a lossd of another version ({message})")
    is_, do = compared(server_version)
    return (f"lossd {server_version} at {target} does not know this call: it is {is_} this client (lossd {VERSION}); {do} "
            f"({message})")


def _detail(error: grpc.RpcError) -> types_pb2.ErrorDetail | None:
    """The detail that the server sent; None if there is none or it cannot be read."""
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY:
            continue
        detail = types_pb2.ErrorDetail()
        try:
            for packed in types_pb2.StatusDetails.FromString(value).details:
                if packed.Unpack(detail):
                    return detail
        except DecodeError:
            return None
    return None


def restarted(head: str | None, before: int, now: int, step: int | None) -> Restarted:
    """`head` None: none is known."""
    if head is None:
        consequence = "gradients of open steps are lost: restore the heads or repeat the steps"
    else:
        lost = "its weights may have changed" if step is None else f"gradients of step {step} are lost"
        consequence = f'{lost}: restore head "{head}" or repeat the step'
    message = f"server restarted (incarnation {before:016x} -> {now:016x}); {consequence}"
    return Restarted(message, types_pb2.ErrorDetail(incarnation=now))


def _discarded(head: str, step: int, how: str, incarnation: int = 0) -> StepDiscarded:
    return StepDiscarded(f'gradients of step {step} of head "{head}" were discarded: {how}',
                         types_pb2.ErrorDetail(incarnation=incarnation))


def discarded(head: str, step: int, before: int, now: int) -> StepDiscarded:
    """The head has gradients of another generation."""
    return _discarded(head, step, "another caller has zeroed them, reset the head or loaded a checkpoint (generation "
                                  f"{before} -> {now}); start the step again")


def is_transient(error: LossdError) -> bool:
    """Whether a call that ended with `error` may end otherwise when it is sent again as it was.

    Unavailable; or ResourceExhausted that did not come from the server, whose errors have a detail, but from the
    transport, for example "Received RST_STREAM with error code 11" of a server that is short of memory for messages. Such
    a call may have taken effect. A message that is too large for the transport stays too large.
    """
    if isinstance(error, Unavailable):
        return True
    return isinstance(error, ResourceExhausted) and not error._has_detail and _TOO_LARGE not in error.message


def refuses_generation(error: LossdError) -> bool:
    """Whether the server has refused a call because the head has other gradients than the call names."""
    return type(error) is Aborted and error.field.rpartition(".")[2] == "generation"


def discarded_says_server(head: str, step: int, error: LossdError) -> StepDiscarded:
    """`error` is one that refuses_generation."""
    return _discarded(head, step, "another caller has zeroed them, reset the head or loaded a checkpoint; start the step again (the "
                                  f"server says: {error.message})", error.incarnation)


def discarded_by_this_client(head: str, step: int) -> StepDiscarded:
    return _discarded(head, step, "this client has started the step again during the call")


def server_sent(what: str) -> Internal:
    """What the protocol does not allow."""
    return Internal(f"server sent {what}")
