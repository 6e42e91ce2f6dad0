#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares lossd's optimizers with torch.optim's over random training histories, through a running server.

    compare_torch_optimizers.py LOSSD PROTO_DIRECTORY [--histories=12] [--steps=25] [--seed=S] [--backend=cpu]

Half of the histories have lazy rows: torch's optimizers are dense, so a row of the weight without a gradient, and its moments, get back what
they were before the step. Every history has hyper-parameters of its own, parameters of every kind (weight, bias, norm gain and shift),
gradients sent with AddGradient, and steps whose gradient is not finite, which both sides skip. The error of
lossd and that of torch in fp32 are measured against torch in double precision. Exits with 77 (skipped) where
torch, grpcio or protoc are not installed.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time

try:
    import grpc
    import numpy
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

HIDDEN, CLASSES = 5, 7
SHAPES = {"WEIGHT": (CLASSES, HIDDEN), "BIAS": (CLASSES,), "NORM_GAIN": (HIDDEN,), "NORM_SHIFT": (HIDDEN,)}
# Of a parameter or moment, relative to 1 + its size. fp32 has 1.2e-7; a history has some ten roundings a step.
TOLERANCE = 3e-6


class Server:
    """A lossd process and its HeadService."""

    def __init__(self, binary, protos, folder, backend):
        subprocess.run(["protoc", f"-I{protos}", f"--python_out={folder}", "lossd/v1/types.proto",
                        "lossd/v1/loss.proto", "lossd/v1/head.proto"], check=True)
        sys.path.insert(0, folder)
        from lossd.v1 import head_pb2, types_pb2
        self.head_pb2, self.types_pb2 = head_pb2, types_pb2
        port_file = os.path.join(folder, "ports.json")
        self.process = subprocess.Popen(
            [binary, "--listen=127.0.0.1:0", "--http=", f"--port_file={port_file}", f"--backend={backend}",
             f"--checkpoint_dir={folder}/checkpoints", "--log_level=warning"])
        self.channel = grpc.insecure_channel(self.await_address(port_file))

    def await_address(self, port_file):
        for _ in range(1200):
            try:
                with open(port_file, encoding="utf-8") as file:
                    return json.load(file)["grpc"]
            except (OSError, ValueError):
                time.sleep(0.05)
        raise RuntimeError("lossd did not start")

    def stop(self):
        self.process.terminate()
        self.process.wait()

    def call(self, method, request, response):
        """A unary call, or one that sends a stream if `request` is a list."""
        kind = self.channel.stream_unary if isinstance(request, list) else self.channel.unary_unary
        stub = kind(f"/lossd.v1.HeadService/{method}",
                    request_serializer=lambda message: message.SerializeToString(),
                    response_deserializer=response.FromString)
        return stub(iter(request) if isinstance(request, list) else request, timeout=60)

    def read(self, head, param, role):
        stub = self.channel.unary_stream("/lossd.v1.HeadService/ReadTensor",
                                         request_serializer=lambda message: message.SerializeToString(),
                                         response_deserializer=self.head_pb2.TensorSlice.FromString)
        request = self.head_pb2.ReadTensorRequest(head=head, param=f"PARAM_{param}", role=f"ROLE_{role}")
        data = b"".join(piece.payload for piece in stub(request, timeout=60))
        return numpy.frombuffer(data, numpy.float32).reshape(SHAPES[param])


def random_optimizer(rng):
    """Hyper-parameters: of torch.optim, and what lossd has besides."""
    common = {"lr": 10 ** rng.uniform(-4, -1), "weight_decay": rng.choice([0.0, rng.uniform(0, 0.5)])}
    ours = {"grad_multiplier": rng.uniform(-2, 2), "decay_vectors": rng.random() < 0.5, "lazy_rows": rng.random() < 0.5}
    if rng.random() < 0.5:
        return {**common, "betas": (rng.uniform(0, 0.99), rng.uniform(0.5, 0.9999)),
                "eps": 10 ** rng.uniform(-10, -2)}, ours
    momentum = rng.choice([0.0, rng.uniform(0.1, 0.99)])
    nesterov = momentum > 0 and rng.random() < 0.5
    return {**common, "momentum": momentum, "nesterov": nesterov,
            "dampening": 0.0 if nesterov else rng.uniform(0, 0.9)}, ours


class TorchSide:
    """The same training in torch, in one dtype."""

    def __init__(self, values, options, ours, dtype):
        self.parameters = {name: torch.nn.Parameter(torch.tensor(value, dtype=dtype))
                           for name, value in values.items()}
        self.multiplier = ours["grad_multiplier"]
        self.lazy_rows = ours["lazy_rows"]
        no_decay = options["weight_decay"] if ours["decay_vectors"] else 0.0
        groups = [{"params": [parameter],
                   "weight_decay": options["weight_decay"] if name == "WEIGHT" else no_decay}
                  for name, parameter in self.parameters.items()]
        kind = torch.optim.AdamW if "betas" in options else torch.optim.SGD
        self.optimizer = kind(groups, **options)

    def step(self, gradients):
        for name, gradient in gradients.items():
            parameter = self.parameters[name]
            parameter.grad = torch.tensor(gradient, dtype=parameter.dtype) * self.multiplier
        weight = self.parameters["WEIGHT"]
        idle = torch.from_numpy(~gradients["WEIGHT"].any(axis=1) & self.lazy_rows)
        before = weight.detach().clone(), {key: value.clone() for key, value in self.state_of(weight).items()}
        self.optimizer.step()
        weight.data[idle] = before[0][idle]
        for key, value in self.state_of(weight).items():
            value[idle] = before[1][key][idle] if key in before[1] else 0.0  # torch has no state before the first step

    def state_of(self, parameter):
        """What the optimizer keeps for each element."""
        return {key: value for key, value in self.optimizer.state.get(parameter, {}).items()
                if torch.is_tensor(value) and value.shape == parameter.shape}

    def moments(self, name):
        state = self.optimizer.state[self.parameters[name]]
        keys = {"MOMENT1": "exp_avg", "MOMENT2": "exp_avg_sq"} if "exp_avg" in state else {"MOMENT1": "momentum_buffer"}
        return {role: state[key].numpy() for role, key in keys.items() if state.get(key) is not None}


