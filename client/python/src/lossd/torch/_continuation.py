# SPDX-License-Identifier: Apache-2.0
"""What a program continues when it trains a head that it has not made, and what it begins."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from typing import Any

import lossd
from lossd import errors
from lossd.torch import _callers
from lossd.torch._step_tracker import StepTracker

_MOST = 1024  # heads that are remembered

_lock = threading.Lock()
_trained: OrderedDict[tuple[int, str], None] = OrderedDict()  # by this process: incarnation and head; guarded by _lock


class Continuation:
    """Of one LossHead."""

    def __init__(self, client: lossd.Client, head: str, steps: StepTracker, description: lossd.HeadDescription) -> None:
        self._client, self._head, self._steps = client, head, steps
        self._description = description
        self._begun = False
        self._loaded = False  # by load_state(), since the last step

    def found(self, description: lossd.HeadDescription) -> None:
        """The head is so now."""
        self._description = description

    def loaded(self) -> None:
        """This program has restored the head from a checkpoint."""
        self._loaded = True

    @property
    def is_loaded(self) -> bool:
        """Whether this program has, and no step came after that."""
        return self._loaded or self._client._head_cache.loaded(self._head, self._description.state.incarnation)

    def forget(self) -> None:
        """What was restored was the start of something else: a step has come after it."""
        self._loaded = False
        self._client._head_cache.forget_loaded(self._head, self._description.state.incarnation)

    def begin(self) -> None:
        """Before a forward in training: the first one says what it continues."""
        if self._begun:
            return
        self._begun = True
        if not self._note_training() and self._steps.rank == 0 and not self.is_loaded and self._is_used():
            _callers.warn(self._words())

    def explain(self, error: errors.LossdError) -> None:
        """Adds to an error about a step that has moved what moved it, if that is known, and the way out."""
        moved = isinstance(error, errors.FailedPrecondition) and error.field.rpartition(".")[2] == "step"
        if not moved and not isinstance(error, errors.StepDiscarded):
            return
        try:
            now = self._client.describe_head(self._head)
        except errors.LossdError:
            return
        history, own = now.history, self._client.run
        others = [run for run in (history.open_run, history.run) if run and run != own]
        restarted = self._description.state.incarnation != now.state.incarnation
        if others and not history.loaded and not restarted:
            said = "" if "another program trains this head" in error.message else (
                f"; another program trains this head: run {others[0]}, which is at step {now.state.step}")
            error.add(f"{said}; this one is run {own}. Give one of them another head; several trainers of one head need "
                      "process_group=, or rank= and world_size=")
        elif moved:
            since = "; the server was started anew since this LossHead was made" if restarted else ""
            error.add(f"{since}. LossHead.sync() takes the head as it is now")

    def is_loaded_on_server(self) -> bool:
        """Whether somebody has restored the head, and no step came after that: for trainers who cannot ask each other."""
        description = self._client.describe_head(self._head)
        history = description.history
        return bool(history.loaded and history.checkpoint and history.checkpoint_step == description.state.step)

    def _note_training(self) -> bool:
        """Whether this process has trained the head before."""
        key = self._description.state.incarnation, self._head
        with _lock:
            before = key in _trained
            _trained.pop(key, None)
            _trained[key] = None
            if len(_trained) > _MOST:
                _trained.popitem(last=False)
        run = self._description.history.run
        return before or (run == self._client.run and f":{os.getpid()}-" in run)  # not one that programs share by its name

    def _is_used(self) -> bool:
        return self._description.state.step > 0 or self._description.updates > 0

    def _words(self) -> str:
        history = self._description.history
        known = []
        if history.run or history.applied_unix_seconds:
            known.append(f"{f'run {history.run}' if history.run else 'another program'} applied the last step"
                         f"{_at(history.applied_unix_seconds)}")
        if history.checkpoint:
            known.append(f"{'restored from' if history.loaded else 'saved as'} {history.checkpoint}"
                         f"{_at(history.checkpoint_unix_seconds)}")
        return (f"head {self._head!r} continues at step {self._description.state.step}"
                f"{': ' if known else ''}{', '.join(known)}; "
                f"Client.create_head(..., if_exists='reset') or Client.reset_head({self._head!r}, 'all') begins anew")


def _at(unix_seconds: int) -> str:
    return f" at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(unix_seconds))}" if unix_seconds else ""
