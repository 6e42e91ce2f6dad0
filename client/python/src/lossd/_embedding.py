# SPDX-License-Identifier: Apache-2.0
"""A head's weight [V, D] as an embedding: rows of it, and their gradients; what such calls send, and the methods of lossd.Client."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lossd import _arrays, _wire, errors, types
from lossd._arrays import RowMemory, UnsentRows
from lossd._connections import Deadline
from lossd._head_cache import GradientsId, names
from lossd._head_calls import HeadCalls
from lossd._loss_call import LossCall, PendingLoss, PendingRows
from lossd._plan import Rows, SliceRule, divide_into_slices, split_ranges, unsent
from lossd._wire import Room
from lossd._work import Outputs, StreamPlan, Work, rows_per_stream
from lossd.types import DType, EmbedResult, LossResult
from lossd.v1 import loss_pb2, types_pb2


class EmbeddingWork(Work):
    """Rows of the weight, one for each id, or their gradients, which join that of the weight."""

    def __init__(self, *, head: str, step: int | None, id: int, ids: NDArray[np.int32], padding_idx: int | None,
                 dtype: types_pb2.DType, hidden_size: int, element_size: int, gradients: RowMemory | None, scale: float,
                 outputs: Outputs, run: str = "") -> None:
        """`gradients`: of the rows, times `scale`; those of ids that are `padding_idx` are left out. None: outputs has the place
        of the rows, and nothing joins a step."""
        accumulates = gradients is not None
        super().__init__(head=head, step=step, id=id, accumulate=accumulates, in_step=accumulates, rows=len(ids),
                         hidden_size=hidden_size, element_size=element_size, outputs=outputs, run=run)
        self.rows_argument = "gradients" if accumulates else "out"
        out = outputs.grad_hidden
        self.hidden = gradients or UnsentRows("" if out is None else out.device)
        self._ids = ids
        self._padding_idx = padding_idx
        self._dtype = dtype
        self._scale = scale
        self._valid: NDArray[np.bool_] = np.ones(len(ids), np.bool_) if padding_idx is None else ids != padding_idx
        self._valid_rows = int(np.count_nonzero(self._valid))
        if (ids < 0).any():
            row = int((ids < 0).argmax())
            raise errors.InvalidArgument(f"ids[{row}] is {ids[row]}; an id is a row of the weight, so it must not be negative",
                                         types_pb2.ErrorDetail(field=f"ids[{row}]", value=str(ids[row])))
        if not math.isfinite(scale):
            raise errors.InvalidArgument(f"scale is {scale}; it must be finite")

    @property
    def moved_rows(self) -> int:
        return self._valid_rows

    def split(self, streams: int, max_message_bytes: int) -> list[Rows]:
        return split_ranges(self._valid, streams, rows_per_stream(max_message_bytes, 4))

    def plan(self, rows: Rows, rule: SliceRule, meant: GradientsId | None, region: bytes = b"",
             room: Room | None = None) -> StreamPlan:
        slices = divide_into_slices(self._valid, rows, rule)
        for piece in unsent(rows, slices):
            self.outputs.fill_ignored(piece, self.row_bytes)
        first = loss_pb2.OpenMicrobatch(
            head=self.head, step=self.step, microbatch_id=self.id, microbatch_rows=self.rows,
            rows=types_pb2.RowRange(begin=rows.begin, end=rows.end), hidden_dtype=self._dtype,
            options=loss_pb2.LossOptions(ignore_index=self._padding_idx), reduction=loss_pb2.REDUCTION_SUM,
            grad_output=self._scale if self.accumulate else None,
            want_grad_hidden=not self.accumulate, accumulate_gradients=self.accumulate)
        last = loss_pb2.OpenMicrobatch(region=region, run=self.run, embedding=(
            loss_pb2.EMBEDDING_GRADIENTS if self.accumulate else loss_pb2.EMBEDDING_ROWS), **names(meant))
        arrays = {"targets": self._ids[rows.begin:rows.end]}
        return StreamPlan(_wire.encode_opening("open", first, arrays, last), rows, slices)

    def conclude(self, total: LossResult) -> None:
        if total.valid_rows != self._valid_rows:
            raise errors.server_sent(f"a count of {total.valid_rows} valid rows; {self._valid_rows} were sent")


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
        work = EmbeddingWork(
            head=head, step=step, id=0, ids=numbers, padding_idx=None, dtype=types.DTYPES[dtype], hidden_size=hidden_size,
            element_size=types.NUMPY_DTYPES[dtype].itemsize, gradients=None, scale=1.0, outputs=Outputs(place), run=self._run)
        call = self._launch(work, streams, None, timeout, _arrays.ready_with(place, ready))
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
        work = EmbeddingWork(
            head=head, step=step, id=id, ids=numbers, padding_idx=_padding(padding_idx),
            dtype=types.DTYPES[kind], hidden_size=shape[1], element_size=types.NUMPY_DTYPES[kind].itemsize, gradients=data,
            scale=scale, outputs=Outputs(), run=self._run)
        call = self._launch(work, streams, None, timeout, _arrays.ready_with(data, ready))
        return PendingLoss(call, lambda result: result)

    def _hidden_size(self, head: str, timeout: float | None) -> int:
        """D, which is asked for once."""
        facts = self._head_cache.facts(head)
        if facts is None:
            if not head:
                raise errors.InvalidArgument("head is empty")
            return int(self._describe(head, Deadline(timeout or self._call_timeout)).spec.hidden_size)
        return facts.hidden_size

    @abstractmethod
    def _launch(self, work: Work, streams: int | None, slice_bytes: int | None, timeout: float | None,
                ready: Callable[[], None] | None) -> LossCall:
        """Begins a call of the client."""


def _padding(padding_idx: int | None) -> int | None:
    """InvalidArgument if it cannot be an id."""
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, Integral) or not 0 <= int(padding_idx) < 2**31:
        raise errors.InvalidArgument(f"padding_idx is {padding_idx!r}; it must be a whole number in [0, 2^31), or None",
                                     types_pb2.ErrorDetail(field="padding_idx", value=str(padding_idx)))
    return int(padding_idx)
