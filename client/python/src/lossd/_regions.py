# SPDX-License-Identifier: Apache-2.0
"""Memory that a server on this host shares with a client (region.proto). _region_source.py opens it.

It is memory of the host, or of a GPU of the server for arrays that lie on one (CUDA IPC).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import threading
import time
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from lossd import _cuda, _plan, errors
from lossd.v1 import region_pb2

_ALIGNMENT = 256  # of slices in a region
_ID_BYTES = 16
_MOST_PACKET = 4096
_PATIENCE = 5.0  # seconds, with the server's socket


def no_region(why: object) -> errors.Unavailable:
    return errors.Unavailable(f"no shared memory: {why}")


class SharedRegion:
    """A session of the region socket, the mapping, and which parts of it are in use. Thread-safe."""

    def __init__(self, name: str, size: int, device: str = "") -> None:
        """Opens a region of about `size` bytes; Unavailable, saying why, if there is none to be had.

        `device`: the GPU whose memory it is to be, "GPU-..."; "": memory of the host.
        """
        number = _number_of(device)
        self._socket, descriptor, answer = _open(name, size, device)
        self.id = answer.id
        self.size: int = answer.bytes
        self._pid = os.getpid()
        self.refused = False  # the server says that it has no such region
        self.crowded = False  # there was no room for something
        self._lock = threading.Lock()  # guards what follows
        self._freed = threading.Condition(self._lock)
        self._retired = False
        self._users = 0  # calls, and copies
        self._taken: dict[int, int] = {}  # offset to end
        self._pin_lock = threading.Lock()  # guards what follows
        self._pin: _cuda.Pin | None = None
        self.pin_problem: errors.LossdError | None = None  # why GPUs copy to memory of the host by a detour
        self.memory: NDArray[Any] = np.empty(0, np.uint8)  # of the host; unmapped with the last view of it
        self.mapping: _cuda.Mapping | None = None  # of a GPU
        try:
            if device:
                self.mapping = _cuda.Mapping(_cuda.driver(), descriptor, self.size, number)
            else:
                self.memory = _map(descriptor, self.size)
        except (OSError, ValueError, errors.Unavailable) as error:
            self._socket.close()
            raise no_region(error) from None
        finally:
            os.close(descriptor)

    def __del__(self) -> None:
        if (pin := getattr(self, "_pin", None)) is not None:
            pin.release()
        if getattr(self, "_socket", None) is not None:
            self._close_session()

    @property
    def address(self) -> int:
        return self.mapping.address if self.mapping is not None else int(self.memory.ctypes.data)

    def pin_for(self, device: str) -> None:
        """A call begins whose rows are on this GPU. The first one lets GPUs copy to and from memory of the host without a
        detour, which takes some milliseconds; all wait for it. Where the driver refuses that, it is not asked again: copies
        are slower then."""
        with self._pin_lock:
            if self.mapping is not None or self._pin is not None or self.pin_problem is not None:
                return
            try:
                driver = _cuda.driver()
                self._pin = _cuda.Pin(driver, self.address, self.size, driver.find(device) or 0)
            except errors.LossdError as error:
                self.pin_problem = error

    def begin(self) -> bool:
        """A call begins to use it, until leave(). False: it has been retired, so the call is to do without."""
        with self._lock:
            if self._retired:
                return False
            self._users += 1
            return True

    def enter(self) -> None:
        """A copy of a call that uses it begins, until leave(); the call may end before."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """That has ended."""
        with self._lock:
            self._users -= 1
            self._end_session()

    def _end_session(self) -> None:
        """Gives the memory back to the server as soon as nothing uses it, whoever still refers to this object."""
        if self._retired and self._users == 0:
            if self._pin is not None:
                self._pin.release()
            self._close_session()

    def _close_session(self) -> None:
        if getattr(self, "_pid", 0) == os.getpid():
            with contextlib.suppress(OSError):  # the server has gone, or it is closed
                self._socket.shutdown(socket.SHUT_RDWR)  # a child may have inherited it: closing does not end it then
        self._socket.close()

    @property
    def share(self) -> int:
        """Bytes that one call takes at most."""
        return _plan.share_of_region(self.size)

    def wanted_rows(self, row_bytes: int) -> int:
        """How many rows of a slice are best for a call that has entered."""
        with self._lock:
            among_calls = self._users > 1
        return _plan.wanted_rows(self.size, self.mapping is not None, row_bytes, among_calls)

    def take(self, size: int, patience: float = 0.0) -> int | None:
        """The offset of a free range; None if there is none within `patience` seconds."""
        whole = -(-size // _ALIGNMENT) * _ALIGNMENT
        end = time.monotonic() + patience
        with self._lock:
            while (offset := self._find(whole)) is None:
                self.crowded = True
                left = end - time.monotonic()
                if left <= 0 or whole > self.size or self._retired:
                    return None
                self._freed.wait(left)
            self._taken[offset] = offset + whole
            return offset

    def _find(self, whole: int) -> int | None:
        begin = 0
        for offset in sorted(self._taken):
            if offset - begin >= whole:
                break
            begin = self._taken[offset]
        return None if self.size - begin < whole else begin

    def give(self, offset: int) -> None:
        with self._lock:
            del self._taken[offset]
            self._freed.notify_all()

    def retire(self) -> None:
        """What is under way may go on, but nothing new is to begin: the server may still write to it.

        The session ends with the last call that uses it.
        """
        with self._lock:
            self._retired = True
            self._freed.notify_all()
            self._end_session()

    def retire_unused(self) -> None:
        """Gives it back to the server at once if no call uses it."""
        with self._lock:
            if self._users == 0:
                self._retired = True
                self._end_session()

    def after_failure(self, error: BaseException, *, holds: bool) -> None:
        """A call that named it has failed: it is retired if the server may still write to ranges of the call (`holds`),
        or may have lost it."""
        if isinstance(error, errors.Unavailable) and error.field.endswith("region"):
            self.refused = True
        if holds or isinstance(error, errors.Unavailable):
            self.retire()

    def usable(self) -> bool:
        """Whether a call may begin to use it: the server's end is open, and this is the process that opened it."""
        if self._retired or self._pid != os.getpid():
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True  # it has nothing to say, and has not closed
        except OSError:
            pass
        return False


