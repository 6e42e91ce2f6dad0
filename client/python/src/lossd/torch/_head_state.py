# SPDX-License-Identifier: Apache-2.0
"""What the state_dict of a trainer holds of a head: the name of a checkpoint on the server, written then.

A state is a dictionary of strings and numbers. Restoring it loads the checkpoint, unless the head is as it was; it
raises if that is not possible.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

import lossd
from lossd import errors
from lossd.torch._data_parallel import DataParallel

State: TypeAlias = "dict[str, Any]"
_VERSION = 1


@dataclass(frozen=True)
class _Moment:
    """Names the values that a head has."""

    incarnation: int
    step: int
    weights_version: int  # 0 from servers that do not number versions

    def is_that_of(self, other: _Moment) -> bool:
        """Whether the values are certainly the same."""
        return self.weights_version != 0 and self == other


class HeadStates:
    """Saves and restores one head. With several ranks all restore, and any may save."""

    def __init__(self, client: lossd.Client, head: str, parallel: DataParallel, kept: bool) -> None:
        """Not `kept`: states say nothing of the head, which is saved elsewhere."""
        self._client, self._head, self._parallel, self._kept = client, head, parallel, kept
        self._last: tuple[str, _Moment] | None = None  # a checkpoint that holds these values

    def save(self) -> State:
        """Saves the head, unless it is as it was when it was saved or restored last."""
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
        """RuntimeError, NotFound and so on if the head is not what `state` says afterwards. Collective.

        False if the state does not hold the head.
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
    """For a module's state_dict, all of whose entries many programs expect to be tensors."""
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def from_tensor(tensor: torch.Tensor) -> State:
    state: State = json.loads(bytes(tensor.cpu().tolist()))
    return state
