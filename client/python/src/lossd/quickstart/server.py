# SPDX-License-Identifier: Apache-2.0
"""A lossd of the quickstart's own, on free ports of the loopback interface."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


class NoServer(Exception):
    """There is no program, or it did not start; says what to do."""


def find_program(given: str | None = None) -> str:
    """The lossd program: the given one, that of the package lossd-server, or the one on the PATH."""
    if given is not None:
        if not Path(given).is_file():
            raise NoServer(f"there is no file {given}")
        return given
    try:
        return str(importlib.import_module("lossd_server").program("lossd"))
    except ImportError:
        pass
    if found := shutil.which("lossd"):
        return found
    raise NoServer("there is no lossd program: the wheel lossd_server-*.whl of a release or of `make packages` brings one, --program "
                   "names one, and --server names a server that runs already")


class OwnServer:
    """Runs from `with` to the end of it."""

    def __init__(self, program: str | None = None) -> None:
        self._program = find_program(program)
        self.target = ""

    def __enter__(self) -> OwnServer:
        self._folder = tempfile.TemporaryDirectory(prefix="lossd-quickstart.")
        folder = Path(self._folder.name)
        ports, log = folder / "ports", folder / "log"
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [self._program, "--listen=127.0.0.1:0", "--http=127.0.0.1:0", f"--port_file={ports}",
                 f"--checkpoint_dir={folder / 'checkpoints'}"], stdout=output, stderr=subprocess.STDOUT)
        begin = time.monotonic()
        while not (ports.exists() and ports.read_text()):
            if self._process.poll() is not None or time.monotonic() - begin > _START_SECONDS:
                what = log.read_text(errors="replace").strip() or "it wrote nothing"
                self.__exit__(None, None, None)
                raise NoServer(f"{self._program} did not start: {what}")
            time.sleep(0.02)
        addresses = json.loads(ports.read_text())
        self.target = addresses["grpc"]
        print(f"started {self._program}: gRPC on {self.target}, status page on http://{addresses['http']}/")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()
