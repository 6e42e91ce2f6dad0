# SPDX-License-Identifier: Apache-2.0
"""How a call may cut its rows into slices: as its head's limits say, which are learnt anew where they have changed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lossd import errors
from lossd._answer_check import AnswerCheck
from lossd._head_cache import HeadCache, HeadInfo
from lossd._plan import SliceRule, make_slice_rule
from lossd._work import Work
from lossd.v1 import head_pb2


class SliceRules:
    """Thread-safe, once learn() has returned."""

    def __init__(self, head_cache: HeadCache, work: Work, check: AnswerCheck, slice_bytes: int | None,
                 describe: Callable[[str], head_pb2.HeadDescription]) -> None:
        self._head_cache = head_cache
        self._work = work
        self._check = check
        self._slice_bytes = slice_bytes
        self._describe = describe
        self._lock = threading.Lock()
        self._facts: HeadInfo | None = None  # guarded by _lock
        self._fresh = False  # _facts were learnt during this call, since a stream was refused; guarded by _lock

    def learn(self) -> None:
        """Finds the head's limits; blocks if the client does not know them yet."""
        facts = self._head_cache.facts(self._work.head)
        if facts is None or facts.hidden_size != self._work.hidden_size:
            facts = self._ask()
        with self._lock:
            self._facts = facts

    def rule(self) -> SliceRule:
        with self._lock:
            assert self._facts is not None
            return make_slice_rule(self._work.row_bytes, self._slice_bytes, self._facts.limits)

    def may_cut_otherwise(self, rule: SliceRule) -> bool:
        """The server may have been restarted with other limits: learns them once; true if they cut otherwise."""
        with self._lock:
            fresh = self._fresh
        if not fresh:
            facts = self._ask()
            with self._lock:
                self._facts, self._fresh = facts, True
        now = self.rule()
        return (now.max_rows < rule.max_rows or now.row_grid != rule.row_grid
                or now.max_rows_in_region < rule.max_rows_in_region)

    def _ask(self) -> HeadInfo:
        try:
            description = self._describe(self._work.head)
        except errors.LossdError as error:
            self._check.interpret(error)
            raise
        if description.spec.hidden_size != self._work.hidden_size:
            raise errors.InvalidArgument(
                f'hidden: a row has {self._work.hidden_size} elements, but head "{self._work.head}" has '
                f"{description.spec.hidden_size}")
        return self._head_cache.learn(description)
