# SPDX-License-Identifier: Apache-2.0
"""Which server a client means, and what it shows there: arguments, environment and contexts, in that order."""

from __future__ import annotations

import os

from lossd import _contexts, _target, errors
from lossd._credentials import Credentials


def resolve(target: str | None, context: str | None, ca: str | None, cert: str | None, key: str | None,
            token: str | None) -> tuple[str, Credentials]:
    """The address of the server, and the credentials for it: those of a context go only to its server."""
    if target is not None and context is not None:
        raise errors.InvalidArgument(f"target is {target!r} and context is {context!r}; give one of them")
    if context is None and target is None and not os.environ.get("LOSSD_SERVER"):
        context = os.environ.get("LOSSD_CONTEXT") or None
    if context is None:
        return _target.given_or_environment(target), Credentials.given_or_environment(ca, cert, key, token)
    named, named_token = _contexts.named(context, with_token=token is None and not os.environ.get("LOSSD_TOKEN"))
    if cert is None and key is None and not os.environ.get("LOSSD_CERT") and not os.environ.get("LOSSD_KEY"):
        cert, key = named.cert, named.key  # a pair
    return named.server, Credentials.given_or_environment(
        _given(ca, "LOSSD_CA", named.ca), cert, key, _given(token, "LOSSD_TOKEN", named_token))


def _given(argument: str | None, variable: str, stored: str) -> str | None:
    """What Credentials.given_or_environment is to be given."""
    return argument if argument is not None or os.environ.get(variable) else stored
