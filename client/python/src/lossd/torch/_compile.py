# SPDX-License-Identifier: Apache-2.0
"""What torch.compile leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., object])


def outside_of_compile(function: F) -> F:
    """A function that runs as it is when a compiled one calls it: the graph is cut there once, and nothing is said.

    What talks to a server cannot be compiled. Without this, torch.compile would follow the calls into the client and cut
    the graph in many places. torch 1.13 has no compiler, torch 2.0 no torch.compiler.disable.
    """
    disable = getattr(getattr(torch, "compiler", None), "disable", None)
    return function if disable is None else cast(F, disable(function))
