# SPDX-License-Identifier: Apache-2.0
"""Client: the connection of a trainer or another program to a lossd server."""

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
    """Connections to a lossd server, which computes losses and gradients, and applies optimizer steps to the heads that it owns.

        with lossd.Client("127.0.0.1:7070") as client:
            client.create_head("lm", hidden_size=64, vocab_size=1000)
            result = client.compute_loss("lm", hidden, targets, step=0, id=1, accumulate=True, grad_hidden=True)
            client.apply_step("lm", 0, lossd.AdamW(lr=1e-3), expected_microbatches=[1])

    lossd.torch builds a PyTorch module and an optimizer on this class.

    Every method may be called from any thread at any time; calls run concurrently. Errors are the classes of lossd.errors. If
    the connection breaks, the client repeats calls within their timeout: calls that only read, and calls that the server
    carries out once however often they arrive (apply_step, add_gradient, reset_head, set_shares, delete_checkpoint, loss
    computations). Other calls are never repeated.

    Bad input that the client can recognize raises before anything is sent. Times are in seconds, sizes in bytes. Symbols: N
    rows of a microbatch, D hidden size, V vocabulary size.

    A client cannot be copied, pickled or used after a fork: each process creates its own.
    """

    def __init__(
            self, target: str | None = None, *, context: str | None = None, ca: str | None = None, cert: str | None = None,
            key: str | None = None, token: str | None = None, channels: int | None = None, connect_timeout: float = 10.0,
            wait_for_server: bool = False, max_message_bytes: int = 64 << 20, call_timeout: float = 60.0,
            transfer_timeout: float = 1800.0, loss_timeout: float = 600.0, dead_peer_timeout: float = 30.0,
            retry: RetryOptions = RetryOptions(), expected_incarnation: int = 0, max_pending: int = 64,
            transport: str | None = None, shared_memory_bytes: int | None = None, run: str | None = None) -> None:
        """Connects. Unavailable if no server answers, after about two seconds unless `wait_for_server`. Restarted if the
        server is another process than `expected_incarnation`.

        Args:
          target: host:port, or any gRPC target name. None: the target of `context`, else of the environment variable
            LOSSD_SERVER, else of the context that LOSSD_CONTEXT names, else 127.0.0.1:7070.
          context: the name of a server that `lossctl context add` has stored with its certificates and token. Not together
            with `target`. The arguments below, and their environment variables, take precedence over the stored values. The
            current context of lossctl has no effect here.
          ca: path of the PEM file with the authorities that sign servers' certificates. If it is given, the connection uses
            TLS. None: LOSSD_CA; "": none. The server's certificate must be for the host of `target`.
          cert, key: paths of the client's own certificate and of its key. None: LOSSD_CERT and LOSSD_KEY; "": none.
          token: for servers that identify clients by tokens. None: LOSSD_TOKEN; "": none. Sent only over TLS, or to a loopback address.
          channels: the number of connections to the server, in [1, 64]. A loss computation spreads its rows over them. None: starts with
            one, and adds connections, up to 8, as long as another one makes rows that are sent in messages faster.
          connect_timeout: the limit for a running server to answer on all connections.
          wait_for_server: also wait, for all of `connect_timeout`, for a server that is not running yet.
          max_message_bytes: the largest message, sent or received.
          call_timeout: the limit for descriptions, gradient norm and steps.
          transfer_timeout: the limit for creation, tensors and checkpoints.
          loss_timeout: the limit for a loss computation, with all its attempts and waits.
          dead_peer_timeout: a connection is closed if the server accepts no data for this time.
          retry: how calls are repeated when a connection breaks.
          expected_incarnation: the incarnation of the server, from results and descriptions, if the caller knows it from before. If the
            server is another process now, connecting, and calls that accumulate or apply gradients, fail as after a restart. 0: any server.
          max_pending: the most loss computations in flight. Starting another one waits until one has ended, at most for its
            timeout. On a deterministic server, all of them may wait for a microbatch with a smaller id, so at most
            max_pending - 1 may be started before that microbatch.
          transport: how rows are sent. "grpc": in messages. "shared_memory": in memory that client and server share, for
            which both must be on one host (Unavailable if this is not possible). "cuda_ipc": rows of CUDA arrays of any GPU
            in memory of the server's nearest GPU, which this process must see (Unavailable if this is not possible); other
            rows as with "auto". "auto": rows that lie on a GPU of the server in memory of that GPU, other rows in shared
            memory if that is possible. None: the environment variable LOSSD_TRANSPORT, or "auto".
          shared_memory_bytes: the size of the shared memory to ask the server for. It applies to host memory and, when a GPU
            is first used, to the memory of each GPU. The server may give less. None: 4 MiB of each at first; it grows as
            calls need it, to about four times the rows of the largest call, and at most to 256 MiB.
          run: a name for the program that trains, of at most 128 printable characters. A head records which run applied its
            last step, and errors name another run that trains it. Processes of one training may have the same name. None: the
            environment variable LOSSD_RUN, else "<host>:<pid>-<8 hexadecimal digits>". "": no name.
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

        The client divides the rows into streams and slices; long runs of ignored rows are not sent. If a stream breaks (Unavailable), or
        the transport and not the server refuses it (ResourceExhausted), the client sends it again, unless the server was restarted or the
        gradients of the step were discarded. The server accumulates no row twice. A computation that neither accumulates nor retains begins
        again if the weights change meanwhile (RetryOptions), so its results belong to one version of the weights.

        Args:
          hidden: [N, D], float32 or float16; bf16 as uint16 with dtype="bf16", or as ml_dtypes.bfloat16. A C-contiguous array
            is sent without a copy, and must not change before the computation is done. It may also be a C-contiguous CUDA
            array (any object with `__cuda_array_interface__`; bf16 as 16-bit integers). Its rows are sent through memory of
            the server's GPU if `cuda_transport` says so.
          targets: [N] classes in [0, V), or options.ignore_index. Targets and row_weights are copied.
          step: the open step to which the gradients belong. Required with `accumulate`.
          id: names the microbatch within (head, step). The same id may be sent again with the same contents.
          row_weights: [N], factors of the rows' losses and gradients.
          advantages, old_logprobs, ref_logprobs: [N], what options.objective needs for each row (lossd.Objective): the
            advantage, the log-probability of the target under the policy that sampled it, and under the reference.
          reduction: "sum"; "mean" (divided by `normalizer`); or "none": no gradients are computed yet (see `retain`), and the
            result's loss is the sum.
          normalizer: what a mean is divided by. None: the number of valid targets of the microbatch. With class weights it
            must be given: the sum of the weights of the valid targets.
          grad_output: the gradient of the final objective with respect to this loss. It multiplies every gradient.
          accumulate: add dL/dW, dL/db, ... to the head's gradients. Each row is added at most once, even if connections break.
          retain: with reduction "none": keep the hidden states on the server, under `id`, for backward().
          grad_hidden: True: return dL/dx. Or a C-contiguous array [N, D] of the same dtype, to write dL/dx into; if `hidden`
            is a CUDA array, it must be one, too.
          rows: the results that are wanted for every row.
          classes: classes whose log-probabilities are wanted (LossResult.class_logprobs): [K], the same for all rows, or [N,
            K]. K is at most 256; a class may occur more than once.
          top_k: how many of the most probable classes are wanted (LossResult.top_classes, top_logprobs): at most 128, and at
            most V. If logits are equal, the smaller class comes first.
          streams: the most concurrent streams; there are fewer if the rows are few. Each computation has at least one;
            additional streams are limited to 64 for the whole client. None: one for each connection; in shared memory one for
            each 8 MiB of rows, up to four and up to half of the machine's cores.
          slice_bytes: the most bytes of hidden states that are sent at once. None: 1 MiB in messages, 4 MiB in shared memory;
            in memory of the GPU, what a quarter of that memory holds.
          ready: a function that blocks until `hidden` may be read and `grad_hidden` may be written. It runs on a thread of the client, and
            wait() raises its error; with an attribute `by_caller` that is true it runs on the calling thread, before this call returns.
          teacher_hidden: [N, D of the teacher], with options.distillation: the teacher's hidden states of the rows. They have
            the dtype and the device of `hidden`, and the same rules apply.
          target_classes, target_weights: [N, K] each, with options.rest: soft targets, which replace `targets` in the loss. A class is in
            [0, V), in any order; -1 marks an unused entry, whose weight must be 0. If a row names a class more than once, the weights add
            up. Weights are finite and not negative. K is at most 256, and at most V. Copied. `targets` still says which rows are ignored,
            and results "logprob" and correct_rows refer to it. A row fails if its target, or a class with a weight, has the probability 0.
          depths: divide the rows, in order, into at most 64 parts of the loss, each with its own weight, normalizer and sums
            (LossResult.depths). This is for models that predict several tokens. One pass over the weights computes all
            depths. `hidden` may then be a list or tuple with an array [rows, D] for each depth, which need not be adjacent in
            memory; `grad_hidden` is True, or a list with as many arrays. Not with reduction "none".
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
        """Like compute_loss(), but the loss of a row is its divergence from the softmax of a teacher, a frozen head of the server.

            client.create_head("teacher", hidden_size=4096, vocab_size=32000, frozen=True)
            result = client.distill("student", hidden, teacher_hidden, lossd.Distillation("teacher", "reverse_kl"),
                                    step=0, id=1, accumulate=True, grad_hidden=True)

        Args:
          teacher_hidden: [N, D of the teacher], as in compute_loss().
          targets: [N]; rows whose target is options.ignore_index are ignored. None: no row is ignored, and correct_rows is 0.
            Required for distillation.target_weight and for rows "logprob".
          options: `distillation` replaces options.distillation. The other arguments are those of compute_loss().
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
        """Starts the second half of a deferred computation, when the upstream gradient of each row is known.

        Before it, call compute_loss with reduction "none" and retain=True in the same step; after it, release_microbatch.
        NotFound if the server does not retain the rows, or does not any more.

        Args:
          grad_loss: [N], finite: the objective's gradient with respect to each row's loss.
          hidden_size, dtype: the same as when the rows were retained.
          grad_lse, grad_entropy: [N], the objective's gradient with respect to each row's log-sum-exp and entropy. None: 0.
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
        """Frees retained rows. False if there were none."""
        request = loss_pb2.ReleaseMicrobatchRequest(head=head, microbatch_id=id)
        return self._call("ReleaseMicrobatch", request, loss_pb2.ReleaseMicrobatchResponse, timeout).released

    # ---- Embedding rows ----

    def embed_async(self, head: str, ids: ArrayLike, *, dtype: DType = "bf16", step: int | None = None, out: Any = None,
                    streams: int | None = None, timeout: float | None = None, ready: Callable[[], None] | None = None) -> PendingRows:
        """Asks for rows of a head's weight [V, D], used as an embedding: row n of the result is row ids[n] of the weight.

        All rows are of one version of the weights: if the weights change meanwhile, the call begins again (RetryOptions). It
        changes nothing on the server. The first call for a head also asks the server for its D, unless `out` has that shape.

        InvalidArgument, with place and value, if an id is negative or not below V; also if the head has a draft vocabulary.
        Unimplemented if the head is stored in host memory.

        Args:
          ids: [N] integers in [0, V), in any order; an id may occur more than once. Copied.
          dtype: the type to which the rows are rounded: "fp32", "fp16", or "bf16" (its bits, as uint16).
          step: the step that must be open (FailedPrecondition if another one is). None: any.
          out: a C-contiguous array [N, D] of that dtype, or such a CUDA array (for bf16 any 16-bit type), into which the rows
            are written. None: a new array.
          streams, timeout: as in compute_loss_async().
          ready: a function that blocks until `out` may be written. It runs where compute_loss_async() runs `ready`.
        """
        self.check_usable()
        numbers = _arrays.as_ids(ids)
        types.enum_value("dtype", types.DTYPES, dtype)
        shape = _arrays.array_of("out", out).shape if _arrays.is_cuda_array(out) else getattr(out, "shape", None)
        if out is not None and (shape is None or len(shape) != 2):
            raise errors.InvalidArgument(f"out has shape {shape}; it must be [{len(numbers)}, D]")
        if not head:
            raise errors.InvalidArgument("head is empty")
        hidden_size = self._library.lossd_client_known_hidden_size(self._pointer, head.encode()) if shape is None else int(shape[1])
        hidden_size = hidden_size or self._describe(head, timeout).spec.hidden_size
        array, place = _arrays.gradient_rows(True if out is None else out, dtype, (len(numbers), hidden_size), None, "out")
        _loss_call.check_numbers(step=step, streams=streams)
        open_ = loss_pb2.OpenMicrobatch(head=head, step=step, hidden_dtype=types.DTYPES[dtype], reduction=loss_pb2.REDUCTION_SUM,
                                        embedding=loss_pb2.EMBEDDING_ROWS)
        asked = Asked(lossd_loss(rows=len(numbers), hidden_size=hidden_size, streams=streams or 0), open_, "out")
        asked.put(targets=numbers, grad_hidden=place)

        def finish(result: LossResult) -> EmbedResult:
            return EmbedResult(array, **{each.name: getattr(result, each.name) for each in fields(EmbedResult)[1:]})

        return self._launch(PendingRows(self, asked, finish), timeout, ready)

    embed = waiting(embed_async, EmbedResult)

    def add_row_gradients_async(
            self, head: str, ids: ArrayLike, gradients: Any, *, step: int, id: int, scale: float = 1.0,
            padding_idx: int | None = None, dtype: DType | None = None, streams: int | None = None,
            timeout: float | None = None, ready: Callable[[], None] | None = None) -> PendingLoss:
        """Starts adding gradients of rows that embed() returned: `scale` * gradients[n] to that of row ids[n] of the weight, in fp32.

        The call is a microbatch of the step, like compute_loss(accumulate=True): each row is added once, even if connections
        break, and apply_step can expect its id. In the result, the row counts (valid_rows are the rows that are not padding),
        the server's incarnation and step, and the times are set; losses are 0.

        InvalidArgument as in embed_async(). NonFinite if a gradient of a row that is not padding is not finite.

        Args:
          ids: [N] integers in [0, V), the same as for embed(). Copied.
          gradients: [N, D], float32 or float16, or bf16, like `hidden` of compute_loss_async(), whose rules apply, also for CUDA arrays.
          step: the open step to which the gradients belong.
          id: names the microbatch within (head, step). No loss computation of the step may have the same id. The same id may
            be sent again with the same contents.
          padding_idx: gradients of rows with this id are not added. None: all are added.
          dtype: the type of the gradients, if the array does not say it.
          streams, timeout, ready: as in compute_loss_async().
        """
        self.check_usable()
        numbers = _arrays.as_ids(ids)
        kind, data = _arrays.as_rows("gradients", gradients, dtype)
        if len(numbers) != data.shape[0]:
            raise errors.InvalidArgument(f"ids has {len(numbers)} entries for {data.shape[0]} rows of gradients")
        if not abs(types.checked("scale", scale)) <= np.finfo(np.float32).max:
            raise errors.InvalidArgument(f"scale is {scale}; it must be finite in float32")
        _loss_call.check_numbers(step=step, id=id, streams=streams, padding_idx=padding_idx)
        open_ = loss_pb2.OpenMicrobatch(
            head=head, step=step, microbatch_id=id, hidden_dtype=types.DTYPES[kind], reduction=loss_pb2.REDUCTION_SUM,
            options=loss_pb2.LossOptions(ignore_index=padding_idx), grad_output=scale, accumulate_gradients=True,
            embedding=loss_pb2.EMBEDDING_GRADIENTS)
        asked = Asked(lossd_loss(rows=len(numbers), hidden_size=data.shape[1], streams=streams or 0), open_, "gradients")
        asked.put(targets=numbers, hidden=data)
        return self._launch(PendingLoss(self, asked, lambda result: result), timeout, ready)

    add_row_gradients = waiting(add_row_gradients_async, LossResult)

    # ---- Server ----

    def get_server(self, timeout: float | None = None) -> ServerDescription:
        """The server's description: its version, devices, memory and limits."""
        return read(ServerDescription, self._call("GetServer", server_pb2.GetServerRequest(), server_pb2.ServerDescription, timeout))

    def list_streams(self, max_streams: int = 0, timeout: float | None = None) -> StreamList:
        """The clients that send rows now, and at most `max_streams` of the open loss computations (0: 1000)."""
        request = server_pb2.ListStreamsRequest(max_streams=max_streams)
        return read(StreamList, self._call("ListStreams", request, server_pb2.ListStreamsResponse, timeout))


def _per_depth(gradient: Any, depths: Sequence[Depth]) -> tuple[Any, list[Any]]:
    """The gradients of all rows (None if each depth has an array of its own), and the gradients of each depth."""
    if not depths or not isinstance(gradient, np.ndarray):  # an array on a GPU can only be divided by the library that made it
        return (None, gradient) if isinstance(gradient, list) else (gradient, [])
    return gradient, np.split(gradient, np.cumsum([depth.rows for depth in depths], dtype=np.int64)[:-1])
