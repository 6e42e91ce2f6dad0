# SPDX-License-Identifier: Apache-2.0
"""The exceptions of the client: one class for each status code of the protocol, with the server's structured detail.

Every exception is a LossdError. If Python has a class for the same kind of error, the exception also derives from it, so that
`except ValueError` and `except ConnectionError` work as expected.
"""

from __future__ import annotations

from lossd.v1 import types_pb2


class LossdError(Exception):
    """Base of all errors of this package.

    Attributes:
      message:       what was wrong, in words.
      field:         path of the offending field, e.g. "open.targets[17]"; empty if there is none.
      value:         the value found there, as text; may be empty.
      incarnation:   the incarnation of the server that answered; 0 if none answered.
      current_step:  the head's open step, if the server names it.
      missing:       the rows that ApplyStep misses, e.g. ("microbatch 7: rows [128, 256)",).
    """

    def __init__(self, message: str, detail: types_pb2.ErrorDetail | None = None) -> None:
        super().__init__(message)
        detail = detail or types_pb2.ErrorDetail()
        self.message = message
        self.field: str = detail.field
        self.value: str = detail.value
        self.incarnation: int = detail.incarnation
        self.current_step: int | None = detail.current_step if detail.HasField("current_step") else None
        self.missing: tuple[str, ...] = tuple(detail.missing)

    def reword(self, message: str) -> None:
        self.message = message
        self.args = (message,)

    def add(self, more: str) -> None:
        """Appends to the message."""
        self.reword(self.message + more)

    def __str__(self) -> str:
        return "; ".join((self.message, *(f"missing: {what}" for what in self.missing if what not in self.message)))


class InvalidArgument(LossdError, ValueError):
    """A field or a value breaks a rule. Nothing has changed."""


class NonFinite(LossdError, ArithmeticError):
    """A row's loss or gradient is not finite. Nothing of its slice was accumulated. Skip the step or lower the loss scale."""


class NotFound(LossdError, LookupError):
    """There is no such head, tensor, checkpoint or retained row."""


class AlreadyExists(LossdError):
    """The name is already in use."""


class FailedPrecondition(LossdError):
    """The step is wrong, the head is frozen, the microbatch id was sent with other contents, or rows are missing (see `missing`)."""


class ResourceExhausted(LossdError):
    """There are too many calls, the message is too large, or the server has no memory for it."""


class Unavailable(LossdError, ConnectionError):
    """There is no connection, the server is draining, or the connection broke and repeating the call did not help."""


class DeadlineExceeded(LossdError, TimeoutError):
    """The call took longer than its timeout."""


class Cancelled(LossdError):
    """The caller cancelled the call, or closed the client during the call."""


class Aborted(LossdError):
    """What the call works with changed during the call: the gradients of its step, or the weights."""


class Restarted(Aborted):
    """The server was restarted, so the gradients of the open step are lost.

    Restore the head from a checkpoint, or repeat the step after Client.acknowledge_restart().
    """


class StepDiscarded(Aborted):
    """Another caller has zeroed the open step's gradients, reset the head, or loaded a checkpoint: this client's rows of the step are lost.

    Calls of the step fail until this client starts it again: zero_gradients, reset_head, load_checkpoint or acknowledge_restart().
    """


class Unauthenticated(LossdError, PermissionError):
    """The server does not know who this client is, or the client does not trust the server's certificate."""


class PermissionDenied(LossdError, PermissionError):
    """This client's role is too low for the call; the message names method, role and identity."""


class DataLoss(LossdError, OSError):
    """A checkpoint does not contain what was saved; the message names the tensor or the file."""


class Internal(LossdError, RuntimeError):
    """A device or disk failed, or the server sent something that the protocol does not allow."""


class Unimplemented(LossdError, NotImplementedError):
    """The server does not know the call: it is another version of lossd, or not lossd."""


class ClientClosed(LossdError):
    """The client was closed."""


class ForkedClient(LossdError, RuntimeError):
    """The client was created before a fork, and its connections do not survive a fork. Create a client in the child, or use spawn."""


_CLASSES: dict[int, type[LossdError]] = {  # by gRPC status code
    1: Cancelled, 3: InvalidArgument, 4: DeadlineExceeded, 5: NotFound, 6: AlreadyExists, 7: PermissionDenied, 8: ResourceExhausted,
    9: FailedPrecondition, 10: Aborted, 11: NonFinite, 12: Unimplemented, 14: Unavailable, 15: DataLoss, 16: Unauthenticated}
_REASONS: dict[int, type[LossdError]] = {1: Restarted, 2: StepDiscarded}


def from_native(code: int, message: str, packed: bytes = b"", reason: int = 0) -> LossdError:
    """The error for a result of the library. `code`: gRPC's; `packed`: an ErrorDetail; `reason`: the kind of Aborted (lossd_result)."""
    return _REASONS.get(reason, _CLASSES.get(code, Internal))(message, types_pb2.ErrorDetail.FromString(packed))
