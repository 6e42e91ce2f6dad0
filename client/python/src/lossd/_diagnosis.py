# SPDX-License-Identifier: Apache-2.0
"""Why no connection to a server comes about. Connects to it once or twice, which takes some seconds at most."""

from __future__ import annotations

import queue
import socket
import ssl
import threading

from lossd import _target, errors
from lossd._credentials import Credentials

_SECONDS = 2.0  # for finding the host, for a connection to it, and for its first words
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # of an HTTP/2 client, with empty settings
_FRAME = 9  # bytes before the payload of a frame of HTTP/2
_WAIT = "If it is being started, wait_for_server=True waits for it"


def diagnose(target: str, credentials: Credentials) -> errors.LossdError | None:
    """What is wrong, and what to do. Unavailable: nobody is there, which may change. None: nothing was found, so that a
    server that has not answered may be busy."""
    if path := _target.socket_path(target):
        return _diagnose_socket(target, path)
    host, port = _target.host_and_port(target)
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
    return bool(_target.host_and_port(target)[0] or _target.socket_path(target))


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
        secret = _words_in_secret(*_target.host_and_port(target), credentials)
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
