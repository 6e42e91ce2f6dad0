# SPDX-License-Identifier: Apache-2.0
"""How a client proves who it is and knows who the server is, and channels made so. client/cpp/client_options.h does alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from lossd import errors
from lossd._target import is_local


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
