# SPDX-License-Identifier: Apache-2.0
"""A head's weight [V, D] as an embedding: rows of it, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from numpy.typing import ArrayLike

from lossd import _arrays, _loss_call, errors, types
from lossd._head_calls import HeadCalls
from lossd._loss_call import PendingLoss, PendingRows, waiting
from lossd.types import DType, EmbedResult, LossResult


class EmbeddingCalls(HeadCalls):
    """The part of lossd.Client that is about heads as embeddings; threads, units and errors as there."""

    def embed_async(self, head: str, ids: ArrayLike, *, dtype: DType = "bf16", step: int | None = None, out: Any = None,
                    streams: int | None = None, timeout: float | None = None,
                    ready: Callable[[], None] | None = None) -> PendingRows:
        """Asks for rows of a head's weight [V, D], which serves as an embedding: row n of the result is that of ids[n].

        All rows are of one version of the weights: the call begins again if they change under it (RetryOptions). It changes
        nothing on the server. The first call about a head asks for its D, unless `out` says it.

        InvalidArgument if an id is negative or not below V, with its place and value, and for heads with a draft vocabulary;
        Unimplemented for heads that live in memory of the host.

        Args:
          ids: [N] integers in [0, V), in any order; one may come several times. Copied.
          dtype: of the rows, which are rounded to it: "fp32", "fp16", or "bf16" (its bits, as uint16).
          step: the step that has to be open (FailedPrecondition if another one is). None: any.
          out: a C-contiguous array [N, D] of that dtype, or such a CUDA array (bf16: any of 16 bits), to write the rows into.
            None: a new array.
          streams, timeout: as compute_loss_async().
          ready: blocks until `out` may be written; runs on a thread of the client.
        """
        self.check_usable()
        numbers = _arrays.as_targets(ids, "ids")
        types.enum_value("dtype", types.DTYPES, dtype)
        shape = out.__cuda_array_interface__["shape"] if _arrays.is_cuda_array(out) else getattr(out, "shape", None)
        if out is not None and (shape is None or len(shape) != 2):
            raise errors.InvalidArgument(f"out has shape {shape}; it must be [{len(numbers)}, D]")
        hidden_size = self._hidden_size(head, timeout) if shape is None else int(shape[1])
        array, place = _arrays.gradient_rows(True if out is None else out, dtype, (len(numbers), hidden_size), None, "out")
        assert place is not None
        asked = _loss_call.embedding(
            head, step=step, ids=numbers, hidden_size=hidden_size, dtype=types.DTYPES[dtype], streams=streams, place=place)

        def finish(result: LossResult) -> EmbedResult:
            return EmbedResult(array, **{each.name: getattr(result, each.name) for each in fields(EmbedResult)[1:]})

        return self._launch(PendingRows(self, asked, finish), timeout, ready)

    embed = waiting(embed_async, EmbedResult)
    """As embed_async(), and waits for the rows."""

    def add_row_gradients_async(
            self, head: str, ids: ArrayLike, gradients: Any, *, step: int, id: int, scale: float = 1.0,
            padding_idx: int | None = None, dtype: DType | None = None, streams: int | None = None,
            timeout: float | None = None, ready: Callable[[], None] | None = None) -> PendingLoss:
        """Begins to add the gradients of rows that embed() gave: `scale` times gradients[n] joins the gradient of row ids[n] of
        the weight, in fp32.

        It is a microbatch of the step as those of compute_loss(accumulate=True) are: each row counts once, whatever breaks, and
        apply_step can expect its id. Of the result, the counts of rows (valid_rows are those that are no padding), where the
        server stood, and the times mean something; losses are 0.

        InvalidArgument as in embed_async(); NonFinite if a gradient that counts is not finite.

        Args:
          ids: [N] integers in [0, V), as embed() was given them. Copied.
          gradients: [N, D], float32 or float16; bf16 as `hidden` of compute_loss_async(), of which all holds, also for CUDA
            arrays.
          step: the open step that the gradients belong to.
          id: names the microbatch within (head, step); no loss of the step has the same. Sending it again with the same contents
            is safe.
          padding_idx: rows with this id are padding, whose gradients are left out. None: none are.
          dtype: of the gradients, where the array does not say it.
          streams, timeout, ready: as compute_loss_async().
        """
        self.check_usable()
        numbers = _arrays.as_targets(ids, "ids")
        kind, data = _arrays.as_rows("gradients", gradients, dtype)
        if len(numbers) != data.shape[0]:
            raise errors.InvalidArgument(f"ids has {len(numbers)} entries for {data.shape[0]} rows of gradients")
        asked = _loss_call.embedding(
            head, step=step, id=id, ids=numbers, hidden_size=data.shape[1], dtype=types.DTYPES[kind], streams=streams, gradients=data,
            scale=scale, padding_idx=None if padding_idx is None else types.whole_number("padding_idx", padding_idx, 0, 31))
        return self._launch(PendingLoss(self, asked, lambda result: result), timeout, ready)

    add_row_gradients = waiting(add_row_gradients_async, LossResult)
    """As add_row_gradients_async(), and waits for the result."""

    def _hidden_size(self, head: str, timeout: float | None) -> int:
        """D, which is asked for once."""
        if not head:
            raise errors.InvalidArgument("head is empty")
        known = int(self._library.lossd_client_known_hidden_size(self._pointer, head.encode()))
        return known or int(self._describe(head, timeout).spec.hidden_size)
