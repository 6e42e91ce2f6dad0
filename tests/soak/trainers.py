# SPDX-License-Identifier: Apache-2.0
"""The process of a trainer (trainer.py), killed and started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


class Trainer:
    """One trainer at a time; its log goes on over restarts. For one thread at a time."""

    def __init__(self, target: str, head: str, log: Path) -> None:
        self._command = [sys.executable, str(Path(__file__).with_name("trainer.py")), target, head, str(log)]
        self._log = log
        self.ended_by_themselves = 0  # which none does unless something is wrong; it says what on its standard error
        self._process = subprocess.Popen(self._command)

    def restart(self) -> None:
        """kill -9, at whatever moment this is, and a new one."""
        self.kill()
        self._process = subprocess.Popen(self._command)

    def kill(self) -> None:
        if self._process.poll() is not None:
            self.ended_by_themselves += 1
        self._process.kill()
        self._process.wait()

    def lines(self) -> list[str]:
        """What all trainers so far have written; kill -9 leaves no half lines, they are written at once."""
        return self._log.read_text().splitlines() if self._log.exists() else []
