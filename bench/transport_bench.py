#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares transports of rows on one host: rows per second and cores of each, and the latency of small microbatches.

    python3 bench/transport_bench.py --bin=bin --json=transports.json
    python3 bench/transport_bench.py --bin=build/release/bin --backend=cpu --shapes=256x512 --data=random --seconds=1

The program starts a server for each head, measures it with `lossctl bench`, and stops it. With `--kernels`, `cuda_bench loss`
also computes the same chunks in process, for the same time. Compare only results of the same run with each other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

from pipeline_server import Server

SHAPES = {"gemma2-2b": (2304, 256000), "llama3-8b": (4096, 128256), "phi3.5-mini": (3072, 32064)}
HEAD = "bench"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="folder of lossd, lossctl and cuda_bench")
    parser.add_argument("--shapes", default="phi3.5-mini,llama3-8b", help="names of shapes, or DxV")
    parser.add_argument("--gradients", default="exact,sampled")
    parser.add_argument("--data", default="real", choices=("real", "random"))
    parser.add_argument("--ways", default="shared_memory,cuda_ipc,grpc:1,grpc:4,grpc",
                        help="transports; with a number of connections behind a colon, else as many as help; cuda_ipc@1: "
                             "with the trainer's rows on GPU 1")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--latency", default="", help="numbers of rows of small microbatches, one at a time; empty: none")
    parser.add_argument("--latency-what", default="all,dx,loss")
    parser.add_argument("--kernels", action="store_true", help="also time the kernels in process")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--flags", default="", help="further flags of the server, separated by spaces")
    parser.add_argument("--label", default="", help="of these runs, recorded in the results")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path, help="file for the results; those that it has are kept")
    return parser.parse_args()


def shape_of(name: str) -> tuple[int, int]:
    if name in SHAPES:
        return SHAPES[name]
    hidden, _, vocab = name.partition("x")
    return int(hidden), int(vocab)


class CpuSamples:
    """A context manager: samples the CPU time of a process within the block. cores() then tells how many cores it used."""

    _INTERVAL = 0.02  # seconds

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._samples: list[tuple[float, float]] = []  # (time of the sample, CPU seconds until then)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> CpuSamples:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        ticks = os.sysconf("SC_CLK_TCK")
        while not self._over.wait(self._INTERVAL):
            try:
                fields = self._stat.read_text().rpartition(")")[2].split()
            except OSError:
                return  # the process has ended
            self._samples.append((time.monotonic(), (int(fields[11]) + int(fields[12])) / ticks))

    def cores(self, seconds: float) -> float:
        """The cores that the process used in the last `seconds` of the samples."""
        if len(self._samples) < 2:
            return 0.0
        end, cpu = self._samples[-1]
        begin, before = next(sample for sample in self._samples if sample[0] >= end - seconds)
        return (cpu - before) / max(end - begin, self._INTERVAL)


