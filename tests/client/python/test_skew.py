# SPDX-License-Identifier: Apache-2.0
"""Clients and servers of two versions (docs/compatibility.md)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from servers import ForwardingServer

import lossd
from lossd.v1 import head_pb2, loss_pb2, server_pb2, types_pb2


# What may change of a protocol while clients and servers of the version before are in use (docs/compatibility.md).
#
# faults(before, now) compares two FileDescriptorSets of one package and says, one line each, what breaks the other side.

_KINDS = descriptor_pb2.FieldDescriptorProto.Type
_LABELS = descriptor_pb2.FieldDescriptorProto.Label
_PAYLOAD = "payload"


def faults(before: descriptor_pb2.FileDescriptorSet, now: descriptor_pb2.FileDescriptorSet, package: str) -> list[str]:
    old, new = _named(before, package), _named(now, package)
    found = [f"{name} is gone" for name in old if name not in new]
    for name in old.keys() & new.keys():
        if type(old[name]) is not type(new[name]):
            found.append(f"{name} has become something else")
        else:
            found += [f"{name}{fault}" for fault in _CHECKS[type(old[name])](old[name], new[name])]
    return sorted([*found, *(f"{name}{fault}" for name, each in new.items() for fault in _payload_is_last(each))])


def _named(files: descriptor_pb2.FileDescriptorSet, package: str) -> dict[str, Any]:
    """Messages, enumerations and services by full name."""
    named: dict[str, Any] = {}

    def add(scope: str, holder: Any) -> None:
        for each in [*getattr(holder, "message_type", []), *getattr(holder, "nested_type", []), *holder.enum_type,
                     *getattr(holder, "service", [])]:
            named[f"{scope}.{each.name}"] = each
            if isinstance(each, descriptor_pb2.DescriptorProto):
                add(f"{scope}.{each.name}", each)

    for file in files.file:
        if file.package == package:
            add(package, file)
    return named


def _is_reserved(message: Any, number: int, name: str) -> bool:
    # The end of a range is not part of it in messages, and part of it in enumerations.
    last = 0 if isinstance(message, descriptor_pb2.EnumDescriptorProto) else 1
    return name in message.reserved_name and any(each.start <= number <= each.end - last for each in message.reserved_range)


def _stays_reserved(old: Any, new: Any) -> Iterator[str]:
    for name in old.reserved_name:
        if name not in new.reserved_name:
            yield f": the name {name} is no longer reserved"
    kept = [(each.start, each.end) for each in new.reserved_range]
    for each in old.reserved_range:
        if not any(start <= each.start and each.end <= end for start, end in kept):
            yield f": the numbers from {each.start} are no longer reserved"


def _shape(message: Any, field: Any) -> dict[str, object]:
    """What a peer relies on."""
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") and not field.proto3_optional else ""
    return {"name": field.name, "type": _KINDS.Name(field.type), "type name": field.type_name, "label": _LABELS.Name(field.label),
            "oneof": oneof, "optional": field.proto3_optional, "packed": field.options.packed, "default": field.default_value}


def _message(old: Any, new: Any) -> Iterator[str]:
    by_number = {field.number: field for field in new.field}
    for field in old.field:
        if field.number not in by_number:
            if not _is_reserved(new, field.number, field.name):
                yield f".{field.name} = {field.number} is gone, and number and name are not reserved"
            continue
        was, is_now = _shape(old, field), _shape(new, by_number[field.number])
        for what in was:
            if was[what] != is_now[what]:
                yield f".{field.name} = {field.number}: its {what} was {was[what]!r} and is {is_now[what]!r}"
    numbers = {field.number for field in old.field}
    for field in new.field:
        if field.number not in numbers and (_is_reserved(old, field.number, field.name) or field.name in {each.name for each in old.field}):
            yield f".{field.name} = {field.number} uses a number or name that was in use before"
    yield from _stays_reserved(old, new)


def _enum(old: Any, new: Any) -> Iterator[str]:
    by_number = {value.number: value.name for value in new.value}
    for value in old.value:
        if value.number not in by_number:
            if not _is_reserved(new, value.number, value.name):
                yield f".{value.name} = {value.number} is gone, and number and name are not reserved"
        elif by_number[value.number] != value.name:
            yield f".{value.name} = {value.number}: its name is {by_number[value.number]} now"
    yield from _stays_reserved(old, new)


def _service(old: Any, new: Any) -> Iterator[str]:
    by_name = {method.name: method for method in new.method}
    for method in old.method:
        if method.name not in by_name:
            yield f".{method.name} is gone"
            continue
        for what in ("input_type", "output_type", "client_streaming", "server_streaming"):
            was, is_now = getattr(method, what), getattr(by_name[method.name], what)
            if was != is_now:
                yield f".{method.name}: its {what} was {was!r} and is {is_now!r}"


def _payload_is_last(message: Any) -> Iterator[str]:
    """docs/protocol.md: the tensor is the last field, so that it is sent and read without a copy."""
    if isinstance(message, descriptor_pb2.DescriptorProto):
        for field in message.field:
            if field.name == _PAYLOAD and field.number != max(each.number for each in message.field):
                yield f".{_PAYLOAD} = {field.number} has a field behind it"


_CHECKS: dict[type, Any] = {descriptor_pb2.DescriptorProto: _message, descriptor_pb2.EnumDescriptorProto: _enum,
                            descriptor_pb2.ServiceDescriptorProto: _service}


# The protocol of the version before (tests/proto/previous): its messages, and a server that knows no more of them.
#
# The messages live in a pool of their own, beside today's.

PACKAGE = "lossd.v1"
FILES = descriptor_pb2.FileDescriptorSet.FromString(
    Path(__file__).parents[2].joinpath("proto", "previous", "protocol.binpb").read_bytes())
_POOL = descriptor_pool.DescriptorPool()
for _file in FILES.file:  # in the order in which they need each other
    _POOL.Add(_file) if hasattr(_POOL, "Add") else _POOL.AddSerializedFile(_file.SerializeToString())


def message(name: str) -> Any:
    """The class of a message, by its name within the package."""
    descriptor = _POOL.FindMessageTypeByName(f"{PACKAGE}.{name}")
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(_POOL).GetPrototype(descriptor)


def _services() -> dict[str, Any]:
    return {f"/{PACKAGE}.{service.name}/{method.name}": method for file in FILES.file if file.package == PACKAGE
            for service in file.service for method in service.method}


METHODS = _services()


def stub(channel: grpc.Channel, method: str) -> Callable[..., Any]:
    """A call of `Service/Method` with messages of the version before."""
    path = f"/{PACKAGE}.{method}"
    described = METHODS[path]
    arity = f"{'stream' if described.client_streaming else 'unary'}_{'stream' if described.server_streaming else 'unary'}"
    answer = message(described.output_type.rsplit(".", 1)[1])
    return getattr(channel, arity)(path, request_serializer=lambda request: request.SerializeToString(),
                                   response_deserializer=answer.FromString)


class PreviousServer(ForwardingServer):
    """Stands before a server of today and makes it one of the version before: what that did not know is removed from requests and
    answers, and a method that it did not have is unknown. `removed` counts messages that lost something, by method."""

    def __init__(self, target: str) -> None:
        self.removed: dict[str, int] = {}
        super().__init__(target)

    def knows(self, method: str) -> bool:
        return method in METHODS

    def request(self, method: str, data: bytes) -> bytes:
        return self._known(method, METHODS[method].input_type, data)

    def answer(self, method: str, data: bytes) -> bytes:
        return self._known(method, METHODS[method].output_type, data)

    def _known(self, method: str, kind: str, data: bytes) -> bytes:
        parsed = message(kind.rsplit(".", 1)[1]).FromString(data)
        parsed.DiscardUnknownFields()
        known: bytes = parsed.SerializeToString()
        if len(known) < len(data):
            self.removed[method] = self.removed.get(method, 0) + 1
        return known


# Clients and servers of two versions (docs/compatibility.md): the protocol may only grow, a client that knows the version before
# trains with this server, and this client with a server that knows the version before. LOSSD_BINARY: the server; lossctl is beside it.

D, V, N, STEPS = 16, 90, 40, 3


def of_today():
    files = descriptor_pb2.FileDescriptorSet()
    for module in (types_pb2, loss_pb2, head_pb2, server_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    return files


def file_of(files, name):
    return next(file for file in files.file if any(each.name == name for each in [*file.message_type, *file.enum_type, *file.service]))


def named(messages, name):
    return next(each for each in messages if each.name == name)


def test_the_protocol_only_grows():
    assert not faults(FILES, of_today(), PACKAGE)


def break_it(files, how):
    loss, head = file_of(files, "OpenMicrobatch"), file_of(files, "HeadSpec")
    opened, spec = named(loss.message_type, "OpenMicrobatch"), named(head.message_type, "HeadSpec")
    if how == "a field is gone":
        del opened.field[2]
    elif how == "a number has another type":
        named(opened.field, "step").type = descriptor_pb2.FieldDescriptorProto.TYPE_FIXED64
    elif how == "a name has moved":
        named(opened.field, "microbatch_rows").number = 900
    elif how == "presence has changed":
        field = named(spec.field, "norm_epsilon")
        field.proto3_optional = False
        field.ClearField("oneof_index")
    elif how == "a list became one value":
        named(opened.field, "targets").label = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
    elif how == "a value is gone":
        del named(head.enum_type, "Norm").value[-1]
    elif how == "a value has another meaning":
        named(head.enum_type, "Norm").value[-1].name = "NORM_OTHER"
    elif how == "a method is gone":
        del named(head.service, "HeadService").method[0]
    elif how == "a method streams":
        named(head.service, "HeadService").method[0].server_streaming = True
    elif how == "a message is gone":
        loss.message_type.remove(opened)
    elif how == "a field behind the payload":
        field = named(loss.message_type, "ComputeLossRequest").field.add()
        field.CopyFrom(named(opened.field, "head"))
        field.name, field.number = "more", 1001


@pytest.mark.parametrize("how, said", [
    ("a field is gone", "OpenMicrobatch.microbatch_id = 3 is gone, and number and name are not reserved"),
    ("a number has another type", "OpenMicrobatch.step = 2: its type was 'TYPE_UINT64'"),
    ("a name has moved", "OpenMicrobatch.microbatch_rows = 4 is gone"),
    ("presence has changed", "HeadSpec.norm_epsilon = 7: its optional was True"),
    ("a list became one value", "OpenMicrobatch.targets = 18: its label was 'LABEL_REPEATED'"),
    ("a value is gone", "Norm.NORM_RMSNORM = 3 is gone"),
    ("a value has another meaning", "Norm.NORM_RMSNORM = 3: its name is NORM_OTHER now"),
    ("a method is gone", "HeadService.CreateHead is gone"),
    ("a method streams", "HeadService.CreateHead: its server_streaming was False"),
    ("a message is gone", "OpenMicrobatch is gone"),
    ("a field behind the payload", "ComputeLossRequest.payload = 1000 has a field behind it"),
])
def test_what_breaks_the_other_side_is_found(how, said):
    files = of_today()
    break_it(files, how)
    found = faults(FILES, files, PACKAGE)
    assert any(said in fault for fault in found), found


def test_what_goes_away_reserved_stays_reserved():
    files = of_today()
    opened = named(file_of(files, "OpenMicrobatch").message_type, "OpenMicrobatch")
    gone = opened.field[2]
    opened.reserved_name.append(gone.name)
    opened.reserved_range.add(start=gone.number, end=gone.number + 1)
    opened.field.remove(gone)
    assert not faults(FILES, files, PACKAGE)
    reused = of_today()
    field = named(file_of(reused, "OpenMicrobatch").message_type, "OpenMicrobatch").field[2]
    assert any("uses a number or name" in fault or "its name was" in fault for fault in faults(files, reused, PACKAGE)), field.name


def problem(seed):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((N, D)).astype(np.float32), rng.integers(0, V, N)) for _ in range(STEPS)]


def train_as_today(client, head, seed):
    """Losses, the gradients of hidden states, gradient norms and the weight in the end."""
    client.create_head(head, hidden_size=D, vocab_size=V, bias=True, norm="rmsnorm", seed=5, compute_dtype="fp32")
    losses, gradients, norms = [], [], []
    for step, (hidden, targets) in enumerate(problem(seed)):
        result = client.compute_loss(head, hidden, targets, step=step, id=1, accumulate=True, grad_hidden=True, streams=1)
        norms.append(client.grad_norm(head, step))
        client.apply_step(head, step, lossd.AdamW(lr=1e-2), expected_microbatches=[1])
        losses.append(result.loss)
        gradients.append(result.grad_hidden)
    return losses, gradients, norms, client.read_tensor(head)


def train_as_before(channel, head, seed):
    """The same with the messages of the version before alone."""
    new = message

    def call(method, request):
        return stub(channel, method)(request, timeout=120)

    call("HeadService/CreateHead", new("CreateHeadRequest")(
        spec=new("HeadSpec")(name=head, hidden_size=D, vocab_size=V, bias=True, norm=head_pb2.NORM_RMSNORM, compute_dtype=types_pb2.DTYPE_FP32),
        kaiming_uniform=new("KaimingUniform")(seed=5)))
    losses, gradients, norms = [], [], []
    for step, (hidden, targets) in enumerate(problem(seed)):
        rows = new("RowRange")(begin=0, end=N)
        opened = new("OpenMicrobatch")(
            head=head, step=step, microbatch_id=1, microbatch_rows=N, rows=rows, hidden_dtype=types_pb2.DTYPE_FP32,
            reduction=loss_pb2.REDUCTION_MEAN, want_grad_hidden=True, accumulate_gradients=True, targets=targets.tolist())
        messages = [new("ComputeLossRequest")(open=opened),
                    new("ComputeLossRequest")(slice=new("SliceHeader")(rows=rows), payload=hidden.tobytes())]
        for answer in call("LossService/ComputeLoss", iter(messages)):
            if answer.WhichOneof("kind") == "slice":
                gradients.append(np.frombuffer(answer.payload, np.float32).reshape(N, D))
            elif answer.WhichOneof("kind") == "summary":
                losses.append(answer.summary.loss_sum / answer.summary.normalizer)
        norms.append(call("HeadService/GradNorm", new("GradNormRequest")(head=head, step=step)).grad_norm)
        applied = call("HeadService/ApplyStep", new("ApplyStepRequest")(
            head=head, step=step, expected_microbatches=[1], optimizer=new("Optimizer")(adamw=new("AdamW")(learning_rate=1e-2))))
        assert applied.state.step == step + 1
    weight = b"".join(each.payload for each in call("HeadService/ReadTensor", new("ReadTensorRequest")(
        head=head, param=head_pb2.PARAM_WEIGHT, dtype=types_pb2.DTYPE_FP32)))
    return losses, gradients, norms, np.frombuffer(weight, np.float32).reshape(V, D)


def assert_same_run(one, other):
    for ours, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def has_unknown(answer):
    known = type(answer).FromString(answer.SerializeToString())
    known.DiscardUnknownFields()
    return known.ByteSize() < answer.ByteSize()


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.target) as made:
        yield made


@pytest.fixture
def server_before(server):
    proxy = PreviousServer(server.target)
    yield proxy
    proxy.stop()


def test_a_client_of_the_version_before_trains_as_todays(client, channel, seed):
    assert_same_run(train_as_before(channel, "skew-before", seed), train_as_today(client, "skew-today", seed))


def test_a_client_of_the_version_before_passes_over_what_it_does_not_know(client, channel):
    client.create_head("skew-split", hidden_size=D, vocab_size=V, split="rows")
    described = stub(channel, "HeadService/DescribeHead")(message("DescribeHeadRequest")(head="skew-split"))
    assert has_unknown(described) and described.spec.vocab_size == V
    about = stub(channel, "ServerService/GetServer")(message("GetServerRequest")())
    assert has_unknown(about) and about.max_streams > 0
    with pytest.raises(grpc.RpcError) as raised:
        stub(channel, "HeadService/DescribeHead")(message("DescribeHeadRequest")(head="nowhere"))
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND


def test_todays_client_trains_at_a_server_of_the_version_before(client, server_before, seed):
    with lossd.Client(server_before.target) as at_before:
        assert at_before.transport[0] == "grpc"  # that server knows of no shared memory
        assert_same_run(train_as_today(at_before, "skew-there", seed), train_as_today(client, "skew-here", seed))
        saved = at_before.save_checkpoint("skew-there")
        assert [each.checkpoint for each in at_before.list_checkpoints("skew-there")] == [saved.checkpoint]
        assert at_before.load_checkpoint(saved.checkpoint).state.step == STEPS
        deferred = at_before.compute_loss("skew-there", *problem(seed)[0], step=STEPS, id=7, reduction="none", retain=True, rows=("loss",))
        again = at_before.backward("skew-there", 7, np.ones(N), hidden_size=D, step=STEPS, grad_hidden=True)
        assert len(deferred.rows["loss"]) == N and again.grad_hidden.shape == (N, D)
        with pytest.raises(lossd.InvalidArgument, match="label_smoothing"):
            at_before.compute_loss("skew-there", *problem(seed)[0], options=lossd.LossOptions(label_smoothing=2.0))
    assert server_before.removed.get("/lossd.v1.ServerService/GetServer"), "nothing was kept from the client"


def test_what_a_server_of_the_version_before_does_not_know_is_not_in_its_description(server_before):
    with lossd.Client(server_before.target) as at_before:
        described = at_before.create_head("skew-wish", hidden_size=D, vocab_size=V, split="vocabulary")
        assert described.spec.split == "any"
    assert server_before.removed["/lossd.v1.HeadService/CreateHead"]


def test_a_server_of_the_version_before_is_not_asked_for_what_it_would_pass_over(server_before):
    with lossd.Client(server_before.target) as at_before:
        at_before.create_head("skew-begin", hidden_size=D, vocab_size=V)
        assert at_before.apply_step("skew-begin", 0, lossd.AdamW(lr=0.1), begin_optimizer=True).state.step == 1  # it is new
        with pytest.raises(lossd.Unimplemented, match="does not know begin_optimizer"):
            at_before.apply_step("skew-begin", 1, lossd.AdamW(lr=0.1), begin_optimizer=True)
        assert at_before.describe_head("skew-begin").state.step == 1
        assert at_before.describe_head("skew-begin").history == lossd.HeadHistory()
        at_before.create_head("skew-lazy", hidden_size=D, vocab_size=V)
        with pytest.raises(lossd.Unimplemented, match="does not know lazy_rows"):
            at_before.apply_step("skew-lazy", 0, lossd.AdamW(lr=0.1, lazy_rows=True))
        assert at_before.describe_head("skew-lazy").state.step == 0
        with pytest.raises(lossd.Unimplemented, match="does not know this call"):
            at_before.reset_head("skew-begin", "all")


def test_a_method_that_the_server_does_not_have_is_unimplemented(server_before):
    with grpc.insecure_channel(server_before.target) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary("/lossd.v1.HeadService/Invented")(b"")
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_lossctl_works_at_a_server_of_the_version_before(server_before):
    def lossctl(*arguments):
        program = Path(os.environ["LOSSD_BINARY"]).with_name("lossctl")
        return subprocess.run([program, f"--server={server_before.target}", *arguments], check=True, capture_output=True, text=True).stdout

    lossctl("create", "skew-cli", "--hidden", str(D), "--vocab", str(V))
    assert "loss" in lossctl("loss", "skew-cli", "--random", "32", "--accumulate", "--microbatch-id", "1")
    lossctl("step", "skew-cli", "--step", "0", "--lr", "1e-3")
    assert "skew-cli" in lossctl("heads")
    assert lossctl("describe", "skew-cli")
