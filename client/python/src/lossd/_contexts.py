# SPDX-License-Identifier: Apache-2.0
"""Named servers, from the file that `lossctl context` keeps. client/cli/context.h describes it and reads it alike."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lossd import _target, errors
from lossd._target import Credentials
from lossd._shown import exact_bytes
from lossd.v1 import types_pb2


# Which server a client means, and what it shows there: arguments, environment and contexts, in that order.


def resolve(target: str | None, context: str | None, ca: str | None, cert: str | None, key: str | None,
            token: str | None) -> tuple[str, Credentials]:
    """The address of the server, and the credentials for it: those of a context go only to its server."""
    if target is not None and context is not None:
        raise errors.InvalidArgument(f"target is {target!r} and context is {context!r}; give one of them")
    if context is None and target is None and not os.environ.get("LOSSD_SERVER"):
        context = os.environ.get("LOSSD_CONTEXT") or None
    if context is None:
        return _target.given_or_environment(target), Credentials.given_or_environment(ca, cert, key, token)
    found, found_token = named(context, with_token=token is None and not os.environ.get("LOSSD_TOKEN"))
    if cert is None and key is None and not os.environ.get("LOSSD_CERT") and not os.environ.get("LOSSD_KEY"):
        cert, key = found.cert, found.key  # a pair
    return found.server, Credentials.given_or_environment(
        _given(ca, "LOSSD_CA", found.ca), cert, key, _given(token, "LOSSD_TOKEN", found_token))


def _given(argument: str | None, variable: str, stored: str) -> str | None:
    """What Credentials.given_or_environment is to be given."""
    return argument if argument is not None or os.environ.get(variable) else stored


_MAX_FILE_BYTES = 1 << 20
_MAX_CONTEXTS = 1000
_MAX_TOKEN_BYTES = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class NamedServer:
    """One of them. Paths are as the file has them; empty: not given."""

    server: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    token_file: str = ""
    http: str = ""


_FIELDS = tuple(each.name for each in fields(NamedServer))


def named(name: str, with_token: bool = True) -> tuple[NamedServer, str]:
    """The server of that name, its paths absolute, and its token ("": none). NotFound, or InvalidArgument and
    PermissionDenied naming the file. Without `with_token`, the file of the token is not read."""
    file = path()
    contexts = read(file)[1]
    if name not in contexts:
        known = f"; it has {', '.join(sorted(contexts))}" if contexts else ", which has none"
        raise errors.NotFound(f'there is no context "{name}" in {file or "any file"}{known}',
                              types_pb2.ErrorDetail(field="context", value=name))
    found = contexts[name]
    folder = os.path.dirname(os.path.abspath(file))

    def beside(file: str) -> str:
        return os.path.join(folder, file) if file else ""

    token_file = beside(found.token_file)
    return (NamedServer(found.server, beside(found.ca), beside(found.cert), beside(found.key), token_file, found.http),
            _token(token_file) if token_file and with_token else "")


def path() -> str:
    """The path of the file; "" if there is no home."""
    if given := os.environ.get("LOSSD_CONFIG"):
        return given
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if not folder.startswith("/"):
        home = os.environ.get("HOME")
        if not home:
            return ""
        folder = f"{home}/.config"
    return f"{folder}/lossd/contexts.json"


def read(file: str) -> tuple[str, Mapping[str, NamedServer]]:
    """The name of the current context, "" if there is none, and all of them. No contexts if there is no file."""
    content = _private(file, stat.S_IWGRP | stat.S_IWOTH, "change", _MAX_FILE_BYTES) if file else None
    if content is None:
        return "", {}
    return parse(content, file)


def parse(content: bytes, file: str) -> tuple[str, Mapping[str, NamedServer]]:
    """The same from what was read from `file`."""
    try:
        document = json.loads(content.decode("utf-8"), object_pairs_hook=_Once)
    except json.JSONDecodeError as error:
        raise errors.InvalidArgument(f"{file}:{error.lineno}: is not JSON: {error.msg}") from None
    except (UnicodeDecodeError, RecursionError):
        raise errors.InvalidArgument(f"{file} is not JSON") from None
    top = _object(file, "", document, ("current", "contexts"))
    current = _text(file, "current", top.get("current", ""), empty=True)
    contexts = {name: _server(file, f"contexts.{name}", value)
                for name, value in _object(file, "contexts", top.get("contexts", {})).items()}
    if len(contexts) > _MAX_CONTEXTS:
        raise _wrong(file, "contexts", f"have at most {_MAX_CONTEXTS} names", str(len(contexts)))
    for name in contexts:
        if not _NAME.fullmatch(name):
            raise _wrong(file, "contexts",
                         "have names of 1 to 64 characters A-Z a-z 0-9 . _ -, a letter or digit first", name)
    if current and current not in contexts:
        raise _wrong(file, "current", "be one of the contexts", current)
    return current, contexts


class _Once(dict[str, Any]):
    """An object of the file, and a name in it that is there twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.twice = next((name for name in names if names.count(name) > 1), None) if len(self) < len(pairs) else None


