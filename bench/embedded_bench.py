# SPDX-License-Identifier: Apache-2.0
"""Times loss and gradients of a head on an embedded server (lossd.embedded()) and of local heads, on one GPU, through autograd.

    python3 bench/embedded_bench.py --library build/release/bin/liblossd.so --real_data build/release/bin/real_data \\
        --loss_bench build/release/bin/cuda_bench --json embedded.json

For each shape, kind of data and number of rows, the results have these median milliseconds: loss and both gradients of each head;
the three bare matrix products; and the same kernels called in process (cuda_bench loss). They are times of CUDA events, but for the
embedded head, which gives the trainer the hidden gradient while it computes the weight gradient: there `median_ms` is the wall time
until the GPU is idle, and `hidden_gradient_ms` the time until the trainer's stream has the hidden gradient. Local heads are
those of peers.py that can be imported. For the largest number of rows, the results also have the peak GPU memory of each head.
For a local head this is the memory of loss and gradients, without its weight. For the embedded head it is all memory that its
server has for it, with weight and gradient, and the part of it that is workspace.

With --depths 2 it also times two losses of the same rows, as of a model that predicts several tokens: in one call
(LossHead.depth_losses), and in separate calls, which run one after another or are begun together. --target=HOST:PORT measures a
running server instead of an embedded one, through the transport that the client chooses:

    python3 bench/embedded_bench.py --depths 2 --target 127.0.0.1:7070 --methods "" --json depths.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch

import lossd
from lossd.torch import HeadOptimizer, LossHead

HEAD = "embedded-bench"
DATA = {"real": peers.real, "peaked": peers.peaked, "flat": peers.flat}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="liblossd.so [where lossd.embedded() looks]")
    parser.add_argument("--real_data", default="build/release/bin/real_data", help="the program, for real data")
    parser.add_argument("--loss_bench", help="the program cuda_bench")
    parser.add_argument("--shapes", default="gemma2-2b,llama3-8b", help="of peers.py")
    parser.add_argument("--data", default="real", help="real, peaked, flat, with commas between them; of fewer rows the first")
    parser.add_argument("--rows", default="8192,128,1")
    parser.add_argument("--gradients", default="exact,sampled")
    parser.add_argument("--methods", default="torch.compile,liger,torch.linear_cross_entropy", help="local heads, of peers.py")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--depths", type=int, default=0, help="also time so many losses of the rows in one call and apart [0: not]")
    parser.add_argument("--target", help="of a server that runs, HOST:PORT, instead of an embedded one")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def of_kernels(program: str, rows: int, hidden: int, vocab: int, kind: str, gradients: str) -> dict[str, float]:
    """Milliseconds of loss and gradients of the kernels, called in process by cuda_bench, for each kind of gradients."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "loss.json")
        subprocess.run([program, "loss", f"--out={out}", f"--shapes={rows}x{hidden}x{vocab}", f"--data={kind}", f"--gradients={gradients}",
                        "--noerrors", "--noparts", "--nonorm"], check=True, stdout=subprocess.DEVNULL)
        return {each["gradients"]: each["loss_and_gradients"]["median_ms"] for each in json.loads(out.read_text())["loss"]}


