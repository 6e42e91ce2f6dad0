# SPDX-License-Identifier: Apache-2.0
"""The records that LossHead and HeadOptimizer keep about a head's training in this trainer. StepTracker records which microbatches of
the open step the trainer has sent, and what became of each. Feeder identifies the trainer of a head; a new LossHead takes over
from an earlier one with the same Feeder. Continuation warns if training continues a head that another program left. Watch
warns of loops that never apply a step. HeadStates saves and restores a head for a state_dict. StepTracker, and what this
module shares between heads, are thread-safe.

Microbatches are numbered 0, 1, ... within a step and trainer. In messages, trainer `rank` of `world_size` uses the ids number
* world_size + rank, so that two trainers never use the same id.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

import lossd
from lossd import _head_calls, errors
from lossd.torch import _modes
from lossd.torch._data_parallel import DataParallel

_APART = 1 << 40  # microbatches that are accumulated have smaller numbers than this; others have larger ones


class StepTracker:
    """The microbatches of the open step that this trainer has sent, and what became of each. Thread-safe.

    A microbatch gets a number from number(), is sent within sending(), and ends with arrived() or failed(). A failed
    microbatch may be sent again under its number. contribution() and contributed() do the same for a gradient that is added
    at once (TiedEmbedding). advance() begins the next step.

    Five sets hold numbers of microbatches, and they overlap:

      _accumulated: the server has, or may have, gradients of these.
      _unconfirmed: the part of _accumulated whose call has not succeeded: it is under way, or it has failed.
      _failed: the call has failed, and the microbatch was not sent again. This set also holds microbatches that were to be
        accumulated only in backward, and that are not in _accumulated yet.
      _waiting: the call has succeeded and accumulated a weight gradient, but the loss had no backward() yet.
      _lost_rows: gradients of embedding rows whose call has failed. They cannot be computed again, so they are not in
        _unconfirmed.
    """

    def __init__(self, step: int, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must be in [0, world_size) with world_size {world_size}")
        self.rank = rank
        self.world_size = world_size
        self.group = 1  # the number of microbatches of a step is a multiple of this
        self.discards = 0  # how often the contents of an open step were discarded
        self._changes = 0  # how often this trainer's part of the gradients has changed
        self._lock = threading.Lock()
        self._begin(step)

    @property
    def alone(self) -> bool:
        """Whether this is the only trainer."""
        return self.world_size == 1

    def _begin(self, step: int) -> None:
        self.step = step
        self._next = 0
        self._next_apart = 0
        self._accumulated: set[int] = set()  # the class comment describes the sets
        self._unconfirmed: set[int] = set()
        self._failed: set[int] = set()
        self._rows: dict[int, int] = {}  # for each microbatch whose call has succeeded: the number of its valid rows
        self._passed_over = False  # some microbatches have failed, and the step is applied without them
        self._lost: str | None = None  # why the server has lost all gradients of the step; None: it has not lost them
        self._waiting: set[int] = set()
        self._lost_rows: set[int] = set()
        self._contribution: int | None = None  # the number of the contribution that is being added; None: there is none
        self._contributions: set[int] = set()  # the numbers of the contributions that were added

    def advance(self, step: int) -> None:
        """Forgets the microbatches of the old step, which was applied or discarded. `step` is the open step now."""
        with self._lock:
            self._begin(step)

    def number(self, wanted: int | None) -> int:
        """The number of the microbatch that begins. `wanted`: the number of an earlier microbatch that is sent again. None:
        the microbatch is new and gets the next number."""
        with self._lock:
            return self._next if wanted is None else wanted

    def number_apart(self) -> int:
        """A number for a microbatch that is not accumulated. No accumulated microbatch has such a number."""
        with self._lock:
            self._next_apart += 1
            return _APART + self._next_apart

    def wire_id(self, number: int) -> int:
        """The id that messages have for microbatch `number` of this trainer."""
        return number * self.world_size + self.rank

    @contextmanager
    def sending(self, number: int, accumulates: bool) -> Iterator[None]:
        """A context whose block hands a microbatch to the client. If the block raises an Exception, then nothing of the
        microbatch was sent, and the tracker takes its record of the microbatch back."""
        with self._lock:
            before = self._next, number in self._accumulated, number in self._unconfirmed, number in self._failed
            if number < _APART:
                self._next = max(self._next, number + 1)
            self._failed.discard(number)
            if accumulates:
                self._accumulated.add(number)
                self._unconfirmed.add(number)
        try:
            yield
        except Exception:
            with self._lock:
                if self._next == number + 1:
                    self._next = before[0]
                for numbers, was_in in zip((self._accumulated, self._unconfirmed, self._failed), before[1:]):
                    (numbers.add if was_in else numbers.discard)(number)
            raise

    def failed(self, number: int) -> None:
        """The call of microbatch `number` has ended with an error."""
        with self._lock:
            if number < _APART:
                self._failed.add(number)

    def failed_rows(self, number: int) -> None:
        """The call that sends microbatch `number`, a gradient of embedding rows, has ended with an error. The gradient cannot
        be computed again."""
        with self._lock:
            self._lost_rows.add(number)
            self._unconfirmed.discard(number)

    def lost(self, why: str) -> None:
        """The server has lost all gradients of this step."""
        with self._lock:
            self._lost = why

    def arrived(self, number: int, rows: int, waits_for_backward: bool) -> None:
        """The server has accumulated the gradients of microbatch `number`, which has `rows` valid rows. `waits_for_backward`:
        the loss of the microbatch must still have its backward()."""
        with self._lock:
            self._rows[number] = rows
            self._changes += 1
            self._unconfirmed.discard(number)
            self._failed.discard(number)
            if waits_for_backward:
                self._waiting.add(number)

    @property
    def has_some_failures(self) -> bool:
        """Whether some microbatches of this step have failed and were not sent again, while others have succeeded."""
        with self._lock:
            return bool(self._failed & self._unconfirmed) and bool(self._rows)

    @property
    def rows(self) -> int:
        """The number of valid rows in the microbatches of this trainer whose calls have succeeded."""
        with self._lock:
            return sum(self._rows.values())

    def pass_over_failures(self) -> None:
        """Drops the microbatches that failed from the step. Call it only if the server has accumulated none of their rows."""
        with self._lock:
            self._passed_over = True
            self._accumulated -= self._failed
            self._unconfirmed -= self._failed
            self._failed.clear()

    def expected_rows(self) -> int | None:
        """The number of rows that the step must have if microbatches were passed over. The server checks it, so that none of
        their rows is in the step. None: no microbatch was passed over."""
        return self.rows if self._passed_over else None

    def had_backward(self, number: int) -> None:
        """The loss of microbatch `number` had its backward()."""
        with self._lock:
            self._waiting.discard(number)
            self._changes += 1

    def contribution(self) -> int:
        """The number for a contribution that is to be added. Until contributed() is called, it returns the same number, so a
        call that failed can be repeated."""
        with self._lock:
            if self._contribution is None:
                self._contribution = self._next
                self._next += 1
            return self._contribution

    def contributed(self) -> None:
        """The contribution with the number from contribution() was added."""
        with self._lock:
            if self._contribution is not None:
                self._contributions.add(self._contribution)
                self._changes += 1
            self._contribution = None

    @property
    def sent(self) -> int:
        """The number of microbatches and contributions of this trainer that the server has, or may have, in this step.

        A microbatch whose gradients are computed in backward counts, because the server may keep its hidden states.
        """
        with self._lock:
            return self._next

    @property
    def moment(self) -> tuple[int, int, int]:
        """A value that changes whenever this trainer accumulates something and whenever gradients are discarded. Compare two
        of these values to see whether the gradient is still the same."""
        with self._lock:
            return self.step, self.discards, self._changes

    @property
    def has_gradients(self) -> bool:
        """Whether this trainer has accumulated something in the step. Microbatches whose rows were all ignored count, because
        they would give a local head a gradient (of 0), too."""
        with self._lock:
            return bool(self._accumulated or self._rows or self._contributions)

    def discarded(self) -> None:
        """The contents of the open step are going to be discarded."""
        with self._lock:
            self.discards += 1

    def taken_over(self) -> None:
        """Another LossHead of this program, with a tracker of its own, has taken the head over. It has discarded what this
        trainer had in the open step."""
        with self._lock:
            self.discards += 1
            self._lost = "another LossHead of this program has taken the head over: use that one"

    def check_settled(self, what: str) -> None:
        """RuntimeError unless the open step is complete. It is not if the server has lost it, if a call has failed or not
        ended, if a loss had no backward(), or if the number of microbatches is not a multiple of `group`. `what` names the
        caller in the error."""
        with self._lock:
            unconfirmed, waiting, lost = sorted(self._unconfirmed), sorted(self._waiting), self._lost
            contribution, lost_rows = self._contribution, sorted(self._lost_rows)
        if lost is not None:
            raise RuntimeError(f"{what}: step {self.step} is lost ({lost}). Start it again: load a checkpoint and call "
                               "LossHead.sync(), or discard the step with HeadOptimizer.discard()")
        if contribution is not None:
            raise RuntimeError(f"{what}: a gradient for step {self.step} failed to be added; add it again, or discard "
                               "the step with HeadOptimizer.discard()")
        if lost_rows:
            raise RuntimeError(
                f"{what}: a gradient of rows of the embedding, microbatch {lost_rows[0]} of step {self.step}, failed to be "
                "added: discard the step with HeadOptimizer.discard()")
        if unconfirmed:
            raise RuntimeError(
                f"{what}: microbatch {unconfirmed[0]} of step {self.step} failed, or is not finished. Compute it again with "
                f"head(..., microbatch={unconfirmed[0]}), or discard the step with HeadOptimizer.discard()")
        if waiting:
            raise RuntimeError(
                f"{what}: the loss of microbatch {waiting[0]} of step {self.step} had no backward(), but the server "
                "accumulated its weight gradient in forward. Compute losses that are only looked at under "
                "torch.no_grad(), call zero_grad() before forward, or discard the step with HeadOptimizer.discard()")

        with self._lock:
            microbatches = len(self._accumulated | self._rows.keys())
        if microbatches % self.group != 0:
            raise RuntimeError(
                f"{what}: step {self.step} has {microbatches} microbatches, but they come in groups of "
                f"{self.group}; discard the step with HeadOptimizer.discard()")

    def check_order(self, number: int) -> None:
        """RuntimeError if an earlier microbatch or contribution has failed. A deterministic server accumulates in the order of
        the numbers, so it would keep microbatch `number` waiting."""
        with self._lock:
            failed, contribution = min(self._failed, default=number), self._contribution
            lost_rows = min(self._lost_rows, default=number)
        waits = f"and a deterministic server keeps microbatch {number} waiting for it"
        if contribution is not None and contribution < number < _APART:
            raise RuntimeError(f"a gradient for step {self.step} failed to be added, {waits}. Add it again, or discard the "
                               "step with HeadOptimizer.discard()")
        if lost_rows < number < _APART:
            raise RuntimeError(f"a gradient of rows of the embedding, microbatch {lost_rows} of step {self.step}, failed to be "
                               f"added, {waits}. Discard the step with HeadOptimizer.discard()")
        if failed < number < _APART:
            raise RuntimeError(f"microbatch {failed} of step {self.step} failed, {waits}. Compute it again with "
                               f"head(..., microbatch={failed}), or discard the step with HeadOptimizer.discard()")

    def expected(self, takes_part: Sequence[bool] | None = None) -> list[int]:
        """The wire ids that the step must have, of all trainers that take part (None: all trainers). Assumes that each of
        them has used the same numbers as this trainer."""
        with self._lock:
            return [n * self.world_size + rank for n in sorted(self._accumulated | self._contributions)
                    for rank in range(self.world_size) if takes_part is None or takes_part[rank]]


# Which LossHead of this program trains a head. If a program makes another LossHead of the same head, for example because a
# notebook cell runs again, then the new LossHead takes over, and learns what the earlier one left in the open step.
# Thread-safe; bounded.

_MOST = 1024  # the largest number of heads that are remembered


@dataclass(frozen=True)
class Feeder:
    """Identifies a trainer of a head on a server process."""

    incarnation: int
    head: str
    rank: int
    world_size: int


_trackers_lock = threading.Lock()
# For each feeder, the tracker of its newest LossHead; guarded by _trackers_lock.
_trackers: OrderedDict[Feeder, StepTracker] = OrderedDict()


def take_over(feeder: Feeder, tracker: StepTracker) -> StepTracker | None:
    """Records `tracker`, of a new LossHead, as the feeder's tracker. Returns the tracker that it replaces if that one has left
    something in the same step, else None."""
    with _trackers_lock:
        before = _trackers.pop(feeder, None)
        _trackers[feeder] = tracker
        if len(_trackers) > _MOST:
            _trackers.popitem(last=False)
    return before if before is not None and before.step == tracker.step and before.sent > 0 else None


# A program may continue a head that it has not created, or begin it. Continuation tells which, and warns.

_told_lock = threading.Lock()
# Heads that this process has trained, by incarnation and name; guarded by _told_lock.
_trained: OrderedDict[tuple[int, str], None] = OrderedDict()


class Continuation:
    """Knows whether the training of one LossHead continues a head as another program left it, and warns of this once. It also
    completes errors that another program's training causes."""

    def __init__(self, client: lossd.Client, head: str, steps: StepTracker, description: lossd.HeadDescription) -> None:
        self._client, self._head, self._steps = client, head, steps
        self._description = description
        self._begun = False
        self._loaded = False  # whether load_state() was called after the last step

    def found(self, description: lossd.HeadDescription) -> None:
        """Updates the description of the head."""
        self._description = description

    def loaded(self) -> None:
        """Notes that this program has restored the head from a checkpoint."""
        self._loaded = True

    @property
    def is_loaded(self) -> bool:
        """Whether this program has restored the head, and has applied no step after that."""
        return self._loaded or _head_calls.has_loaded(self._head, self._description.state)

    def forget(self) -> None:
        """Forgets that the head was restored. Called when a step was applied."""
        self._loaded = False
        _head_calls.forget_loaded(self._head, self._description.state)

    def begin(self) -> None:
        """Called before a forward in training. The first call warns if the head was trained before, and this program has
        neither trained nor restored it."""
        if self._begun:
            return
        self._begun = True
        if not self._note_training() and self._steps.rank == 0 and not self.is_loaded and self._is_used():
            _modes.warn(self._words())

    def explain(self, error: errors.LossdError) -> None:
        """Adds to an error its cause, if it is known, and what to do. It knows two kinds of errors: another LossHead has used
        the microbatch id, or the head's open step is another one now."""
        if isinstance(error, errors.FailedPrecondition) and error.field == "open.microbatch_id":
            error.add(
                ". Another LossHead has sent this microbatch of the step: several trainers of one head need "
                "process_group=, or rank= and world_size=; what an earlier LossHead left, zero_grad() discards")
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
        """Whether a client has restored the head, and no step was applied after that. Asks the server. For trainers without a
        process group, which cannot ask each other."""
        description = self._client.describe_head(self._head)
        history = description.history
        return bool(history.loaded and history.checkpoint and history.checkpoint_step == description.state.step)

    def _note_training(self) -> bool:
        """Records that this process trains the head. Returns whether it has trained the head before."""
        key = self._description.state.incarnation, self._head
        with _told_lock:
            before = key in _trained
            _trained.pop(key, None)
            _trained[key] = None
            if len(_trained) > _MOST:
                _trained.popitem(last=False)
        run = self._description.history.run
        # This process's id in the name of the run shows that the run is this program's own. A name that several programs
        # share does not contain the id.
        return before or (run == self._client.run and f":{os.getpid()}-" in run)

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


