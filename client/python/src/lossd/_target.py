# SPDX-License-Identifier: Apache-2.0
"""How a server is reached: its address (a gRPC target name), the credentials that a connection takes, and why no connection to
it comes about (diagnose). Functions about addresses do no I/O."""

from __future__ import annotations

import ipaddress
import os
import queue
import re
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

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


def host_and_port(target: str) -> tuple[str, int]:
    """"[::1]:7070" as ("::1", 7070); ("", 0) for targets that are not one host and its port."""
    scheme, rest = _split_scheme(target)
    host, _, port = rest.rpartition("/")[2].rpartition(":")
    if scheme in _WITHOUT_HOST or not host or not port.isdecimal() or "," in rest:
        return "", 0
    return host.removeprefix("[").removesuffix("]"), int(port)


def socket_path(target: str) -> str:
    """That of a Unix socket; "" for other targets."""
    scheme, rest = _split_scheme(target)
    return "/" + rest.lstrip("/") if scheme == "unix" and rest.startswith("/") else rest if scheme == "unix" else ""


def is_local(target: str) -> bool:
    """Whether it is a loopback address, localhost or a Unix socket."""
    if _split_scheme(target)[0] in ("unix", "unix-abstract"):
        return True
    host, _ = host_and_port(target)
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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


# How a client proves who it is and knows who the server is, and channels made so. client/cpp/client_options.h does alike.

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


# Why no connection to a server comes about. Connects to it once or twice, which takes some seconds at most.

_SECONDS = 2.0  # for finding the host, for a connection to it, and for its first words
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # of an HTTP/2 client, with empty settings
_FRAME = 9  # bytes before the payload of a frame of HTTP/2
_WAIT = "If it is being started, wait_for_server=True waits for it"


def diagnose(target: str, credentials: Credentials) -> errors.LossdError | None:
    """What is wrong, and what to do. Unavailable: nobody is there, which may change. None: nothing was found, so that a
    server that has not answered may be busy."""
    if path := socket_path(target):
        return _diagnose_socket(target, path)
    host, port = host_and_port(target)
    if not host:
        return None
    if (absent := _look_up(target, host, port)) is not None:
        return absent
    try:
        with socket.create_connection((host, port), _SECONDS) as connection:
            words = _first_words(connection)
    except TimeoutError:
        return _absent(target, f"{host} does not answer on port {port}. Is the address right, and does a firewall let "
                               "this machine through?")
    except OSError as error:
        return _refused(target, error)
    return None if words is None else _diagnose_words(target, words, credentials)


def can_diagnose(target: str) -> bool:
    """Whether diagnose() finds out if somebody is there: for one host and its port, and for Unix sockets."""
    return bool(host_and_port(target)[0] or socket_path(target))


def _absent(target: str, why: str) -> errors.Unavailable:
    return errors.Unavailable(f"no server at {target}: {why} {_WAIT}")


def _refused(target: str, error: OSError) -> errors.Unavailable:
    if isinstance(error, ConnectionRefusedError):
        return _absent(target, "the connection was refused, because nothing listens there. Start lossd, or give the "
                               "address that its --listen names (LOSSD_SERVER).")
    return _absent(target, f"{error.strerror or error}.")


def _diagnose_socket(target: str, path: str) -> errors.LossdError | None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_SECONDS)
        try:
            connection.connect(path)
        except TimeoutError:
            return None
        except OSError as error:
            return _refused(target, error)
    return None


def _look_up(target: str, host: str, port: int) -> errors.Unavailable | None:
    """Whether the host has an address. The resolver's own timeouts are long, so a thread waits for it."""
    found: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()

    def look() -> None:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.put(None)
        except (OSError, UnicodeError) as error:  # a name whose parts are too long cannot be encoded
            found.put(error if isinstance(error, OSError) else OSError(str(error)))

    threading.Thread(target=look, name="lossd-look-up", daemon=True).start()
    try:
        error = found.get(timeout=_SECONDS)
    except queue.Empty:
        return _absent(target, f"the name of the host {host!r} was not found within {_SECONDS:g} s.")
    if error is None:
        return None
    return _absent(target, f"the name of the host was not found ({error.strerror or error}). Is {host!r} spelled right?")


def _first_words(connection: socket.socket) -> bytes | None:
    """What the other side says to an HTTP/2 client, b"" if it hangs up; None if it says nothing. May raise SSLError."""
    words = b""
    try:
        connection.sendall(_PREFACE)
        while len(words) < _FRAME and (more := connection.recv(_FRAME - len(words))):
            words += more
    except TimeoutError:
        return words or None
    except ssl.SSLError:
        raise
    except OSError:
        pass
    return words


