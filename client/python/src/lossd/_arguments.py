# SPDX-License-Identifier: Apache-2.0
"""Errors of calls with arguments that do not exist."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def known_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose TypeError for an unknown keyword argument names the one that was probably meant.

    Its signature and documentation stay visible.
    """
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    called = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in names:
                raise TypeError(f"{called}() has no argument {name!r}{_suggestion(name, names)}")
        return function(*args, **kwargs)

    return checked


def _suggestion(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}"
