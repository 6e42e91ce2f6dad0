# SPDX-License-Identifier: Apache-2.0
"""A lossd of its own for a test: starts the program that LOSSD_BINARY names on a free port of the loopback.

With LOSSD_TEST_SOCKETS=unix it listens on a Unix socket instead. LOSSD_TEST_FLAGS are further flags of every server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path


def on_unix_sockets() -> bool:
    return os.environ.get("LOSSD_TEST_SOCKETS") == "unix"


class ServerProcess:
    def __init__(self, *flags: str, program: str = "LOSSD_BINARY") -> None:
        """`program`: the environment variable that names it."""
        self._program = os.environ[program]
        self._folder = tempfile.TemporaryDirectory(prefix="lossd-test.")
        self.folder = Path(self._folder.name)
        self._flags = (*flags, *os.environ.get("LOSSD_TEST_FLAGS", "").split())
        self._process: subprocess.Popen[bytes] | None = None
        self.target = f"unix:{self.folder}/grpc" if on_unix_sockets() else "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Starts it, at the address it had before if it had one."""
        ports = self.folder / "ports"
        ports.unlink(missing_ok=True)
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._program, f"--listen={self.target}", "--http=", f"--port_file={ports}",
                 f"--checkpoint_dir={self.folder / 'checkpoints'}", "--threads=2", *self._flags],
                stdout=log, stderr=subprocess.STDOUT)
        for _ in range(2400):  # two minutes, on a machine that does other work too
            if ports.exists() and ports.read_text():
                self.target = json.loads(ports.read_text())["grpc"]
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError("lossd did not come up:\n" + (self.folder / "log").read_text())

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def ended(self) -> int | None:
        """Its exit status if it has ended, by itself or not."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """As a crash ends it."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)
        self._folder.cleanup()

    def _end(self, how: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(timeout=60)
