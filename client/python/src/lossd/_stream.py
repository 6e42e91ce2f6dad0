# SPDX-License-Identifier: Apache-2.0
"""One ComputeLoss call: sends what its plan says and scatters the answers into the caller's memory.

A stream runs on one thread; gRPC pulls its messages on another, one at a time, as the connection takes them: at most
one slice is in memory twice. cancel() may be called from any thread.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lossd import _wire, errors
from lossd._arrays import RowMemory
from lossd._connections import Connection, Connections, Deadline
from lossd._interrupts import Cancellation
from lossd._plan import AnswerTracker, Rows, SliceRule
from lossd._shown import exact_bytes
from lossd._wire import SlicePlaces
from lossd._work import Outputs, StreamPlan, Work
from lossd.types import ClassOutput, RowOutput
from lossd.v1 import loss_pb2, types_pb2


# The messages of one ComputeLoss call, apart from gRPC: the bytes of a slice, and what the server's answers mean.
#
# client/cpp/loss_call.h does the same; tests/client/golden/messages.json and stream_answers.json hold both to it.


def encode_slice(hidden: RowMemory, rows: Rows, row_bytes: int) -> bytes:
    """The message of one slice."""
    request = loss_pb2.ComputeLossRequest(slice=loss_pb2.SliceHeader(
        rows=types_pb2.RowRange(begin=rows.begin, end=rows.end)))
    return _wire.encode(request, hidden.read(rows.begin * row_bytes, rows.end * row_bytes))


def encode_slice_in_region(rows: Rows, row_bytes: int, offset: int) -> bytes:
    """The message of a slice that lies in the call's region."""
    return loss_pb2.ComputeLossRequest(slice=loss_pb2.SliceHeader(
        rows=types_pb2.RowRange(begin=rows.begin, end=rows.end),
        in_region=loss_pb2.RegionRange(offset=offset, bytes=len(rows) * row_bytes))).SerializeToString()


class StreamAnswers:
    """Takes the answers of one call in their order, checks them and scatters results into the caller's memory.

    Used by one thread but for replace. After an error the outputs are unspecified.
    """

    def __init__(self, plan: StreamPlan, outputs: Outputs, row_bytes: int,
                 accept: Callable[[types_pb2.HeadState], None], places: SlicePlaces | None = None) -> None:
        """`accept` decides whether to go on from where the server stands; its exception ends the call.

        `places` None: no slice lies in a region.
        """
        self._outputs = outputs
        self._row_bytes = row_bytes
        self._accept = accept
        self._places = places or SlicePlaces(None, may_wait=False)
        self._answers = AnswerTracker(plan.rows, plan.slices)
        self._depths = plan.depths
        self._accepted: loss_pb2.MicrobatchAccepted | None = None
        self._summary: loss_pb2.MicrobatchSummary | None = None
        self.received_bytes = self.received_in_messages = 0  # of payload

    def end(self) -> loss_pb2.MicrobatchSummary:
        """The summary, once the server has ended the call with OK; Internal if it may not have."""
        if self._summary is None:
            raise errors.server_sent("no summary before it ended the call")
        return self._summary

    def replace(self, whole: Rows, parts: list[Rows]) -> None:
        """A slice is sent in parts; on any thread, before they are."""
        self._answers.replace(whole, parts)

    def handle(self, data: bytes) -> None:
        """Takes the next answer; Internal says what the server sent if it cannot be right."""
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
        self.received_in_messages += payload.nbytes
        if result.in_region:
            self._fetch_gradient(rows, payload)
        else:
            self._scatter_gradient(rows, payload)
        values: dict[RowOutput, Any] = {
            "loss": result.row_loss, "lse": result.row_lse, "entropy": result.row_entropy,
            "logprob": result.row_logprob, "argmax": result.row_argmax}
        for name, field in values.items():
            self._scatter_rows(rows, name, field)
        several: dict[ClassOutput, Any] = {
            "class_logprobs": result.class_logprobs, "top_logprobs": result.top_logprobs,
            "top_classes": result.top_classes}
        for kind, field in several.items():
            self._scatter_classes(rows, kind, field)
        self._places.free(rows.begin)

    def _fetch_gradient(self, rows: Rows, payload: memoryview) -> None:
        out, begin, end = self._outputs.grad_hidden, rows.begin * self._row_bytes, rows.end * self._row_bytes
        place = self._places.find(rows.begin, end - begin)
        if place is None or payload.nbytes:
            raise errors.server_sent(f"gradients in a region for {rows}, which are not in one")
        if out is None:
            raise errors.server_sent(f"{exact_bytes(end - begin)} of gradients for {rows}; 0 were expected")
        out.from_region(begin, end, *place)
        self.received_bytes += end - begin

    def _scatter_gradient(self, rows: Rows, payload: memoryview) -> None:
        out, row_bytes = self._outputs.grad_hidden, self._row_bytes
        expected = len(rows) * row_bytes if out is not None else 0
        if payload.nbytes != expected:
            raise errors.server_sent(f"{exact_bytes(payload.nbytes)} of gradients for {rows}; {expected} were expected")
        if out is not None:
            out.write(rows.begin * row_bytes, payload)
        self.received_bytes += payload.nbytes

    def _scatter_rows(self, rows: Rows, name: RowOutput, values: Any) -> None:
        out = self._outputs.rows.get(name)
        expected = len(rows) if out is not None else 0
        if len(values) != expected:
            raise errors.server_sent(f"{len(values)} values of row_{name} for {rows}; {expected} were expected")
        if out is not None:
            out[rows.begin:rows.end] = np.fromiter(values, out.dtype, expected)

    def _scatter_classes(self, rows: Rows, name: ClassOutput, values: Any) -> None:
        out = self._outputs.classes.get(name)
        expected = len(rows) * out.shape[1] if out is not None else 0
        if len(values) != expected:
            raise errors.server_sent(f"{len(values)} values of {name} for {rows}; {expected} were expected")
        if out is not None:
            out[rows.begin:rows.end] = np.fromiter(values, out.dtype, expected).reshape(len(rows), -1)

    def _handle_summary(self, summary: loss_pb2.MicrobatchSummary) -> None:
        if self._accepted is None:
            raise errors.server_sent("the summary before `accepted`")
        if not self._answers.complete() or self._answers.answered_rows < summary.valid_rows:
            raise errors.server_sent(
                f"the summary of {summary.valid_rows} valid rows after results of {self._answers.answered_rows} rows")
        if summary.state.incarnation != self._accepted.state.incarnation:
            raise errors.server_sent("another incarnation in the summary than in `accepted`")
        if len(summary.depths) != self._depths:
            raise errors.server_sent(f"sums of {len(summary.depths)} depths; {self._depths} were sent")
        self._summary = summary


