# SPDX-License-Identifier: Apache-2.0
"""What a fixed piece of work takes another process on this machine now: what latencies are compared with.

The machine of a soak run may do other work too; then this takes as much longer as an answer of the server does.
"""

from __future__ import annotations

import subprocess
import sys
import time

_WORK = """
import sys
import numpy as np
a = np.ones((64, 256), np.float32)
b = np.ones((256, 256), np.float32)
for line in sys.stdin:
    for _ in range(4):
        a @ b
    print("done", flush=True)
"""


class Control:
    """A process that computes about as much as the server does for one measured call. For one thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True, bufsize=1)
        self.seconds()  # it has started

    def seconds(self) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        begin = time.monotonic()
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError("the process that latencies are compared with has ended")
        return time.monotonic() - begin

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