def milliseconds(work: Callable[[], None], iterations: int) -> dict[str, float]:
    """Wall milliseconds from an idle GPU until it is idle again, the weight gradient of a server in this process included; and
    milliseconds of the trainer's stream, by CUDA events. Of a server in another process neither includes all of the weight
    gradient."""
    hidden_gradient = peers.milliseconds(work, iterations)["median_ms"]  # warms up, too
    times = []
    for _ in range(iterations):
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    times.sort()
    return {"median_ms": times[len(times) // 2], "min_ms": times[0], "max_ms": times[-1], "hidden_gradient_ms": hidden_gradient}


class Embedded:
    """A head with a given weight [V, D] on an embedded server, or on a running one."""

    def __init__(self, weight: torch.Tensor, gradients: str, target: str | None = None) -> None:
        """`gradients`: the kinds to measure, with commas between them. `target`: the address of a running server; it has the head
        until close(). None: starts an embedded server."""
        self.client = lossd.Client(target) if target else lossd.embedded(backend="cuda")
        self.served = target is not None
        vocab, hidden = weight.shape
        self.client.create_head(HEAD, hidden_size=hidden, vocab_size=vocab, compute_dtype="bf16", zeros=True)
        self.client.write_tensor(HEAD, "weight", weight.view(torch.int16).cpu().numpy().view(np.uint16), dtype="bf16")
        self.gradients = gradients.split(",")

    def time(self, hidden: torch.Tensor, targets: torch.Tensor, gradients: str, iterations: int) -> dict[str, float]:
        head = LossHead(self.client, HEAD, gradients=gradients)
        rows = hidden.detach().clone().requires_grad_(True)
        on_host = targets.cpu()

        def full() -> None:
            rows.grad = None
            head(rows, on_host).backward()

        found = milliseconds(full, iterations)
        HeadOptimizer(head, lr=0.0).discard()
        return found

    def time_depths(self, hidden: torch.Tensor, targets: torch.Tensor, gradients: str, depths: int,
                    iterations: int) -> dict[str, float]:
        """Median milliseconds of `depths` losses of the same rows with both gradients: in one call, in separate calls one after
        another, and in separate calls that are begun together. "of_..." is the first time divided by one of the others."""
        head = LossHead(self.client, HEAD, gradients=gradients)
        rows = [hidden.detach().clone().requires_grad_(True) for _ in range(depths)]
        on_host = targets.cpu()
        of_all = on_host.expand(depths, -1).contiguous()
        weights = [1.0] + [0.3] * (depths - 1)

        def together() -> None:
            head.depth_losses(rows, of_all, weights=weights).loss.backward()

        def one_after_another() -> None:
            for each, weight in zip(rows, weights):
                head.grad_output = weight
                (weight * head(each, on_host)).backward()

        def begun_together() -> None:
            pending = []
            for each, weight in zip(rows, weights):
                head.grad_output = weight
                pending.append(head.start(each, on_host))
            for loss, weight in zip(pending, weights):
                (weight * loss.wait()).backward()

        found = {}
        for way in (together, one_after_another, begun_together):
            head.grad_output = 1.0
            for each in rows:
                each.grad = torch.zeros_like(each)
            found[way.__name__ + "_ms"] = milliseconds(way, iterations)["median_ms"]
            HeadOptimizer(head, lr=0.0).discard()
        for way in (one_after_another, begun_together):
            found["of_" + way.__name__] = found["together_ms"] / found[way.__name__ + "_ms"]
        return found

    def close(self) -> None:
        if self.served:
            self.client.delete_head(HEAD)
        self.client.close()

    def memory(self) -> dict[str, int]:
        """MiB of the GPU: all memory of the head, and its workspace: what is neither weight, gradient nor optimizer state."""
        of_head = self.client.describe_head(HEAD).memory
        return {"mib": of_head.total >> 20, "workspace_mib": (of_head.total - of_head.weights - of_head.gradients - of_head.optimizer) >> 20}


def run_case(name: str, kind: str, counts: list[int], arguments: argparse.Namespace, methods: dict[str, Any]) -> list[dict[str, Any]]:
    n, d, v = peers.SHAPES[name]
    hidden, weight, targets = DATA[kind](max(counts), d, v)
    embedded = Embedded(weight, arguments.gradients, arguments.target)
    cases = []
    for rows in counts:
        x, y = hidden[:rows].contiguous(), targets[:rows].contiguous()
        floor = peers.floor(x, weight, arguments.iterations)
        case: dict[str, Any] = {"shape": name, "data": kind, "rows": rows, "hidden": d, "vocab": v, "floor_ms": floor["total_ms"], "embedded": {},
                                "local": {}}
        for gradients in embedded.gradients:
            case["embedded"][gradients] = embedded.time(x, y, gradients, arguments.iterations)
            if arguments.depths:
                case.setdefault("depths", {"count": arguments.depths})[gradients] = embedded.time_depths(
                    x, y, gradients, arguments.depths, arguments.iterations)
        case["cuda_transport"] = list(embedded.client.cuda_transport)
        if arguments.loss_bench:
            case["kernels_ms"] = of_kernels(arguments.loss_bench, rows, d, v, kind, arguments.gradients)
        for method, function in methods.items():
            try:
                measured = peers.run_method(function, (x, weight, y), arguments.iterations)
            except Exception as error:  # other libraries raise errors of many kinds
                print(f"{method}: {str(error)[:200]}", flush=True)
                continue
            case["local"][method] = {**measured["loss_and_gradients"], "peak_mib": measured["peak_mib"]}
        if rows == max(counts):
            case["memory"] = embedded.memory()
        print(json.dumps(case), flush=True)
        cases.append(case)
    embedded.close()
    return cases


def main() -> None:
    arguments = parse_arguments()
    peers.REAL_DATA = arguments.real_data
    if arguments.library:
        os.environ["LOSSD_LIBRARY"] = str(Path(arguments.library).resolve())
    wanted = arguments.methods.split(",")
    methods = {name: function for name, function in peers.methods(dynamic=False).items() if name in wanted}
    result = {"card": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "commit": arguments.commit, "versions": peers.versions(),
              "cases": []}
    counts = sorted(map(int, arguments.rows.split(",")), reverse=True)
    for name in arguments.shapes.split(","):
        for place, kind in enumerate(arguments.data.split(",")):
            result["cases"] += run_case(name, kind, counts if place == 0 else counts[:1], arguments, methods)
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
