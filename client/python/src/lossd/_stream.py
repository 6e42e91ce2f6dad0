"""One ComputeLoss call: sends what its plan says and scatters the answers into the caller's memory.

A stream runs on one thread; gRPC pulls its messages on another, one at a time, as the connection takes them: at most
one slice is in memory twice. cancel() may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lossd import _wire, errors
from lossd._connections import Connections, Deadline
from lossd._plan import Rows, SliceBook
from lossd._work import StreamPlan, Work
from lossd.types import RowOutput
from lossd.v1 import loss_pb2, types_pb2

_METHOD = "/lossd.v1.LossService/ComputeLoss"


class LossStream:
    """`accept` decides whether to go on from where the server stands; its exception ends the call."""

    def __init__(self, connections: Connections, channel: int, work: Work, plan: StreamPlan,
                 accept: Callable[[types_pb2.HeadState], None]) -> None:
        self._connections = connections
        self._method = connections.stream(channel, _METHOD)
        self._work = work
        self._plan = plan
        self._accept = accept
        self._answers = SliceBook(plan.rows, plan.slices)
        self._accepted: loss_pb2.MicrobatchAccepted | None = None
        self._summary: loss_pb2.MicrobatchSummary | None = None
        self._call: Any = None
        self._cancelled = False
        self.sent_bytes = 0
        self.received_bytes = 0

    def run(self, deadline: Deadline) -> loss_pb2.MicrobatchSummary:
        """Blocks until the call has ended."""
        def exchange() -> None:
            self._call = self._method(self._messages(), timeout=deadline.left())
            if self._cancelled:
                self._call.cancel()
            for data in self._call:
                self._handle(data)

        try:
            self._connections.run(exchange)
        finally:
            self.cancel()  # no effect if it has ended
        if self._summary is None:
            raise errors.server_sent("no summary before it ended the call")
        return self._summary

    def cancel(self) -> None:
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    def _messages(self) -> Iterator[bytes]:
        yield self._plan.first
        hidden, row_bytes = self._work.hidden, self._work.row_bytes
        for rows in self._plan.slices or ():
            assert hidden is not None
            request = loss_pb2.ComputeLossRequest(slice=loss_pb2.SliceHeader(
                rows=types_pb2.RowRange(begin=rows.begin, end=rows.end)))
            self.sent_bytes += len(rows) * row_bytes
            yield _wire.encode(request, hidden[rows.begin * row_bytes:rows.end * row_bytes])

    def _handle(self, data: bytes) -> None:
        response, payload = _wire.decode(loss_pb2.ComputeLossResponse, data)
        if self._summary is not None:
            raise errors.server_sent("a message after the summary")
        kind = response.WhichOneof("kind")
        if kind == "slice":
            self._handle_slice(response.slice, payload)
        elif kind == "accepted":
            self._handle_accepted(response.accepted)
        elif kind == "summary":
            self._handle_summary(response.summary)
        else:
            raise errors.server_sent("a message of unknown kind")

    def _handle_accepted(self, accepted: loss_pb2.MicrobatchAccepted) -> None:
        if self._accepted is not None:
            raise errors.server_sent("`accepted` twice")
        self._accepted = accepted
        self._accept(accepted.state)

    def _handle_slice(self, result: loss_pb2.SliceResult, payload: memoryview) -> None:
        if self._accepted is None:
            raise errors.server_sent("a slice before `accepted`")
        rows = Rows(result.rows.begin, result.rows.end)
        self._answers.take(rows)
        self._scatter_gradient(rows, payload)
        values: dict[RowOutput, Any] = {
            "loss": result.row_loss, "lse": result.row_lse, "entropy": result.row_entropy,
            "logprob": result.row_logprob, "argmax": result.row_argmax}
        for name, field in values.items():
            self._scatter_rows(rows, name, field)
        self.received_bytes += payload.nbytes

    def _scatter_gradient(self, rows: Rows, payload: memoryview) -> None:
        out, row_bytes = self._work.outputs.grad_hidden, self._work.row_bytes
        expected = len(rows) * row_bytes if out is not None else 0
        if payload.nbytes != expected:
            raise errors.server_sent(f"{payload.nbytes} bytes of gradients for {rows}; {expected} were expected")
        if out is not None:  # NumPy copies without the interpreter's lock
            np.frombuffer(out, np.uint8)[rows.begin * row_bytes:rows.end * row_bytes] = np.frombuffer(payload, np.uint8)

    def _scatter_rows(self, rows: Rows, name: RowOutput, values: Any) -> None:
        out = self._work.outputs.rows.get(name)
        expected = len(rows) if out is not None else 0
        if len(values) != expected:
            raise errors.server_sent(f"{len(values)} values of row_{name} for {rows}; {expected} were expected")
        if out is not None:
            out[rows.begin:rows.end] = np.fromiter(values, out.dtype, expected)

    def _handle_summary(self, summary: loss_pb2.MicrobatchSummary) -> None:
        if self._accepted is None:
            raise errors.server_sent("the summary before `accepted`")
        if not self._answers.complete() or self._answers.answered_rows < summary.valid_rows:
            raise errors.server_sent(
                f"the summary of {summary.valid_rows} valid rows after results of {self._answers.answered_rows} rows")
        if summary.state.incarnation != self._accepted.state.incarnation:
            raise errors.server_sent("another incarnation in the summary than in `accepted`")
        self._summary = summary
