"""Where the slices of one ComputeLoss call lie: in messages, or in shared memory, where their gradients come back."""

from __future__ import annotations

import threading

import numpy as np

from lossd import errors
from lossd._regions import SharedRegion

_CALLS_PER_REGION = 4  # so that the calls of several microbatches find room beside each other


class SlicePlaces:
    """One thread puts slices, another one frees them, any may close."""

    def __init__(self, region: SharedRegion | None, may_wait: bool) -> None:
        """`region` None: all slices go in messages. `may_wait`: answers come while further slices are not sent, so a
        slice may wait for the place of one before it."""
        self._region = region
        self._may_wait = may_wait
        self._changed = threading.Condition()  # guards what follows
        self._taken: dict[int, tuple[int, int]] = {}  # first row to offset and bytes
        self._taken_bytes = 0
        self._closed = False

    def put(self, row: int, hidden: memoryview) -> int | None:
        """Copies the slice with this first row into the region: its offset there. None: it is to go in a message.

        Waits until there is room, if an answer of this call will make some. Not to be called after close().
        """
        if self._region is None or hidden.nbytes == 0:
            return None
        with self._changed:
            offset = self._take(hidden.nbytes)
            while offset is None and self._taken and self._may_wait and not self._closed:
                self._changed.wait()
                offset = self._take(hidden.nbytes)
            if offset is None:
                return None
            self._taken[row] = offset, hidden.nbytes
            self._taken_bytes += hidden.nbytes
        # NumPy copies without the interpreter's lock.
        self._region.memory[offset:offset + hidden.nbytes] = np.frombuffer(hidden, np.uint8)
        return offset

    def _take(self, size: int) -> int | None:
        assert self._region is not None
        if self._closed or (self._taken and self._taken_bytes + size > self._region.size // _CALLS_PER_REGION):
            return None
        return self._region.take(size)

    def find(self, row: int) -> memoryview | None:
        """The bytes of the slice with this first row; None if it went in a message."""
        with self._changed:
            place = self._taken.get(row)
        if place is None or self._region is None:
            return None
        offset, size = place
        return self._region.memory[offset:offset + size].data

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
        """The call has ended. The region is retired if the server may still write to it, or may have lost it."""
        with self._changed:
            self._closed = True
            if self._region is not None and (self._taken or isinstance(error, errors.Unavailable)):
                self._region.retire()
            self._changed.notify_all()
