# SPDX-License-Identifier: Apache-2.0
"""One ComputeLoss call: sends what its plan says and scatters the answers into the caller's memory.

A stream runs on one thread; gRPC pulls its messages on another, one at a time, as the connection takes them: at most
one slice is in memory twice. cancel() may be called from any thread.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

from lossd._cancellation import Cancellation
from lossd._connections import Connection, Connections, Deadline
from lossd._plan import SliceRule
from lossd._slice_places import SlicePlaces
from lossd._stream_messages import StreamAnswers, encode_slice, encode_slice_in_region
from lossd._work import StreamPlan, Work
from lossd.v1 import loss_pb2, types_pb2

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
        hidden, row_bytes = self._work.hidden, self._work.row_bytes
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
            self.sent_bytes += len(rows) * row_bytes
            if offset is None:
                self._connections.count_moved(len(rows) * row_bytes)
                yield encode_slice(hidden, rows, row_bytes)
            else:
                yield encode_slice_in_region(rows, row_bytes, offset)
