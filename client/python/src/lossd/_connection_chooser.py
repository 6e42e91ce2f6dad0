# SPDX-License-Identifier: Apache-2.0
"""How many connections a client takes that chooses by itself. Times, in seconds, come from the caller.

It begins with one, which is all that small jobs ever have. Once payload keeps the present ones busy, it tries one more for
a while, and stays with it if that moved more; else it goes back, and tries again much later.
client/cpp/connections.h does the same; tests/client/golden/connections.json holds both to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MOST = 8

_ROUND_BYTES = 64 << 20  # a round has at least so much payload,
_ROUND_TIME = 0.2  # and is as long as that
_LONGEST_ROUND = 30.0  # one that takes longer says nothing: something else is slow
_BUSY = 0.9  # connections are busy if each of them has a stream for this part of the time
_GAIN = 1.1  # by which one more has to move more
_FIRST_REST, _LONGEST_REST = 8, 512  # rounds between trials: twice as many after each one in a row that fails


class Advice(Enum):
    STAY = "stay"
    ADD = "add"  # open one more connection, then call added() or refused()
    DROP = "drop"  # the last connection is not used any more


@dataclass
class _Round:
    moved_before: int = 0
    busy: float = 0.0  # with at least one stream under way
    streams_busy: float = 0.0  # summed over streams


class ConnectionChooser:
    """Used by one thread at a time."""

    def __init__(self) -> None:
        self.count = 1  # those that streams are spread over
        self.reason = "little was sent in messages so far"  # why there are so many, for people
        self._opening = False  # another one is being opened
        self._trying = False  # the last one is on trial
        self._before = 0.0  # bytes per second without it
        self._rest = 0  # rounds before the next trial
        self._failures = 0  # trials in a row
        self._under_way = 0  # streams
        self._last = 0.0  # when their number changed
        self._round = _Round()

    def _advance(self, now: float) -> None:
        if self._under_way:
            self._round.busy += now - self._last
            self._round.streams_busy += self._under_way * (now - self._last)
        self._last = now

    def begin(self, now: float) -> None:
        """A stream begins."""
        self._advance(now)
        self._under_way += 1

    def end(self, moved: int, now: float) -> Advice:
        """A stream has ended. `moved`: the bytes of payload that all streams have ever moved in messages, both ways."""
        self._advance(now)
        self._under_way -= 1
        here, size = self._round, moved - self._round.moved_before
        if here.busy > _LONGEST_ROUND:
            self._round = _Round(moved)
            return Advice.STAY
        if self._opening or size < _ROUND_BYTES or here.busy < _ROUND_TIME:
            return Advice.STAY
        self._round = _Round(moved)
        if not self._trying and here.streams_busy < _BUSY * self.count * here.busy:
            return Advice.STAY
        return self._decide(size / here.busy)

    def _decide(self, rate: float) -> Advice:
        if self._trying:
            self._trying = False
            self.reason = f"{self.count - 1} moved {self._before / 1e9:.2f} GB/s, {self.count} moved {rate / 1e9:.2f}"
            if rate < _GAIN * self._before:
                self.count -= 1
                self._take_rest()
                return Advice.DROP
            self._failures = 0
        if self.count == MOST:
            return Advice.STAY
        if self._rest > 0:
            self._rest -= 1
            return Advice.STAY
        self._before = rate
        self._opening = True
        return Advice.ADD

    def _take_rest(self) -> None:
        self._rest = min(_FIRST_REST << min(self._failures, 16), _LONGEST_REST)
        self._failures += 1

    def added(self, moved: int) -> None:
        """The connection that was advised stands; count is one more."""
        self._opening = False
        self._trying = True
        self.count += 1
        self._round = _Round(moved)

    def refused(self, why: str, moved: int) -> None:
        """It does not, for this reason."""
        self._opening = False
        self.reason = f"no further connection came about: {why}"
        self._take_rest()
        self._round = _Round(moved)