_METHOD = "/lossd.v1.LossService/ComputeLoss"


class LossStream:
    """`accept` decides whether to go on from where the server stands; its exception ends the call."""

    def __init__(self, connections: Connections, connection: Connection, work: Work, plan: StreamPlan, rule: SliceRule,
                 accept: Callable[[types_pb2.HeadState], None], places: SlicePlaces) -> None:
        self._connections = connections
        self._method = connections.stream(_METHOD, connection)
        self._work = work
        self._plan = plan
        self._rule = rule  # of slices in messages
        self._places = places
        self._answers = StreamAnswers(plan, work.outputs, work.row_bytes, accept, places)
        self._call: Any = None
        self._cancelled = False
        self._unread: Exception | None = None  # what kept rows from being read
        self.sent_bytes = 0

    @property
    def received_bytes(self) -> int:
        return self._answers.received_bytes

    def run(self, deadline: Deadline, cancellation: Cancellation) -> loss_pb2.MicrobatchSummary:
        """Blocks until the call has ended."""
        def exchange() -> None:
            self._call = self._method(self._messages(), timeout=deadline.left())
            if self._cancelled:
                self._call.cancel()
            for data in self._call:
                before = self._answers.received_in_messages
                self._answers.handle(data)
                if self._answers.received_in_messages > before:
                    self._connections.count_moved(self._answers.received_in_messages - before)

        error: BaseException | None = None
        try:
            with cancellation.ends(self.cancel):
                self._connections.run(exchange)
        except BaseException as raised:
            error = self._unread or raised
            raise error from None
        finally:
            self.cancel()  # no effect if it has ended
            self._places.close(error)
        return self._answers.end()

    def cancel(self) -> None:
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    def _messages(self) -> Iterator[bytes]:
        """What gRPC sends. It takes an exception for its caller's mistake, so the call is ended instead."""
        try:
            yield from self._read()
        except Exception as error:
            self._unread = error
            self.cancel()

    def _read(self) -> Iterator[bytes]:
        yield self._plan.first
        hidden, row_bytes = self._work.hidden, self._work.sent_row_bytes
        left = collections.deque(self._plan.slices or ())
        while left:
            assert hidden is not None
            rows = left.popleft()
            if self._cancelled:
                return  # the memory is not looked at any more
            offset = self._places.put(rows.begin, hidden, rows.begin * row_bytes, rows.end * row_bytes)
            if self._cancelled:
                return
            if offset is None and len(rows) > self._rule.max_rows:
                parts = self._rule.cut(rows)
                self._answers.replace(rows, parts)
                left.extendleft(reversed(parts))
                continue
            sent = len(rows) * row_bytes if hidden.is_sent else 0
            self.sent_bytes += sent
            if offset is None:
                self._connections.count_moved(sent)
                yield encode_slice(hidden, rows, row_bytes)
            else:
                yield encode_slice_in_region(rows, row_bytes, offset)
