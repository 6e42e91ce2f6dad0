# SPDX-License-Identifier: Apache-2.0
"""HeadCalls: the methods of a client that create heads, read and write their tensors, apply steps, and save and load checkpoints."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lossd import _arrays, errors, types
from lossd._loss_call import NativeClient
from lossd.descriptions import read
from lossd.types import DType, Gradients, Logits, Norm, OptimizerState, Param, Residency, Role, Split, TensorFile
from lossd.v1 import head_pb2, types_pb2
from lossd.v1.descriptions import (
    AddedGradient, CheckpointInfo, HeadDescription, HeadState, SavedCheckpoint, SaveProgress, StepResult)

IfExists = Literal["error", "keep", "reset"]
ResetScope = Literal["optimizer", "all"]
_IF_EXISTS = {"error": 0, "keep": 1, "reset": 2}  # the values of lossd_request in the library


def initial_values(seed: int, zeros: bool, tensor_file: TensorFile | None) -> dict[str, Any]:
    """The initial values of a head, as the field of a request."""
    if tensor_file is not None:
        return {"tensor_file": tensor_file.to_proto()}
    return {"zeros": head_pb2.Zeros()} if zeros else {"kaiming_uniform": head_pb2.KaimingUniform(seed=seed)}


def chosen(if_exists: IfExists | None, exist_ok: bool | None) -> IfExists:
    """What to do with a head that exists already. InvalidArgument if both arguments are given, or `if_exists` has another value."""
    if exist_ok is not None and if_exists is not None:
        raise errors.InvalidArgument(
            f"if_exists is {if_exists!r} and exist_ok is {exist_ok}; give if_exists alone (exist_ok=True is its \"keep\")")
    if exist_ok:
        warnings.warn('exist_ok=True is the earlier name of if_exists="keep", and goes away', DeprecationWarning, stacklevel=3)
        return "keep"
    types.enum_value("if_exists", _IF_EXISTS, "error" if if_exists is None else if_exists)
    return if_exists or "error"


def whole_numbers(field: str, numbers: Any) -> list[int]:
    """The numbers as a list. InvalidArgument, naming the entry, if one is not in [0, 2^31)."""
    return [types.whole_number(f"{field}[{index}]", number, 0, 31) for index, number in enumerate(numbers)]


# The heads that clients of this program have loaded from checkpoints: name, incarnation of the server and creation number.
# lossd.torch asks whether training continues from a loaded head. Threads may use the list at the same time.
_loaded: deque[tuple[str, int, int]] = deque(maxlen=1024)


def note_loaded(head: str, state: Any) -> None:
    """Records that a client of this program has loaded a checkpoint into the head. `state` is its HeadState."""
    _loaded.append((head, state.incarnation, state.creation))


def has_loaded(head: str, state: Any) -> bool:
    """Whether note_loaded() was called for this head and state since forget_loaded()."""
    return (head, state.incarnation, state.creation) in list(_loaded)


def forget_loaded(head: str, state: Any = None) -> None:
    """Removes the records of a head; with `state` None, all records of its name."""
    for each in list(_loaded):
        if each[0] == head and (state is None or each[1:] == (state.incarnation, state.creation)):
            with contextlib.suppress(ValueError):  # another thread has already removed it
                _loaded.remove(each)


class HeadCalls(NativeClient):
    """The part of lossd.Client that is about heads. Threads, units, errors and repeats are as described there."""

    def create_head(
            self, name: str, *, hidden_size: int, vocab_size: int, bias: bool = False, class_weights: bool = False, norm: Norm = "none",
            norm_epsilon: float | None = None, compute_dtype: DType | None = None, optimizer_state: OptimizerState = "adam",
            frozen: bool = False, logits: Logits = "stored", gradients: Gradients = "exact", workspace_bytes: int = 0,
            split: Split = "any", shares: Sequence[int] = (), replicas: int = 0, residency: Residency = "device",
            class_list: ArrayLike = (), full_vocab_size: int = 0, seed: int = 0, zeros: bool = False,
            tensor_file: TensorFile | None = None, if_exists: IfExists | None = None, exist_ok: bool | None = None,
            dry_run: bool = False, timeout: float | None = None) -> HeadDescription:
        """Creates a head. Its weights are drawn with `seed` as torch.nn.Linear draws them, or are zeros, or are read from a file.

        Args:
          logits: "stored": logits stay in memory until the gradients are computed. "recomputed": logits are computed again, a
            few at a time, in little memory; for heads that fill a GPU. "none": an embedding alone, without memory for a loss.
          gradients: the kind of gradients where LossOptions.gradients is None.
          workspace_bytes: the most workspace that the head may take on the device. 0: the default with which the server was started.
          split: what several devices of a server divide: "rows", or "vocabulary": the classes of the head, of which each
            device then stores only its own. "any": rows if every device has room for all classes.
          shares: with split "vocabulary" or "any": how much of the classes each device of the server has, relative to the others, e.g. (13,
            6, 13, 13); 0: none. Empty: all devices have equally much. With `replicas`, one entry for each device of a replica.
          replicas: with split "vocabulary" or "any": how many copies of the head there are. Each copy divides its classes
            over an equal number of the server's devices, and the copies divide the rows. 0 and 1: one copy on all devices.
          residency: only of a frozen head: "device"; or "host": its values are stored in host memory, and are copied to a pool on the
            device when rows need them (docs/training/distillation.md). For many teachers of which few are used at a time.
          class_list, full_vocab_size: a draft vocabulary. class_list has the `vocab_size` classes of the head, ascending, by
            their numbers in a larger vocabulary of `full_vocab_size` classes. Targets, named classes, argmax and top classes
            of its losses are numbers of the larger vocabulary. Rows whose target is not in the list are ignored
            (LossOptions.refuse_unlisted). Rows of tensors have the head's own numbers.
          if_exists: what to do if a head of this name exists. "error" (None): raise AlreadyExists. "keep": leave it as it is,
            with its values, step and optimizer, to continue training. "reset": make it like new with reset_head(); one of
            several ranks does this before the others begin. With "keep" and "reset", AlreadyExists is raised if its
            specification differs, and names the difference.
          exist_ok: the earlier name: True means if_exists="keep", with a DeprecationWarning. Do not give both.
          dry_run: creates nothing. Returns the description (memory, rows of chunks and slices, choices), or raises the creation's errors.
        """
        choice = chosen(if_exists, exist_ok)
        spec = head_pb2.HeadSpec(
            name=name, hidden_size=hidden_size, vocab_size=vocab_size, bias=bias, class_weights=class_weights, norm_epsilon=norm_epsilon,
            frozen=frozen, workspace_bytes=workspace_bytes, full_vocab_size=full_vocab_size,
            norm=types.enum_value("norm", types.NORMS, norm), logits=types.enum_value("logits", types.LOGITS, logits),
            optimizer_state=types.enum_value("optimizer_state", types.OPTIMIZER_STATES, optimizer_state),
            gradients=types.enum_value("gradients", types.GRADIENTS, gradients), split=types.enum_value("split", types.SPLITS, split),
            residency=types.enum_value("residency", types.RESIDENCIES, residency),
            compute_dtype=None if compute_dtype is None else types.enum_value("compute_dtype", types.DTYPES, compute_dtype),
            shares=whole_numbers("spec.shares", shares), replicas=types.whole_number("spec.replicas", replicas, 0, 31),
            class_list=whole_numbers("spec.class_list", class_list))
        request = head_pb2.CreateHeadRequest(spec=spec, **initial_values(seed, zeros, tensor_file))
        try:
            if dry_run:
                return read(HeadDescription, self._call("PlanHead", request, head_pb2.HeadDescription, timeout))
            description = self._call("CreateHead", request, head_pb2.HeadDescription, timeout, if_exists=_IF_EXISTS[choice])
        except errors.AlreadyExists as error:
            if dry_run or choice == "error":
                error.add('; if_exists="keep" goes on with the head as it is, if_exists="reset" makes it as new, delete_head() removes it')
            raise
        if choice != "keep":
            forget_loaded(name, description.state)
        return read(HeadDescription, description)

    def reset_head(self, head: str, scope: ResetScope, *, seed: int = 0, zeros: bool = False,
                   tensor_file: TensorFile | None = None, timeout: float | None = None) -> HeadDescription:
        """Resets a head, or its optimizer alone, to the state after its creation. Discards what the open step has.

        The server does it once, even if the call is repeated because its answer was lost. FailedPrecondition if calls that
        accumulate are open on the head; then nothing has changed. Restarted if the server was restarted during the call.

        Args:
          scope: "optimizer": the moments and the count of updates become 0; values and step stay. "all": in addition, all
            values are new, and step 0 is open.
          seed, zeros, tensor_file: as in create_head; only with scope "all".
        """
        number = types.enum_value("scope", types.numbers_of(ResetScope, head_pb2.ResetScope), scope)
        if scope != "all" and (seed or zeros or tensor_file is not None):
            raise errors.InvalidArgument("scope is 'optimizer'; seed, zeros and tensor_file go with 'all'")
        values = initial_values(seed, zeros, tensor_file) if scope == "all" else {}
        request = head_pb2.ResetHeadRequest(head=head, scope=number, **values)
        answer = self._call("ResetHead", request, head_pb2.ResetHeadResponse, timeout)
        forget_loaded(head, answer.head.state)
        return read(HeadDescription, answer.head)

    def set_shares(self, head: str, shares: Sequence[int], timeout: float | None = None) -> HeadDescription:
        """Changes, between two steps, which share of the classes each device has, of a head that is split by vocabulary.

        Step, values and optimizer state keep every bit; other calls on the head wait meanwhile. While the tensors are copied,
        each device has its old and its new part: ResourceExhausted if there is no room. FailedPrecondition if the head is not
        split by vocabulary over several devices, if losses are being computed on it, or if the open step has rows. After an
        error nothing has changed. The server does it once, even if the call is repeated because its answer was lost.
        Restarted if the server was restarted during the call.

        Args:
          shares: as in create_head, one for each device; empty: all devices have equally much.
        """
        request = head_pb2.SetSharesRequest(head=head, shares=whole_numbers("shares", shares))
        return read(HeadDescription, self._call("SetShares", request, head_pb2.SetSharesResponse, timeout).head)

    def describe_head(self, head: str, timeout: float | None = None) -> HeadDescription:
        """The head's description now. NotFound if there is no head of this name."""
        return read(HeadDescription, self._describe(head, timeout))

    def list_heads(self, timeout: float | None = None) -> list[HeadDescription]:
        """All heads, sorted by name."""
        answer = self._call("ListHeads", head_pb2.ListHeadsRequest(), head_pb2.ListHeadsResponse, timeout)
        return [read(HeadDescription, head) for head in answer.heads]

    def delete_head(self, head: str, timeout: float | None = None) -> None:
        """Frees a head; its checkpoints stay. FailedPrecondition if losses are being computed on it."""
        self._call("DeleteHead", head_pb2.DeleteHeadRequest(head=head), head_pb2.DeleteHeadResponse, timeout)
        forget_loaded(head)

    def read_tensor(self, head: str, param: Param = "weight", role: Role = "value", *, dtype: DType = "fp32",
                    rows: tuple[int, int] | None = None, timeout: float | None = None) -> NDArray[Any]:
        """Returns a tensor, or its rows [begin, end): the weight is [V, D], the other tensors have one dimension. bf16 comes as uint16.

        All rows are of one version. If the tensor changes during the read, the client reads again (RetryOptions). Aborted if
        it changes each time, or if the head was deleted and created again meanwhile with another shape.
        """
        deadline = time.monotonic() + (timeout or self._transfer_timeout)
        request = head_pb2.ReadTensorRequest(
            head=head, param=types.enum_value("param", types.PARAMS, param), role=types.enum_value("role", types.ROLES, role),
            dtype=types.enum_value("dtype", types.DTYPES, dtype))
        before = self._describe(head, timeout)
        shape = _tensor_shape(before.spec, param)
        begin, end = rows or (0, shape[0])
        if not 0 <= begin <= end <= shape[0]:
            raise errors.InvalidArgument(f'rows is {rows}; {param} of head "{head}" has rows [0, {shape[0]})')
        request.rows.begin, request.rows.end = begin, end
        out = np.empty((end - begin, *shape[1:]), types.NUMPY_DTYPES[dtype])
        if (left := deadline - time.monotonic()) <= 0:
            raise errors.DeadlineExceeded("the timeout passed between the requests of this call")
        self._call("ReadTensor", request, head_pb2.ReadTensorRequest, left, payload=out, head=before)
        return out

    def write_tensor(self, head: str, param: Param, values: NDArray[Any], *, dtype: DType | None = None,
                     rows: tuple[int, int] | None = None, role: Role = "value", timeout: float | None = None) -> HeadState:
        """Replaces a tensor, or its rows [begin, end). After an error some rows may be replaced. Aborted as for read_tensor."""
        kind, data = _arrays.as_array("values", values, dtype)
        open_ = head_pb2.OpenTensor(
            head=head, param=types.enum_value("param", types.PARAMS, param), role=types.enum_value("role", types.ROLES, role),
            dtype=types.DTYPES[kind], rows=_row_range(rows))
        return read(HeadState, self._call("WriteTensor", open_, head_pb2.WriteTensorResponse, timeout, payload=data).state)

    def add_gradient(self, head: str, param: Param, values: NDArray[Any], *, step: int, id: int, scale: float = 1.0,
                     dtype: DType | None = None, rows: tuple[int, int] | None = None, timeout: float | None = None) -> AddedGradient:
        """Adds `values` times `scale` to a parameter's gradient, or to rows [begin, end) of it, exactly once.

        Use it for the gradient that another stage accumulated for a parameter that it shares with the head (tied embeddings). `id` names
        this contribution. It must differ from the ids of the step's microbatches; apply_step may expect it like one of them.
        """
        kind, data = _arrays.as_array("values", values, dtype)
        open_ = head_pb2.OpenGradient(
            head=head, step=step, contribution_id=id, param=types.enum_value("param", types.PARAMS, param),
            dtype=types.DTYPES[kind], scale=scale, contribution_rows=_row_range(rows))
        return read(AddedGradient, self._call("AddGradient", open_, head_pb2.AddGradientResponse, timeout, payload=data))

    def grad_norm(self, head: str, step: int | None = None, timeout: float | None = None) -> float:
        """The 2-norm of all gradients that are accumulated in the open step."""
        return float(self._call("GradNorm", head_pb2.GradNormRequest(head=head, step=step), head_pb2.GradNormResponse, timeout).grad_norm)

    def apply_step(self, head: str, step: int, optimizer: types.AdamW | types.SGD, *, grad_multiplier: float = 1.0,
                   decay_vectors: bool = False, expected_microbatches: Sequence[int] = (), expected_rows: int | None = None,
                   skip_non_finite: bool = False, begin_optimizer: bool = False, timeout: float | None = None) -> StepResult:
        """Applies one optimizer step to the accumulated gradients, zeroes them and opens the next step.

        The server applies each step once: a repeated call gets the stored result. FailedPrecondition if expected rows (of microbatches and
        contributions) are missing, which it lists, or if the gradient's norm is not finite; then nothing has changed. With
        `skip_non_finite`, a step whose norm is not finite is closed without an update. Restarted if the server was restarted, also if it
        applied the step without the rows that this client had accumulated. StepDiscarded if another caller has zeroed these rows.

        `begin_optimizer` sets the moments and the count of updates to 0 before the step, as in a new torch optimizer, even if
        the step is then skipped. Unimplemented if the server is an older version that does not know begin_optimizer, or an
        optimizer's lazy_rows, and would ignore them.
        """
        request = head_pb2.ApplyStepRequest(
            head=head, step=step, optimizer=optimizer.to_proto(), expected_microbatches=expected_microbatches,
            expected_rows=expected_rows, skip_non_finite=skip_non_finite, begin_optimizer=begin_optimizer)
        request.optimizer.grad_multiplier = grad_multiplier
        request.optimizer.decay_vectors = decay_vectors
        return read(StepResult, self._call("ApplyStep", request, head_pb2.ApplyStepResponse, timeout))

    def zero_gradients(self, head: str, step: int, timeout: float | None = None) -> HeadState:
        """Discards the gradients of the open step and forgets its microbatches. The step stays open."""
        request = head_pb2.ZeroGradientsRequest(head=head, step=step)
        return read(HeadState, self._call("ZeroGradients", request, types_pb2.HeadState, timeout))

    def save_checkpoint(self, head: str, name: str = "", *, keep: int | None = None, cancel_with_call: bool = False,
                        on_progress: Callable[[SaveProgress], None] | None = None, timeout: float | None = None) -> SavedCheckpoint:
        """Writes the head to the server's checkpoint directory. Calls that change the head wait only at the beginning of the save.

        Args:
          name: empty: the server names the checkpoint by its step, and the checkpoint is an automatic one.
          keep: after an automatic save, remove the head's automatic checkpoints except the newest `keep`. 0: remove none.
            None: as the server was started.
          cancel_with_call: if this call ends before the save, the save ends too. False: the save continues.
          on_progress: called on this thread, a few times a second.
        """
        request = head_pb2.SaveCheckpointRequest(head=head, name=name, keep=keep, cancel_with_call=cancel_with_call)
        tell = None if on_progress is None else lambda told: on_progress(read(SaveProgress, head_pb2.SaveProgress.FromString(told)))
        return read(SavedCheckpoint, self._call("SaveCheckpoint", request, head_pb2.SaveCheckpointResponse, timeout, on_progress=tell))

    def list_checkpoints(self, head: str = "", timeout: float | None = None) -> list[CheckpointInfo]:
        """The checkpoints of a head, or of all heads: sorted by head, then from the newest to the oldest, at most 1,000."""
        request = head_pb2.ListCheckpointsRequest(head=head)
        answer = self._call("ListCheckpoints", request, head_pb2.ListCheckpointsResponse, timeout)
        return [read(CheckpointInfo, checkpoint) for checkpoint in answer.checkpoints]

    def load_checkpoint(self, checkpoint: str, head: str = "", timeout: float | None = None) -> HeadDescription:
        """Restores "<head>/<name>" into the head `head`. Empty: into the head that the checkpoint names."""
        request = head_pb2.LoadCheckpointRequest(checkpoint=checkpoint, head=head)
        description = self._call("LoadCheckpoint", request, head_pb2.HeadDescription, timeout)
        note_loaded(description.spec.name, description.state)
        return read(HeadDescription, description)

    def delete_checkpoint(self, checkpoint: str, timeout: float | None = None) -> int:
        """Removes "<head>/<name>" from the server's checkpoint directory. Returns the number of bytes that it had.

        NotFound if there is no such checkpoint. A load that is in progress continues. The server does it once, even if the
        call is repeated because its answer was lost: a checkpoint of the same name that was saved meanwhile stays.
        """
        request = head_pb2.DeleteCheckpointRequest(checkpoint=checkpoint)
        return int(self._call("DeleteCheckpoint", request, head_pb2.DeleteCheckpointResponse, timeout).bytes)

    def _describe(self, head: str, timeout: float | None = None) -> head_pb2.HeadDescription:
        return self._call("DescribeHead", head_pb2.DescribeHeadRequest(head=head), head_pb2.HeadDescription, timeout)


def _row_range(rows: tuple[int, int] | None) -> types_pb2.RowRange | None:
    return None if rows is None else types_pb2.RowRange(
        begin=types.whole_number("rows[0]", rows[0], 0, 63), end=types.whole_number("rows[1]", rows[1], 0, 63))


def _tensor_shape(spec: head_pb2.HeadSpec, param: Param) -> tuple[int, ...]:
    if param == "weight":
        return spec.vocab_size, spec.hidden_size
    return (spec.vocab_size if param in ("bias", "class_weights") else spec.hidden_size,)
