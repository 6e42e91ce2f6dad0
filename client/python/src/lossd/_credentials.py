"""How a client proves who it is and knows who the server is, and channels made so. client/cpp/credentials.h does alike."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from lossd import errors

_SCHEMES = ("dns:///", "dns:", "ipv4:", "ipv6:")
_PROBE_SECONDS = 2.0
_DEFAULT_TARGET = "127.0.0.1:7070"


def target_from_environment() -> str:
    return os.environ.get("LOSSD_SERVER") or _DEFAULT_TARGET


@dataclass(frozen=True)
class Credentials:
    """`ca`, `cert` and `key` are paths of PEM files, read when channels are made. The connection has TLS if there is a
    `ca`. Empty: none."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    token: str = ""

    @staticmethod
    def given_or_environment(ca: str | None, cert: str | None, key: str | None, token: str | None) -> Credentials:
        """None: the value of LOSSD_CA, LOSSD_CERT, LOSSD_KEY or LOSSD_TOKEN."""
        def value(given: str | None, variable: str) -> str:
            return os.fspath(given) if given is not None else os.environ.get(variable, "")

        return Credentials(value(ca, "LOSSD_CA"), value(cert, "LOSSD_CERT"), value(key, "LOSSD_KEY"),
                           value(token, "LOSSD_TOKEN").strip())

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            missing = "key" if self.cert else "cert"
            raise errors.InvalidArgument(
                f"{missing} is not given; a certificate and its key are given together (LOSSD_CERT, LOSSD_KEY)")
        if self.cert and not self.ca:
            raise errors.InvalidArgument("ca is not given (LOSSD_CA); a client certificate is for TLS")
        if not all("!" <= character <= "~" for character in self.token):
            raise errors.InvalidArgument("token must be of visible ASCII characters")

    def __repr__(self) -> str:  # without the token
        return f"Credentials(ca={self.ca!r}, cert={self.cert!r}, token={'given' if self.token else 'none'})"

    def open(self, target: str, arguments: list[tuple[str, int]]) -> Any:
        """A channel (grpc.Channel, as far as this package uses it). InvalidArgument if a file cannot be read or a token
        would go to another host in the clear."""
        if self.token and not self.ca and not is_local(target):
            raise errors.InvalidArgument(
                f"ca is not given (LOSSD_CA); without TLS the token would go to {target} unencrypted")
        if self.ca:
            channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(
                _read("ca", self.ca), _read("key", self.key), _read("cert", self.cert)), options=arguments)
        else:
            channel = grpc.insecure_channel(target, options=arguments)
        return _TokenChannel(channel, self.token) if self.token else channel

    def diagnose(self, target: str) -> errors.LossdError | None:
        """Why no connection to `target` comes about, as far as TLS is the reason. Connects to it once."""
        host, port = _split(target)
        if not host:
            return None
        if _speaks_plain(host, port):
            return errors.FailedPrecondition(
                f"the server at {target} does not speak TLS, and this client does (LOSSD_CA)") if self.ca else None
        speaks, distrust = _speaks_tls(host, port, self.ca)
        if not speaks:
            return None
        if not self.ca:
            return errors.FailedPrecondition(
                f"the server at {target} speaks TLS and this client does not: name the certificate authority (LOSSD_CA)")
        if distrust:
            return errors.Unauthenticated(
                f"the certificate of the server at {target} is not trusted: {distrust} (authorities: {self.ca})")
        refused = f", and refused the one of {self.cert}" if self.cert else ""
        return errors.Unauthenticated(
            f"the server at {target} ended the TLS handshake: it wants a client certificate that its authority has "
            f"signed (LOSSD_CERT, LOSSD_KEY){refused}")


def is_local(target: str) -> bool:
    """Whether a gRPC target is a loopback address, localhost or a Unix socket."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host, _ = _split(target)
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _split(target: str) -> tuple[str, str]:
    """"[::1]:7070" as "::1" and "7070"; empty for targets that are not of this kind."""
    for scheme in _SCHEMES:
        if target.startswith(scheme):
            target = target[len(scheme):]
            break
    host, colon, port = target.rpartition(":")
    if not colon or target.startswith("unix"):
        return "", ""
    return host.removeprefix("[").removesuffix("]"), port


def _read(name: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise errors.InvalidArgument(f"{name} is {path!r}, which cannot be read: {error.strerror}") from None
    if not content:
        raise errors.InvalidArgument(f"{name} is {path!r}, which is empty")
    return content


def _speaks_plain(host: str, port: str) -> bool:
    """An HTTP/2 server without TLS says its settings first: a frame of type 4 for stream 0."""
    try:
        with socket.create_connection((host, int(port)), _PROBE_SECONDS) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            answer = connection.recv(9, socket.MSG_WAITALL)
    except (OSError, ValueError):
        return False
    return len(answer) == 9 and answer[:1] == b"\0" and answer[3] == 4 and answer[5:] == b"\0\0\0\0"


def _speaks_tls(host: str, port: str, ca: str) -> tuple[bool, str]:
    """Whether the server speaks TLS, and why its certificate is not trusted; "" if it is."""
    context = ssl.create_default_context(cafile=ca or None)
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, int(port)), _PROBE_SECONDS) as connection:
            with context.wrap_socket(connection, server_hostname=host):
                return True, ""
    except ssl.SSLCertVerificationError as error:
        return True, error.verify_message
    except ssl.SSLError as error:
        return "WRONG_VERSION" not in str(error.reason), ""
    except (OSError, ValueError):
        return False, ""


class _TokenChannel:
    """A channel that puts a token on every call."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {token}"),)

    def unary_unary(self, *method: Any, **serializers: Any) -> Any:
        return _TokenCall(self._channel.unary_unary(*method, **serializers), self._metadata)

    def unary_stream(self, *method: Any, **serializers: Any) -> Any:
        return _TokenCall(self._channel.unary_stream(*method, **serializers), self._metadata)

    def stream_stream(self, *method: Any, **serializers: Any) -> Any:
        return _TokenCall(self._channel.stream_stream(*method, **serializers), self._metadata)

    def close(self) -> None:
        self._channel.close()


class _TokenCall:
    def __init__(self, call: Callable[..., Any], metadata: tuple[tuple[str, str], ...]) -> None:
        self._call: Any = call
        self._metadata = metadata

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._call(*arguments, metadata=self._metadata, **options)

    def future(self, *arguments: Any, **options: Any) -> Any:
        return self._call.future(*arguments, metadata=self._metadata, **options)
