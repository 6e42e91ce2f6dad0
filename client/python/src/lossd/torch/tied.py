# SPDX-License-Identifier: Apache-2.0
"""TiedEmbedding: an embedding in the trainer that shares its weights with a head on a server."""

from __future__ import annotations

import torch

from lossd.torch import _input
from lossd.torch.head import LossHead


class TiedEmbedding:
    """Keeps the weight of a trainer's embedding and the weight of a head the same matrix.

    The server owns the matrix and applies its steps. The embedding is a copy, which must not be in an optimizer of the
    trainer. Call add_gradient() once a step, after the last backward and before HeadOptimizer's load_grad_norm() or step():
    it adds the embedding's gradient to the head's. Call pull() after the step: it copies the new weight back.

        loss.backward()
        tied.add_gradient()
        head_optimizer.step()
        tied.pull()

    add_gradient() and pull() each take the time to send a matrix [V, D]. Under a wrapper that averages gradients over ranks
    (LossHead's process_group), every rank calls them, and adds its own copy of the averaged gradient.
    """

    def __init__(self, head: LossHead, weight: torch.nn.Parameter) -> None:
        """`weight` is the weight of the embedding, [V, D]. Call push() or pull() at the beginning to make it equal to the
        head's weight."""
        if tuple(weight.shape) != (head.vocab_size, head.hidden_size):
            raise ValueError(f"weight has shape {tuple(weight.shape)}; head {head.head_name!r} has "
                             f"{(head.vocab_size, head.hidden_size)}")
        self.head = head
        self.weight = weight

    def add_gradient(self) -> None:
        """Adds the embedding's gradient to the head's, exactly once, and sets the embedding's gradient to None.

        If the call fails, the gradient stays, and the call may be repeated. If the head is not trained, nothing is added.
        """
        head = self.head
        if not head.train_head:
            self.weight.grad = None
        if self.weight.grad is None:
            return
        number = head.steps.contribution()
        host, ready = _input.to_host(self.weight.grad.to_dense() if self.weight.grad.is_sparse else self.weight.grad)
        if ready is not None:
            ready()
        head.client.add_gradient(head.head_name, "weight", _input.as_array(host), step=head.step,
                                 id=head.steps.wire_id(number), dtype=_input.DTYPES[host.dtype],
                                 scale=head.scale.of_finished_gradient(head.step))
        head.steps.contributed()
        self.weight.grad = None

    def pull(self) -> None:
        """Copies the head's weight into the embedding."""
        self._copy(self.head.client.read_tensor(self.head.head_name, "weight", dtype=_input.DTYPES[self.weight.dtype]))

    def push(self) -> None:
        """Copies the embedding into the head's weight."""
        host, ready = _input.to_host(self.weight)
        if ready is not None:
            ready()
        self.head.client.write_tensor(self.head.head_name, "weight", _input.as_array(host),
                                      dtype=_input.DTYPES[host.dtype])

    @torch.no_grad()
    def _copy(self, values: _input.Array) -> None:
        self.weight.copy_(_input.as_tensor(values, self.weight.dtype))
