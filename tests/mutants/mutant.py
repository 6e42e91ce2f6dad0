# SPDX-License-Identifier: Apache-2.0
"""Which of the small changes ("mutants") that mutate_python.py has put into the client is in force: mutant.h in Python.

mutants.py copies it into the changed package as lossd._mutant. It is not part of lossd. The number of the change is in
LOSSD_MUTANT. If LOSSD_MUTANT_REACHED names a file, its byte number n becomes 1 when place n is reached, in any process
that has the variable.
"""

from __future__ import annotations

import mmap
import os

_active = int(os.environ.get("LOSSD_MUTANT", "0"))
_reached: mmap.mmap | None = None
try:
    with open(os.environ["LOSSD_MUTANT_REACHED"], "r+b") as _file:
        _reached = mmap.mmap(_file.fileno(), 0)
except (KeyError, OSError):  # not asked for, or in a process of a user who may not write there
    pass


def on(number: int) -> bool:
    if _reached is not None and number < len(_reached):
        _reached[number] = 1
    return number == _active