def lossctl(arguments: argparse.Namespace, server: Server, *words: str) -> dict[str, Any]:
    """Runs lossctl and returns the JSON that it prints. If lossctl measured something, adds the cores that lossctl and the server
    used meanwhile. RuntimeError with lossctl's error message if it fails.
    """
    command = [str(arguments.bin / "lossctl"), "--server", server.target, "-o", "json", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with CpuSamples(process.pid) as of_client, CpuSamples(server.pid) as of_server:
        output, error = process.communicate(timeout=600)
    if process.returncode != 0:
        raise RuntimeError(f"lossctl {' '.join(words)}: {error}")
    found: dict[str, Any] = json.loads(output)
    if "seconds" in found:
        found["client_cores"] = round(of_client.cores(found["seconds"]), 2)
        found["server_cores"] = round(of_server.cores(found["seconds"]), 2)
    return found


class Runs:
    """The measurements. Each method runs one, prints it, and adds it to the results file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        path = arguments.json
        self._found: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path is not None and path.exists() else []

    def _add(self, result: dict[str, Any]) -> None:
        """Adds a result and writes the file, so that the file has all results until then if the program is interrupted."""
        arguments = self._arguments
        self._found.append(result)
        if arguments.json is not None:
            content = {"date": str(date.today()), "commit": arguments.commit, "cores": os.cpu_count(), "runs": self._found}
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")

    def _bench(self, server: Server, shape: str, gradients: str, *words: str) -> dict[str, Any]:
        arguments = self._arguments
        real = ["--data", "real", "--overwrite-weight"] if arguments.data == "real" else []
        result = lossctl(arguments, server, "bench", HEAD, "--gradients", gradients, *real,
                         "--seconds", str(arguments.seconds), *words)
        result |= {"shape": shape, "gradients": gradients, "label": arguments.label}
        self._add(result)
        return result

    def throughput(self, server: Server, shape: str, gradients: str, way: str) -> None:
        where, _, channels = way.partition(":")
        transport, _, gpu = where.partition("@")
        words = (["--channels", channels] if channels else []) + (["--gpu", gpu] if gpu else [])
        result = self._bench(server, shape, gradients, "--rows", str(self._arguments.rows), "--transport", transport,
                             "--in-flight", str(self._arguments.in_flight), *words)
        print(f"{shape:12} {gradients:8} {way:14} {result['rows_per_second']:12,.0f} rows/s  "
              f"{result['sent_bytes_per_second'] / 1e9:5.2f} GB/s each way  {result['channels']} connections, "
              f"{result['streams']} streams, cores {result['client_cores']:.2f} + {result['server_cores']:.2f}", flush=True)

    def latency(self, server: Server, shape: str, gradients: str, rows: str, what: str) -> None:
        result = self._bench(server, shape, gradients, "--rows", rows, "--what", what, "--in-flight", "1", "--channels", "1")
        times = result["latency_seconds"]
        print(f"{shape:12} {gradients:8} {rows:>4} rows, {what:4}: mean {times['mean'] * 1e3:.3f} ms, "
              f"p50 {times['p50'] * 1e3:.3f}, p99 {times['p99'] * 1e3:.3f}", flush=True)

    def kernels(self, shape: str, gradients: str) -> None:
        """Measures the kernels in process: the median of so many microbatches that they take about as long as a run of the
        client. Measures twice, because the first run gives the number of microbatches."""
        arguments = self._arguments
        name = shape if shape in SHAPES else f"{arguments.rows}x" + "x".join(map(str, shape_of(shape)))
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            iterations = 10
            for _ in range(2):
                subprocess.run([str(arguments.bin / "cuda_bench"), "loss", f"--shapes={name}", f"--gradients={gradients}",
                                "--data=real", "--nonorm", "--noerrors", "--noparts", f"--iterations={iterations}",
                                f"--out={file.name}"], check=True, capture_output=True, timeout=600)
                result = json.loads(Path(file.name).read_text())["loss"][0]
                milliseconds = result["loss_and_gradients"]["median_ms"]
                iterations = max(10, int(arguments.seconds * 1e3 / milliseconds))
        rate = arguments.rows / milliseconds * 1e3
        self._add({"shape": shape, "gradients": gradients, "label": "kernels", "rows_per_second": rate})
        print(f"{shape:12} {gradients:8} kernels        {rate:12,.0f} rows/s", flush=True)


def main() -> None:
    arguments = parse_arguments()
    runs = Runs(arguments)
    for shape in arguments.shapes.split(","):
        hidden, vocab = shape_of(shape)
        with Server(str(arguments.bin / "lossd"), f"--backend={arguments.backend}", *arguments.flags.split()) as server:
            lossctl(arguments, server, "create", HEAD, "--hidden", str(hidden), "--vocab", str(vocab))
            for gradients in arguments.gradients.split(","):
                for way in filter(None, arguments.ways.split(",")):
                    runs.throughput(server, shape, gradients, way)
                for rows in filter(None, arguments.latency.split(",")):
                    for what in arguments.latency_what.split(","):
                        runs.latency(server, shape, gradients, rows, what)
        if arguments.kernels:
            for gradients in arguments.gradients.split(","):
                runs.kernels(shape, gradients)


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, subprocess.SubprocessError) as error:
        sys.exit(f"transport_bench: {error}")
