# SPDX-License-Identifier: Apache-2.0
"""Every golden case of tests/client/golden, which the C++ client runs too (tests/client/cpp/golden_test.cc).

Each kind of file has a function that runs one of its cases through the Python client (RUNS).
"""

from __future__ import annotations

import functools
import json
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import json_format
from servers import ScriptedServer, listener, speak

import lossd
from lossd import _connections, _plan, _stream, _target, _tensors, _wire, errors, types
from lossd._arrays import as_soft_targets, class_arrays, HostRows
from lossd._embedding import EmbeddingWork
from lossd._head_cache import GradientsId, HeadCache, TrainerStep
from lossd._loss_call import AnswerCheck
from lossd._work import BackwardWork, ForwardWork, Outputs, Scale, Work
from lossd.v1 import head_pb2, loss_pb2, types_pb2


# What golden cases (tests/client/golden/README.md) have in common: their members, and the errors they expect.

Case = dict[str, Any]

CODES: dict[type[errors.LossdError], str] = {
    errors.Restarted: "RESTARTED", errors.StepDiscarded: "DISCARDED",
    **{kind: code.name for code, kind in errors._CLASSES.items()}, errors.Internal: "INTERNAL"}


def error_named(code: str, message: str, detail: types_pb2.ErrorDetail | None = None) -> errors.LossdError:
    kind = next(kind for kind, name in CODES.items() if name == code)
    return kind(message, detail)


