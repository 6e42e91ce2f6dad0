# SPDX-License-Identifier: Apache-2.0
"""A head's weight [V, D] as an embedding: rows of it, and their gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from numpy.typing import ArrayLike

from lossd import _arrays, _loss_call, errors, types
from lossd._head_calls import HeadCalls
from lossd._loss_call import Asked, LossCall, PendingLoss, PendingRows
from lossd.types import DType, EmbedResult, LossResult


class EmbeddingCalls(HeadCalls):
    """The part of lossd.Client that is about heads as embeddings; threads, units and errors as there."""

    def embed(self, head: str, ids: ArrayLike, *, dtype: DType = "bf16", step: int | None = None, out: Any = None,
              streams: int | None = None, timeout: float | None = None,
              ready: Callable[[], None] | None = None) -> EmbedResult:
        """Rows of a head's weight; blocks until they are there; see embed_async."""
        return self.embed_async(
            head, ids, dtype=dtype, step=step, out=out, streams=streams, timeout=timeout, ready=ready).wait()

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
        self._connections.check_usable()
        numbers = _arrays.as_targets(ids, "ids")
        types.enum_value("dtype", types.DTYPES, dtype)
        shape = out.__cuda_array_interface__["shape"] if _arrays.is_cuda_array(out) else getattr(out, "shape", None)
        if out is not None and (shape is None or len(shape) != 2):
            raise errors.InvalidArgument(f"out has shape {shape}; it must be [{len(numbers)}, D]")
        hidden_size = self._hidden_size(head, timeout) if shape is None else int(shape[1])
        array, place = _arrays.gradient_rows(True if out is None else out, dtype, (len(numbers), hidden_size), None, "out")
        assert place is not None
        call = self._launch(_loss_call.embedding(
            head, step=step, ids=numbers, hidden_size=hidden_size, dtype=types.DTYPES[dtype], streams=streams, place=place),
            timeout, ready)
        return PendingRows(call, lambda result: EmbedResult(
            array, result.step, result.incarnation, result.weights_version, result.wall_seconds, result.received_bytes,
            result.streams, result.repeats))

    def add_row_gradients(
            self, head: str, ids: ArrayLike, gradients: Any, *, step: int, id: int, scale: float = 1.0,
            padding_idx: int | None = None, dtype: DType | None = None, streams: int | None = None,
            timeout: float | None = None, ready: Callable[[], None] | None = None) -> LossResult:
        """Adds gradients of rows to that of a head's weight; blocks until all is done; see add_row_gradients_async."""
        return self.add_row_gradients_async(
            head, ids, gradients, step=step, id=id, scale=scale, padding_idx=padding_idx, dtype=dtype, streams=streams,
            timeout=timeout, ready=ready).wait()

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
        self._connections.check_usable()
        numbers = _arrays.as_targets(ids, "ids")
        kind, shape, data = _arrays.as_rows("gradients", gradients, dtype)
        if len(numbers) != shape[0]:
            raise errors.InvalidArgument(f"ids has {len(numbers)} entries for {shape[0]} rows of gradients")
        call = self._launch(_loss_call.embedding(
            head, step=step, id=id, ids=numbers, hidden_size=shape[1], dtype=types.DTYPES[kind], streams=streams, gradients=data,
            scale=scale, padding_idx=None if padding_idx is None else types.whole_number("padding_idx", padding_idx, 0, 31)),
            timeout, ready)
        return PendingLoss(call, lambda result: result)

    def _hidden_size(self, head: str, timeout: float | None) -> int:
        """D, which is asked for once."""
        if not head:
            raise errors.InvalidArgument("head is empty")
        return self._connections.known_hidden_size(head) or int(self._describe(head, timeout).spec.hidden_size)

    @abstractmethod
    def _launch(self, asked: Asked, timeout: float | None, ready: Callable[[], None] | None) -> LossCall:
        """Begins a computation of the client."""
