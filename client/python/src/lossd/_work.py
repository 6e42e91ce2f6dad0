# SPDX-License-Identifier: Apache-2.0
"""What one loss call computes, apart from how it travels: the rows of a microbatch, or gradients of retained rows.

Works are immutable, but for know_classes(); methods may run on several threads at once, each with rows of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lossd import _wire, errors
from lossd._head_cache import GradientsId, names
from lossd._plan import Rows, SliceRule, divide_into_slices, listed, split_ranges, unsent, within
from lossd._arrays import PairedRows, RowMemory, SoftTargets
from lossd._wire import Room
from lossd.types import MOST_DEPTHS, ClassOutput, Depth, LossOptions, LossResult, Reduction, RowOutput
from lossd.v1 import loss_pb2, types_pb2

_MAX_OPEN_BYTES = 4 << 20  # opening messages, with targets and weights, stay below what any gRPC peer takes
_OPEN_OVERHEAD = 64 << 10  # room for their small fields
_MAX_ROWS = 2**31 - 1

_IGNORED: dict[RowOutput, int] = {"loss": 0, "lse": 0, "entropy": 0, "logprob": 0, "argmax": -1}


def rows_per_stream(max_message_bytes: int, bytes_per_row: int) -> int:
    """How many rows a first message has room for, with so many bytes for each."""
    open_bytes = min(max(max_message_bytes, _OPEN_OVERHEAD + 1024), _MAX_OPEN_BYTES)
    return (open_bytes - _OPEN_OVERHEAD) // bytes_per_row


@dataclass(frozen=True)
class Outputs:
    """Where results go; written in place. Only what is there is computed and sent."""

    grad_hidden: RowMemory | None = None
    rows: dict[RowOutput, NDArray[Any]] = field(default_factory=dict)  # [N] each
    classes: dict[ClassOutput, NDArray[Any]] = field(default_factory=dict)  # [N, K] or [N, k] each

    @property
    def class_count(self) -> int:
        return self.classes["class_logprobs"].shape[1] if "class_logprobs" in self.classes else 0

    @property
    def top_k(self) -> int:
        return self.classes["top_classes"].shape[1] if "top_classes" in self.classes else 0

    def most_rows(self) -> int | None:
        """Of a slice with results of single classes, which are large (OpenMicrobatch.class_count); None: as many as may be."""
        row_bytes = 4 * self.class_count + 9 * self.top_k
        return max(1, 2**19 // row_bytes) if row_bytes else None

    def fill_ignored(self, rows: Rows, row_bytes: int) -> None:
        if self.grad_hidden is not None:
            self.grad_hidden.zero(rows.begin * row_bytes, rows.end * row_bytes)
        for name, array in self.rows.items():
            array[rows.begin:rows.end] = _IGNORED[name]
        for kind, array in self.classes.items():
            array[rows.begin:rows.end] = -1 if kind == "top_classes" else 0


@dataclass(frozen=True)
class StreamPlan:
    """What one stream sends, and how much of its summary is expected."""

    first: bytes  # opens the call
    rows: Rows  # the range it opens
    slices: list[Rows] | None  # to be sent; None: nothing is, the server cuts
    depths: int = 0


class Work(ABC):
    rows_argument = "hidden"  # the caller's name of the rows, for errors

    def __init__(self, *, head: str, step: int | None, id: int, accumulate: bool, in_step: bool, rows: int,
                 hidden_size: int, element_size: int, outputs: Outputs, run: str) -> None:
        """`in_step`: what the call does ends with the gradients of the step (AnswerCheck). `run`: the client's."""
        if not head:
            raise errors.InvalidArgument("head is empty")
        for name, value in (("step", step), ("id", id)):
            if value is not None and not 0 <= value < 2**64:
                raise errors.InvalidArgument(f"{name} is {value}; it must be in [0, 2^64)")
        if rows > _MAX_ROWS:
            raise errors.InvalidArgument(f"the microbatch has {rows} rows; the most is {_MAX_ROWS}")
        if hidden_size < 1:
            raise errors.InvalidArgument("hidden: a row has no elements")
        if accumulate and step is None:
            raise errors.InvalidArgument("step is None; accumulate=True needs the step that the gradients belong to")
        self.head = head
        self.step = step
        self.id = id
        self.accumulate = accumulate
        self.in_step = in_step
        self.rows = rows
        self.hidden_size = hidden_size
        self.row_bytes = hidden_size * element_size
        self.sent_row_bytes = self.row_bytes  # of what is sent of a row: with the hidden state of a teacher
        self.outputs = outputs
        self.run = run
        self.hidden: RowMemory | None = None  # None: no slices are sent

    @property
    def memory(self) -> RowMemory | None:
        """Where rows come from or gradients go; None: neither is wanted."""
        return self.hidden or self.outputs.grad_hidden

    @property
    def moved_rows(self) -> int:
        """Rows whose hidden states or gradients travel."""
        return self.rows

    def know_classes(self, classes: NDArray[np.int32]) -> None:
        """The head has these classes of a larger vocabulary: rows with another target count as ignored.

        Comes before the methods below, or not at all.
        """

    @property
    def restartable(self) -> bool:
        """Nothing of a call that fails stays, so it may begin again with what it finds."""
        return not self.in_step

    @abstractmethod
    def split(self, streams: int, max_message_bytes: int) -> list[Rows]:
        """Ranges for about so many streams, whose first messages stay below `max_message_bytes` and below 4 MiB."""

    @abstractmethod
    def plan(self, rows: Rows, rule: SliceRule, meant: GradientsId | None, region: bytes = b"",
             room: Room | None = None) -> StreamPlan:
        """What the stream of a range sends, meant for these gradients (None: for any). Its slices may lie in `region`;
        `room`: where in it, if the server cuts them.

        Writes the results of rows that nothing will be received for.
        """

    @abstractmethod
    def conclude(self, total: LossResult) -> None:
        """Sets what follows from the sums over all streams. Raises if the sums cannot be right."""


