# SPDX-License-Identifier: Apache-2.0
"""A fake server of scripted faults (tests/client/scripted_server.h): the program that LOSSD_FAKE_SERVER names."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any


class ScriptedServer:
    """`script`: what a golden case of kind "repeats" says of the server."""

    def __init__(self, script: dict[str, Any]) -> None:
        self._process = subprocess.Popen([os.environ["LOSSD_FAKE_SERVER"], "--scripted"], text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.target = self._ask(json.dumps(
            {name: script[name] for name in ("limits", "faults", "versions") if name in script}))

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def log(self) -> Any:
        """What has reached the server, as cases write it."""
        return json.loads(self._ask("log"))

    def stop(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0
