# SPDX-License-Identifier: Apache-2.0
"""The name under which a program trains: servers put it into a head's history and into words (HeadHistory.run)."""

from __future__ import annotations

import os
import secrets
import socket

from lossd import errors

_MOST_CHARACTERS = 128
_MOST_OF_HOST = 64


def given_or_default(run: str | None) -> str:
    """`run`; None: the environment variable LOSSD_RUN, else a name that no other client has.

    InvalidArgument unless it has at most 128 printable characters.
    """
    given, source = (run, "run") if run is not None else (os.environ.get("LOSSD_RUN") or None, "LOSSD_RUN")
    if given is None:
        return _own_name()
    if not isinstance(given, str):
        raise errors.InvalidArgument(f"{source} is {given!r}; it must be a str")
    if len(given) > _MOST_CHARACTERS or not given.isprintable():
        shown = given if len(given) <= _MOST_CHARACTERS else f"{given[:_MOST_CHARACTERS]}... ({len(given)} characters)"
        raise errors.InvalidArgument(f"{source} is {shown!r}; it must be at most {_MOST_CHARACTERS} printable characters")
    return given


def _own_name() -> str:
    """"<host>:<pid>-<8 hexadecimal digits>"."""
    host = "".join(character for character in socket.gethostname() if character.isprintable())
    return f"{host[:_MOST_OF_HOST]}:{os.getpid()}-{secrets.token_hex(4)}"
