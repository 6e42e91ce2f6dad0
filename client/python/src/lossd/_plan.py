# SPDX-License-Identifier: Apache-2.0
"""How the rows of a microbatch are spread over streams and slices. Pure arithmetic, no I/O."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lossd import errors
from lossd._shown import exact_bytes
from lossd.v1 import loss_pb2

MIN_ROWS_PER_STREAM = 128  # fewest valid rows worth a stream of their own, as in client/cpp/loss_plan.h
_MESSAGE_BYTES = 2 << 20  # larger messages cost less in the interpreter, smaller ones overlap better
_CALLS_PER_REGION = 4
REGION_GROWTH = 4  # the region that is asked for when calls have found no room: so many times what it was asked for
_HOST_SLICE_BYTES = 4 << 20  # of rows that are copied into a region, while the server works on those before them;
_HOST_SLICE_BYTES_AMONG_CALLS = 16 << 20  # or on those of other calls: then fewer messages matter more


@dataclass(frozen=True)
class Rows:
    """Rows [begin, end)."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"rows [{self.begin}, {self.end})"


def split_ranges(valid: NDArray[np.bool_], streams: int, max_rows: int) -> list[Rows]:
    """Splits all rows into contiguous ranges, at least one.

    `streams` of them with about the same number of valid rows each; fewer if there are few valid rows, more if one
    would have over `max_rows` rows.
    """
    counts = np.cumsum(valid)
    total = int(counts[-1]) if len(valid) else 0
    wanted = min(max(total // MIN_ROWS_PER_STREAM, 1), max(1, streams))
    cuts = [int(np.searchsorted(counts, total * i // wanted)) + 1 for i in range(1, wanted)]
    ranges: list[Rows] = []
    begin = 0
    for end in [*cuts, len(valid)]:
        while end - begin > max_rows:
            ranges.append(Rows(begin, begin + max_rows))
            begin += max_rows
        if end > begin or not ranges:
            ranges.append(Rows(begin, end))
            begin = end
    return ranges


@dataclass(frozen=True)
class SliceRule:
    """How rows may be cut."""

    max_rows: int
    row_grid: int = 0  # 0: no rule; else no slice has rows on both sides of a multiple of it
    max_rows_in_region: int = 0  # of a slice that lies in a region; at most max_rows: no more than in a message

    def in_region(self, rows: int, wanted: int) -> SliceRule:
        """For so many rows that lie in a region: about `wanted` at once if that is allowed, in parts of equal size."""
        most = max(self.max_rows, min(self.max_rows_in_region, wanted))
        parts = -(-rows // most)
        return SliceRule(most if parts <= 1 else -(-rows // parts), self.row_grid)

    def cut(self, rows: Rows) -> list[Rows]:
        """Parts of a slice that finds no room in a region, for messages."""
        parts: list[Rows] = []
        begin = rows.begin
        while begin < rows.end:
            room = self.max_rows if self.row_grid == 0 else min(self.max_rows, self.row_grid - begin % self.row_grid)
            parts.append(Rows(begin, min(begin + room, rows.end)))
            begin = parts[-1].end
        return parts


@dataclass(frozen=True)
class RegionSizes:
    """Bytes of the regions that a client asks for: `least` at first."""

    least: int
    most: int

    def wanted(self, call_bytes: int) -> int:
        """The region for calls whose rows have so many bytes: a power of two of which they are a share, within the sizes."""
        wanted = _CALLS_PER_REGION * min(call_bytes, self.most)
        return min(max(1 << max(wanted - 1, 0).bit_length(), self.least), self.most)


def share_of_region(size: int) -> int:
    """Bytes that one call takes at most of a region of `size`, so that those of several microbatches find room."""
    return size // _CALLS_PER_REGION


def wanted_rows(size: int, of_gpu: bool, row_bytes: int, among_calls: bool = False) -> int:
    """How many rows of a slice are best in a region of `size` bytes, of a GPU's memory or of the host's.

    `among_calls`: other calls use the region too. Copies between two places of a GPU take no time.
    """
    share = share_of_region(size)
    host = _HOST_SLICE_BYTES_AMONG_CALLS if among_calls else _HOST_SLICE_BYTES
    return (share if of_gpu else min(share, host)) // row_bytes


def divide_into_slices(valid: NDArray[np.bool_], rows: Rows, rule: SliceRule) -> list[Rows]:
    """Cuts the valid rows of a range into slices, ascending.

    Slices start and end with a valid row; long runs of ignored rows are in none.
    """
    longest_gap = max(1, rule.max_rows // 8)  # ignored rows sent along at most
    index = np.flatnonzero(valid[rows.begin:rows.end]) + rows.begin
    before_gap = np.flatnonzero(np.diff(index) > longest_gap + 1)  # positions whose successor is far away
    slices: list[Rows] = []
    first = 0
    while first < len(index):
        begin = int(index[first])
        room = rule.max_rows if rule.row_grid == 0 else min(rule.max_rows, rule.row_grid - begin % rule.row_grid)
        end = int(np.searchsorted(index, begin + room))  # first position that does not fit
        gap = int(np.searchsorted(before_gap, first))
        if gap < len(before_gap):
            end = min(end, int(before_gap[gap]) + 1)
        slices.append(Rows(begin, int(index[end - 1]) + 1))
        first = end
    return slices


def listed(targets: NDArray[np.int32], classes: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which targets are among the classes of a head, which are ascending."""
    places = np.minimum(np.searchsorted(classes, targets), len(classes) - 1)
    found: NDArray[np.bool_] = classes[places] == targets
    return found


def within(rows: Rows, parts: list[Rows]) -> list[Rows]:
    """What a range has of each of the parts, without those that it has nothing of."""
    shared = (Rows(max(part.begin, rows.begin), min(part.end, rows.end)) for part in parts)
    return [part for part in shared if part.end > part.begin]


def make_slice_rule(row_bytes: int, slice_bytes: int | None, limits: loss_pb2.SliceLimits) -> SliceRule:
    """Slices as large as `slice_bytes` and the server's limits allow. Raises if one row is too large.

    None: those in messages have about _MESSAGE_BYTES, and those in a region as much as the server allows.
    """
    rows = max(1, (slice_bytes or _MESSAGE_BYTES) // row_bytes)
    in_region = limits.max_bytes_in_region // row_bytes if slice_bytes is None else 0
    if limits.max_bytes > 0:
        if row_bytes > limits.max_bytes:
            raise errors.InvalidArgument(
                f"hidden: a row has {exact_bytes(row_bytes)}, but the server takes slices of "
                f"{exact_bytes(limits.max_bytes)} at most")
        rows = min(rows, limits.max_bytes // row_bytes)
    if limits.max_rows > 0:
        rows = min(rows, limits.max_rows)
        in_region = min(in_region, limits.max_rows)
    return SliceRule(int(rows), limits.row_grid, int(in_region))


def unsent(rows: Rows, slices: list[Rows]) -> list[Rows]:
    """The parts of a range that no slice covers."""
    edges = [rows.begin, *(edge for piece in slices for edge in (piece.begin, piece.end)), rows.end]
    return [Rows(begin, end) for begin, end in zip(edges[::2], edges[1::2]) if end > begin]


class AnswerTracker:
    """Which rows of a call have been answered; finds answers that do not belong to it.

    With `slices`, answers must be exactly these; without, the server cuts: any disjoint rows of the range. One thread takes
    answers, another one may replace slices that were not sent.
    """

    def __init__(self, rows: Rows, slices: list[Rows] | None) -> None:
        self._range = rows
        self._lock = threading.Lock()  # guards _open
        self._open = None if slices is None else set(slices)
        self._answered: list[Rows] = []
        self.answered_rows = 0

    def replace(self, whole: Rows, parts: list[Rows]) -> None:
        """A slice is sent in parts."""
        assert self._open is not None
        with self._lock:
            self._open.remove(whole)
            self._open.update(parts)

    def take(self, rows: Rows) -> None:
        if self._open is not None:
            with self._lock:
                if rows not in self._open:
                    again = rows in self._answered
                    raise errors.server_sent(f"results of {rows}" + (
                        " twice" if again else ", which are no slice of this call"))
                self._open.remove(rows)
        elif rows.begin >= rows.end or rows.begin < self._range.begin or rows.end > self._range.end:
            raise errors.server_sent(f"results of {rows}, which are not in this call")
        elif any(rows.begin < other.end and other.begin < rows.end for other in self._answered):
            raise errors.server_sent(f"results of {rows} twice")
        self._answered.append(rows)
        self.answered_rows += len(rows)

    def complete(self) -> bool:
        with self._lock:
            return not self._open
