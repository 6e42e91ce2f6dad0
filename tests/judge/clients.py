# SPDX-License-Identifier: Apache-2.0
"""Clients whose calls are recorded: one that makes single gRPC calls, and a lossd.Client, as trainers have it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
from history import EMBEDDED, GRID, Event, Recorder, Values

import lossd
from lossd.v1 import head_pb2, loss_pb2, types_pb2

_ON_GPU = os.environ.get("LOSSD_TRANSPORT") == "cuda_ipc"  # trainers' rows are on a GPU, which is played
if _ON_GPU:
    from fake_cuda import FakeArray


# Calls of lossd's protocol, one gRPC call each, recorded: with pauses between messages, slow reading, cancellations.
#
# A RawClient is one client of one head with a connection of its own. Its methods block, record one event, and return it;
# status codes are the event's outcome and raise nothing. The hidden states are all (1, 0, 0, ...), see history.py.

_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20),
            ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16),  # a slow reader slows the server
            ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]
_ROLES = {"value": head_pb2.ROLE_VALUE, "gradient": head_pb2.ROLE_GRADIENT, "moment1": head_pb2.ROLE_MOMENT1}
_STATE_FIELDS = ("incarnation", "step", "generation", "weights_version")

Message = tuple[int, int, Sequence[int]]  # rows [begin, end) and their values
Named = tuple[int, int]  # the incarnation and the generation that a call is meant for
Pause = Callable[[int], None]  # called before message number i is sent


def state_of(state: types_pb2.HeadState) -> dict[str, int]:
    """A HeadState as plain values."""
    return {name: getattr(state, name) for name in _STATE_FIELDS}


def _no_pause(_: int) -> None:
    pass


def _name(named: Named | None, message: Any, args: dict[str, Any]) -> None:
    if named is not None:
        message.incarnation, message.generation = args["incarnation"], args["generation"] = named


class RawClient:
    def __init__(self, name: str, target: str, recorder: Recorder, head: str, hidden_size: int = 4) -> None:
        self.name = name
        self._recorder = recorder
        self._head = head
        self._hidden_size = hidden_size
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)

    def close(self) -> None:
        self._channel.close()

    # ---- Microbatches ----

    def compute_loss(self, id: int, slices: Sequence[tuple[int, int]], total: int, *, step: int | None = None,
                     accumulate: bool = False, retain: bool = False, scale: float = 1.0, pause: Pause = _no_pause,
                     on_slice: Pause = _no_pause, cancel_after: float | None = None, timeout: float = 30.0,
                     named: Named | None = None, embedding: bool = False) -> Event:
        """Rows of all `slices` in one call; `total` is N. Rows that accumulate have weight 0: their gradient is 0.
        `named`: to be named in the call. `embedding`: the rows have no loss: they are row EMBEDDED of the weight, or, if
        they accumulate, gradients of it, which are 0."""
        rows = (slices[0][0], slices[-1][1])
        args: dict[str, Any] = {"id": id, "rows": rows, "total": total, "step": step, "accumulate": accumulate,
                                "retain": retain, "scale": scale}
        if embedding:
            args["embedding"] = True
        opened = loss_pb2.OpenMicrobatch(
            head=self._head, step=step, microbatch_id=id, microbatch_rows=total,
            rows=types_pb2.RowRange(begin=rows[0], end=rows[1]), hidden_dtype=types_pb2.DTYPE_FP32,
            options=loss_pb2.LossOptions(logit_scale=scale),
            reduction=loss_pb2.REDUCTION_NONE if retain else loss_pb2.REDUCTION_SUM, want_row_lse=True,
            accumulate_gradients=accumulate, retain=retain, targets=[0] * (rows[1] - rows[0]),
            row_weights=[0.0] * (rows[1] - rows[0]) if accumulate else [])
        if embedding:
            opened = loss_pb2.OpenMicrobatch(
                head=self._head, step=step, microbatch_id=id, microbatch_rows=total, rows=opened.rows,
                hidden_dtype=types_pb2.DTYPE_FP32, reduction=loss_pb2.REDUCTION_SUM, want_grad_hidden=not accumulate,
                embedding=loss_pb2.EMBEDDING_GRADIENTS if accumulate else loss_pb2.EMBEDDING_ROWS,
                accumulate_gradients=accumulate, targets=[EMBEDDED] * (rows[1] - rows[0]))
        _name(named, opened, args)
        sent: dict[int, int] = {}

        def messages() -> Iterator[loss_pb2.ComputeLossRequest]:
            yield loss_pb2.ComputeLossRequest(open=opened)
            for number, (begin, end) in enumerate(slices):
                pause(number)
                sent[begin] = self._recorder.now()
                hidden = np.zeros((end - begin, self._hidden_size), np.float32)
                hidden[:, 0] = not embedding
                yield loss_pb2.ComputeLossRequest(
                    slice=loss_pb2.SliceHeader(rows=types_pb2.RowRange(begin=begin, end=end)),
                    payload=b"" if embedding and not accumulate else hidden.tobytes())

        with self._recorder.call(self.name, "ComputeLoss", args) as event:
            self._exchange(event, messages(), sent, on_slice, cancel_after, timeout)
        return event

    def backward(self, id: int, rows: int, *, step: int | None = None, timeout: float = 30.0) -> Event:
        """dx of rows [0, rows) of a retained microbatch, for dL/dlse = 1 and dL/dloss = 0; nothing accumulates."""
        backward = loss_pb2.OpenBackward(
            head=self._head, step=step, microbatch_id=id, rows=types_pb2.RowRange(begin=0, end=rows),
            want_grad_hidden=True, grad_loss=[0.0] * rows, grad_lse=[1.0] * rows)
        request = loss_pb2.ComputeLossRequest(backward=backward)
        with self._recorder.call(self.name, "Backward", {"id": id, "step": step, "rows": (0, rows)}) as event:
            self._exchange(event, iter([request]), {}, _no_pause, None, timeout)
        return event

    def _exchange(self, event: Event, messages: Iterator[loss_pb2.ComputeLossRequest], sent: dict[int, int],
                  on_slice: Pause, cancel_after: float | None, timeout: float) -> None:
        pieces = event.result["slices"] = []
        call = self._call("stream_stream", "LossService/ComputeLoss", loss_pb2.ComputeLossResponse)(
            messages, timeout=cancel_after or timeout)
        for answer in call:
            now = self._recorder.now()
            kind = answer.WhichOneof("kind")
            if kind == "accepted":
                event.result["accepted"] = {"time": now, "state": state_of(answer.accepted.state)}
            elif kind == "slice":
                begin, end = answer.slice.rows.begin, answer.slice.rows.end
                piece = {"rows": [begin, end], "sent": sent.get(begin, event.start), "got": now}
                if answer.payload:
                    piece["dx"] = np.frombuffer(answer.payload, np.float32).reshape(
                        end - begin, self._hidden_size)[:, 0].tolist()
                elif answer.slice.row_lse:
                    piece["lse"] = list(answer.slice.row_lse)
                pieces.append(piece)
                on_slice(len(pieces) - 1)
            else:
                event.result["accumulated"] = answer.summary.accumulated_rows
                event.result["repeated"] = answer.summary.repeated_rows

    def release(self, id: int) -> Event:
        return self._unary("ReleaseMicrobatch", {"id": id},
                           loss_pb2.ReleaseMicrobatchRequest(head=self._head, microbatch_id=id),
                           loss_pb2.ReleaseMicrobatchResponse, lambda answer: {"released": answer.released},
                           service="LossService")

    # ---- Tensors ----

    def read(self, role: str = "value", *, on_slice: Pause = _no_pause, timeout: float = 30.0) -> Event:
        """`on_slice` runs before the next message is taken: a slow reader waits there."""
        request = head_pb2.ReadTensorRequest(head=self._head, param=head_pb2.PARAM_WEIGHT, role=_ROLES[role])
        with self._recorder.call(self.name, "ReadTensor", {"role": role}) as event:
            pieces = event.result["slices"] = []
            for piece in self._call("unary_stream", "HeadService/ReadTensor", head_pb2.TensorSlice)(
                    request, timeout=timeout):
                got = self._recorder.now()
                rows = [piece.rows.begin, piece.rows.end]
                values = np.frombuffer(piece.payload, np.float32).reshape(rows[1] - rows[0], self._hidden_size)
                if values[:, 1:].any():
                    raise AssertionError("a column other than the first is not zero")
                numbers = (values[:, 0].astype(np.float64) / GRID).tolist()
                pieces.append({"rows": rows, "values": [int(n) if n == int(n) else n for n in numbers],
                               "state": state_of(piece.state), "got": got})
                on_slice(len(pieces) - 1)
        return event

    def write(self, messages: Sequence[Message], *, pause: Pause = _no_pause, timeout: float = 30.0) -> Event:
        """A value of all rows, in one or several messages."""
        opened = head_pb2.OpenTensor(head=self._head, param=head_pb2.PARAM_WEIGHT)
        return self._send("WriteTensor", {}, messages, head_pb2.WriteTensorRequest, opened,
                          head_pb2.WriteTensorResponse, pause, timeout)

    def add_gradient(self, step: int, id: int, messages: Sequence[Message], *, pause: Pause = _no_pause,
                     timeout: float = 30.0, named: Named | None = None) -> Event:
        opened = head_pb2.OpenGradient(head=self._head, step=step, contribution_id=id, param=head_pb2.PARAM_WEIGHT)
        args: dict[str, Any] = {"id": id, "step": step}
        _name(named, opened, args)
        return self._send("AddGradient", args, messages, head_pb2.AddGradientRequest, opened,
                          head_pb2.AddGradientResponse, pause, timeout)

    def _send(self, method: str, args: dict[str, Any], messages: Sequence[Message], request: Any, opened: Any,
              answer: Any, pause: Pause, timeout: float) -> Event:
        sent: list[int] = []

        def requests() -> Iterator[Any]:
            for number, (begin, end, values) in enumerate(messages):
                pause(number)
                rows = np.zeros((end - begin, self._hidden_size), np.float32)
                rows[:, 0] = np.array(values, np.float64) * GRID
                sent.append(self._recorder.now())
                yield request(open=opened if number == 0 else None, payload=rows.tobytes())

        listed = [[begin, end, list(values)] for begin, end, values in messages]
        with self._recorder.call(self.name, method, {**args, "messages": listed}) as event:
            event.result["sent"] = sent
            told = self._call("stream_unary", f"HeadService/{method}", answer)(requests(), timeout=timeout)
            event.result["state"] = state_of(told.state)
            if method == "AddGradient":
                event.result["added"], event.result["repeated"] = told.added_rows, told.repeated_rows
        return event

    # ---- Steps, heads, checkpoints ----

    def create(self, vocab: int) -> Event:
        spec = head_pb2.HeadSpec(name=self._head, hidden_size=self._hidden_size, vocab_size=vocab,
                                 compute_dtype=types_pb2.DTYPE_FP32,
                                 optimizer_state=head_pb2.OPTIMIZER_STATE_MOMENTUM)
        if shares := os.environ.get("LOSSD_TEST_SHARES"):
            spec.split = head_pb2.SPLIT_VOCABULARY
            spec.shares.extend(map(int, shares.split(",")))
        return self._unary("CreateHead", {"vocab": vocab},
                           head_pb2.CreateHeadRequest(spec=spec, zeros=head_pb2.Zeros()), head_pb2.HeadDescription)

    def delete(self) -> Event:
        return self._unary("DeleteHead", {}, head_pb2.DeleteHeadRequest(head=self._head), head_pb2.DeleteHeadResponse)

    def describe(self) -> Event:
        return self._unary("DescribeHead", {}, head_pb2.DescribeHeadRequest(head=self._head),
                           head_pb2.HeadDescription, lambda told: {"exists": True, "step_rows": told.step_rows})

    def list_heads(self) -> Event:
        with self._recorder.call(self.name, "ListHeads", {}) as event:
            told = self._call("unary_unary", "HeadService/ListHeads", head_pb2.ListHeadsResponse)(
                head_pb2.ListHeadsRequest(), timeout=30.0)
            mine = [head for head in told.heads if head.spec.name == self._head]
            event.result["exists"] = bool(mine)
            if mine:
                event.result.update(state=state_of(mine[0].state), step_rows=mine[0].step_rows)
        return event

    def apply_step(self, step: int, momentum: int = 0, expected: Sequence[int] | None = None,
                   named: Named | None = None) -> Event:
        args: dict[str, Any] = {"step": step, "momentum": momentum, "expected": expected}
        request = head_pb2.ApplyStepRequest(head=self._head, step=step, expected_microbatches=expected or ())
        request.optimizer.sgd.learning_rate = 1.0
        request.optimizer.sgd.momentum = momentum
        _name(named, request, args)
        return self._unary("ApplyStep", args, request, head_pb2.ApplyStepResponse, step_result)

    def zero_gradients(self, step: int) -> Event:
        return self._unary("ZeroGradients", {"step": step}, head_pb2.ZeroGradientsRequest(head=self._head, step=step),
                           head_pb2.ZeroGradientsResponse)

    def grad_norm(self, step: int | None = None) -> Event:
        return self._unary("GradNorm", {"step": step}, head_pb2.GradNormRequest(head=self._head, step=step),
                           head_pb2.GradNormResponse, lambda told: {"norm": told.grad_norm})

    def save(self, name: str) -> Event:
        with self._recorder.call(self.name, "SaveCheckpoint", {"name": name}) as event:
            for update in self._call("unary_stream", "HeadService/SaveCheckpoint", head_pb2.SaveCheckpointUpdate)(
                    head_pb2.SaveCheckpointRequest(head=self._head, name=name), timeout=30.0):
                if update.HasField("saved"):
                    event.result["state"] = state_of(update.saved.state)
        return event

    def load(self, name: str) -> Event:
        return self._unary("LoadCheckpoint", {"name": name},
                           head_pb2.LoadCheckpointRequest(checkpoint=f"{self._head}/{name}"), head_pb2.HeadDescription)

    def _unary(self, method: str, args: dict[str, Any], request: Any, answer: Any,
               result: Callable[[Any], dict[str, Any]] = lambda told: {}, service: str = "HeadService") -> Event:
        with self._recorder.call(self.name, method, args) as event:
            told = self._call("unary_unary", f"{service}/{method}", answer)(request, timeout=30.0)
            event.result.update(result(told))
            if "state" in told.DESCRIPTOR.fields_by_name:
                event.result["state"] = state_of(told.state)
        return event

    def _call(self, kind: str, method: str, answer: Any) -> Any:
        return getattr(self._channel, kind)(
            f"/lossd.v1.{method}", request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString)


def step_result(told: head_pb2.ApplyStepResponse) -> dict[str, Any]:
    return {"norm": told.grad_norm, "microbatches": told.microbatches, "rows": told.rows,
            "contributions": told.contributions, "repeated": told.repeated_call}


def whole(values: Values) -> list[Message]:
    """All rows in one message."""
    return [(0, len(values), values)]


def halves(values: Values) -> list[Message]:
    """Two messages of half of the rows."""
    middle = len(values) // 2
    return [(0, middle, values[:middle]), (middle, len(values), values[middle:])]


def sleeper(*seconds: float) -> Pause:
    """Sleeps so long before message (or after answer) 0, 1, ...; not at all after the last."""
    return lambda number: time.sleep(seconds[number]) if number < len(seconds) else None


# A trainer as it is in real life: a lossd.Client, which remembers its step and repeats what broke, recorded.
#
# With LOSSD_TRANSPORT=cuda_ipc its rows are on a GPU, which is played on both sides (stage.py), unless it has them in messages.


def _connected(target: str, transport: str | None, retry: lossd.RetryOptions) -> lossd.Client:
    """Connections that are cut while they are made are made again."""
    for _ in range(20):
        with contextlib.suppress(lossd.Unavailable):
            return lossd.Client(target, channels=1, transport=transport, retry=retry, call_timeout=10.0, transfer_timeout=10.0,
                                loss_timeout=20.0, wait_for_server=True)
    raise RuntimeError(f"no connection to {target} stands")


class TrainerClient:
    """One lossd.Client of one head, with its own connection; for one thread. Methods are as RawClient's."""

    def __init__(self, name: str, target: str, recorder: Recorder, head: str, hidden_size: int = 4, *,
                 cut_times: Sequence[int] = (), accept_times: Sequence[int] = (), transport: str | None = None,
                 retry: lossd.RetryOptions = lossd.RetryOptions(max_attempts=20, initial_backoff=0.02,
                                                               max_backoff=0.2)) -> None:
        self.name = name
        self._recorder = recorder
        self._head = head
        self._hidden_size = hidden_size
        self._cut_times = cut_times  # of the proxy that it connects through
        self._accept_times = accept_times
        self._on_gpu = _ON_GPU and transport != "grpc"
        self._gpu = int(os.environ.get("LOSSD_TEST_GPU", "0"))
        self._client = _connected(target, transport, retry)

    def close(self) -> None:
        self._client.close()

    @property
    def transport(self) -> tuple[str, str]:
        """How its rows travel, and why."""
        return self._client.cuda_transport if self._on_gpu else self._client.transport

    def compute_loss(self, id: int, rows: int, *, step: int, slice_rows: int = 2) -> Event:
        """Accumulates rows of weight 0 over one stream. Notes when the client had the first answer: from then on it
        knows the generation that its rows are in."""
        args = {"id": id, "rows": (0, rows), "total": rows, "step": step, "accumulate": True}
        hidden = np.zeros((rows, self._hidden_size), np.float32)
        hidden[:, 0] = 1
        gradient = np.full_like(hidden, np.nan)  # the client scatters answers into it as they come
        memory: tuple[Any, Any] = hidden, gradient
        if self._on_gpu:
            memory = FakeArray(hidden, self._gpu), FakeArray(gradient, self._gpu)
            gradient = memory[1].values
        with self._record("ComputeLoss", args) as event:
            pending = self._client.compute_loss_async(
                self._head, memory[0], np.zeros(rows, np.int64), step=step, id=id, accumulate=True, grad_hidden=memory[1],
                row_weights=np.zeros(rows, np.float32), reduction="sum", rows=("lse",), streams=1,
                slice_bytes=slice_rows * hidden.itemsize * self._hidden_size)
            while not pending.done() and np.isnan(gradient).all():
                time.sleep(0.0005)
            if not np.isnan(gradient).all():
                event.result["accepted"] = {"time": self._recorder.now(), "state": None}
            told = pending.wait()
            event.result.update(accumulated=told.accumulated_rows, repeated=told.repeated_rows, repeats=told.repeats)
            self._note_resent(event, told.repeats)
            lses, now = told.rows["lse"].tolist(), self._recorder.now()
            # Rows of several attempts were computed at different moments.
            size = 1 if told.repeats else rows
            event.result["slices"] = [
                {"rows": [begin, begin + size], "sent": event.start, "got": now, "lse": sorted(set(
                    lses[begin:begin + size]))} for begin in range(0, rows, size)]
        return event

    def _note_resent(self, event: Event, repeats: int) -> None:
        """If each cut ended an attempt, the last attempt came on a connection that was made after the last cut."""
        cuts = self._cuts_since(event)
        if not repeats or repeats != len(cuts):
            return
        made = [at for at in map(self._recorder.at, list(self._accept_times)) if at >= max(cuts)]
        if made:  # else the last cut came when the call had its answer
            event.result["resent"] = min(made)

    def add_gradient(self, step: int, id: int, messages: Sequence[Message]) -> Event:
        (begin, end, values), = messages
        array = np.zeros((end - begin, self._hidden_size), np.float32)
        array[:, 0] = np.array(values, np.float64) * GRID
        args = {"id": id, "step": step, "messages": [[begin, end, list(values)]]}
        with self._record("AddGradient", args) as event:
            event.result["sent"] = [event.start]
            told = self._client.add_gradient(self._head, "weight", array, step=step, id=id, rows=(begin, end))
            event.result.update(state=state_of(told.state), added=told.added_rows, repeated=told.repeated_rows)
        return event

    def apply_step(self, step: int, momentum: int = 0, expected: Sequence[int] | None = None) -> Event:
        args = {"step": step, "momentum": momentum, "expected": expected}
        with self._record("ApplyStep", args) as event:
            told = self._client.apply_step(self._head, step, lossd.SGD(lr=1.0, momentum=momentum),
                                           expected_microbatches=expected or ())
            event.result.update(step_result(told), state=state_of(told.state))
        return event

    def zero_gradients(self, step: int) -> Event:
        with self._record("ZeroGradients", {"step": step}) as event:
            event.result["state"] = state_of(self._client.zero_gradients(self._head, step))
        return event

    def acknowledge(self) -> Event:
        """The trainer starts its step again."""
        with self._record("Acknowledge", {}) as event:
            self._client.acknowledge_restart(self._head)
        return event

    @contextlib.contextmanager
    def _record(self, call: str, args: dict[str, Any]) -> Iterator[Event]:
        with self._recorder.call(self.name, call, args, trainer=True) as event:
            try:
                yield event
            finally:
                event.result["broken"] = self._cuts_since(event)

    def _cuts_since(self, event: Event) -> list[int]:
        return sorted(at for at in map(self._recorder.at, list(self._cut_times)) if at >= event.start)
