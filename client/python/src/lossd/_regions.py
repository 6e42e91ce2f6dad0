# SPDX-License-Identifier: Apache-2.0
"""Memory that a server on this host shares with a client (region.proto), and where calls get it from.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from lossd import _cuda, _plan, errors
from lossd._plan import RegionSizes
from lossd.v1 import region_pb2, server_pb2

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


# Where the loss calls of a client get their region of shared memory from.

TRANSPORTS = ("auto", "grpc", "shared_memory", "cuda_ipc")

_FIRST_PAUSE = 2.0  # seconds without after an attempt that failed; twice as long each time
_LONGEST_PAUSE = 64.0
_LONGEST_GROWTH_PAUSE = 3600.0


def given_or_environment(transport: str | None) -> str:
    """The transport that was given, else that of LOSSD_TRANSPORT, else "auto"."""
    chosen = (os.environ.get("LOSSD_TRANSPORT") or "auto") if transport is None else transport
    if chosen not in TRANSPORTS:
        raise errors.InvalidArgument(f"transport is {chosen!r}; it must be auto, grpc, shared_memory or cuda_ipc")
    return chosen


class RegionSource:
    """Opens a region with the first loss call of a client, a larger one in its place when calls need it, and another one
    when that cannot be used any more.

    An attempt that fails is repeated by calls that begin later, after pauses that grow. Thread-safe.
    """

    def __init__(self, transport: str, sizes: _plan.RegionSizes, name: str, ask: Callable[[], str], device: str = "") -> None:
        """`name`: the region socket, as the server has told it; `ask` asks for it again. `device` as in SharedRegion."""
        self._transport = transport
        self._sizes = sizes
        self._ask = ask
        self._device = device
        self._changed = threading.Condition()  # guards what follows
        self._name = name
        self._region: SharedRegion | None = None
        self._next_growth = 0.0
        self._growth_pause = _LONGEST_PAUSE  # after the next attempt that brings less than it asked for
        self._opening = self._tried = self._closed = False
        self._refused = False  # the server did not know the region before
        self._pause = _FIRST_PAUSE  # after the next attempt that fails
        self._next_try = 0.0
        self._problem: errors.LossdError | None = None

    def check(self) -> None:
        """Raises if there is no region to be had."""
        if self.get() is None and self._problem is not None:
            raise self._problem

    def get(self, call_bytes: int = 0) -> SharedRegion | None:
        """The region for a call that begins, whose rows have so many bytes; None: it is to send its slices in messages.

        All calls wait for the first attempt to open one, and none for a later one of another call: they use the region that
        is there, if there is one.
        """
        if self._transport == "grpc":
            return None
        with self._changed:
            while self._opening and not self._tried:
                self._changed.wait()
            usable = self._region is not None and self._region.usable()
            if not usable:
                self._drop()
            size = self._wanted(call_bytes)
            before = self._region.size if self._region is not None else 0
            next_try = self._next_growth if usable else self._next_try
            if self._closed or self._opening or size <= before or time.monotonic() < next_try:
                return self._region
            self._opening = True
            if self._region is not None:  # the server may have no room for both
                self._region.retire_unused()
        try:
            region, problem = self._open(size, ask=self._tried and not usable)  # it may be another process by now
        except BaseException:  # an interrupt: the next call is to try
            with self._changed:
                self._opening = False
                self._changed.notify_all()
            raise
        with self._changed:
            self._opening, self._tried = False, True
            self._changed.notify_all()
            self._take(region, size, problem)
            return self._region

    def _wanted(self, call_bytes: int) -> int:
        """What to ask the server for."""
        wanted = self._sizes.wanted(call_bytes)
        if self._region is None or not self._region.crowded:
            return wanted
        return max(wanted, min(self._sizes.most, _plan.REGION_GROWTH * self._region.size))

    def _take(self, region: SharedRegion | None, size: int, problem: errors.LossdError | None) -> None:
        """Takes what an attempt to get so many bytes has brought."""
        if self._closed:
            if region is not None:
                region.retire()
            return
        if region is None or region.size < size:  # a server is not asked with each call for what it has not given
            self._next_growth = time.monotonic() + self._growth_pause
            self._growth_pause = min(2 * self._growth_pause, _LONGEST_GROWTH_PAUSE)
        else:
            self._growth_pause = _LONGEST_PAUSE
        if self._region is not None and self._region.usable():  # calls use it, for which a larger one was wanted
            if region is not None and region.size > self._region.size:
                self._region.retire()  # they keep it
                self._region = region
            elif region is not None:
                region.retire()
            return
        self._drop()
        self._region, self._problem = region, problem
        if region is None:
            self._wait_longer()
        elif not self._refused:
            self._pause = _FIRST_PAUSE

    def _drop(self) -> None:
        """Of a region that cannot be used any more."""
        if self._region is None:
            return
        refused = self._region.refused
        # Once it is a server that has been restarted. If it does not know the next one either, the socket leads to
        # another server.
        if refused and self._refused:
            self._problem = no_region("the server does not know the regions of its socket")
            self._wait_longer()
        self._refused = refused
        self._region = None

    def _wait_longer(self) -> None:
        self._next_try = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _open(self, size: int, ask: bool) -> tuple[SharedRegion | None, errors.LossdError | None]:
        """One attempt, by the one thread that has set _opening."""
        try:
            if ask:
                self._name = self._ask()
            if not self._name:
                raise no_region("the server offers none")
            return SharedRegion(self._name, size, self._device), None
        except errors.LossdError as error:
            return None, error

    def choice(self) -> tuple[str, str]:
        """How rows travel, "cuda_ipc", "shared_memory" or "grpc", and why."""
        if self._transport == "grpc":
            return "grpc", "the client was told so"
        with self._changed:
            if self._region is not None and self._device:
                return "cuda_ipc", f"the server's GPU is of this host; {self._region.size >> 20} MiB of {self._device}"
            if self._region is not None:
                problem = self._region.pin_problem
                return "shared_memory", f"the server is on this host; {self._region.size >> 20} MiB" + (
                    "" if problem is None else f"; GPUs copy to it by a detour: {problem.message}")
            if self._opening:
                return "grpc", "the shared memory is being opened"
            if not self._tried:
                return "grpc", "nothing was sent yet"
            if self._problem is None:
                return "grpc", "the shared memory was given up after a call that failed; later ones get other"
            return "grpc", f"{self._problem.message}; tried again from time to time"

    def close(self) -> None:
        """Gives the region back; nothing is opened any more."""
        with self._changed:
            if self._region is not None:
                self._region.retire()
            self._region = None
            self._closed = True


# Where the loss calls of a client get their regions from whose rows are CUDA arrays.
#
# There is a source for each GPU of the server that shares memory. Rows on one of these GPUs take memory of that GPU. Rows on
# another GPU take memory of the nearest one if the client was told so ("cuda_ipc"), and else go as rows of the host do.


def sharing_devices(server: server_pb2.ServerDescription) -> tuple[str, ...]:
    """The GPUs whose memory the server shares ("GPU-..."), in its order."""
    if server.region_devices:
        return tuple(server.region_devices)
    return (server.region_device,) if server.region_device else ()  # of a server that knows of one alone


@dataclass(frozen=True)
class _Route:
    """Where rows on one GPU go."""

    regions: RegionSource | None  # None: `reason` says why not
    reason: str = ""


class DeviceRegions:
    """Thread-safe."""

    def __init__(self, transport: str, sizes: RegionSizes, server: server_pb2.ServerDescription,
                 ask: Callable[[], server_pb2.ServerDescription]) -> None:
        """`ask` asks the server, which may be another process by now, what it is."""
        self._transport = transport
        self._ask = ask
        self._why_none = f"the transport is {transport}"
        self._sources: dict[str, RegionSource] = {}  # by GPU, in the server's order
        if transport in ("auto", "cuda_ipc"):
            self._why_none = "the server shares no memory of a GPU" + (", as it has several processes" if server.ranks else "")
            for device in sharing_devices(server):
                self._sources[device] = RegionSource("auto", sizes, server.region_socket, self._socket_of(device), device)
        self._lock = threading.Lock()  # guards what follows
        self._routes: dict[str, _Route] = {}  # by the GPU that rows came from
        self._checked: RegionSource | None = None

    def _socket_of(self, device: str) -> Callable[[], str]:
        def ask() -> str:
            server = self._ask()
            if device not in sharing_devices(server):
                raise no_region(f"the server has no memory of {device} to share")
            return server.region_socket

        return ask

    def __bool__(self) -> bool:
        """Whether the server shares memory of a GPU, and the client may take it."""
        return bool(self._sources)

    def check(self) -> None:
        """With "cuda_ipc": raises if there is no region to be had. Opens it, on the GPU that the calling thread works on if
        that is one of the server's, and else on the first one that this process sees."""
        if self._transport != "cuda_ipc":
            return
        if not self._sources:
            raise errors.Unavailable(f"no CUDA IPC: {self._why_none}")
        driver = _cuda.driver()
        current = driver.current()
        seen = [device for device in self._sources if driver.find(device) is not None]
        if not seen and len(self._sources) > 1:
            raise no_region(f"the server's GPUs are {self._names()}, none of which this process sees")
        chosen = next((device for device in seen if driver.find(device) == current), (seen or list(self._sources))[0])
        with self._lock:
            self._checked = self._sources[chosen]
        self._sources[chosen].check()

    def get(self, device: str, call_bytes: int = 0) -> SharedRegion | None:
        """The region for a call that begins, whose rows have so many bytes and are on `device`; None: they are to go as rows
        of the host do. May open a region."""
        if not self._sources:
            return None
        with self._lock:
            route = self._routes.get(device)
        if route is None:
            route = self._route_of(device)
            with self._lock:
                self._routes[device] = route
        return None if route.regions is None else route.regions.get(call_bytes)

    def any(self) -> SharedRegion | None:
        """The region of the first GPU of the server that this process sees; None: there is none. May open it."""
        for device, source in self._sources.items():
            if _cuda.driver().find(device) is not None:
                return source.get()
        return None

    def _route_of(self, device: str) -> _Route:
        if device in self._sources:
            return _Route(self._sources[device])
        if self._transport == "cuda_ipc":
            return _Route(self._sources[self._nearest_to(device)])
        whose = "GPU is" if len(self._sources) == 1 else "GPUs are"
        return _Route(None, f"the rows are on {device}, and the server's {whose} {self._names()}")

    def _nearest_to(self, device: str) -> str:
        """The sharing GPU that is nearest to `device`, which is another one, and the one at the same place in its order of
        several that are as near."""
        driver = _cuda.driver()
        number = driver.find(device) or 0
        nearest: list[str] = []
        distance: int | None = None
        for each in self._sources:
            seen = driver.find(each)
            if seen is None:
                continue
            here = driver.distance(number, seen)
            nearer = here is not None and (distance is None or here < distance)
            if nearer:
                nearest, distance = [], here
            if not nearest or here == distance:
                nearest.append(each)
        return nearest[number % len(nearest)] if nearest else next(iter(self._sources))  # whose error says why there is none

    def choice(self) -> tuple[str, str]:
        """How rows of CUDA arrays travel, and why, over all GPUs that rows came from or that get() was asked for: "cuda_ipc", or
        "grpc" if some go as rows of the host do."""
        if not self._sources:
            return "grpc", self._why_none
        with self._lock:
            routes = dict(self._routes) or {"": _Route(self._checked, "nothing was sent yet")}
        ways = {device: route.regions.choice() if route.regions is not None else ("grpc", route.reason)
                for device, route in routes.items()}
        if len(ways) == 1:
            return next(iter(ways.values()))
        together = "cuda_ipc" if all(transport == "cuda_ipc" for transport, _ in ways.values()) else "grpc"
        return together, "; ".join(f"rows on {device}: {transport}, {why}" for device, (transport, why) in sorted(ways.items()))

    def _names(self) -> str:
        return ", ".join(self._sources)

    def close(self) -> None:
        """Gives the regions back; nothing is opened any more."""
        for source in self._sources.values():
            source.close()