def to_proto(head_pb2, options, ours):
    optimizer = head_pb2.Optimizer(grad_multiplier=ours["grad_multiplier"], decay_vectors=ours["decay_vectors"],
                                    lazy_rows=ours["lazy_rows"])
    if "betas" in options:
        optimizer.adamw.CopyFrom(head_pb2.AdamW(
            learning_rate=options["lr"], beta1=options["betas"][0], beta2=options["betas"][1],
            epsilon=options["eps"], weight_decay=options["weight_decay"]))
    else:
        optimizer.sgd.CopyFrom(head_pb2.Sgd(
            learning_rate=options["lr"], momentum=options["momentum"], dampening=options["dampening"],
            nesterov=options["nesterov"], weight_decay=options["weight_decay"]))
    return optimizer


def run_history(server, name, steps, rng, noise):
    """Trains on both sides; returns the largest errors of lossd and of torch in fp32."""
    pb = server.head_pb2
    options, ours = random_optimizer(rng)
    print(name, options, ours, flush=True)
    server.call("CreateHead", pb.CreateHeadRequest(spec=pb.HeadSpec(
        name=name, hidden_size=HIDDEN, vocab_size=CLASSES, bias=True, norm=pb.NORM_LAYERNORM)), pb.HeadDescription)
    values = {param: noise.standard_normal(shape).astype(numpy.float32) for param, shape in SHAPES.items()}
    for param, value in values.items():
        open_ = pb.OpenTensor(head=name, param=f"PARAM_{param}")
        server.call("WriteTensor", [pb.WriteTensorRequest(open=open_, payload=value.tobytes())],
                    pb.WriteTensorResponse)
    exact = TorchSide(values, options, ours, torch.float64)
    single = TorchSide(values, options, ours, torch.float32)
    for step in range(steps):
        finite = rng.random() > 0.15
        gradients = {param: noise.standard_normal(shape).astype(numpy.float32) for param, shape in SHAPES.items()}
        gradients["WEIGHT"][noise.random(CLASSES) < 0.4] = 0.0
        for i, (param, gradient) in enumerate(gradients.items()):
            # Two halves that add up without rounding; twice the largest float does not.
            for half in range(2):
                payload = gradient / 2 if finite else numpy.full_like(gradient, 3e38)
                open_ = pb.OpenGradient(head=name, step=step, contribution_id=2 * i + half, param=f"PARAM_{param}")
                server.call("AddGradient", [pb.AddGradientRequest(open=open_, payload=payload.tobytes())],
                            pb.AddGradientResponse)
        answer = server.call("ApplyStep", pb.ApplyStepRequest(
            head=name, step=step, optimizer=to_proto(pb, options, ours), skip_non_finite=True,
            expected_microbatches=range(2 * len(SHAPES))), pb.ApplyStepResponse)
        assert answer.skipped == (not finite), f"step {step}: skipped {answer.skipped}, norm {answer.grad_norm}"
        assert math.isfinite(answer.grad_norm) == finite
        if finite:
            exact.step(gradients)
            single.step(gradients)
    errors = [0.0, 0.0]
    for param in SHAPES:
        wanted = {"VALUE": exact.parameters[param].detach().numpy(), **exact.moments(param)}
        in_single = {"VALUE": single.parameters[param].detach().numpy(), **single.moments(param)}
        for role, want in wanted.items():
            for side, got in enumerate([server.read(name, param, role), in_single[role]]):
                error = float(numpy.max(numpy.abs(got - want) / (1 + numpy.abs(want))))
                errors[side] = max(errors[side], error)
                assert side > 0 or error <= TOLERANCE, f"{param} {role}: error {error:.2e}"
    return errors


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lossd")
    parser.add_argument("protos")
    parser.add_argument("--histories", type=int, default=12)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--backend", default="cpu")
    args = parser.parse_args()
    if shutil.which("protoc") is None:
        print("skipped: no protoc")
        sys.exit(77)
    print(f"torch {torch.__version__}, seed {args.seed}")
    rng, noise = random.Random(args.seed), numpy.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(args.lossd, args.protos, folder, args.backend)
        try:
            errors = [run_history(server, f"history-{i}", args.steps, rng, noise) for i in range(args.histories)]
        finally:
            server.stop()
    print(f"{args.histories} histories of {args.steps} steps; largest error against double precision: "
          f"lossd {max(e[0] for e in errors):.2e}, torch in fp32 {max(e[1] for e in errors):.2e}")


if __name__ == "__main__":
    main()
