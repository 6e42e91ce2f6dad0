# SPDX-License-Identifier: Apache-2.0
"""The version of this package, and how it compares with a server's."""

from __future__ import annotations

from importlib import metadata

VERSION: str = metadata.version("lossd")


def compared(server: str) -> tuple[str, str]:
    """What the version of a server is beside this client's, and what to update; versions are "1.2.3"."""
    theirs, ours = _numbers(server), _numbers(VERSION)
    if not theirs or theirs == ours:
        return "of another version than", "use the same version of both"
    return ("older than", "update the server") if theirs < ours else ("newer than", "update the client")


def _numbers(version: str) -> tuple[int, ...]:
    """() if it is not made of numbers."""
    parts = version.split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()