@dataclass(frozen=True)
class Scale:
    reduction: Reduction
    normalizer: float | None  # mean only; None: the number of valid targets
    grad_output: float

    def check(self, use_class_weights: bool) -> None:
        if not math.isfinite(self.grad_output):
            raise errors.InvalidArgument(f"grad_output is {self.grad_output}; it must be finite")
        if self.normalizer is None:
            if self.reduction == "mean" and use_class_weights:
                raise errors.InvalidArgument(
                    "normalizer is None; with class weights a mean needs the sum of the weights of the targets")
        elif self.reduction != "mean":
            raise errors.InvalidArgument("normalizer is for reduction='mean' only")
        elif not math.isfinite(self.normalizer) or self.normalizer < 0:
            raise errors.InvalidArgument(f"normalizer is {self.normalizer}; it must be finite and not negative")


class ForwardWork(Work):
    def __init__(self, *, head: str, step: int | None, id: int, accumulate: bool, hidden: RowMemory,
                 hidden_dtype: types_pb2.DType, hidden_size: int, element_size: int, targets: NDArray[np.int32],
                 row_weights: NDArray[np.float32] | None, options: LossOptions, scale: Scale,
                 reduction: loss_pb2.Reduction, retain: bool, outputs: Outputs, run: str = "",
                 numbers: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
                 teacher: RowMemory | None = None, teacher_row_bytes: int = 0, classes: NDArray[np.int32] | None = None,
                 soft: SoftTargets | None = None, depths: Sequence[Depth] = ()) -> None:
        """`numbers`: those of options.objective, by the names of the protocol's fields and in their order. `teacher`: hidden
        states of options.distillation's teacher, [N, teacher_row_bytes]. `classes`: [K] or [N, K], those that outputs.classes
        is for. `soft`: with options.rest. `depths`: divide the rows, in order; empty: they are not divided."""
        super().__init__(head=head, step=step, id=id, accumulate=accumulate, in_step=accumulate or retain,
                         rows=len(targets), hidden_size=hidden_size, element_size=element_size, outputs=outputs, run=run)
        self.hidden = hidden
        if teacher is not None:
            self.hidden = PairedRows(hidden, self.row_bytes, teacher, teacher_row_bytes)
            self.sent_row_bytes += teacher_row_bytes
        self._dtype = hidden_dtype
        self._targets = targets
        self._row_weights = row_weights
        self._numbers = numbers
        self._classes = classes
        self._soft = soft
        self._depths = tuple(depths)
        ends = list(itertools.accumulate(depth.rows for depth in self._depths))
        self._rows_of_depths = [Rows(end - depth.rows, end) for depth, end in zip(self._depths, ends)]
        self._options = options
        self._scale = scale
        self._reduction = reduction
        self._retain = retain
        self._valid = targets != options.ignore_index
        self._valid_rows = int(np.count_nonzero(self._valid))
        self._check()

    @property
    def moved_rows(self) -> int:
        return self._valid_rows

    def know_classes(self, classes: NDArray[np.int32]) -> None:
        distillation = self._options.distillation
        if distillation is not None and distillation.target_weight == 0:
            return  # then a target only says whether the row counts
        self._valid = self._valid & listed(self._targets, classes)
        self._valid_rows = int(np.count_nonzero(self._valid))

    def _check(self) -> None:
        self._scale.check(self._options.use_class_weights and not self._depths)
        self._check_depths()
        weights = {} if self._row_weights is None else {"row_weights": self._row_weights}
        for name, values in {**weights, **self._numbers}.items():
            if len(values) != self.rows:
                raise errors.InvalidArgument(f"{name} has {len(values)} entries for {self.rows} rows")
        self._check_objective()
        if (self._options.rest is None) != (self._soft is None):
            raise errors.InvalidArgument("target_classes and target_weights come with options.rest, and only with it")
        if self._soft is not None and (self.outputs.class_count or self.outputs.top_k):
            raise errors.InvalidArgument("classes and top_k are not for rows with soft targets (options.rest)")
        distillation = self._options.distillation
        if (distillation is None) != (self.sent_row_bytes == self.row_bytes):
            raise errors.InvalidArgument("teacher_hidden comes with options.distillation, and only with it")
        if distillation is not None and self._retain:
            raise errors.InvalidArgument("retain is True; hidden states of a teacher are not retained")
        deferred = self._scale.reduction == "none"
        if self._retain and not deferred:
            raise errors.InvalidArgument("retain=True goes with reduction='none' only")
        if deferred and (self.accumulate or self.outputs.grad_hidden is not None):
            raise errors.InvalidArgument("with reduction='none' gradients come by backward(), after retain=True")

    def _check_depths(self) -> None:
        if not self._depths:
            return
        if len(self._depths) > MOST_DEPTHS:
            raise errors.InvalidArgument(f"depths has {len(self._depths)} entries; the most is {MOST_DEPTHS}")
        if self._scale.reduction == "none":
            raise errors.InvalidArgument("reduction is 'none'; with depths it must be 'sum' or 'mean'")
        if self._scale.normalizer is not None:
            raise errors.InvalidArgument(f"normalizer is {self._scale.normalizer}; depths have normalizers of their own")
        if self._rows_of_depths[-1].end != self.rows:
            raise errors.InvalidArgument(f"depths have {self._rows_of_depths[-1].end} rows; targets has {self.rows}")
        for index, depth in enumerate(self._depths):
            try:
                Scale(self._scale.reduction, depth.normalizer, 1.0).check(self._options.use_class_weights)
            except errors.InvalidArgument as error:
                raise errors.InvalidArgument(f"depths[{index}].{error}") from None

    def _check_objective(self) -> None:
        objective = self._options.objective
        needed = () if objective is None else objective.numbers
        for name in ("advantages", "old_logprobs", "ref_logprobs"):
            if name in needed and name not in self._numbers:
                raise errors.InvalidArgument(f"{name} is None; objective {objective} needs one for each row")
            if name in self._numbers and name not in needed:
                raise errors.InvalidArgument(f"{name} is given, but objective {objective} does not use it")
        if objective is not None and self._scale.reduction == "none":
            raise errors.InvalidArgument("reduction is 'none'; with an objective it must be 'sum' or 'mean'")

    def split(self, streams: int, max_message_bytes: int) -> list[Rows]:
        # Target, row weight, numbers of the objective, classes.
        named = self._classes.shape[1] if self._classes is not None and self._classes.ndim == 2 else 0
        soft = self._soft.count if self._soft is not None else 0
        row_bytes = 8 + 4 * (len(self._numbers) + named) + 8 * soft
        return split_ranges(self._valid, streams, rows_per_stream(max_message_bytes, row_bytes))

    def plan(self, rows: Rows, rule: SliceRule, meant: GradientsId | None, region: bytes = b"",
             room: Room | None = None) -> StreamPlan:
        most = self.outputs.most_rows()
        if most is not None:
            rule = dataclasses.replace(rule, max_rows=min(rule.max_rows, most))
        parts = within(rows, self._rows_of_depths) if self._depths else [rows]
        slices = [piece for part in parts for piece in divide_into_slices(self._valid, part, rule)]
        for piece in unsent(rows, slices):
            self.outputs.fill_ignored(piece, self.row_bytes)
        arrays: dict[str, NDArray[Any]] = {"targets": self._targets[rows.begin:rows.end]}
        if self._row_weights is not None:
            arrays["row_weights"] = self._row_weights[rows.begin:rows.end]
        last = loss_pb2.OpenMicrobatch(retain=self._retain, region=region, run=self.run, **names(meant))
        numbers = {name: values[rows.begin:rows.end] for name, values in self._numbers.items()}
        count = loss_pb2.OpenMicrobatch(class_count=self.outputs.class_count)
        classes: dict[str, NDArray[Any]] = {}
        if self._classes is not None:
            classes["classes"] = self._classes if self._classes.ndim == 1 else self._classes[rows.begin:rows.end]
        top = loss_pb2.OpenMicrobatch(top_k=self.outputs.top_k, depths=self._depths_to_proto())
        soft: dict[str, NDArray[Any]] = {}
        if self._soft is not None:
            top.target_count = self._soft.count
            soft["target_classes"] = self._soft.classes[rows.begin:rows.end]
            soft["target_weights"] = self._soft.weights[rows.begin:rows.end]
        opening = _wire.encode_opening("open", self._open(rows), arrays, last, numbers, count, classes, top, soft)
        return StreamPlan(opening, rows, slices, len(self._depths))

    def _normalizer_of(self, depth: int) -> float:
        if self._scale.reduction != "mean":
            return 1.0
        given = self._depths[depth].normalizer
        return float(self._valid_rows_of(depth)) if given is None else given

    def _valid_rows_of(self, depth: int) -> int:
        rows = self._rows_of_depths[depth]
        return int(np.count_nonzero(self._valid[rows.begin:rows.end]))

    def _depths_to_proto(self) -> list[loss_pb2.Depth]:
        mean = self._scale.reduction == "mean"
        return [loss_pb2.Depth(rows=depth.rows, weight=depth.weight, normalizer=self._normalizer_of(index) if mean else None)
                for index, depth in enumerate(self._depths)]

    def _normalizer(self) -> float:
        return float(self._valid_rows) if self._scale.normalizer is None else self._scale.normalizer

    def _open(self, rows: Rows) -> loss_pb2.OpenMicrobatch:
        """The fields before the targets."""
        mean = self._scale.reduction == "mean"
        want = self.outputs.rows
        return loss_pb2.OpenMicrobatch(
            head=self.head, step=self.step, microbatch_id=self.id, microbatch_rows=self.rows,
            rows=types_pb2.RowRange(begin=rows.begin, end=rows.end), hidden_dtype=self._dtype,
            options=self._options.to_proto(), reduction=self._reduction,
            normalizer=self._normalizer() if mean and not self._depths else None, grad_output=self._scale.grad_output,
            want_grad_hidden=self.outputs.grad_hidden is not None, accumulate_gradients=self.accumulate,
            want_row_loss="loss" in want, want_row_lse="lse" in want, want_row_entropy="entropy" in want,
            want_row_logprob="logprob" in want, want_row_argmax="argmax" in want)

    def conclude(self, total: LossResult) -> None:
        if total.valid_rows != self._valid_rows:
            raise errors.server_sent(f"a count of {total.valid_rows} valid rows; {self._valid_rows} were sent")
        if self._depths:
            return self._conclude_depths(total)
        if self._scale.reduction == "mean":
            total.normalizer = self._normalizer()
        total.loss = total.loss_sum / total.normalizer if self._valid_rows else 0.0


    def _conclude_depths(self, total: LossResult) -> None:
        if len(total.depths) != len(self._depths):
            raise errors.server_sent(f"sums of {len(total.depths)} depths; {len(self._depths)} were sent")
        for index, (found, depth) in enumerate(zip(total.depths, self._depths)):
            valid = self._valid_rows_of(index)
            if found.valid_rows != valid:
                raise errors.server_sent(f"a count of {found.valid_rows} valid rows of depth {index}; {valid} were sent")
            found.normalizer = self._normalizer_of(index)
            found.loss = found.loss_sum / found.normalizer if valid else 0.0
            total.loss += depth.weight * found.loss