# Watch warns of a training loop that never applies the head's steps, once for each LossHead. These are the limits:

_BACKWARDS = 4  # the number of backward passes, if no HeadOptimizer was made for the head
_STEPS_OF_OTHERS = 2  # the number of steps of another optimizer, if the HeadOptimizer has made none
_DISCARDS = 4  # the number of discarded steps that had a backward, if the HeadOptimizer has made no step
# The number of backward passes before the first step of the HeadOptimizer. This limit counts only if no other optimizer can
# show that a step is over: only the head is trained, or torch (1.13) does not report the steps of optimizers.
_BACKWARDS_OF_A_STEP = 64

# Registers a function that is called after each step of any optimizer; torch 2.0 or later.
_HOOK = getattr(importlib.import_module("torch.optim.optimizer"), "register_optimizer_step_post_hook", None)

_forgetting_lock = threading.Lock()
# The heads for which a HeadOptimizer was made, by server and head name. _forgetting_lock guards this and the next two.
_with_optimizer: OrderedDict[tuple[str, str], None] = OrderedDict()
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_hooked = False


class Watch:
    """Counts backward passes, steps and discarded steps of a LossHead, and warns if its loop never applies a step."""

    def __init__(self, target: str, head: str) -> None:
        self._key = target, head
        self._backwards = 0  # the number of backward passes since the last step of the head
        # For each other optimizer: the number of its steps, and the value of _backwards at its last step.
        self._others: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._discards = 0  # the number of discarded steps since the last step of the head
        self._has_stepped = False  # whether the head had a step
        self._said = False  # whether the warning was issued
        with _forgetting_lock:
            _watches.add(self)

    def had_backward(self, head_alone: bool) -> None:
        """A loss of the head had its backward. `head_alone`: only the head is trained, no trunk."""
        self._backwards += 1
        if self._said:
            return
        head = self._key[1]
        with _forgetting_lock:
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
        """Begins the counts again, because the head has had a step, or has a good reason to have none."""
        self._backwards = self._discards = 0
        self._others.clear()

    def discarded(self) -> None:
        """zero_grad() discards the contents of the open step."""
        if self._backwards == 0:
            return
        self._discards += 1
        if self._discards >= _DISCARDS and not self._has_stepped and not self._said:
            self._say(f"zero_grad() has discarded {self._discards} steps of head {self._key[1]!r}, and its HeadOptimizer "
                      "has made none, so the head does not learn: add head_optimizer.step() before head_optimizer.zero_grad()")

    def another_stepped(self, optimizer: Any) -> None:
        """An optimizer that does not step a head has made a step."""
        steps, backwards = self._others.get(optimizer, (0, 0))
        if self._said or self._backwards <= backwards:
            return
        self._others[optimizer] = steps + 1, self._backwards
        if steps + 1 >= _STEPS_OF_OTHERS:
            self._say(f"{type(optimizer).__name__} has made {steps + 1} steps, each after losses of head "
                      f"{self._key[1]!r}, and its HeadOptimizer has made none, so the head does not learn: add "
                      "head_optimizer.step() after optimizer.step()")

    def explain(self, error: errors.ResourceExhausted) -> None:
        """Adds an explanation to the error of a full ledger. The server's ledger has an entry for every row of the open step,
        so it fills up if no step is applied."""
        if "ledger" in error.message and self._backwards > 0:
            error.add(f". The open step of head {self._key[1]!r} has had {self._backwards} backward passes of this LossHead "
                      "and no step(): if the loop never calls step() of its HeadOptimizer, add that first")

    def _say(self, what: str) -> None:
        self._said = True
        _modes.warn(what)


