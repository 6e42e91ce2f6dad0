"""The client of a lossd server: loss and gradients for a trainer, administration of heads.

    with lossd.Client("127.0.0.1:7070") as client:
        client.create_head("lm", hidden_size=64, vocab_size=1000)
        result = client.compute_loss("lm", hidden, targets, step=0, id=1, accumulate=True, grad_hidden=True)
        client.apply_step("lm", 0, lossd.AdamW(lr=1e-3), expected_microbatches=[1])

Symbols: N rows of a microbatch, D hidden size, V vocabulary size. Times are seconds, sizes are bytes.

Threads: every method may be called from any thread at any time; calls run concurrently. A client does not survive a
fork: processes started with multiprocessing make their own.

Errors are the classes of lossd.errors. Bad input raises before anything is sent where that can be known.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import ArrayLike, NDArray

from lossd import _arrays, _tensors, _wire, errors, types
from lossd._connections import ConnectionOptions, Connections, Deadline
from lossd._head_book import HeadBook
from lossd._loss_call import CallOptions, Core, LossCall, PendingLoss
from lossd._work import BackwardWork, ForwardWork, Outputs, Scale, Work
from lossd.types import (
    DType,
    LossOptions,
    LossResult,
    Norm,
    OptimizerState,
    Param,
    Reduction,
    RetryOptions,
    Role,
    RowOutput,
)
from lossd.v1 import head_pb2, loss_pb2, server_pb2, types_pb2

M = TypeVar("M", bound=Message)

_HEADS = "/lossd.v1.HeadService/"
_LOSSES = "/lossd.v1.LossService/"
_STREAM_THREADS = 8  # a connection's share of the threads that streams run on
_SLICE_BYTES = 2 << 20  # larger messages cost less in the interpreter, smaller ones overlap better
_DEFAULT_OPTIONS = LossOptions()


class Client:
    def __init__(self, target: str = "127.0.0.1:7070", *, channels: int = 2, connect_timeout: float = 10.0,
                 wait_for_server: bool = True, max_message_bytes: int = 64 << 20, call_timeout: float = 60.0,
                 transfer_timeout: float = 1800.0, loss_timeout: float = 600.0, dead_peer_timeout: float = 30.0,
                 retry: RetryOptions = RetryOptions(), expected_incarnation: int = 0, max_pending: int = 64) -> None:
        """Connects, or raises Unavailable after `connect_timeout`; Restarted if another server is expected.

        Args:
          target: host:port, or any gRPC target name.
          channels: connections to the server, in [1, 64]; a loss computation spreads its rows over them.
          wait_for_server: False: give up when the server's address refuses the first attempt.
          max_message_bytes: of one message, sent or received.
          call_timeout: for descriptions, gradient norm, steps.
          transfer_timeout: for creation, tensors, checkpoints.
          loss_timeout: for a loss computation, attempts and waits together.
          dead_peer_timeout: a connection whose peer takes no data for so long is given up.
          retry: how calls that may be repeated are repeated when a connection breaks.
          expected_incarnation: of the server, as results and descriptions name it, if the caller knows it from before:
            connecting, and calls that accumulate or apply gradients, fail as after a restart if it is another process
            by now. 0: the server is taken as it is found.
          max_pending: loss computations under way; starting another one waits until one has ended.
        """
        _wire.keep_freed_memory()
        self._call_timeout = call_timeout
        self._transfer_timeout = transfer_timeout
        self._loss_timeout = loss_timeout
        self._channels = channels
        self._connections = Connections(ConnectionOptions(
            target, channels, connect_timeout, wait_for_server, max_message_bytes, dead_peer_timeout, retry))
        self._book = HeadBook(expected_incarnation)
        self._pool = ThreadPoolExecutor(channels * _STREAM_THREADS, thread_name_prefix="lossd")
        self._core = Core(self._connections, self._book, self._pool, self._describe)
        self._pending_slots = threading.BoundedSemaphore(max_pending)
        self._lock = threading.Lock()
        self._pending: set[LossCall] = set()  # guarded by _lock
        if expected_incarnation:
            self._insist_on(expected_incarnation)

    def close(self) -> None:
        """Cancels what is under way, waits for it, and closes the connections. May be repeated."""
        self._connections.close()
        with self._lock:
            pending = list(self._pending)
        for call in pending:
            call.cancel()
        self._pool.shutdown(wait=True)

    @property
    def closed(self) -> bool:
        return self._connections.closed

    @property
    def target(self) -> str:
        return self._connections.options.target

    def check_usable(self) -> None:
        """ClientClosed or ForkedClient if no call can be made."""
        self._connections.check_usable()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    # ---- Loss ----

    def compute_loss(self, head: str, hidden: NDArray[Any], targets: ArrayLike, **options: Any) -> LossResult:
        """Computes loss and gradients of a microbatch and blocks until all is done; see compute_loss_async."""
        return _wait(self.compute_loss_async(head, hidden, targets, **options))

    def compute_loss_async(
            self, head: str, hidden: NDArray[Any], targets: ArrayLike, *, step: int | None = None, id: int = 0,
            dtype: DType | None = None, row_weights: ArrayLike | None = None,
            options: LossOptions = _DEFAULT_OPTIONS, reduction: Reduction = "mean",
            normalizer: float | None = None, grad_output: float = 1.0, accumulate: bool = False,
            retain: bool = False, grad_hidden: bool | NDArray[Any] = False, rows: Iterable[RowOutput] = (),
            streams: int | None = None, slice_bytes: int = _SLICE_BYTES, timeout: float | None = None,
            ready: Callable[[], None] | None = None) -> PendingLoss:
        """Starts a loss computation.

        Rows are split over streams and slices; long runs of ignored rows are not sent. A stream that breaks with
        Unavailable is sent again while the server has not been restarted; the server accumulates no row twice.

        Args:
          hidden: [N, D], float32 or float16; bf16 as uint16 with dtype="bf16", or as ml_dtypes.bfloat16. Sent from
            where it lies if it is C-contiguous; must not change before the computation is done.
          targets: [N] classes in [0, V) or options.ignore_index. Copied, like row_weights.
          step: the open step that the gradients belong to. Required with `accumulate`.
          id: names the microbatch within (head, step). Sending the same id again with the same contents is safe.
          row_weights: [N], multiply the rows' losses and gradients.
          reduction: "sum", "mean" (divided by `normalizer`), or "none": no gradients yet (see `retain`), and the
            result's loss is the sum.
          normalizer: what a mean divides by. None: the number of valid targets of the microbatch. With class
            weights it must be given: the sum of the weights of valid targets.
          grad_output: the gradient of the final objective with respect to this loss; multiplies every gradient.
          accumulate: add dL/dW, dL/db, ... to the head's accumulators, at most once per row, whatever breaks.
          retain: with reduction "none": keep the hidden states on the server for backward(), under `id`.
          grad_hidden: True: return dL/dx; or a C-contiguous array [N, D] of the same dtype to write it into.
          rows: results wanted for every row.
          streams: concurrent streams. None: one per connection.
          slice_bytes: of hidden states per message.
          ready: blocks until `hidden` may be read; runs on a thread of the client.
        """
        self._connections.check_usable()
        kind, data = _arrays.as_matrix("hidden", hidden, dtype)
        classes = _arrays.as_targets(targets)
        if len(classes) != len(data):
            raise errors.InvalidArgument(f"targets has {len(classes)} entries for {len(data)} rows of hidden")
        gradient = _arrays.gradient_array(grad_hidden, data)
        wanted = _arrays.row_arrays(rows, len(classes))
        work = ForwardWork(
            head=head, step=step, id=id, accumulate=accumulate, hidden=_arrays.bytes_of(data),
            hidden_dtype=types.DTYPES[kind], hidden_size=data.shape[1], element_size=data.itemsize, targets=classes,
            row_weights=_arrays.as_floats("row_weights", row_weights), options=options,
            scale=Scale(reduction, normalizer, grad_output),
            reduction=types.enum_value("reduction", types.REDUCTIONS, reduction), retain=retain,
            outputs=Outputs(None if gradient is None else _arrays.bytes_of(gradient), wanted))
        return self._start(work, gradient, streams, slice_bytes, timeout, ready)

    def backward(self, head: str, id: int, grad_loss: ArrayLike, **options: Any) -> LossResult:
        """Gradients of a microbatch computed with retain=True; blocks until all is done; see backward_async."""
        return _wait(self.backward_async(head, id, grad_loss, **options))

    def backward_async(
            self, head: str, id: int, grad_loss: ArrayLike, *, hidden_size: int, dtype: DType = "fp32",
            grad_lse: ArrayLike | None = None, grad_entropy: ArrayLike | None = None, step: int | None = None,
            accumulate: bool = False, grad_hidden: bool | NDArray[Any] = False, streams: int | None = None,
            timeout: float | None = None) -> PendingLoss:
        """Starts the second half of a deferred computation: the upstream gradient of each row is known now.

        compute_loss with reduction "none" and retain=True comes first, within the same step; release_microbatch
        afterwards. NotFound if the rows are not retained (any more).

        Args:
          grad_loss: [N], finite: the objective's gradient with respect to each row's loss.
          hidden_size, dtype: as when the rows were retained.
          grad_lse, grad_entropy: [N], with respect to each row's log sum exp and entropy. None: 0.
        """
        self._connections.check_usable()
        upstream = _arrays.as_floats("grad_loss", grad_loss)
        assert upstream is not None
        types.enum_value("dtype", types.DTYPES, dtype)
        shape = np.broadcast_to(np.zeros((), types.NUMPY_DTYPES[dtype]), (len(upstream), hidden_size))
        gradient = _arrays.gradient_array(grad_hidden, shape)
        work = BackwardWork(
            head=head, step=step, id=id, accumulate=accumulate, hidden_size=hidden_size,
            element_size=types.NUMPY_DTYPES[dtype].itemsize, grad_loss=upstream,
            grad_lse=_arrays.as_floats("grad_lse", grad_lse),
            grad_entropy=_arrays.as_floats("grad_entropy", grad_entropy),
            outputs=Outputs(None if gradient is None else _arrays.bytes_of(gradient)))
        return self._start(work, gradient, streams, _SLICE_BYTES, timeout, None)

    def release_microbatch(self, head: str, id: int, timeout: float | None = None) -> bool:
        """Lets go of retained rows. False if there were none."""
        request = loss_pb2.ReleaseMicrobatchRequest(head=head, microbatch_id=id)
        return self._connections.unary(_LOSSES + "ReleaseMicrobatch", request, loss_pb2.ReleaseMicrobatchResponse,
                                       Deadline(timeout or self._call_timeout), repeat=True).released

    def acknowledge_restart(self, head: str) -> None:
        """The trainer repeats the open step from its beginning: Restarted is not raised for it any more.

        Not needed after load_checkpoint, create_head, delete_head or zero_gradients of this client on the head.
        """
        self._book.forget_accumulation(head)

    # ---- Heads ----
    # Calls that only read, apply_step and add_gradient (the server does both once) are repeated when the connection
    # breaks, within the timeout. The others never are.

    def create_head(self, name: str, *, hidden_size: int, vocab_size: int, bias: bool = False,
                    class_weights: bool = False, norm: Norm = "none", norm_epsilon: float | None = None,
                    compute_dtype: DType | None = None, optimizer_state: OptimizerState = "adam",
                    frozen: bool = False, seed: int = 0, zeros: bool = False,
                    tensor_file: head_pb2.TensorFile | None = None,
                    timeout: float | None = None) -> head_pb2.HeadDescription:
        """Creates a head: weights as torch.nn.Linear draws them with `seed`, or zeros, or out of a file."""
        spec = head_pb2.HeadSpec(
            name=name, hidden_size=hidden_size, vocab_size=vocab_size, bias=bias, class_weights=class_weights,
            norm=types.enum_value("norm", types.NORMS, norm), norm_epsilon=norm_epsilon, frozen=frozen,
            optimizer_state=types.enum_value("optimizer_state", types.OPTIMIZER_STATES, optimizer_state))
        if compute_dtype is not None:
            spec.compute_dtype = types.enum_value("compute_dtype", types.DTYPES, compute_dtype)
        request = head_pb2.CreateHeadRequest(spec=spec)
        if tensor_file is not None:
            request.tensor_file.CopyFrom(tensor_file)
        elif zeros:
            request.zeros.SetInParent()
        else:
            request.kaiming_uniform.seed = seed
        description = self._heads("CreateHead", request, head_pb2.HeadDescription, timeout or self._transfer_timeout)
        self._book.learn(description)
        self._book.forget_accumulation(name)
        return description

    def describe_head(self, head: str, timeout: float | None = None) -> head_pb2.HeadDescription:
        return self._describe(head, Deadline(timeout or self._call_timeout))

    def list_heads(self, timeout: float | None = None) -> list[head_pb2.HeadDescription]:
        answer = self._heads("ListHeads", head_pb2.ListHeadsRequest(), head_pb2.ListHeadsResponse,
                             timeout or self._call_timeout, repeat=True)
        return list(answer.heads)

    def delete_head(self, head: str, timeout: float | None = None) -> None:
        self._heads("DeleteHead", head_pb2.DeleteHeadRequest(head=head), head_pb2.DeleteHeadResponse,
                    timeout or self._call_timeout)
        self._book.forget_facts(head)
        self._book.forget_accumulation(head)

    def read_tensor(self, head: str, param: Param = "weight", role: Role = "value", *, dtype: DType = "fp32",
                    rows: tuple[int, int] | None = None, timeout: float | None = None) -> NDArray[Any]:
        """A tensor, or rows [begin, end) of it: [V, D] for the weight, else one-dimensional. bf16 as uint16."""
        deadline = Deadline(timeout or self._transfer_timeout)
        number = types.enum_value("param", types.PARAMS, param)
        request = head_pb2.ReadTensorRequest(
            head=head, param=number, role=types.enum_value("role", types.ROLES, role),
            dtype=types.enum_value("dtype", types.DTYPES, dtype))
        shape = _tensors.tensor_shape(self._describe(head, deadline).spec, number)
        begin, end = rows or (0, shape[0])
        if not 0 <= begin <= end <= shape[0]:
            raise errors.InvalidArgument(f"rows is {rows}; {param} of head \"{head}\" has rows [0, {shape[0]})")
        request.rows.begin, request.rows.end = begin, end
        out = np.empty((end - begin, *shape[1:]), types.NUMPY_DTYPES[dtype])
        row_bytes = out.itemsize * math.prod(shape[1:])
        self._connections.repeated(
            lambda: _tensors.read_tensor(self._connections, request, row_bytes, begin, _arrays.bytes_of(out), deadline),
            deadline)
        return out

    def write_tensor(self, head: str, param: Param, values: NDArray[Any], *, dtype: DType | None = None,
                     rows: tuple[int, int] | None = None, role: Role = "value",
                     timeout: float | None = None) -> types_pb2.HeadState:
        """Replaces a tensor, or rows [begin, end) of it. After an error some rows may be replaced."""
        deadline = Deadline(timeout or self._transfer_timeout)
        number = types.enum_value("param", types.PARAMS, param)
        kind, data = _arrays.as_array("values", values, dtype)
        range_, row_bytes = self._rows_of(head, param, data, rows, deadline)
        open_ = head_pb2.OpenTensor(head=head, param=number, role=types.enum_value("role", types.ROLES, role),
                                    dtype=types.DTYPES[kind], rows=range_)
        return _tensors.write_tensor(self._connections, open_, row_bytes, _arrays.bytes_of(data), deadline).state

    def add_gradient(self, head: str, param: Param, values: NDArray[Any], *, step: int, id: int, scale: float = 1.0,
                     dtype: DType | None = None, rows: tuple[int, int] | None = None,
                     timeout: float | None = None) -> head_pb2.AddGradientResponse:
        """Adds `values` times `scale` to a parameter's gradient, or to rows [begin, end) of it, exactly once.

        For what another stage accumulated for a parameter that it shares with the head (tied embeddings). `id` names
        the contribution; it is not the id of a microbatch of the step, and apply_step may expect it like one.
        """
        deadline = Deadline(timeout or self._transfer_timeout)
        number = types.enum_value("param", types.PARAMS, param)
        kind, data = _arrays.as_array("values", values, dtype)
        with self._restarts_told(head, step):
            range_, row_bytes = self._rows_of(head, param, data, rows, deadline)
            open_ = head_pb2.OpenGradient(head=head, step=step, contribution_id=id, param=number,
                                          dtype=types.DTYPES[kind], scale=scale, contribution_rows=range_,
                                          incarnation=self._book.incarnation_of(head, step))
            payload = _arrays.bytes_of(data)
            answer = self._connections.repeated(
                lambda: _tensors.add_gradient(self._connections, open_, row_bytes, payload, deadline), deadline)
        self._book.note_accumulation(head, step, answer.state.incarnation)
        return answer

    def grad_norm(self, head: str, step: int | None = None, timeout: float | None = None) -> float:
        """The 2-norm over all gradients accumulated in the open step."""
        with self._restarts_told(head, step):
            answer = self._heads("GradNorm", head_pb2.GradNormRequest(head=head, step=step),
                                 head_pb2.GradNormResponse, timeout or self._call_timeout, repeat=True)
        self._book.check_incarnation(head, answer.state.step, answer.state.incarnation)
        return float(answer.grad_norm)

    def apply_step(self, head: str, step: int, optimizer: types.AdamW | types.SGD, *, grad_multiplier: float = 1.0,
                   decay_vectors: bool = False, expected_microbatches: Sequence[int] = (),
                   expected_rows: int | None = None, skip_non_finite: bool = False,
                   timeout: float | None = None) -> head_pb2.ApplyStepResponse:
        """Applies one optimizer step to the accumulated gradients, zeroes them and opens the next step.

        Applied once per step: a repeat gets the stored result. FailedPrecondition lists expected rows (of microbatches
        and contributions) that are missing, or says that the gradient's norm is not finite; then nothing changed. With
        `skip_non_finite` such a step is closed without an update. Restarted also if the server that applied the step
        does not have the rows that this client accumulated.
        """
        request = head_pb2.ApplyStepRequest(
            head=head, step=step, optimizer=optimizer.to_proto(), expected_microbatches=expected_microbatches,
            expected_rows=expected_rows, skip_non_finite=skip_non_finite,
            incarnation=self._book.incarnation_of(head, step))
        request.optimizer.grad_multiplier = grad_multiplier
        request.optimizer.decay_vectors = decay_vectors
        with self._restarts_told(head, step):
            answer = self._heads("ApplyStep", request, head_pb2.ApplyStepResponse, timeout or self._call_timeout,
                                 repeat=True)
        self._book.check_incarnation(head, step, answer.applied_incarnation)
        self._book.close_step(head, step)
        return answer

    def zero_gradients(self, head: str, step: int, timeout: float | None = None) -> types_pb2.HeadState:
        """Discards the gradients of the open step and forgets its microbatches; the step stays open."""
        answer = self._heads("ZeroGradients", head_pb2.ZeroGradientsRequest(head=head, step=step),
                             head_pb2.ZeroGradientsResponse, timeout or self._call_timeout)
        self._book.forget_accumulation(head)
        return answer.state

    def save_checkpoint(self, head: str, name: str = "", *, keep: int | None = None, cancel_with_call: bool = False,
                        on_progress: Callable[[head_pb2.SaveProgress], None] | None = None,
                        timeout: float | None = None) -> head_pb2.SaveCheckpointResponse:
        """Writes the head to the server's checkpoint directory; calls that change the head wait only at the beginning.

        Args:
          name: empty: the server names it by step, and it is automatic.
          keep: after an automatic save, remove automatic checkpoints of the head but the newest so many. 0: none.
            None: as the server was started.
          cancel_with_call: the save ends when this call ends before it; else it goes on.
          on_progress: called on this thread, a few times a second.
        """
        request = head_pb2.SaveCheckpointRequest(head=head, name=name, keep=keep, cancel_with_call=cancel_with_call)
        saved = None
        for update in self._connections.updates(_HEADS + "SaveCheckpoint", request, head_pb2.SaveCheckpointUpdate,
                                                Deadline(timeout or self._transfer_timeout)):
            if update.HasField("saved"):
                saved = update.saved
            elif on_progress is not None:
                on_progress(update.progress)
        if saved is None:
            raise errors.server_sent("no word of what it saved")
        return saved

    def list_checkpoints(self, head: str = "", timeout: float | None = None) -> list[head_pb2.CheckpointInfo]:
        """Of a head, or of all: by head, then from the newest to the oldest, at most 1,000."""
        answer = self._heads("ListCheckpoints", head_pb2.ListCheckpointsRequest(head=head),
                             head_pb2.ListCheckpointsResponse, timeout or self._call_timeout, repeat=True)
        return list(answer.checkpoints)

    def load_checkpoint(self, checkpoint: str, head: str = "",
                        timeout: float | None = None) -> head_pb2.HeadDescription:
        """Restores "<head>/<name>" into `head`; empty: the checkpoint's own head name."""
        description = self._heads(
            "LoadCheckpoint", head_pb2.LoadCheckpointRequest(checkpoint=checkpoint, head=head),
            head_pb2.HeadDescription, timeout or self._transfer_timeout)
        self._book.learn(description)
        self._book.forget_accumulation(description.spec.name)
        return description

    # ---- Server ----

    def get_server(self, timeout: float | None = None) -> server_pb2.ServerDescription:
        return self._connections.unary("/lossd.v1.ServerService/GetServer", server_pb2.GetServerRequest(),
                                       server_pb2.ServerDescription, Deadline(timeout or self._call_timeout),
                                       repeat=True)

    # ---- Parts ----

    def _insist_on(self, incarnation: int) -> None:
        """Closes the client and raises Restarted if the server is another process."""
        try:
            found = self.get_server().incarnation
            if found != incarnation:
                raise errors.restarted(None, incarnation, found, None)
        except BaseException:
            self.close()
            raise

    def _heads(self, method: str, request: Message, answer: type[M], timeout: float, *, repeat: bool = False) -> M:
        return self._connections.unary(_HEADS + method, request, answer, Deadline(timeout), repeat=repeat)

    def _describe(self, head: str, deadline: Deadline) -> head_pb2.HeadDescription:
        description = self._connections.unary(
            _HEADS + "DescribeHead", head_pb2.DescribeHeadRequest(head=head), head_pb2.HeadDescription, deadline,
            repeat=True)
        self._book.learn(description)
        return description

    @contextlib.contextmanager
    def _restarts_told(self, head: str, step: int | None) -> Iterator[None]:
        """Raises Restarted instead of an error that came from a server which lost gradients of the step."""
        try:
            yield
        except errors.LossdError as error:
            if error.incarnation and step is not None:
                self._book.check_incarnation(head, step, error.incarnation)
            raise

    def _rows_of(self, head: str, param: Param, data: NDArray[Any], rows: tuple[int, int] | None,
                 deadline: Deadline) -> tuple[types_pb2.RowRange, int]:
        """The rows that `data` is for, and the bytes of one. InvalidArgument if its shape is not theirs."""
        shape = _tensors.tensor_shape(self._describe(head, deadline).spec, types.PARAMS[param])
        begin, end = rows or (0, shape[0])
        if not 0 <= begin <= end <= shape[0]:
            raise errors.InvalidArgument(f'rows is {rows}; {param} of head "{head}" has rows [0, {shape[0]})')
        if data.shape != (end - begin, *shape[1:]):
            raise errors.InvalidArgument(
                f'values has shape {data.shape}; {param} of head "{head}" takes {(end - begin, *shape[1:])}')
        return types_pb2.RowRange(begin=begin, end=end), data.itemsize * math.prod(shape[1:])

    def _start(self, work: Work, gradient: NDArray[Any] | None, streams: int | None, slice_bytes: int,
               timeout: float | None, ready: Callable[[], None] | None) -> PendingLoss:
        call = LossCall(self._core, work, CallOptions(
            self._channels if streams is None else streams, slice_bytes,
            self._loss_timeout if timeout is None else timeout, ready))
        self._pending_slots.acquire()
        call.future.add_done_callback(lambda _: self._forget(call))
        with self._lock:
            self._pending.add(call)
        try:
            call.start()
        except RuntimeError as error:  # the pool takes no task any more
            self._forget(call)
            raise errors.ClientClosed("this client is closed; make a new lossd.Client") from error

        def finish(result: LossResult) -> LossResult:
            result.grad_hidden = gradient
            return result

        return PendingLoss(call, finish)

    def _forget(self, call: LossCall) -> None:
        with self._lock:
            self._pending.discard(call)
        self._pending_slots.release()


def _wait(pending: PendingLoss) -> LossResult:
    """An interrupt ends the computation before it is passed on, so that the caller's memory is free."""
    try:
        return pending.wait()
    except (KeyboardInterrupt, SystemExit):
        pending.cancel()
        try:
            pending.wait()
        except errors.LossdError:
            pass
        raise
