# SPDX-License-Identifier: Apache-2.0
"""How a server is reached: its address, a gRPC target name, and the credentials that a connection takes. No I/O."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from lossd import errors
from lossd.v1 import types_pb2

DEFAULT_PORT = 7070  # of lossd's --listen
_VARIABLE = "LOSSD_SERVER"
_WITH_HOST = ("dns", "ipv4", "ipv6")
_WITHOUT_HOST = ("unix", "unix-abstract", "vsock", "xds", "google-c2p")
_WITH_TLS = ("https", "grpcs")


def given_or_environment(target: str | None) -> str:
    """A target that is well formed; None: the one that LOSSD_SERVER names, or this machine's."""
    if target is not None:
        check(target)
        return target
    named = os.environ.get(_VARIABLE)
    if not named:
        return f"127.0.0.1:{DEFAULT_PORT}"
    check(named, f"target is {named!r} (from {_VARIABLE})")
    return named


def check(target: str, subject: str = "") -> None:
    """InvalidArgument with what to write instead if this cannot be the address of a server.

    A "host:port", or a target name of gRPC's with a scheme of its own ("dns:///host:port", "unix:/run/lossd").
    `subject`: what messages begin with.
    """
    problem = _problem(target)
    if problem:
        raise errors.InvalidArgument(f"{subject or f'target is {target!r}'}; {problem}",
                                     types_pb2.ErrorDetail(field="target", value=str(target)))


def _split_scheme(target: str) -> tuple[str, str]:
    """The scheme, "" if there is none that gRPC knows, and what comes behind it."""
    scheme, colon, rest = target.partition(":")
    return (scheme, rest) if colon and scheme in (*_WITH_HOST, *_WITHOUT_HOST) else ("", target)


def _problem(target: object) -> str:
    if not isinstance(target, str):
        return f"it must be a string, host:port, as in '127.0.0.1:{DEFAULT_PORT}'"
    if not target:
        return f"it must be not empty, but host:port, as in '127.0.0.1:{DEFAULT_PORT}'"
    if any(character.isspace() for character in target):
        return "it has white space in it"
    scheme, rest = _split_scheme(target)
    if scheme in _WITHOUT_HOST:
        return ""
    if scheme == "dns" and rest.startswith("//"):
        rest = rest[2:].partition("/")[2]  # without the name server
    if url := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", rest):
        return _url_problem(url.group(1), rest[url.end():])
    problems = (_address_problem(address) for address in rest.split(","))
    return next(filter(None, problems), "")


def _url_problem(scheme: str, rest: str) -> str:
    host = rest.partition("/")[0]
    address = host if re.search(r":\d+$", host) else f"{host}:{DEFAULT_PORT}"
    tls = ". TLS is used if a certificate authority is given: ca=, or LOSSD_CA" if scheme.lower() in _WITH_TLS else ""
    return f"write the address without '{scheme}://': {address!r}{tls}"


def _address_problem(address: str) -> str:
    """`address`: "host:port" if it is right."""
    address, slash, path = address.partition("/")
    if slash:
        return f"the address of a server has no path {slash + path!r}: {address!r}"
    if address.count(":") > 1 and not address.startswith("["):
        return f"an IPv6 address stands in brackets: '[{address}]:{DEFAULT_PORT}'"
    host, colon, port = ("", "", "") if address.endswith("]") else address.rpartition(":")
    if not colon or not port:
        return f"it has no port; lossd's is {DEFAULT_PORT} unless its --listen says otherwise: " \
               f"'{address.removesuffix(':')}:{DEFAULT_PORT}'"
    if not host:
        return f"it has no host: '127.0.0.1:{port}' is this machine"
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        return f"its port {port!r} is not a number from 1 to 65535"
    return ""


@dataclass(frozen=True)
class Credentials:
    """`ca`, `cert` and `key` are paths of PEM files, read when channels are made. The connection has TLS if there is a
    `ca`. Empty: none."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    token: str = field(default="", repr=False)

    @staticmethod
    def given_or_environment(ca: str | None, cert: str | None, key: str | None, token: str | None) -> Credentials:
        """None: the value of LOSSD_CA, LOSSD_CERT, LOSSD_KEY or LOSSD_TOKEN."""
        def value(given: str | None, variable: str) -> str:
            return os.fspath(given) if given is not None else os.environ.get(variable, "")

        return Credentials(value(ca, "LOSSD_CA"), value(cert, "LOSSD_CERT"), value(key, "LOSSD_KEY"),
                           value(token, "LOSSD_TOKEN").strip())
