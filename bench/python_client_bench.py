# SPDX-License-Identifier: Apache-2.0
"""Measures rows per second through the Python client, and through `lossctl bench` with the same settings and the same server.

    python3 bench/python_client_bench.py --lossctl build/release/bin/lossctl --channels 4 --in_flight 4

Every microbatch asks for dL/dx and accumulates dL/dW, which is discarded at the end. The program creates a head for this and
deletes it afterwards. With --cuda, it also passes hidden states and gradients to lossd.Client as CUDA tensors. With --torch, it
also passes them through lossd.torch.LossHead; the time includes copies to and from the device. --data=real needs a GPU, and takes
weight and rows from peers.py. The client's library is the one beside lossctl, unless LOSSD_LIBRARY names another.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import lossd

HEAD = "python-client-bench"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:7070")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--hidden_size", type=int, default=4096)
    parser.add_argument("--vocab_size", type=int, default=128256)
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--streams", type=int, default=0, help="per microbatch; 0: as the clients choose")
    parser.add_argument("--in_flight", type=int, default=2, help="microbatches under way at once")
    parser.add_argument("--slice_bytes", type=int, help="of hidden states that are sent at once")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--transport", help="of the Python client")
    parser.add_argument("--shared_memory_bytes", type=int, help="that it asks for")
    parser.add_argument("--gradients", default="exact", choices=("exact", "filtered", "sampled", "auto"))
    parser.add_argument("--data", default="random", choices=("random", "real"))
    parser.add_argument("--real-data", default="bin/real_data", help="the program real_data, for real data")
    parser.add_argument("--server_pid", type=int, help="of the server, to read the CPU time that it takes")
    parser.add_argument("--no-numpy", dest="numpy", action="store_false", help="without rows of the host")
    parser.add_argument("--cuda", action="store_true", help="also with CUDA tensors")
    parser.add_argument("--lossctl", help="path of lossctl, to compare with")
    parser.add_argument("--torch", action="store_true", help="also through LossHead with CUDA tensors")
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args()


def measure(start: Any, finish: Any, arguments: argparse.Namespace) -> dict[str, float]:
    """Computes microbatches for some seconds, `in_flight` of them at a time. pending = start(i) begins a microbatch, and
    finish(pending) waits for it."""
    under_way: collections.deque[tuple[float, Any]] = collections.deque()
    latencies: list[float] = []

    def end_one() -> None:
        begin, pending = under_way.popleft()
        finish(pending)
        latencies.append(time.monotonic() - begin)

    def run(goes_on: Callable[[], bool]) -> None:
        while goes_on():
            under_way.append((time.monotonic(), start(next(numbers))))
            if len(under_way) == arguments.in_flight:
                end_one()
        while under_way:
            end_one()

    numbers = itertools.count()
    run(lambda: len(latencies) < 2 * arguments.in_flight)  # a warm-up
    latencies.clear()
    cpu = time.process_time(), server_cpu(arguments.server_pid)
    begin = time.monotonic()
    run(lambda: time.monotonic() - begin < arguments.seconds)
    seconds = time.monotonic() - begin
    return {"rows_per_second": len(latencies) * arguments.rows / seconds,
            "client_cores": (time.process_time() - cpu[0]) / seconds,
            "server_cores": (server_cpu(arguments.server_pid) - cpu[1]) / seconds,
            "latency_p50_ms": float(np.percentile(latencies, 50)) * 1e3,
            "latency_p99_ms": float(np.percentile(latencies, 99)) * 1e3}


def server_cpu(pid: int | None) -> float:
    """Seconds of CPU time that a process has used until now; 0 without a process id."""
    if pid is None:
        return 0.0
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_rows(client: lossd.Client, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Hidden states [N, D] as the bits of bf16, and targets [N]. For real data, also writes the weight to the head."""
    if arguments.data == "real":
        import peers
        import torch
        peers.REAL_DATA = arguments.real_data
        hidden, weight, targets = peers.real(arguments.rows, arguments.hidden_size, arguments.vocab_size)
        client.write_tensor(HEAD, "weight", weight.view(torch.int16).cpu().numpy().view(np.uint16), dtype="bf16")
        return hidden.view(torch.int16).cpu().numpy().view(np.uint16), targets.cpu().numpy().astype(np.int32)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((arguments.rows, arguments.hidden_size), np.float32)
    return ((values.view(np.uint32) >> 16).astype(np.uint16),
            rng.integers(0, arguments.vocab_size, arguments.rows).astype(np.int32))