def check_members(case: Case, required: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Fails for a case with a member that is not looked at, or without one that is."""
    members = set(case) - {"name"}
    assert not members - set(required) - set(optional), f"unknown members {members - set(required) - set(optional)}"
    assert not set(required) - members, f"missing members {set(required) - members}"


def check_fails(expected: Case, error: errors.LossdError) -> None:
    check_members(expected, ("error", "says"), ("at", "before", "now"))
    assert CODES[type(error)] == expected["error"], error
    assert expected["says"] in str(error)
    if "now" in expected:
        assert error.incarnation == expected["now"]


def expect(expected: Case, action: Callable[[], Any]) -> Any:
    """Runs the action; the error must be `fails` if the case has it, else there must be none."""
    if "fails" not in expected:
        return action()
    try:
        action()
    except errors.LossdError as error:
        check_fails(expected["fails"], error)
    else:
        raise AssertionError(f"no error; expected {expected['fails']}")
    return None


# The works of calls that golden cases describe, as the Python client makes them.


def host_rows(data: bytes) -> HostRows:
    return HostRows(np.frombuffer(data, np.uint8))


def _stale(size: int) -> HostRows:
    return HostRows(np.full(size, 255, np.uint8))


def _forward(call: Case) -> ForwardWork:
    options = dict(call["options"])
    kind = types.NUMPY_DTYPES[call["dtype"]]
    rows = len(call["targets"])
    gradient = _stale(rows * call["hidden_size"] * kind.itemsize) if call["grad_hidden"] else None
    classes = np.array(call["classes"], "<i4") if "classes" in call else None
    several = class_arrays(classes, call.get("top_k", 0), rows)
    for array in several.values():
        array.fill(77)
    results = {name: np.full(rows, 77, np.int32 if name == "argmax" else np.float32)
               for name in call["row_results"] if name not in several}
    weights = call["row_weights"]
    return ForwardWork(
        head=call["head"], step=call["step"], id=call["id"], accumulate=call["accumulate"],
        hidden=host_rows(b""),
        hidden_dtype=types.DTYPES[call["dtype"]], hidden_size=call["hidden_size"], element_size=kind.itemsize,
        targets=np.array(call["targets"], "<i4"), row_weights=None if weights is None else np.array(weights, "<f4"),
        options=types.LossOptions(**options),
        scale=Scale(call["reduction"], call["normalizer"], call["grad_output"]),
        reduction=types.REDUCTIONS[call["reduction"]], retain=call["retain"],
        outputs=Outputs(gradient, results, several), classes=classes,
        soft=as_soft_targets(call.get("target_classes"), call.get("target_weights"), rows),
        depths=[types.Depth(**depth) for depth in call.get("depths", [])])


def _backward(call: Case) -> BackwardWork:
    def floats(name: str) -> Any:
        return None if call[name] is None else np.array(call[name], "<f4")

    size = types.NUMPY_DTYPES[call["dtype"]].itemsize
    rows = len(call["grad_loss"])
    gradient = _stale(rows * call["hidden_size"] * size) if call["grad_hidden"] else None
    return BackwardWork(
        head=call["head"], step=call["step"], id=call["id"], accumulate=call["accumulate"],
        hidden_size=call["hidden_size"], element_size=size, grad_loss=floats("grad_loss"),
        grad_lse=floats("grad_lse"), grad_entropy=floats("grad_entropy"), outputs=Outputs(gradient))


def _embedding(call: Case) -> EmbeddingWork:
    """`embedding`: "rows" or "gradients"; of the options only ignore_index may be there."""
    size = types.NUMPY_DTYPES[call["dtype"]].itemsize
    gradients = call["embedding"] == "gradients"
    rows = len(call["targets"])
    return EmbeddingWork(
        head=call["head"], step=call["step"], id=call["id"], ids=np.array(call["targets"], "<i4"),
        padding_idx=dict(call["options"]).get("ignore_index"), dtype=types.DTYPES[call["dtype"]],
        hidden_size=call["hidden_size"], element_size=size, gradients=host_rows(b"") if gradients else None,
        scale=call["grad_output"] if gradients else 1.0,
        outputs=Outputs(None if gradients else _stale(rows * call["hidden_size"] * size)))


def work_of(call: Case) -> Work:
    if "embedding" in call:
        return _embedding(call)
    return _backward(call) if "grad_loss" in call else _forward(call)


# Runs golden cases (tests/client/golden/README.md) of addresses, and of what is found there.


def run_targets(case: Case) -> None:
    if "fails" in case:
        check_members(case, ("target", "fails"))
        return expect(case, lambda: _target.check(case["target"]))
    check_members(case, ("target", "host", "port", "socket", "local"))
    target = case["target"]
    _target.check(target)
    assert _target.host_and_port(target) == (case["host"], case["port"])
    assert _target.socket_path(target) == case["socket"]
    assert _target.is_local(target) == case["local"]


@functools.lru_cache
def _certificate(name: str) -> tuple[str, str]:
    """Paths of one for 127.0.0.1 that signs itself, and of its key."""
    folder = Path(tempfile.mkdtemp())
    paths = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
                    "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
    return paths


def _connect(target: str, client: str, seconds: float) -> None:
    ca = {"plain": "", "trusts": _certificate("server")[0], "distrusts": _certificate("other")[0]}[client]
    lossd.Client(target, ca=ca, connect_timeout=seconds).close()


def run_listeners(case: Case) -> None:
    patience = 2.0 if "has not answered" in case["fails"]["says"] else 240.0
    start = time.monotonic()
    if "listens" in case:
        check_members(case, ("listens", "client", "fails"))
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            expect(case, lambda: _connect(f"127.0.0.1:{held.getsockname()[1]}", case["client"], patience))
    else:
        check_members(case, ("words", "tls", "client", "fails"))
        words = None if case["words"] is None else bytes.fromhex(case["words"])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*_certificate("server"))
        context.set_alpn_protocols(["h2"])

        def answer(connection: socket.socket) -> None:
            if not case["tls"]:
                return speak(connection, words)
            with context.wrap_socket(connection, server_side=True) as secure:
                speak(secure, words)

        with listener(answer) as target:
            expect(case, lambda: _connect(target, case["client"], patience))
    assert time.monotonic() - start < 120.0, "it waited for its timeout"


# Runs golden cases (tests/client/golden/README.md) through the Python client: one function for each kind of file.


def _payload(begin: int, end: int) -> bytes:
    return (np.arange(begin, end) % 251).astype(np.uint8).tobytes()


# ---- plan ----


def _call_of_plan(case: Case) -> Case:
    call = {"head": "lm", "step": None, "id": 0, "accumulate": False, "hidden_size": case["hidden_size"],
            "dtype": case["dtype"], "grad_hidden": False}
    if "backward_rows" in case:
        return call | {"grad_loss": [1.0] * case["backward_rows"], "grad_lse": None, "grad_entropy": None}
    retain = case.get("retain", False)
    call |= {"depths": case["depths"]} if "depths" in case else {}
    return call | {"targets": [target for count, target in case["targets"] for _ in range(count)],
                   "row_weights": None, "options": {"ignore_index": case.get("ignore_index", -100)},
                   "reduction": "none" if retain else "sum", "normalizer": None, "grad_output": 1.0, "retain": retain,
                   "row_results": []}


def _with_bytes(slices: list[_plan.Rows], row_bytes: int) -> list[list[int]]:
    return [[piece.begin, piece.end, len(piece) * row_bytes] for piece in slices]


def run_plan(case: Case) -> None:
    check_members(case, ("hidden_size", "dtype", "limits", "slice_bytes", "streams", "max_message_bytes"),
                  ("targets", "backward_rows", "ignore_index", "retain", "depths", "streams_planned", "fails"))
    work = work_of(_call_of_plan(case))
    limits = json_format.ParseDict(case["limits"], loss_pb2.SliceLimits())

    def plan() -> list[Case]:
        rule = _plan.make_slice_rule(work.row_bytes, case["slice_bytes"], limits)
        plans = [work.plan(rows, rule, None) for rows in work.split(case["streams"], case["max_message_bytes"])]
        return [{"rows": [each.rows.begin, each.rows.end],
                 "slices": None if each.slices is None else _with_bytes(each.slices, work.row_bytes)} for each in plans]

    planned = expect(case, plan)
    if "fails" not in case:
        assert planned == case["streams_planned"]


def run_region_plan(case: Case) -> None:
    check_members(case, ("targets", "rows", "hidden_size", "dtype", "limits", "slice_bytes", "region", "slices",
                         "in_messages"))
    check_members(case["region"], ("bytes", "of_gpu"))
    work = work_of(_call_of_plan(case))
    limits = json_format.ParseDict(case["limits"], loss_pb2.SliceLimits())
    rule = _plan.make_slice_rule(work.row_bytes, case["slice_bytes"], limits)
    rows = _plan.Rows(*case["rows"])
    wanted = _plan.wanted_rows(case["region"]["bytes"], case["region"]["of_gpu"], work.row_bytes)
    slices = work.plan(rows, rule.in_region(len(rows), wanted), None).slices
    assert slices is not None
    assert _with_bytes(slices, work.row_bytes) == case["slices"]
    parts = [part for piece in slices for part in rule.cut(piece)]
    assert _with_bytes(parts, work.row_bytes) == case["in_messages"]


def run_region_sizes(case: Case) -> None:
    check_members(case, ("call_bytes", "least", "most", "region"))
    assert _plan.RegionSizes(case["least"], case["most"]).wanted(case["call_bytes"]) == case["region"]


# ---- wire ----


def run_wire(case: Case) -> None:
    if case["message"] in ("open", "backward"):
        check_members(case, ("message", "call", "rows", "incarnation", "hex"), ("generation",))
        rows, incarnation = _plan.Rows(*case["rows"]), case["incarnation"]
        meant = None if incarnation is None else GradientsId(incarnation, case.get("generation", 0))
        first = work_of(case["call"]).plan(rows, _plan.SliceRule(1000), meant).first
        assert first.hex() == case["hex"]
    elif case["message"] == "slice":
        check_members(case, ("message", "rows", "row_bytes", "hex", "payload"))
        rows, row_bytes = _plan.Rows(*case["rows"]), case["row_bytes"]
        hidden = host_rows(_payload(0, rows.end * row_bytes))
        message = _stream.encode_slice(hidden, rows, row_bytes)
        assert message == bytes.fromhex(case["hex"]) + _payload(*case["payload"])
    else:
        check_members(case, ("message", "open", "row_bytes", "payload_bytes", "messages"))
        kind = {"write_tensor": head_pb2.WriteTensorRequest, "add_gradient": head_pb2.AddGradientRequest}
        first = json_format.ParseDict({"open": case["open"]}, kind[case["message"]]())
        payload = memoryview(_payload(0, case["payload_bytes"]))
        messages = list(_tensors.encode_rows(first, case["row_bytes"], payload))
        assert messages == [bytes.fromhex(each["hex"]) + _payload(*each["payload"]) for each in case["messages"]]


# ---- decode ----


def _type(name: str) -> Any:
    return getattr(loss_pb2, name, None) or getattr(head_pb2, name)


def run_decode(case: Case) -> None:
    check_members(case, ("type", "hex"), ("fields", "payload", "fails"))
    kind = _type(case["type"])
    decoded = expect(case, lambda: _wire.decode(kind, bytes.fromhex(case["hex"])))
    if "fails" in case:
        return
    message, payload = decoded
    message.DiscardUnknownFields()
    assert message == json_format.ParseDict(case["fields"], kind())
    assert bytes(payload).hex() == case["payload"]


# ---- stream answers, tensor answers ----


def _answer(kind: Any, answer: Case) -> bytes:
    if "hex" in answer:
        check_members(answer, ("hex",))
        return bytes.fromhex(answer["hex"])
    check_members(answer, ("fields",), ("payload",))
    message = json_format.ParseDict(answer["fields"], kind())
    if answer.get("payload"):
        message.payload = bytes.fromhex(answer["payload"])
    return bytes(message.SerializeToString())


def _feed(case: Case, messages: list[bytes], handle: Callable[[bytes], None], end: Callable[[], Any]) -> Any:
    """The end's result; the error must come at the message that the case names, or at the end."""
    steps: list[Callable[[], Any]] = [*(lambda data=data: handle(data) for data in messages), end]
    for index, step in enumerate(steps):
        if "fails" in case and case["fails"]["at"] == index:
            return expect(case, step)
        result = step()
    assert "fails" not in case
    return result


def run_stream_answers(case: Case) -> None:
    check_members(case, ("call", "slice_rows", "answers"), ("gives", "fails"))
    work = work_of(case["call"])
    plan = work.plan(_plan.Rows(0, work.rows), _plan.SliceRule(case["slice_rows"]), None)
    answers = _stream.StreamAnswers(plan, work.outputs, work.row_bytes, lambda state: None)
    messages = [_answer(loss_pb2.ComputeLossResponse, answer) for answer in case["answers"]]
    summary = _feed(case, messages, answers.handle, answers.end)
    if "fails" in case:
        return
    gradient = work.outputs.grad_hidden
    assert case["gives"] == {
        "valid_rows": summary.valid_rows, "received_bytes": answers.received_bytes,
        "grad_hidden": None if gradient is None else bytes(gradient.read(0, gradient.nbytes)).hex(),
        "row_results": {name: values.reshape(-1).tolist()
                        for name, values in (work.outputs.rows | work.outputs.classes).items()}}


def run_tensor_answers(case: Case) -> None:
    if case["call"] == "read_tensor":
        check_members(case, ("call", "rows", "cols", "dtype", "answers"), ("role", "gives", "fails"))
        begin, end = case["rows"]
        request = head_pb2.ReadTensorRequest(head="lm", role=types.ROLES[case.get("role", "value")],
                                             rows=types_pb2.RowRange(begin=begin, end=end))
        row_bytes = case["cols"] * types.NUMPY_DTYPES[case["dtype"]].itemsize
        out = bytearray(b"\xff" * ((end - begin) * row_bytes))
        reader = _tensors.TensorReader(request, row_bytes, memoryview(out))
        messages = [_answer(head_pb2.TensorSlice, answer) for answer in case["answers"]]
        _feed(case, messages, reader.handle, reader.end)
        assert "fails" in case or bytes(out).hex() == case["gives"]
        return
    check_members(case, ("call", "answers"), ("gives", "fails"))
    kind = {"write_tensor": head_pb2.WriteTensorResponse, "add_gradient": head_pb2.AddGradientResponse}[case["call"]]
    messages = [_answer(kind, answer) for answer in case["answers"]]
    answer = expect(case, lambda: _tensors.one_answer(kind, messages))
    assert "fails" in case or answer == json_format.ParseDict(case["gives"], kind())


# ---- statuses ----


class _RpcError(grpc.RpcError):
    """What gRPC raises for a call that ended with a status."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode[self._case["code"]]

    def details(self) -> str:
        return str(self._case["message"])

    def trailing_metadata(self) -> list[tuple[str, bytes]]:
        details = self._case.get("details")
        return [] if details is None else [("grpc-status-details-bin", bytes.fromhex(details))]


def run_statuses(case: Case) -> None:
    check_members(case, ("code", "message", "target", "gives"), ("details", "server_version"))
    version = case.get("server_version", "").replace("CLIENT", lossd.__version__)
    error = errors.from_rpc(_RpcError(case), case["target"], version)
    gives = case["gives"]
    message = gives["message"].replace("CLIENT", lossd.__version__)
    assert (CODES[type(error)], error.message) == (gives["error"], message)
    expected = json_format.ParseDict(gives["detail"] or {}, types_pb2.ErrorDetail())
    assert (error.field, error.value, error.incarnation) == (expected.field, expected.value, expected.incarnation)
    assert error.current_step == (expected.current_step if expected.HasField("current_step") else None)
    assert error.missing == tuple(expected.missing)


# ---- incarnations ----


_EVENTS: dict[str, tuple[str, ...]] = {
    "call": ("call", "head", "step", "accumulate"), "accepted": ("call", "incarnation", "step"),
    "error": ("call", "code", "incarnation"), "names": ("call", "incarnation"), "begins_again": ("call",),
    "contribution": ("head", "step", "incarnation"), "applied": ("head", "step", "incarnation"),
    "seen": ("head", "step", "incarnation"), "acknowledged": ("head",), "connected": ("expected", "incarnation")}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "call": ("in_step",), "accepted": ("generation", "weights_version"), "error": ("field",), "names": ("generation",),
    "contribution": ("generation",), "seen": ("generation",)}


def _gradients(at: Case) -> GradientsId:
    return GradientsId(at["incarnation"], at.get("generation", 0))


class _Incarnations:
    def __init__(self, expected: int) -> None:
        self._head_cache = HeadCache(expected)
        self._calls: dict[str, AnswerCheck] = {}

    def do(self, event: Case) -> None:
        kind = event["event"]
        check_members(event, ("event", *_EVENTS[kind]), ("fails", *_OPTIONAL.get(kind, ())))
        do = dict[str, Callable[[Case], Any]](
            call=self._call, accepted=self._accepted, error=self._error, names=self._names,
            begins_again=lambda at: self._calls[at["call"]].begin_again(),
            contribution=self._contribution, applied=self._applied, seen=self._seen,
            acknowledged=lambda at: self._head_cache.forget_accumulation(at["head"]),
            connected=self._connected)[kind]
        expect(event, lambda: do(event))

    def _call(self, at: Case) -> None:
        self._calls[at["call"]] = AnswerCheck(self._head_cache, at["head"], at["step"], accumulate=at["accumulate"],
                                              in_step=at.get("in_step", at["accumulate"]))

    def _accepted(self, at: Case) -> None:
        self._calls[at["call"]].accept(types_pb2.HeadState(
            incarnation=at["incarnation"], step=at["step"], generation=at.get("generation", 0),
            weights_version=at.get("weights_version", 0)))

    def _error(self, at: Case) -> None:
        error = error_named(at["code"], "what happened", types_pb2.ErrorDetail(
            incarnation=at["incarnation"], field=at.get("field", "")))
        self._calls[at["call"]].interpret(error)
        raise error

    def _names(self, at: Case) -> None:
        expected = None if at["incarnation"] is None else _gradients(at)
        assert self._calls[at["call"]].meant() == expected

    def _at(self, at: Case) -> TrainerStep:
        return self._head_cache.trainer_step(at["head"], at["step"])

    def _contribution(self, at: Case) -> None:
        self._head_cache.note_accumulation(self._at(at), _gradients(at))

    def _applied(self, at: Case) -> None:
        self._head_cache.check(self._at(at), _gradients(at))
        self._head_cache.close_step(at["head"], at["step"])

    def _connected(self, at: Case) -> None:
        raise errors.restarted(None, at["expected"], at["incarnation"], None)

    def _seen(self, at: Case) -> None:
        self._head_cache.check(self._at(at), _gradients(at))


def run_incarnations(case: Case) -> None:
    check_members(case, ("expected_incarnation", "events"))
    run = _Incarnations(case["expected_incarnation"])
    for event in case["events"]:
        run.do(event)


# ---- waits ----


def run_waits(case: Case) -> None:
    check_members(case, ("error", "attempt", "retry", "left", "wait"), ("restartable", "detail", "message"))
    retry = lossd.RetryOptions(**case["retry"])
    error = error_named(case["error"], case.get("message", "what happened"),
                        types_pb2.ErrorDetail() if case.get("detail", False) else None)
    waits = [_connections.wait_before_repeat(retry, error, case["attempt"], case["left"], factor,
                                       case.get("restartable", False)) for factor in (0.8, 1.2)]
    if case["wait"] is None:
        assert waits == [None, None]
    else:
        np.testing.assert_allclose(waits, case["wait"], rtol=1e-6)
    assert all(0.8 <= _connections.jitter() <= 1.2 for _ in range(100))


# ---- connections ----


def run_connections(case: Case) -> None:
    check_members(case, ("rounds", "says"), ())
    chooser, now, moved = _connections.ConnectionChooser(), 0.0, 0
    for round_ in case["rounds"]:
        check_members(round_, ("streams", "megabytes", "seconds", "advice", "connections"), ("times", "opens"))
        for _ in range(round_.get("times", 1)):
            [chooser.begin(now) for _ in range(round_["streams"])]
            now += round_["seconds"]
            moved += round_["megabytes"] * 1_000_000
            advice = {chooser.end(moved, now).value for _ in range(round_["streams"])}
            assert advice | {"stay"} == {round_["advice"], "stay"}, round_
            if "opens" in round_:
                chooser.added(moved) if round_["opens"] else chooser.refused("full", moved)
            assert chooser.count == round_["connections"], round_
    assert case["says"] in chooser.reason


# ---- repeats ----


_D, _V = 8, 10  # of the scripted server's head


def _do(client: lossd.Client, call: Case) -> Any:
    rows = call.get("rows", 0)
    if call["do"] == "compute_loss":
        check_members(call, ("do", "id", "step", "accumulate", "rows", "slice_rows"), ("retain", "gives", "fails"))
        retain = call.get("retain", False)
        return client.compute_loss(
            "head", np.ones((rows, _D), np.float32), np.arange(rows) % _V, step=call["step"], id=call["id"],
            accumulate=call["accumulate"], streams=1, slice_bytes=call["slice_rows"] * _D * 4, retain=retain,
            reduction="none" if retain else "mean")
    if call["do"] == "backward":
        check_members(call, ("do", "id", "step", "accumulate", "rows"), ("gives", "fails"))
        return client.backward("head", call["id"], np.ones(rows), hidden_size=_D, step=call["step"],
                               accumulate=call["accumulate"], streams=1)
    if call["do"] == "add_gradient":
        check_members(call, ("do", "id", "step"), ("gives", "fails"))
        return client.add_gradient("head", "weight", np.ones((_V, _D), np.float32), step=call["step"], id=call["id"])
    if call["do"] == "apply_step":
        check_members(call, ("do", "step"), ("gives", "fails"))
        return client.apply_step("head", call["step"], lossd.SGD(lr=1.0))
    others: dict[str, tuple[tuple[str, ...], Callable[[], Any]]] = {
        "read_tensor": (("role",), lambda: client.read_tensor("head", "weight", call["role"])),
        "zero_gradients": (("step",), lambda: client.zero_gradients("head", call["step"])),
        "load_checkpoint": ((), lambda: client.load_checkpoint("head/any")),
        "grad_norm": (("step",), lambda: client.grad_norm("head", call["step"])),
        "acknowledge_restart": ((), lambda: client.acknowledge_restart("head"))}
    members, do = others[call["do"]]
    check_members(call, ("do", *members), ("fails",))
    do()
    return SimpleNamespace()


def run_repeats(case: Case) -> None:
    check_members(case, ("limits", "max_attempts", "faults", "calls"), ("versions", "log"))
    server = ScriptedServer(case)
    retry = lossd.RetryOptions(max_attempts=case["max_attempts"], initial_backoff=0.002)
    try:
        with lossd.Client(server.target, channels=1, retry=retry) as client:
            for call in case["calls"]:
                result = expect(call, lambda call=call: _do(client, call))
                for name, value in call.get("gives", {}).items():
                    assert getattr(result, name) == value, name
        assert "log" not in case or server.log() == case["log"]
    finally:
        server.stop()


RUNS: dict[str, Callable[[Case], None]] = {
    "plan": run_plan, "plan in a region": run_region_plan, "sizes of regions": run_region_sizes, "wire": run_wire,
    "decode": run_decode, "stream answers": run_stream_answers,
    "tensor answers": run_tensor_answers, "statuses": run_statuses, "incarnations": run_incarnations,
    "waits": run_waits, "connections": run_connections, "repeats": run_repeats, "targets": run_targets, "listeners": run_listeners}


FOLDER = Path(__file__).parents[1] / "golden"
FILES = [json.loads(path.read_text()) for path in sorted(FOLDER.iterdir()) if path.name != "README.md"]
KINDS = [kind for file in FILES for kind in (file if isinstance(file, list) else [file])]


def test_every_kind_is_known_and_stands_once():
    assert sorted(content["kind"] for content in KINDS) == sorted(RUNS)
    for content in KINDS:
        assert set(content) == {"kind", "cases"} and content["cases"], content["kind"]
        names = [case["name"] for case in content["cases"]]
        assert len(set(names)) == len(names), f"{content['kind']}: two cases of one name"


@pytest.mark.parametrize("kind, case", [
    pytest.param(content["kind"], case, id=f"{content['kind']}: {case['name']}")
    for content in KINDS for case in content["cases"]])
def test_case(kind, case):
    assert kind in RUNS, f"no test knows how to run cases of kind {kind}"
    RUNS[kind](case)
