"""Why no connection to a server comes about. Connects to it once or twice, which takes some seconds at most."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
from typing import Any

from lossd import _target, errors

_SECONDS = 2.0  # for finding the host, for a connection to it, and for its first words
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # of an HTTP/2 client, with empty settings
_FRAME = 9  # bytes before the payload of a frame of HTTP/2
_WAIT = "If it is being started, wait_for_server=True waits for it"


def diagnose(target: str, ca: str, cert: str) -> errors.LossdError | None:
    """What is wrong, and what to do. Unavailable: nobody is there, which may change. None: nothing was found.

    `ca`, `cert`: paths of a client's authorities and of its certificate; "": none.
    """
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
    return None if words is None else _diagnose_words(target, words, ca, cert)


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
    """What the other side says to an HTTP/2 client without TLS, b"" if it hangs up; None if it says nothing."""
    words = b""
    try:
        connection.sendall(_PREFACE)
        while len(words) < _FRAME and (more := connection.recv(_FRAME - len(words))):
            words += more
    except TimeoutError:
        return words or None
    except OSError:
        pass
    return words


def _diagnose_words(target: str, words: bytes, ca: str, cert: str) -> errors.LossdError | None:
    if _are_settings(words):
        return errors.FailedPrecondition(
            f"the server at {target} does not speak TLS, and this client does: give no certificate authority "
            "(ca=\"\", LOSSD_CA)") if ca else None
    if words.startswith(b"HTTP/1"):
        return errors.FailedPrecondition(
            f"what listens at {target} is an HTTP server, not lossd's gRPC port. Of a lossd this is the port of --http; "
            "give that of --listen")
    host, port = _target.host_and_port(target)
    protocol = _tls_protocol(host, port, ca)
    if protocol is None and len(words) < _FRAME:
        return _absent(target, "the connection was closed before a word was said. It may be a proxy or a tunnel whose "
                               "server is gone, or a server that has too many connections.")
    if protocol is None:
        return errors.FailedPrecondition(
            f"what listens at {target} does not speak gRPC: it is another program than lossd, or another port")
    return _diagnose_tls(target, protocol, ca, cert)


def _diagnose_tls(target: str, protocol: str | ssl.SSLError, ca: str, cert: str) -> errors.LossdError:
    if not ca:
        return errors.FailedPrecondition(
            f"the server at {target} speaks TLS and this client does not: name the certificate authority (ca=, LOSSD_CA)")
    if isinstance(protocol, ssl.SSLCertVerificationError):
        return errors.Unauthenticated(
            f"the certificate of the server at {target} is not trusted: {protocol.verify_message} (authorities: {ca})")
    if protocol != "h2" and not isinstance(protocol, ssl.SSLError):
        return errors.FailedPrecondition(
            f"what listens at {target} speaks TLS, but does not speak gRPC: it is another program than lossd")
    refused = f", and refused the one of {cert}" if cert else ""
    return errors.Unauthenticated(
        f"the server at {target} ended the TLS handshake: it wants a client certificate that its authority has "
        f"signed (cert= and key=, LOSSD_CERT and LOSSD_KEY){refused}")


def _are_settings(words: bytes) -> bool:
    """An HTTP/2 server without TLS says its settings first: a frame of type 4 for stream 0."""
    return len(words) == _FRAME and words[:1] == b"\0" and words[3] == 4 and words[5:] == b"\0\0\0\0"


def _tls_protocol(host: str, port: int, ca: str) -> Any:
    """What a TLS handshake agrees on ("h2" with gRPC), or how it ended; None if the other side does not speak TLS."""
    context = ssl.create_default_context(cafile=ca or None)
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, port), _SECONDS) as connection:
            with context.wrap_socket(connection, server_hostname=host) as secure:
                return secure.selected_alpn_protocol() or ""
    except ssl.SSLCertVerificationError as error:
        return error
    except ssl.SSLError as error:
        hung_up = isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
        return None if hung_up or error.reason in _NOT_TLS else error
    except OSError:
        return None


# OpenSSL's words for an answer that is not of TLS.
_NOT_TLS = ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING", "HTTP_REQUEST", "RECORD_LAYER_FAILURE",
            "PACKET_LENGTH_TOO_LONG")