class BackwardWork(Work):
    def __init__(self, *, head: str, step: int | None, id: int, accumulate: bool, hidden_size: int,
                 element_size: int, grad_loss: NDArray[np.float32], grad_lse: NDArray[np.float32] | None,
                 grad_entropy: NDArray[np.float32] | None, outputs: Outputs, run: str = "") -> None:
        super().__init__(head=head, step=step, id=id, accumulate=accumulate, in_step=True, rows=len(grad_loss),
                         hidden_size=hidden_size, element_size=element_size, outputs=outputs, run=run)
        if self.rows == 0:
            raise errors.InvalidArgument("grad_loss is empty")
        self._gradients = {"grad_loss": grad_loss}
        for name, values in (("grad_lse", grad_lse), ("grad_entropy", grad_entropy)):
            if values is None:
                continue
            if len(values) != self.rows:
                raise errors.InvalidArgument(f"{name} has {len(values)} entries for {self.rows} rows")
            self._gradients[name] = values

    def split(self, streams: int, max_message_bytes: int) -> list[Rows]:
        # No row is known to be ignored.
        return split_ranges(np.ones(self.rows, np.bool_), streams, rows_per_stream(max_message_bytes, 12))

    def plan(self, rows: Rows, rule: SliceRule, meant: GradientsId | None, region: bytes = b"",
             room: Room | None = None) -> StreamPlan:
        self.outputs.fill_ignored(rows, self.row_bytes)
        open_ = loss_pb2.OpenBackward(
            head=self.head, step=self.step, microbatch_id=self.id,
            rows=types_pb2.RowRange(begin=rows.begin, end=rows.end),
            want_grad_hidden=self.outputs.grad_hidden is not None, accumulate_gradients=self.accumulate)
        arrays = {name: values[rows.begin:rows.end] for name, values in self._gradients.items()}
        last = loss_pb2.OpenBackward(run=self.run, **names(meant))
        if room is not None:
            last.region = region
            last.in_region.offset, last.in_region.bytes = room.offset, room.size
        return StreamPlan(_wire.encode_opening("backward", open_, arrays, last), rows, None)

    def conclude(self, total: LossResult) -> None:
        total.loss = total.loss_sum
