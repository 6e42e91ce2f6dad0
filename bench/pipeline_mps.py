# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's Multi-Process Service (MPS) of benchmarks, by which the programs on a GPU run at the same time."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 30.0  # for the control program to start or to end
CLIENT_SECONDS = 5  # for a client that is still there, before it is ended


class Mps:
    """MPS with directories of its own, from entering the context to leaving it. Programs use it that are started with
    `environment`, before they use CUDA."""

    def __init__(self, control: str = CONTROL) -> None:
        self._control = control

    def __enter__(self) -> Mps:
        """RuntimeError if it does not start."""
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
        """The end of what its programs have said."""
        paths = sorted(Path(self.environment["CUDA_MPS_LOG_DIRECTORY"]).glob("*.log"))
        return "".join(path.read_text(errors="replace")[-2000:] for path in paths)

    def _run(self, command: list[str], text: str = "") -> None:
        # Not captured through pipes: the daemon would keep them open.
        with open(Path(self._folder.name, "output"), "a+", encoding="utf-8") as output:
            done = subprocess.run(command, input=text, stdout=output, stderr=output, text=True, timeout=SECONDS, check=False,
                                  env={**os.environ, **self.environment})
            if done.returncode:
                output.seek(0)
                raise subprocess.CalledProcessError(done.returncode, command, stderr=output.read()[-2000:])


def of_trainer(environment: dict[str, str], priority: int) -> dict[str, str]:
    """`environment` for a program whose work yields to the server's: `priority` 0 is that of the server, 1 is below it."""
    return {**environment, "CUDA_MPS_CLIENT_PRIORITY": str(priority)} if environment else {}
