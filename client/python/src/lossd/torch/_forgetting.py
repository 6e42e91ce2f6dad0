# SPDX-License-Identifier: Apache-2.0
"""Loops that train a head and never apply its steps: who notices, and what is said, once for each LossHead."""

from __future__ import annotations

import importlib
import threading
import weakref
from collections import OrderedDict
from typing import Any

from lossd import errors
from lossd.torch import _callers

_BACKWARDS = 4  # without a HeadOptimizer
_STEPS_OF_OTHERS = 2  # of one optimizer, with a HeadOptimizer that makes none
_DISCARDS = 4  # of steps that had a backward, one after the other
# In the first step, where no other optimizer can tell that it should be over: nothing but the head is trained, or torch
# (1.13) does not tell of their steps.
_BACKWARDS_OF_A_STEP = 64
_MOST = 1024  # heads that are remembered

# Calls what it is given after each step of any optimizer; torch 2.0 or later.
_HOOK = getattr(importlib.import_module("torch.optim.optimizer"), "register_optimizer_step_post_hook", None)

_lock = threading.Lock()
_with_optimizer: OrderedDict[tuple[str, str], None] = OrderedDict()  # server and head; guarded by _lock, as below
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_hooked = False


class Watch:
    """Counts what a LossHead's head gets, and what becomes of it."""

    def __init__(self, target: str, head: str) -> None:
        self._key = target, head
        self._backwards = 0  # since the last step of the head
        self._others: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()  # steps, backwards
        self._discards = 0  # likewise
        self._has_stepped = False
        self._said = False
        with _lock:
            _watches.add(self)

    def had_backward(self, head_alone: bool) -> None:
        """A loss whose head is trained, and nothing else if `head_alone`."""
        self._backwards += 1
        if self._said:
            return
        head = self._key[1]
        with _lock:
            optimized = self._key in _with_optimizer
        if not optimized and self._backwards >= _BACKWARDS:
            self._say(f"{self._backwards} losses of head {head!r} had backward(), and no HeadOptimizer was made for it, so "
                      "its weights do not change: add head_optimizer = lossd.torch.HeadOptimizer(head, lr=...) before the "
                      "loop and head_optimizer.step() to each step. LossHead(..., train_head=False) is for a head that is "
                      "not to be trained")
        elif (optimized and (head_alone or _HOOK is None) and not self._has_stepped
              and self._backwards >= _BACKWARDS_OF_A_STEP):
            self._say(f"the open step of head {head!r} has {self._backwards} microbatches: if a step is to have fewer, "
                      "head_optimizer.step() is missing in the loop, and the head does not learn")

    def stepped(self) -> None:
        """The head had its step."""
        self._has_stepped = True
        self.excused()

    def excused(self) -> None:
        """It is known why the head has no step."""
        self._backwards = self._discards = 0
        self._others.clear()

    def discarded(self) -> None:
        """What the open step had is dropped."""
        if self._backwards == 0:
            return
        self._discards += 1
        if self._discards >= _DISCARDS and not self._has_stepped and not self._said:
            self._say(f"zero_grad() has discarded {self._discards} steps of head {self._key[1]!r}, and its HeadOptimizer "
                      "has made none, so the head does not learn: add head_optimizer.step() before head_optimizer.zero_grad()")

    def another_stepped(self, optimizer: Any) -> None:
        steps, backwards = self._others.get(optimizer, (0, 0))
        if self._said or self._backwards <= backwards:
            return
        self._others[optimizer] = steps + 1, self._backwards
        if steps + 1 >= _STEPS_OF_OTHERS:
            self._say(f"{type(optimizer).__name__} has made {steps + 1} steps, each after losses of head "
                      f"{self._key[1]!r}, and its HeadOptimizer has made none, so the head does not learn: add "
                      "head_optimizer.step() after optimizer.step()")

    def explain(self, error: errors.ResourceExhausted) -> None:
        """The server keeps a note of every row of the open step."""
        if "ledger" in error.message and self._backwards > 0:
            error.add(f". The open step of head {self._key[1]!r} has had {self._backwards} backward passes of this LossHead "
                      "and no step(): if the loop never calls step() of its HeadOptimizer, add that first")

    def _say(self, what: str) -> None:
        self._said = True
        _callers.warn(what)


def optimizer_made(target: str, head: str) -> None:
    """A HeadOptimizer was."""
    global _hooked
    with _lock:
        _with_optimizer.pop((target, head), None)
        _with_optimizer[target, head] = None
        if len(_with_optimizer) > _MOST:
            _with_optimizer.popitem(last=False)
        if not _hooked and _HOOK is not None:
            _HOOK(_after_step)
            _hooked = True


def _after_step(optimizer: Any, *_: Any) -> None:
    if getattr(optimizer, "steps_a_head", False):
        return
    with _lock:
        watches = [watch for watch in _watches if watch._key in _with_optimizer]
    for watch in watches:
        watch.another_stepped(optimizer)
