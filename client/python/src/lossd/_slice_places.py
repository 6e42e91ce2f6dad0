# SPDX-License-Identifier: Apache-2.0
"""Where the slices of one ComputeLoss call lie: in messages, or in shared memory, where their gradients come back.

Gradients of rows that the server has retained come to a part of the region that is taken when the call begins.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType

from lossd._plan import Rows
from lossd._regions import SharedRegion
from lossd._arrays import RowMemory

_PATIENCE = 0.1  # seconds; the others may wait for something that this call's caller does only after it


@dataclass(frozen=True)
class Room:
    """The part of the region for gradients of retained rows, `first_row` first."""

    offset: int
    size: int
    first_row: int
    row_bytes: int


class SlicePlaces:
    """One thread puts slices, another one frees them, any may close."""

    def __init__(self, region: SharedRegion | None, may_wait: bool) -> None:
        """`region` None: all slices go in messages. `may_wait`: answers come while further slices are not sent, so a
        slice may wait for the place of one before it."""
        self._region = region if region is not None and region.begin() else None
        self._may_wait = may_wait
        self._changed = threading.Condition()  # guards what follows
        self._taken: dict[int, tuple[int, int]] = {}  # first row to offset and bytes
        self._taken_bytes = 0
        self._closed = False
        self._patient = True  # with other calls; of the thread that puts
        self._room: Room | None = None

    @property
    def region(self) -> SharedRegion | None:
        """The one that the call uses; None if that could not be used any more."""
        return self._region

    def __enter__(self) -> SlicePlaces:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(error)

    def reserve(self, rows: Rows, row_bytes: int) -> Room | None:
        """Takes room for gradients of rows that the server has: of as many as there is room for, from the first one on."""
        if self._region is None:
            return None
        count = min(len(rows), self._region.share // row_bytes)
        while count > 0 and self._room is None:
            offset = self._region.take(count * row_bytes)
            if offset is not None:
                self._room = Room(offset, count * row_bytes, rows.begin, row_bytes)
            count //= 2
        return self._room

    def put(self, row: int, hidden: RowMemory, begin: int, end: int) -> int | None:
        """Copies the slice with this first row, bytes of `hidden`, into the region: its offset there. None: it is to go in
        a message.

        Waits until there is room if an answer of this call will make some, and a moment if one of another call may. Not to
        be called after close().
        """
        size = end - begin
        if self._region is None or size == 0:
            return None
        with self._changed:
            offset = self._take(size)
            while offset is None and self._taken and self._may_wait and not self._closed:
                self._changed.wait()
                offset = self._take(size)
        if offset is None:
            offset = self._take_from_others(size)
        with self._changed:
            if offset is None:
                return None
            if self._closed:
                self._region.give(offset)
                return None
            self._taken[row] = offset, size
            self._taken_bytes += size
            self._region.enter()  # the call may end during the copy
        try:
            hidden.to_region(begin, end, self._region, offset)
        finally:
            self._region.leave()
        return offset

    def _take_from_others(self, size: int) -> int | None:
        """A call that has nothing in the region waits a while, once, for what other calls give back."""
        assert self._region is not None
        if not self._may_wait or not self._patient or self._closed or self._taken:
            return None
        offset = self._region.take(size, _PATIENCE)
        self._patient = offset is not None
        return offset

    def _take(self, size: int) -> int | None:
        assert self._region is not None
        if self._closed or (self._taken and self._taken_bytes + size > self._region.share):
            return None
        return self._region.take(size)

    def find(self, row: int, size: int) -> tuple[SharedRegion, int] | None:
        """Where the slice with this first row and so many bytes lies; None if it is in a message."""
        if self._region is None:
            return None
        with self._changed:
            offset, most = self._taken.get(row, (0, -1))
        if self._room is not None:
            before = (row - self._room.first_row) * self._room.row_bytes
            offset, most = self._room.offset + before, self._room.size - before if before >= 0 else -1
        return None if size > most else (self._region, offset)

    def free(self, row: int) -> None:
        """The slice was answered, and its gradients have been used."""
        with self._changed:
            place = self._taken.pop(row, None)
            if place is None or self._region is None:
                return
            self._region.give(place[0])
            self._taken_bytes -= place[1]
            self._changed.notify_all()

    def close(self, error: BaseException | None) -> None:
        """The call has ended. The region is retired if the server may still write to it, or may have lost it.

        May be repeated; the first one counts.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if self._region is not None:
                if error is not None:
                    self._region.after_failure(error, holds=bool(self._taken) or self._room is not None)
                elif self._room is not None:
                    self._region.give(self._room.offset)
                self._region.leave()
            self._changed.notify_all()
