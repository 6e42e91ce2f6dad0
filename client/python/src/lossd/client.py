# SPDX-License-Identifier: Apache-2.0
"""The client of a lossd server: class Client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lossd import _arrays, _loss_call, errors, types
from lossd._head_calls import HeadCalls
from lossd._loss_call import Asked, PendingLoss, PendingRows, waiting
from lossd.descriptions import read
from lossd.types import Depth, Distillation, DType, EmbedResult, LossOptions, LossResult, Reduction, RetryOptions, RowOutput
from lossd.v1 import loss_pb2, server_pb2
from lossd.v1.descriptions import ServerDescription, StreamList
from lossd.v1.library import lossd_loss

S = TypeVar("S", bound="Client")
_DEFAULT_OPTIONS = LossOptions()


class Client(HeadCalls):
    """Connections to a lossd server, which computes losses and gradients, and steps the heads that it owns.

        with lossd.Client("127.0.0.1:7070") as client:
            client.create_head("lm", hidden_size=64, vocab_size=1000)
            result = client.compute_loss("lm", hidden, targets, step=0, id=1, accumulate=True, grad_hidden=True)
            client.apply_step("lm", 0, lossd.AdamW(lr=1e-3), expected_microbatches=[1])

    lossd.torch has a module and an optimizer for PyTorch on top.

    Every method may be called from any thread at any time; calls run concurrently. Errors are the classes of lossd.errors.
    Calls that only read, and those that the server does once (apply_step, add_gradient, reset_head, set_shares,
    delete_checkpoint, loss computations), are repeated when the connection breaks, within the timeout; the others never are.

    Bad input raises before anything is sent where that can be known. Times are seconds, sizes are bytes. Symbols: N rows of
    a microbatch, D hidden size, V vocabulary size.

    A client cannot be copied, pickled or used after a fork: each process makes its own.
    """

    def __init__(
            self, target: str | None = None, *, context: str | None = None, ca: str | None = None, cert: str | None = None,
            key: str | None = None, token: str | None = None, channels: int | None = None, connect_timeout: float = 10.0,
            wait_for_server: bool = False, max_message_bytes: int = 64 << 20, call_timeout: float = 60.0,
            transfer_timeout: float = 1800.0, loss_timeout: float = 600.0, dead_peer_timeout: float = 30.0,
            retry: RetryOptions = RetryOptions(), expected_incarnation: int = 0, max_pending: int = 64,
            transport: str | None = None, shared_memory_bytes: int | None = None, run: str | None = None) -> None:
        """Connects, or says what is wrong: Unavailable if nobody is there, within some two seconds unless
        `wait_for_server`; Restarted if another server is expected.

        Args:
          target: host:port, or any gRPC target name; None: that of `context`, else of the environment variable
            LOSSD_SERVER, else of the context that LOSSD_CONTEXT names, or 127.0.0.1:7070.
          context: name of a server that `lossctl context add` has stored with its certificates and token; not with
            `target`. What the arguments below and their variables say goes before what is stored. The current context of
            lossctl counts for lossctl only.
          ca: path of the PEM file with the authorities that sign servers' certificates. The connection has TLS if there
            is one. None: LOSSD_CA; "": none. The server's certificate must be for the host of `target`.
          cert, key: paths of the client's own certificate and of its key. None: LOSSD_CERT and LOSSD_KEY; "": none.
          token: for servers that know clients by tokens. None: LOSSD_TOKEN; "": none. Sent only over TLS, or to a
            loopback address.
          channels: connections to the server, in [1, 64]; a loss computation spreads its rows over them.
            None: one, and as many as 8 while each further one makes rows that travel in messages go faster.
          connect_timeout: for a server that is there, to answer on all connections.
          wait_for_server: wait for one that is not there yet, too: for all of `connect_timeout`.
          max_message_bytes: of one message, sent or received.
          call_timeout: for descriptions, gradient norm, steps.
          transfer_timeout: for creation, tensors, checkpoints.
          loss_timeout: for a loss computation, attempts and waits together.
          dead_peer_timeout: a connection whose peer takes no data for so long is given up.
          retry: how calls that may be repeated are repeated when a connection breaks.
          expected_incarnation: of the server, as results and descriptions name it, if the caller knows it from before:
            connecting, and calls that accumulate or apply gradients, fail as after a restart if it is another process
            by now. 0: the server is taken as it is found.
          max_pending: loss computations under way; starting another one waits until one has ended, at most for its
            timeout. On a deterministic server they may all wait for a microbatch with a smaller id, so not more than
            max_pending - 1 are started before that one.
          transport: how rows travel: "grpc", in messages; "shared_memory", in memory that client and server share, which
            both have to be on one host for (Unavailable if there is none); "cuda_ipc", for rows of CUDA arrays of any GPU, in
            memory of the server's nearest GPU, which this process has to see (Unavailable else), other rows as with "auto";
            "auto": in memory of a GPU of the server if they lie on that one, else in shared memory, if it can be had.
            None: the environment variable LOSSD_TRANSPORT, or "auto".
          shared_memory_bytes: asked for, of the host's memory and of each GPU's as they are needed; the server may give less.
            None: 4 MiB of each at first, and up to 256 MiB as calls need them: about four times the rows of the largest.
          run: names the program that trains, in at most 128 printable characters: a head says who applied its last step,
            and errors say who trains it besides. Processes of one training may share a name. None: the environment variable
            LOSSD_RUN, else "<host>:<pid>-<8 hexadecimal digits>". "": no name.
        """
        super().__init__(
            retry, max_pending, target=target, context=context, ca=ca, cert=cert, key=key, token=token, transport=transport, run=run,
            channels=channels, connect_timeout=connect_timeout, wait_for_server=wait_for_server, max_message_bytes=max_message_bytes,
            call_timeout=call_timeout, transfer_timeout=transfer_timeout, loss_timeout=loss_timeout,
            dead_peer_timeout=dead_peer_timeout, expected_incarnation=expected_incarnation, shared_memory_bytes=shared_memory_bytes)

    def __repr__(self) -> str:
        return f"lossd.Client({self.target!r}{', closed' if self.closed else ''})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} holds connections and threads, so it cannot be copied or pickled; make one with "
                        f"lossd.Client({self.target!r}) where it is needed")

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- Loss ----

    def compute_loss_async(
            self, head: str, hidden: NDArray[Any] | Sequence[NDArray[Any]], targets: ArrayLike, *, step: int | None = None,
            id: int = 0, dtype: DType | None = None, row_weights: ArrayLike | None = None, advantages: ArrayLike | None = None,
            old_logprobs: ArrayLike | None = None, ref_logprobs: ArrayLike | None = None, options: LossOptions = _DEFAULT_OPTIONS,
            reduction: Reduction = "mean", normalizer: float | None = None, grad_output: float = 1.0, accumulate: bool = False,
            retain: bool = False, grad_hidden: bool | NDArray[Any] | Sequence[NDArray[Any]] = False,
            rows: Iterable[RowOutput] = (), classes: ArrayLike | None = None, top_k: int = 0, streams: int | None = None,
            slice_bytes: int | None = None, timeout: float | None = None, ready: Callable[[], None] | None = None,
            teacher_hidden: NDArray[Any] | None = None, target_classes: ArrayLike | None = None,
            target_weights: ArrayLike | None = None, depths: Sequence[Depth] = ()) -> PendingLoss:
        """Starts a loss computation.

        Rows are split over streams and slices; long runs of ignored rows are not sent. A stream that breaks with
        Unavailable, or that the transport refuses (ResourceExhausted that is not the server's), is sent again while the
        server has not been restarted and the gradients of the step have not been discarded; the server accumulates no row
        twice. A computation that neither accumulates nor retains begins again if the weights change under it
        (RetryOptions): its results are those of one version of the weights.

        Args:
          hidden: [N, D], float32 or float16; bf16 as uint16 with dtype="bf16", or as ml_dtypes.bfloat16. Sent from
            where it lies if it is C-contiguous; must not change before the computation is done. Or a C-contiguous CUDA
            array (anything with `__cuda_array_interface__`; bf16 as 16-bit integers), whose rows go through memory of the
            server's GPU if `cuda_transport` says so.
          targets: [N] classes in [0, V) or options.ignore_index. Copied, like row_weights.
          step: the open step that the gradients belong to. Required with `accumulate`.
          id: names the microbatch within (head, step). Sending the same id again with the same contents is safe.
          row_weights: [N], multiply the rows' losses and gradients.
          advantages, old_logprobs, ref_logprobs: [N], what options.objective takes with each row (lossd.Objective): the
            advantage, and the log-probabilities that the policy which sampled the target and the reference gave it.
          reduction: "sum", "mean" (divided by `normalizer`), or "none": no gradients yet (see `retain`), and the
            result's loss is the sum.
          normalizer: what a mean divides by. None: the number of valid targets of the microbatch. With class
            weights it must be given: the sum of the weights of valid targets.
          grad_output: the gradient of the final objective with respect to this loss; multiplies every gradient.
          accumulate: add dL/dW, dL/db, ... to the head's accumulators, at most once per row, whatever breaks.
          retain: with reduction "none": keep the hidden states on the server for backward(), under `id`.
          grad_hidden: True: return dL/dx; or a C-contiguous array [N, D] of the same dtype to write it into. For a CUDA
            array it is a CUDA array.
          rows: results wanted for every row.
          classes: classes whose log-probabilities are wanted (LossResult.class_logprobs): [K], the same for all rows, or
            [N, K]. K is at most 256; a class may come more than once.
          top_k: how many of the most probable classes are wanted (LossResult.top_classes, top_logprobs): at most 128, and
            at most V. Of equal logits the smaller class comes first.
          streams: concurrent streams, fewer if rows are few; beyond one for each computation a client has 64 together. None: one
            for each connection, and in shared memory one for each 8 MiB of rows, up to four and to half of the machine's cores.
          slice_bytes: of hidden states that are sent at once, at most. None: 1 MiB in messages, 4 MiB in shared memory, and
            in memory of the GPU as much as a quarter of it holds.
          ready: blocks until `hidden` may be read and `grad_hidden` be written; runs on a thread of the client.
          teacher_hidden: [N, D of the teacher], with options.distillation: the rows' hidden states of the teacher, of the
            same dtype and on the same device as `hidden`, and under the same rules.
          target_classes, target_weights: [N, K] each, with options.rest: soft targets, which take the place of `targets` in
            the loss. A class is in [0, V), in any order, or -1 in an entry that names none and has weight 0; weights of a
            class that a row names more than once add up. Weights are finite and not negative. K is at most 256, and at most
            V. Copied. `targets` says which rows are ignored, and whose results "logprob" and correct_rows are. A row whose
            target, or a class with a weight, has the probability 0 fails.
          depths: divide the rows, in order, into parts of the loss with weights, normalizers and sums of their own
            (LossResult.depths), such as those of models that predict several tokens: at most 64. One pass over the weights
            serves them all. Then `hidden` may be a list or tuple with an array [rows, D] for each depth, which need not
            lie one behind the other; `grad_hidden` is True, or a list of as many arrays. Not with reduction "none".
        """
        self.check_usable()
        _loss_call.check_numbers(step=step, id=id, streams=streams, slice_bytes=slice_bytes, top_k=top_k)
        kind, data = _arrays.rows_of_depths(hidden, dtype, depths)
        count, width = sum(part.shape[0] for part in data), data[0].shape[1]
        labels = _arrays.as_targets(targets)
        if len(labels) != count:
            raise errors.InvalidArgument(f"targets has {len(labels)} entries for {count} rows of hidden")
        gradient, places = _arrays.gradients_of(grad_hidden, kind, data, bool(depths) and isinstance(hidden, (list, tuple)))
        teacher = _arrays.teacher_rows(teacher_hidden, dtype, kind, count, data)
        given = {"row_weights": row_weights, "advantages": advantages, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
        per_row = {name: _arrays.as_floats(name, values, count) for name, values in given.items() if values is not None}
        soft = _arrays.as_soft_targets(target_classes, target_weights, count)
        named = _arrays.as_classes(classes, count)
        of_rows, of_classes = _arrays.row_arrays(rows, count), _arrays.class_arrays(named, top_k, count)
        open_ = loss_pb2.OpenMicrobatch(
            head=head, step=step, microbatch_id=id, hidden_dtype=types.DTYPES[kind], options=options.to_proto(),
            reduction=types.enum_value("reduction", types.REDUCTIONS, reduction), grad_output=types.checked("grad_output", grad_output),
            normalizer=None if normalizer is None else types.checked("normalizer", normalizer),
            accumulate_gradients=types.checked("accumulate", accumulate, "bool"), retain=retain, top_k=top_k,
            class_count=0 if named is None else named.shape[-1], target_count=soft["target_classes"].shape[1] if soft else 0)
        asked = Asked(lossd_loss(
            rows=count, hidden_size=width, teacher_hidden_size=0 if teacher is None else teacher.shape[1],
            classes_size=0 if named is None else named.size, streams=streams or 0, slice_bytes=slice_bytes or 0), open_)
        asked.put(targets=labels, classes=named, **per_row, **soft, **of_classes,
                  **{f"row_{name}": array for name, array in of_rows.items()})
        asked.put_rows(data, places, depths)
        asked.put(teacher_hidden=teacher)
        whole, of_depths = _per_depth(gradient, depths)

        def finish(result: LossResult) -> LossResult:
            result.grad_hidden, result.rows = whole, of_rows
            for name, array in of_classes.items():
                setattr(result, name, array)
            for depth, part in zip(result.depths, of_depths):
                depth.grad_hidden = part
            return result

        return self._launch(PendingLoss(self, asked, finish), timeout, ready)

    compute_loss = waiting(compute_loss_async, LossResult)

    def distill(
            self, head: str, hidden: NDArray[Any], teacher_hidden: NDArray[Any], distillation: Distillation,
            targets: ArrayLike | None = None, *, step: int | None = None, id: int = 0, dtype: DType | None = None,
            row_weights: ArrayLike | None = None, options: LossOptions = _DEFAULT_OPTIONS, reduction: Reduction = "mean",
            normalizer: float | None = None, grad_output: float = 1.0, accumulate: bool = False,
            grad_hidden: bool | NDArray[Any] = False, rows: Iterable[RowOutput] = (), streams: int | None = None,
            slice_bytes: int | None = None, timeout: float | None = None) -> LossResult:
        """compute_loss() of rows whose loss is their divergence from a teacher's softmax, a frozen head of the server.

            client.create_head("teacher", hidden_size=4096, vocab_size=32000, frozen=True)
            result = client.distill("student", hidden, teacher_hidden, lossd.Distillation("teacher", "reverse_kl"),
                                    step=0, id=1, accumulate=True, grad_hidden=True)

        Args:
          teacher_hidden: [N, D of the teacher], as compute_loss() has it.
          targets: [N]; those that are options.ignore_index mark rows that are left out. None: no row is, and correct_rows
            is 0. Needed for distillation.target_weight and for rows "logprob".
          options: distillation takes the place of what it says of that; the other arguments are those of compute_loss().
        """
        options, rows = replace(options, distillation=distillation), list(rows)
        if targets is None:
            for name, needs in (("distillation.target_weight", distillation.target_weight), ("rows", "logprob" in rows and "logprob")):
                if needs:
                    raise errors.InvalidArgument(f"targets is None; {name} is {needs}, and needs them")
            options = replace(options, ignore_index=-100)
        result = self.compute_loss(
            head, hidden, np.zeros(len(hidden), np.int32) if targets is None else targets, step=step, id=id, dtype=dtype,
            row_weights=row_weights, teacher_hidden=teacher_hidden, options=options, reduction=reduction, normalizer=normalizer,
            grad_output=grad_output, accumulate=accumulate, grad_hidden=grad_hidden, rows=rows, streams=streams, slice_bytes=slice_bytes,
            timeout=timeout)
        return result if targets is not None else replace(result, correct_rows=0)

    def backward_async(
            self, head: str, id: int, grad_loss: ArrayLike, *, hidden_size: int, dtype: DType = "fp32",
            grad_lse: ArrayLike | None = None, grad_entropy: ArrayLike | None = None, step: int | None = None, accumulate: bool = False,
            grad_hidden: bool | NDArray[Any] = False, streams: int | None = None, timeout: float | None = None) -> PendingLoss:
        """Starts the second half of a deferred computation: the upstream gradient of each row is known now.

        compute_loss with reduction "none" and retain=True comes first, within the same step; release_microbatch
        afterwards. NotFound if the rows are not retained (any more).

        Args:
          grad_loss: [N], finite: the objective's gradient with respect to each row's loss.
          hidden_size, dtype: as when the rows were retained.
          grad_lse, grad_entropy: [N], with respect to each row's log sum exp and entropy. None: 0.
        """
        self.check_usable()
        upstream = _arrays.as_floats("grad_loss", grad_loss)
        given = {"grad_lse": grad_lse, "grad_entropy": grad_entropy}
        others = {name: _arrays.as_floats(name, values, len(upstream)) for name, values in given.items() if values is not None}
        types.enum_value("dtype", types.DTYPES, dtype)
        gradient, place = _arrays.gradient_rows(grad_hidden, dtype, (len(upstream), hidden_size), None)
        _loss_call.check_numbers(step=step, id=id, streams=streams)
        asked = Asked(
            lossd_loss(backward=1, rows=len(upstream), hidden_size=hidden_size, hidden_dtype=types.DTYPES[dtype], streams=streams or 0),
            loss_pb2.OpenBackward(head=head, step=step, microbatch_id=id,
                                  accumulate_gradients=types.checked("accumulate", accumulate, "bool")))
        asked.put(grad_loss=upstream, grad_hidden=place, **others)

        def finish(result: LossResult) -> LossResult:
            result.grad_hidden = gradient
            return result

        return self._launch(PendingLoss(self, asked, finish), timeout, None)

    backward = waiting(backward_async, LossResult)

    def release_microbatch(self, head: str, id: int, timeout: float | None = None) -> bool:
        """Lets go of retained rows. False if there were none."""
        request = loss_pb2.ReleaseMicrobatchRequest(head=head, microbatch_id=id)
        return self._call("ReleaseMicrobatch", request, loss_pb2.ReleaseMicrobatchResponse, timeout).released

    # ---- Rows of the weight, as of an embedding ----

    def embed_async(self, head: str, ids: ArrayLike, *, dtype: DType = "bf16", step: int | None = None, out: Any = None,
                    streams: int | None = None, timeout: float | None = None, ready: Callable[[], None] | None = None) -> PendingRows:
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
        numbers = _arrays.as_ids(ids)
        types.enum_value("dtype", types.DTYPES, dtype)
        shape = out.__cuda_array_interface__["shape"] if _arrays.is_cuda_array(out) else getattr(out, "shape", None)
        if out is not None and (shape is None or len(shape) != 2):
            raise errors.InvalidArgument(f"out has shape {shape}; it must be [{len(numbers)}, D]")
        if not head:
            raise errors.InvalidArgument("head is empty")
        hidden_size = self._library.lossd_client_known_hidden_size(self._pointer, head.encode()) if shape is None else int(shape[1])
        hidden_size = hidden_size or self._describe(head, timeout).spec.hidden_size
        array, place = _arrays.gradient_rows(True if out is None else out, dtype, (len(numbers), hidden_size), None, "out")
        _loss_call.check_numbers(step=step, streams=streams)
        asked = Asked(
            lossd_loss(rows=len(numbers), hidden_size=hidden_size, streams=streams or 0),
            loss_pb2.OpenMicrobatch(head=head, step=step, hidden_dtype=types.DTYPES[dtype], reduction=loss_pb2.REDUCTION_SUM,
                                    embedding=loss_pb2.EMBEDDING_ROWS), "out")
        asked.put(targets=numbers, grad_hidden=place)

        def finish(result: LossResult) -> EmbedResult:
            return EmbedResult(array, **{each.name: getattr(result, each.name) for each in fields(EmbedResult)[1:]})

        return self._launch(PendingRows(self, asked, finish), timeout, ready)

    embed = waiting(embed_async, EmbedResult)

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
        numbers = _arrays.as_ids(ids)
        kind, data = _arrays.as_rows("gradients", gradients, dtype)
        if len(numbers) != data.shape[0]:
            raise errors.InvalidArgument(f"ids has {len(numbers)} entries for {data.shape[0]} rows of gradients")
        if not abs(types.checked("scale", scale)) <= np.finfo(np.float32).max:
            raise errors.InvalidArgument(f"scale is {scale}; it must be finite in float32")
        _loss_call.check_numbers(step=step, id=id, streams=streams, padding_idx=padding_idx)
        asked = Asked(
            lossd_loss(rows=len(numbers), hidden_size=data.shape[1], streams=streams or 0),
            loss_pb2.OpenMicrobatch(
                head=head, step=step, microbatch_id=id, hidden_dtype=types.DTYPES[kind], reduction=loss_pb2.REDUCTION_SUM,
                options=loss_pb2.LossOptions(ignore_index=padding_idx), grad_output=scale, accumulate_gradients=True,
                embedding=loss_pb2.EMBEDDING_GRADIENTS), "gradients")
        asked.put(targets=numbers, hidden=data)
        return self._launch(PendingLoss(self, asked, lambda result: result), timeout, ready)

    add_row_gradients = waiting(add_row_gradients_async, LossResult)

    # ---- Server ----

    def get_server(self, timeout: float | None = None) -> ServerDescription:
        """What the server is, has and allows."""
        return read(ServerDescription, self._call("GetServer", server_pb2.GetServerRequest(), server_pb2.ServerDescription, timeout))

    def list_streams(self, max_streams: int = 0, timeout: float | None = None) -> StreamList:
        """Who sends rows now, and the loss computations that are open: at most `max_streams` of them (0: 1000)."""
        request = server_pb2.ListStreamsRequest(max_streams=max_streams)
        return read(StreamList, self._call("ListStreams", request, server_pb2.ListStreamsResponse, timeout))


def _per_depth(gradient: Any, depths: Sequence[Depth]) -> tuple[Any, list[Any]]:
    """The gradients of all rows, None if those of each depth lie apart; and those of each depth."""
    if not isinstance(gradient, np.ndarray):  # of an array on a GPU only its maker can make parts
        return (None, gradient) if isinstance(gradient, list) else (gradient, [])
    return gradient, np.split(gradient, np.cumsum([depth.rows for depth in depths], dtype=np.int64)[:-1])