def through_client(client: lossd.Client, hidden: Any, outputs: list[Any], targets: Any,
                   arguments: argparse.Namespace) -> dict[str, float]:
    def start(i: int) -> lossd.PendingLoss:
        return client.compute_loss_async(
            HEAD, hidden, targets, dtype="bf16", step=0, id=i, accumulate=True,
            options=lossd.LossOptions(gradients=arguments.gradients),
            grad_hidden=outputs[i % arguments.in_flight], streams=arguments.streams or None,
            slice_bytes=arguments.slice_bytes)

    return measure(start, lossd.PendingLoss.wait, arguments)


def through_numpy(client: lossd.Client, hidden: Any, targets: Any, arguments: argparse.Namespace) -> dict[str, float]:
    return through_client(client, hidden, [np.empty_like(hidden) for _ in range(arguments.in_flight)], targets, arguments)


def through_cuda(client: lossd.Client, hidden: Any, targets: Any, arguments: argparse.Namespace) -> dict[str, float]:
    import torch
    on_gpu = torch.from_numpy(hidden.view(np.int16)).cuda()
    outputs = [torch.empty_like(on_gpu) for _ in range(arguments.in_flight)]
    torch.cuda.synchronize()
    return through_client(client, on_gpu, outputs, targets, arguments)


def through_torch(client: lossd.Client, rows: Any, labels: Any, arguments: argparse.Namespace) -> dict[str, float]:
    import torch
    from lossd.torch import HeadOptimizer, LossHead
    head = LossHead(client, HEAD, streams=arguments.streams or None, slice_bytes=arguments.slice_bytes,
                    gradients=arguments.gradients)
    hidden = torch.from_numpy(rows.view(np.int16)).cuda().view(torch.bfloat16)
    hidden.requires_grad_()
    targets = torch.from_numpy(labels).long()

    def finish(pending: Any) -> None:
        pending.wait().backward()
        hidden.grad = None
        torch.cuda.synchronize()

    result = measure(lambda _: head.start(hidden, targets), finish, arguments)
    HeadOptimizer(head, lr=0.0).discard()
    return result


def through_lossctl(arguments: argparse.Namespace) -> dict[str, Any]:
    command = [arguments.lossctl, f"--server={arguments.server}", "--json", "bench", HEAD, f"--rows={arguments.rows}",
               f"--channels={arguments.channels}", f"--streams={arguments.streams}",
               f"--gradients={arguments.gradients}", *([f"--data={arguments.data}", "--overwrite-weight"] if arguments.data != "random" else []),
               f"--in-flight={arguments.in_flight}",
               *([] if arguments.slice_bytes is None else [f"--slice-bytes={arguments.slice_bytes}"]),
               f"--seconds={arguments.seconds}"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    arguments = parse_arguments()
    if arguments.lossctl and (beside := Path(arguments.lossctl).resolve().with_name("liblossd.so")).is_file():
        os.environ.setdefault("LOSSD_LIBRARY", str(beside))
    with lossd.Client(arguments.server, channels=arguments.channels, transport=arguments.transport,
                      shared_memory_bytes=arguments.shared_memory_bytes) as client:
        client.create_head(HEAD, hidden_size=arguments.hidden_size, vocab_size=arguments.vocab_size,
                           optimizer_state="none")
        try:
            results: dict[str, Any] = {"settings": {name: value for name, value in vars(arguments).items() if name != "json"}}
            rows = make_rows(client, arguments)
            for name, through in (("python", through_numpy), ("cuda", through_cuda), ("torch", through_torch)):
                if getattr(arguments, {"python": "numpy"}.get(name, name)):
                    results[name] = through(client, *rows, arguments)
                    client.zero_gradients(HEAD, 0)
            results["transport"], results["cuda_transport"] = client.transport, client.cuda_transport
            if arguments.lossctl:
                results["lossctl"] = through_lossctl(arguments)
        finally:
            client.delete_head(HEAD)
    first = None
    for name in ("lossctl", "python", "cuda", "torch"):
        if name in results:
            rows_per_second = results[name]["rows_per_second"]
            first = first or rows_per_second
            cores = f"{results[name].get('client_cores', 0):.2f}, server's {results[name].get('server_cores', 0):.2f}"
            print(f"{name:>8}: {rows_per_second:10.0f} rows/s ({rows_per_second / first:.2f}), cores of the client {cores}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