def _server(file: str, where: str, value: object) -> NamedServer:
    entry = _object(file, where, value, _FIELDS)
    server = NamedServer(**{name: _text(file, f"{where}.{name}", text) for name, text in entry.items()})
    if not server.server:
        raise _wrong(file, f"{where}.server", "be given", "nothing")
    if bool(server.cert) != bool(server.key):
        missing = "key" if server.cert else "cert"
        raise _wrong(file, f"{where}.{missing}", "be given, as the other of cert and key is", "nothing")
    if server.cert and not server.ca:
        raise _wrong(file, f"{where}.ca", "be given with cert", "nothing")
    _target.check(server.server, f"{file}: {where}.server is '{server.server}'")
    return server


def _object(file: str, where: str, value: object, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    if not isinstance(value, _Once):
        if value == {}:
            return {}
        raise _wrong(file, where or "the file", "be an object", json.dumps(value))
    prefix = f"{where}." if where else ""
    if value.twice is not None:
        raise _wrong(file, prefix + value.twice, "be given once", "a second time")
    for name in value:
        if names is not None and name not in names:
            rule = "be current or contexts" if not where else f"be one of {', '.join(names)}"
            raise _wrong(file, prefix + name, rule, name)
    return value


def _text(file: str, where: str, value: object, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise _wrong(file, where, "be a string", json.dumps(value))
    if not value and not empty:
        raise _wrong(file, where, "not be empty", '""')
    return value


def _wrong(file: str, where: str, rule: str, value: str) -> errors.InvalidArgument:
    return errors.InvalidArgument(f"{file}: {where} must {rule}, got {value}",
                                  types_pb2.ErrorDetail(field=where, value=value))


def _token(file: str) -> str:
    content = _private(file, 0, "read", _MAX_TOKEN_BYTES + 2)
    if content is None:
        raise errors.NotFound(f"{file} cannot be read: No such file or directory")
    token = content.decode("latin-1").strip()
    if not token or len(token) > _MAX_TOKEN_BYTES or not all("!" <= character <= "~" for character in token):
        raise errors.InvalidArgument(  # which does not say what is there
            f"{file} must have one line, a token of 1 to {_MAX_TOKEN_BYTES} visible ASCII characters")
    return token


def _private(file: str, forbidden: int, verb: str, most: int) -> bytes | None:
    """The content of a file that others may not write, or with `forbidden` 0 not even read; None: there is none."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise errors.PermissionDenied(f"{file} cannot be read: {error.strerror}") from None
    with open(descriptor, "rb") as opened:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise errors.InvalidArgument(f"{file} is not a file")
        if found.st_uid not in (os.geteuid(), 0):
            raise errors.PermissionDenied(f"{file} belongs to another user ({found.st_uid})")
        if not forbidden:  # a group may read what belongs to root, as systemd and Kubernetes hand secrets out
            forbidden = stat.S_IRWXO | (stat.S_IRWXG & ~stat.S_IRGRP if found.st_uid == 0 else stat.S_IRWXG)
        if found.st_mode & forbidden:
            raise errors.PermissionDenied(
                f"{file} has the mode {stat.S_IMODE(found.st_mode):04o}, so others can {verb} it; `chmod 600 {file}` mends that")
        content = opened.read(most + 1)
    if len(content) > most:
        raise errors.InvalidArgument(f"{file} has more than {exact_bytes(most)}")
    return content