def _diagnose_words(target: str, words: bytes, credentials: Credentials) -> errors.LossdError | None:
    """`words`: what was said without TLS."""
    if _are_settings(words):
        return errors.FailedPrecondition(
            f"the server at {target} does not speak TLS, and this client does: give no certificate authority "
            "(ca=\"\", LOSSD_CA)") if credentials.ca else None
    if words.startswith(b"HTTP/1"):
        return errors.FailedPrecondition(
            f"what listens at {target} is an HTTP server, not lossd's gRPC port. Of a lossd this is the port of --http; "
            "give that of --listen")
    try:
        secret = _words_in_secret(*host_and_port(target), credentials)
    except ssl.SSLError as error:
        hung_up = isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
        if not hung_up and error.reason not in _NOT_TLS:
            return _diagnose_refusal(target, error, credentials)
    except TimeoutError:
        return None
    except OSError:
        pass
    else:
        return _diagnose_secret_words(target, secret, credentials)
    if len(words) < _FRAME:
        return _absent(target, "the connection was closed before a word was said. It may be a proxy or a tunnel whose "
                               "server is gone, or a server that has too many connections.")
    return errors.FailedPrecondition(
        f"what listens at {target} does not speak gRPC: it is another program than lossd, or another port")


def _diagnose_secret_words(target: str, words: bytes | None, credentials: Credentials) -> errors.LossdError | None:
    """`words`: what was said after a TLS handshake."""
    if not credentials.ca:
        return _no_tls_here(target)
    if words is None or _are_settings(words):
        return None
    if not words:
        return _refused_certificate(target, credentials)
    return errors.FailedPrecondition(
        f"what listens at {target} speaks TLS, but does not speak gRPC: it is another program than lossd")


def _diagnose_refusal(target: str, error: ssl.SSLError, credentials: Credentials) -> errors.LossdError:
    """`error`: how TLS ended."""
    if not credentials.ca:
        return _no_tls_here(target)
    if isinstance(error, ssl.SSLCertVerificationError):
        return errors.Unauthenticated(
            f"the certificate of the server at {target} is not trusted: {error.verify_message} (authorities: "
            f"{credentials.ca})")
    return _refused_certificate(target, credentials)


def _no_tls_here(target: str) -> errors.FailedPrecondition:
    return errors.FailedPrecondition(
        f"the server at {target} speaks TLS and this client does not: name the certificate authority (ca=, LOSSD_CA)")


def _refused_certificate(target: str, credentials: Credentials) -> errors.Unauthenticated:
    refused = f", and refused the one of {credentials.cert}" if credentials.cert else ""
    return errors.Unauthenticated(
        f"the server at {target} ended the TLS handshake: it wants a client certificate that its authority has "
        f"signed (cert= and key=, LOSSD_CERT and LOSSD_KEY){refused}")


def _are_settings(words: bytes) -> bool:
    """An HTTP/2 server says its settings first: a frame of type 4 for stream 0."""
    return len(words) == _FRAME and words[:1] == b"\0" and words[3] == 4 and words[5:] == b"\0\0\0\0"


def _words_in_secret(host: str, port: int, credentials: Credentials) -> bytes | None:
    """_first_words() over TLS. A server refuses a client's certificate after the handshake, in place of its first words."""
    context = _context(credentials)
    with socket.create_connection((host, port), _SECONDS) as connection:
        with context.wrap_socket(connection, server_hostname=host) as secure:
            return _first_words(secure)


def _context(credentials: Credentials) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=credentials.ca or None)
    except ssl.SSLError as error:
        raise errors.InvalidArgument(f"ca is {credentials.ca!r}, which has no certificate: {error.reason}") from None
    context.set_alpn_protocols(["h2"])
    if credentials.cert:
        try:
            context.load_cert_chain(credentials.cert, credentials.key)
        except ssl.SSLError as error:
            raise errors.InvalidArgument(f"cert is {credentials.cert!r} and key {credentials.key!r}, which are no pair: "
                                         f"{error.reason}") from None
    return context


# OpenSSL's words for an answer that is not of TLS.
_NOT_TLS = ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING", "HTTP_REQUEST", "RECORD_LAYER_FAILURE",
            "PACKET_LENGTH_TOO_LONG")
