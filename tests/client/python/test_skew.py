# SPDX-License-Identifier: Apache-2.0
"""Clients and servers of two versions (docs/compatibility.md): the protocol may only grow, a client that knows the version before
trains with this server, and this client with a server that knows the version before. LOSSD_BINARY: the server; lossctl is beside it."""

import os
import subprocess
from pathlib import Path

import grpc
import numpy as np
import previous_protocol as previous
import pytest
from google.protobuf import descriptor_pb2
from protocol_rules import faults

import lossd
from lossd.v1 import head_pb2, loss_pb2, server_pb2, types_pb2

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
    assert not faults(previous.FILES, of_today(), previous.PACKAGE)


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
    found = faults(previous.FILES, files, previous.PACKAGE)
    assert any(said in fault for fault in found), found


def test_what_goes_away_reserved_stays_reserved():
    files = of_today()
    opened = named(file_of(files, "OpenMicrobatch").message_type, "OpenMicrobatch")
    gone = opened.field[2]
    opened.reserved_name.append(gone.name)
    opened.reserved_range.add(start=gone.number, end=gone.number + 1)
    opened.field.remove(gone)
    assert not faults(previous.FILES, files, previous.PACKAGE)
    reused = of_today()
    field = named(file_of(reused, "OpenMicrobatch").message_type, "OpenMicrobatch").field[2]
    assert any("uses a number or name" in fault or "its name was" in fault for fault in faults(files, reused, previous.PACKAGE)), field.name


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
    new = previous.message

    def call(method, request):
        return previous.stub(channel, method)(request, timeout=120)

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
    proxy = previous.PreviousServer(server.target)
    yield proxy
    proxy.stop()


def test_a_client_of_the_version_before_trains_as_todays(client, channel, seed):
    assert_same_run(train_as_before(channel, "skew-before", seed), train_as_today(client, "skew-today", seed))


def test_a_client_of_the_version_before_passes_over_what_it_does_not_know(client, channel):
    client.create_head("skew-split", hidden_size=D, vocab_size=V, split="rows")
    described = previous.stub(channel, "HeadService/DescribeHead")(previous.message("DescribeHeadRequest")(head="skew-split"))
    assert has_unknown(described) and described.spec.vocab_size == V
    about = previous.stub(channel, "ServerService/GetServer")(previous.message("GetServerRequest")())
    assert has_unknown(about) and about.max_streams > 0
    with pytest.raises(grpc.RpcError) as raised:
        previous.stub(channel, "HeadService/DescribeHead")(previous.message("DescribeHeadRequest")(head="nowhere"))
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
        with pytest.raises(lossd.Unimplemented, match="begin_optimizer is True"):
            at_before.apply_step("skew-begin", 1, lossd.AdamW(lr=0.1), begin_optimizer=True)
        assert at_before.describe_head("skew-begin").state.step == 1
        assert at_before.describe_head("skew-begin").history == lossd.HeadHistory()
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
