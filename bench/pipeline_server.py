# SPDX-License-Identifier: Apache-2.0
"""For benchmarks: Server starts a lossd server as a process and reads its metrics; Mps starts NVIDIA's Multi-Process Service."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any


START_SECONDS = 120.0  # after which a server that has not started is given up
# The metrics that read_metrics() returns.
FAMILIES = ("lossd_device_busy_seconds_total", "lossd_memory_peak_bytes", "lossd_gpu_memory_used_bytes",
            "lossd_embedding_rows_total", "lossd_head_device_seconds_total", "lossd_rows_total", "process_cpu_seconds_total")
# A sample of the histogram of the phases of slices.
PHASE = re.compile(r'lossd_phase_seconds_(sum|count)\{.*?\bphase="(\w+)"')


class Server:
    """A context manager: a lossd server runs within the block, on free ports of the loopback interface. `target` and `http` are
    its addresses."""

    def __init__(self, program: str, *flags: str, environment: dict[str, str] | None = None) -> None:
        """`environment`: environment variables in addition to those of this process."""
        self._command = [program, "--listen=127.0.0.1:0", "--http=127.0.0.1:0", *flags]
        self._environment = {**os.environ, **(environment or {})}

    def __enter__(self) -> Server:
        """RuntimeError with the end of the server's log if the server does not start."""
        self._folder = tempfile.TemporaryDirectory(prefix="lossd-bench.")
        folder = Path(self._folder.name)
        ports, log = folder / "ports", folder / "log"
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [*self._command, f"--port_file={ports}", f"--checkpoint_dir={folder / 'checkpoints'}"],
                stdout=output, stderr=subprocess.STDOUT, env=self._environment)
        deadline = time.monotonic() + START_SECONDS
        while not (ports.exists() and ports.read_text()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"{self._command[0]} did not come up:\n{self.last_log}")
            time.sleep(0.05)
        addresses = json.loads(ports.read_text())
        self.target: str = addresses["grpc"].split(",")[0]
        self.http: str = addresses["http"]
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.last_log = (Path(self._folder.name) / "log").read_text(errors="replace")[-4000:]
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        return self._process.pid

    def peak_resident_bytes(self) -> int:
        """The most host memory that the server's process had since it started."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def read_metrics(http: str) -> dict[str, float]:
    """The metrics in FAMILIES, by name. The samples of a metric are added up; a metric that the server does not have is missing.
    Also, for each phase of slices, "sum of PHASE" in seconds, and "count of PHASE"."""
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=30) as answer:
        return parse_metrics(answer.read().decode())


def parse_metrics(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition(" ")[0].partition("{")[0]
        if name in FAMILIES:
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        if phase := PHASE.match(line):
            found[f"{phase[1]} of {phase[2]}"] = float(line.rsplit(" ", 1)[1])
    return found


# NVIDIA's Multi-Process Service (MPS) lets the programs on a GPU run at the same time.

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 30.0  # the limit for a call of the control program
CLIENT_SECONDS = 5  # how long MPS waits at its end for a client that still runs, before it ends the client


class Mps:
    """A context manager: MPS runs within the block, with directories of its own. Programs use it if they have the variables of
    `environment` when they first use CUDA."""

    def __init__(self, control: str = CONTROL) -> None:
        self._control = control

    def __enter__(self) -> Mps:
        """RuntimeError if MPS does not start."""
        self._folder = tempfile.TemporaryDirectory(prefix="lossd-mps.")
        folder = Path(self._folder.name)
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
        for each in self.environment.values():
            Path(each).mkdir()
        try:
            self._run([self._control, "-d"])
        except (OSError, subprocess.SubprocessError) as error:
            self._folder.cleanup()
            raise RuntimeError(f"MPS did not start: {error} {getattr(error, 'stderr', None) or ''}".strip()) from None
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self._run([self._control], f"quit -t {CLIENT_SECONDS}\n")
        except (OSError, subprocess.SubprocessError) as error:
            print(f"MPS did not end: {error}", flush=True)
        self._folder.cleanup()

    def log(self) -> str:
        """The end of each log of MPS."""
        paths = sorted(Path(self.environment["CUDA_MPS_LOG_DIRECTORY"]).glob("*.log"))
        return "".join(path.read_text(errors="replace")[-2000:] for path in paths)

    def _run(self, command: list[str], text: str = "") -> None:
        # The output goes to a file and not to pipes, because the daemon would keep pipes open.
        with open(Path(self._folder.name, "output"), "a+", encoding="utf-8") as output:
            done = subprocess.run(command, input=text, stdout=output, stderr=output, text=True, timeout=SECONDS, check=False,
                                  env={**os.environ, **self.environment})
            if done.returncode:
                output.seek(0)
                raise subprocess.CalledProcessError(done.returncode, command, stderr=output.read()[-2000:])


def of_trainer(environment: dict[str, str], priority: int) -> dict[str, str]:
    """`environment` for a trainer. `priority`: 0 gives its work on the GPU the priority of the server's work, 1 a lower one."""
    return {**environment, "CUDA_MPS_CLIENT_PRIORITY": str(priority)} if environment else {}