def _number_of(device: str) -> int:
    """Of a GPU that this process sees; 0 for memory of the host."""
    if not device:
        return 0
    number = _cuda.driver().find(device)
    if number is None:
        raise no_region(f"the server's GPU is {device}, which this process does not see")
    return number


def _map(descriptor: int, size: int) -> NDArray[Any]:
    if not _is_sealed(descriptor) or os.fstat(descriptor).st_size < size:
        raise ValueError("what the server sent is not sealed memory of the size it says")
    mapping = mmap.mmap(descriptor, size)
    if hasattr(mmap, "MADV_DONTFORK"):
        mapping.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(mapping, np.uint8)


def _is_sealed(descriptor: int) -> bool:
    """Whether the memory has its size for good, so that no access can fail."""
    if not hasattr(fcntl, "F_GET_SEALS"):
        return True  # nor has the system such memory
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # no memory of that kind
        return False


def _cannot_connect(name: str, error: OSError) -> errors.Unavailable:
    """Why a connection to the socket failed, and what is missing."""
    hint = ""
    if error.errno in (errno.EACCES, errno.EPERM):
        hint = "; the server's --unix_socket_mode says who may connect, and the folder has to let this user in"
    elif name.startswith("@") and error.errno == errno.ECONNREFUSED:
        hint = ("; the server is on another host, or in another network namespace (a container): there it has to listen "
                "on a Unix socket in a folder that both see")
    elif error.errno == errno.ENOENT:
        hint = "; the server is on another host, or this container does not have its folder mounted"
    elif error.errno == errno.ECONNREFUSED:
        hint = "; no server listens there any more"
    return no_region(f"{name}: {error.strerror or error}{hint}")


def _ask(session: socket.socket, request: region_pb2.RegionRequest) -> tuple[bytes, list[int]]:
    """Asks for a region; the answer's packet and the descriptors that came with it.

    A server that refuses may have closed the session before the request came (sending it fails), or without
    reading it (a reset, reported once). Its reason can be read in both cases.
    """
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        session.send(request.SerializeToString())
    try:
        packet, descriptors, _, _ = socket.recv_fds(session, _MOST_PACKET, 1)
    except ConnectionResetError:
        packet, descriptors, _, _ = socket.recv_fds(session, _MOST_PACKET, 1)
    return packet, descriptors


def _open(name: str, size: int, device: str) -> tuple[socket.socket, int, region_pb2.RegionOpened]:
    """The session, the descriptor of its memory, and what the server says of it."""
    if not hasattr(socket, "recv_fds"):
        raise no_region("this system passes no descriptors between programs")
    session = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors: list[int] = []
    try:
        session.settimeout(_PATIENCE)
        try:
            session.connect("\0" + name[1:] if name.startswith("@") else name)
        except OSError as error:
            raise _cannot_connect(name, error) from None
        packet, descriptors = _ask(session, region_pb2.RegionRequest(bytes=size, of_device=bool(device), device=device))
        answer = region_pb2.RegionAnswer.FromString(packet)
        if answer.HasField("refused"):
            raise no_region(answer.refused.reason)
        if len(answer.opened.id) != _ID_BYTES or not answer.opened.bytes or len(descriptors) != 1:
            raise no_region("the server has closed the session" if not packet else "the server's answer is no region")
        if answer.opened.device != device:
            raise no_region(f"the server gives memory of {answer.opened.device or 'the host'}, not of {device or 'the host'}")
        session.setblocking(False)
        return session, descriptors[0], answer.opened
    except BaseException as error:
        session.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, (OSError, DecodeError)) and not isinstance(error, errors.LossdError):
            raise no_region(f"{name}: {error}") from None
        raise
