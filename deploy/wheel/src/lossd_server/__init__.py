# SPDX-License-Identifier: Apache-2.0
"""The programs lossd and lossctl, the server as a library, and where they are."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import NoReturn

__version__: str = metadata.version("lossd-server")
__all__ = ["__version__", "library", "program", "run_lossctl", "run_lossd"]


def program(name: str) -> Path:
    """The file of a program, "lossd" or "lossctl"."""
    path = Path(__file__).resolve().parent / "bin" / name
    if not path.is_file():
        raise FileNotFoundError(f"lossd-server has no program {name}: there are lossd and lossctl")
    return path


def library() -> Path:
    """The file of the server as a library, which lossd.embedded() loads."""
    return Path(__file__).resolve().parent / "lib" / "liblossd.so"


def run_lossd() -> NoReturn:
    _run("lossd")


def run_lossctl() -> NoReturn:
    _run("lossctl")


def _run(name: str) -> NoReturn:
    """Takes the place of this process, so that signals and exit status are the program's."""
    os.execv(program(name), [name, *sys.argv[1:]])
