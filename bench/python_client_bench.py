"""Rows per second through the Python client, beside `lossctl bench` with the same settings against the same server.

    python3 bench/python_client_bench.py --lossctl build/release/bin/lossctl --channels 4 --in_flight 4

Every microbatch asks for dL/dx and accumulates dL/dW, which is discarded at the end. The head is made for the purpose
and deleted afterwards. With --torch hidden states are CUDA tensors that pass through lossd.torch.LossHead: copies to
and from the device are in the time.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import subprocess
import time
from collections.abc import Callable
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
    parser.add_argument("--slice_bytes", type=int, default=2 << 20)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--lossctl", help="path of lossctl, to compare with")
    parser.add_argument("--torch", action="store_true", help="also through LossHead with CUDA tensors")
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args()


def measure(start: Any, finish: Any, arguments: argparse.Namespace) -> dict[str, float]:
    """start(i) begins a microbatch, finish(what it returned) ends it; `in_flight` of them at a time."""
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
    run(lambda: len(latencies) < 2 * arguments.in_flight)  # warms up
    latencies.clear()
    begin = time.monotonic()
    run(lambda: time.monotonic() - begin < arguments.seconds)
    seconds = time.monotonic() - begin
    return {"rows_per_second": len(latencies) * arguments.rows / seconds,
            "latency_p50_ms": float(np.percentile(latencies, 50)) * 1e3,
            "latency_p99_ms": float(np.percentile(latencies, 99)) * 1e3}


def through_numpy(client: lossd.Client, arguments: argparse.Namespace) -> dict[str, float]:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((arguments.rows, arguments.hidden_size), np.float32)
    hidden = (values.view(np.uint32) >> 16).astype(np.uint16)
    targets = rng.integers(0, arguments.vocab_size, arguments.rows).astype(np.int32)
    outputs = [np.empty_like(hidden) for _ in range(arguments.in_flight)]

    def start(i: int) -> lossd.PendingLoss:
        return client.compute_loss_async(
            HEAD, hidden, targets, dtype="bf16", step=0, id=i, accumulate=True,
            grad_hidden=outputs[i % arguments.in_flight], streams=arguments.streams or None,
            slice_bytes=arguments.slice_bytes)

    return measure(start, lossd.PendingLoss.wait, arguments)


def through_torch(client: lossd.Client, arguments: argparse.Namespace) -> dict[str, float]:
    import torch
    from lossd.torch import HeadOptimizer, LossHead
    head = LossHead(client, HEAD, streams=arguments.streams or None, slice_bytes=arguments.slice_bytes)
    hidden = torch.randn(arguments.rows, arguments.hidden_size, device="cuda", dtype=torch.bfloat16)
    hidden.requires_grad_()
    targets = torch.randint(0, arguments.vocab_size, (arguments.rows,))

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
               f"--in-flight={arguments.in_flight}", f"--slice-bytes={arguments.slice_bytes}",
               f"--seconds={arguments.seconds}"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    arguments = parse_arguments()
    with lossd.Client(arguments.server, channels=arguments.channels) as client:
        client.create_head(HEAD, hidden_size=arguments.hidden_size, vocab_size=arguments.vocab_size,
                           optimizer_state="none")
        try:
            results: dict[str, Any] = {"settings": vars(arguments), "python": through_numpy(client, arguments)}
            client.zero_gradients(HEAD, 0)
            if arguments.torch:
                results["torch"] = through_torch(client, arguments)
            if arguments.lossctl:
                results["lossctl"] = through_lossctl(arguments)
        finally:
            client.delete_head(HEAD)
    for name in ("lossctl", "python", "torch"):
        if name in results:
            share = results[name]["rows_per_second"] / results.get("lossctl", results["python"])["rows_per_second"]
            print(f"{name:>8}: {results[name]['rows_per_second']:10.0f} rows/s ({share:.2f})")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