def optimizer_made(target: str, head: str) -> None:
    """Notes that a HeadOptimizer was made for this head."""
    global _hooked
    with _forgetting_lock:
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
    with _forgetting_lock:
        watches = [watch for watch in _watches if watch._key in _with_optimizer]
    for watch in watches:
        watch.another_stepped(optimizer)


# A state is what a trainer's state_dict holds of a head: a dictionary of strings and numbers that names a checkpoint on the
# server. Saving a state writes the checkpoint. Restoring a state loads the checkpoint, unless the head still has the same
# values, and raises if that is not possible.

State: TypeAlias = "dict[str, Any]"
_VERSION = 1


@dataclass(frozen=True)
class _Moment:
    """Identifies the values of a head at one time."""

    incarnation: int
    step: int
    weights_version: int  # 0: an older server, which does not number the versions of weights

    def is_that_of(self, other: _Moment) -> bool:
        """Whether the head has certainly the same values at both times."""
        return self.weights_version != 0 and self == other


class HeadStates:
    """Saves one head to the server's checkpoints, and restores it. With several ranks, all of them call restore(), and any of
    them may call save()."""

    def __init__(self, client: lossd.Client, head: str, parallel: DataParallel, kept: bool) -> None:
        """`kept`: whether states name a checkpoint. False: the program saves the head in another way, and states are empty."""
        self._client, self._head, self._parallel, self._kept = client, head, parallel, kept
        self._last: tuple[str, _Moment] | None = None  # the last checkpoint that was saved or restored, and its values

    def save(self) -> State:
        """Saves the head, unless it still has the values that were saved or restored last. Returns the state."""
        state: State = {"version": _VERSION, "head": self._head, "checkpoint": ""}
        if not self._kept:
            return state
        moment = self._moment()
        if self._last is None or not moment.is_that_of(self._last[1]):
            try:
                saved = self._client.save_checkpoint(self._head, f"state-{moment.step:010d}-{secrets.token_hex(4)}")
            except errors.FailedPrecondition as error:
                raise RuntimeError(
                    f"state_dict() saves head {self._head!r} on the server, which refuses: {error}. Start lossd with "
                    "--checkpoint_dir, or make LossHead(..., state='none') and save the head in another way") from error
            self._last = saved.checkpoint, _Moment(
                saved.state.incarnation, saved.state.step, moment.weights_version)
        checkpoint, moment = self._last
        return {**state, "checkpoint": checkpoint, "step": moment.step, "incarnation": moment.incarnation}

    def restore(self, state: State) -> bool:
        """Restores the head from the checkpoint that `state` names. Returns False if it names none. Collective.

        Raises RuntimeError, NotFound or another error if the head does not have the values of `state` afterwards.
        """
        if state.get("version") != _VERSION:
            raise RuntimeError(f"the state of head {self._head!r} has version {state.get('version')!r}; this lossd reads "
                               f"version {_VERSION}")
        checkpoint = state["checkpoint"]
        if not checkpoint:
            if self._kept:
                raise RuntimeError(f"the state was saved with state='none', so it does not hold head {self._head!r}: "
                                   "load a checkpoint of it, and make LossHead(..., state='none')")
            return False
        with self._parallel.before_total():
            if self._parallel.rank == 0:
                self._load(checkpoint, state["step"])
        self._parallel.barrier()
        self._last = checkpoint, self._moment()
        return True

    def _load(self, checkpoint: str, wanted: int) -> None:
        if self._last is not None and self._last[0] == checkpoint and self._moment().is_that_of(self._last[1]):
            return
        try:
            step = self._client.load_checkpoint(checkpoint, self._head).state.step
        except errors.NotFound as error:
            raise errors.NotFound(
                f"the state names checkpoint {checkpoint!r} of head {self._head!r}, which the server at "
                f"{self._client.target} does not have: start it with the --checkpoint_dir that it was saved to") from error
        if step != wanted:
            raise RuntimeError(f"checkpoint {checkpoint!r} is of step {step}, the state of step {wanted}")

    def _moment(self) -> _Moment:
        state = self._client.describe_head(self._head).state
        return _Moment(state.incarnation, state.step, state.weights_version)


def as_tensor(state: State) -> torch.Tensor:
    """The state as a uint8 tensor of JSON, because many programs expect every entry of a state_dict to be a tensor."""
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def from_tensor(tensor: torch.Tensor) -> State:
    state: State = json.loads(bytes(tensor.cpu().tolist()))
    return state
