# SPDX-License-Identifier: Apache-2.0
"""What a forward is for: a step, an evaluation, or a checkpoint's second pass; and what follows for its backward."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lossd.torch import _callers
from lossd.types import LossResult


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is asked of one microbatch."""

    hidden: bool  # the hidden states' gradient
    head: bool  # the head's gradient joins the step
    # The head is trained, but the module is in evaluation mode. Its gradient is not accumulated, and a backward that would
    # have given one to a local head is refused.
    evaluates: bool = False
    # The function around it runs for its first or second time under torch.utils.checkpoint (use_reentrant=False). What the
    # second one returns goes nowhere, but tensors that are saved on the way have to be the same.
    checkpoint: _callers.Pass = _callers.Pass.ORDINARY

    @property
    def repeats(self) -> bool:
        return self.checkpoint is _callers.Pass.REPEATED

    @property
    def has_graph(self) -> bool:
        """Whether the loss is part of a graph."""
        return self.hidden or self.head or self.evaluates

    def computes(self, deferred: bool) -> bool:
        """Whether the server computes gradients, now or in backward."""
        return not self.repeats and (self.head or (self.hidden and not (self.evaluates and deferred)))

    @property
    def joins_step(self) -> bool:
        return self.head and not self.repeats

    @property
    def counts_with_ranks(self) -> bool:
        """Whether the ranks of a group compute it together."""
        return (self.hidden or self.head) and not self.evaluates and not self.repeats


def plan(trained: bool, training: bool, hidden: torch.Tensor) -> Plan:
    """`trained`: the head is. `training`: the module's mode."""
    if not torch.is_grad_enabled() or not (trained or hidden.requires_grad):
        return Plan(hidden=False, head=False)
    return Plan(hidden=hidden.requires_grad, head=trained and training, evaluates=trained and not training,
                checkpoint=_callers.checkpoint_pass())


class Anchor:
    """Ties a loss into the graph where the head's gradient would be one's; knows whether a backward asks for it."""

    def __init__(self, trained: bool) -> None:
        self.tensor = torch.zeros((), requires_grad=trained)
        if trained:
            with torch.enable_grad():
                self.tensor = self.tensor.view(())  # not a leaf: torch tells nothing of leaves

    def is_asked_for(self) -> bool:
        """Within a backward: not, if it is torch.autograd.grad, or backward(inputs=...), of other tensors alone."""
        node: Any = self.tensor.grad_fn
        return node is not None and bool(torch._C._will_engine_execute_node(node))


def refuse_evaluation(head: str, deferred: bool) -> None:
    """Of a backward."""
    alone = ("make the LossHead with train_head=False" if deferred else
             "ask for that with torch.autograd.grad(loss, hidden)")
    raise RuntimeError(
        f"this loss of head {head!r} was computed in evaluation mode, which accumulates nothing on the server, so it has no "
        "backward for the head's weights: call .train() on the LossHead, or the model that holds it, before forward. If "
        f"only the gradient of the hidden states is wanted, {alone}")


class FirstPasses:
    """What first passes under checkpoints have given in the open step, for their second ones. Bounded."""

    _MOST = 256

    def __init__(self) -> None:
        self._step = -1
        self._given: OrderedDict[bytes, list[tuple[LossResult, float]]] = OrderedDict()

    @staticmethod
    def key(labels: NDArray[np.int32], hidden: torch.Tensor) -> bytes:
        text = f"{tuple(hidden.shape)} {hidden.dtype}".encode()
        return hashlib.blake2b(labels.tobytes() + text, digest_size=16).digest()

    def note(self, step: int, key: bytes, result: LossResult, normalizer: float) -> None:
        if step != self._step:
            self._step = step
            self._given.clear()
        given = self._given.setdefault(key, [])
        if len(given) < 2:  # of two it is not known which is which
            given.append((dataclasses.replace(result, grad_hidden=None), normalizer))
        if len(self._given) > self._MOST:
            self._given.popitem(last=False)

    def find(self, key: bytes) -> tuple[LossResult | None, float | None]:
        """The result, or None where it is not known; and what a mean was divided by."""
        given = self._given.get(key, [])
        if not given:
            return None, None
        result, normalizer = given[-1]
        return (result if len(given) == 1 else None), normalizer
