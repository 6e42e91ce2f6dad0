# SPDX-License-Identifier: Apache-2.0
"""The connections of one client, and when a call is repeated. Thread-safe after construction.

A client that was not told how many to take opens further ones while it works (ConnectionChooser).
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from lossd import _cuda, _target, errors
from lossd._interrupts import Cancellation, run_apart
from lossd._plan import RegionSizes
from lossd._regions import DeviceRegions, RegionSource, SharedRegion
from lossd._target import Credentials
from lossd._version import VERSION
from lossd.types import RetryOptions
from lossd.v1 import server_pb2


# When a call is sent again, and after how long. Stateless; only jitter() is not arithmetic.
#
# The caller brings the time that is left and the random factor. client/cpp/core.h does the same;
# tests/client/golden/errors.json holds both to it.


def jitter() -> float:
    """A random factor in [0.8, 1.2], so that clients that failed together do not come back together."""
    return random.uniform(0.8, 1.2)


def may_repeat(error: errors.LossdError, restartable: bool) -> bool:
    """Whether a call that ended with `error` may be sent again: errors.is_transient; Aborted if it is `restartable`.

    A call is restartable if nothing of it stays when it fails, so that it may begin again with what it finds.
    Restarted and StepDiscarded are for the trainer to deal with.
    """
    return errors.is_transient(error) or (restartable and type(error) is errors.Aborted)


def wait_before_repeat(retry: RetryOptions, error: errors.LossdError, attempt: int, left: float, factor: float,
                       restartable: bool = False) -> float | None:
    """Seconds between attempt number `attempt` (1, 2, ...), which ended with `error`, and the next one.

    None if there is no next one: the error may not be repeated, max_attempts were made, or the wait would outlast
    `left` seconds.
    """
    if not may_repeat(error, restartable) or attempt >= retry.max_attempts:
        return None
    wait = min(retry.initial_backoff * 4.0 ** min(attempt - 1, 16), retry.max_backoff) * factor
    return wait if wait < left else None


def with_attempts(error: errors.LossdError, attempts: int) -> errors.LossdError:
    """The error of a call after its last attempt, which says how often it was tried, if twice.

    One that may not be repeated says besides that an attempt before it, which had no answer, may have taken effect.
    """
    if attempts > 1:
        error.add(f"; tried {attempts} times")
        if not may_repeat(error, restartable=True):
            error.add(", and an earlier attempt may have taken effect")
    return error


# The first call on each connection of a client: whether a lossd is there, and what is there if not.

_METHOD = "/lossd.v1.ServerService/GetServer"
_PATIENCE = 0.5  # seconds without an answer, after which the reason is looked for
_ROUND = 5.0  # seconds between the next two looks
_PAUSE = 0.2  # seconds before the next call


def await_server(channel: Any, options: ConnectionOptions, deadline: Deadline) -> server_pb2.ServerDescription:
    """Returns when the server has answered on this channel, or raises what keeps it from answering.

    Unavailable if nobody is there, at once unless options.wait_for_server. What waiting cannot mend (TLS on one side
    only, another program, ...) is raised at once in any case. A server that takes connections but says nothing may be
    busy, so it has until the deadline.
    """
    again = False
    while True:
        try:
            return _ask(channel, options, min(deadline.left(), _ROUND if again else _PATIENCE), wait_for_ready=again)
        except (errors.DeadlineExceeded, errors.ResourceExhausted) as error:
            if isinstance(error, errors.ResourceExhausted) and not errors.is_transient(error):
                raise
            reason = _reason(options)
        except errors.Unavailable as error:
            # An error of the first call may be one of the connection, and of a server that has come up meanwhile.
            reason = _reason(options) or (_no_server(options, error) if again or not _can_tell(options) else None)
        if reason is not None and not (isinstance(reason, errors.Unavailable) and options.wait_for_server):
            raise reason
        if deadline.passed():
            raise _gave_up(reason, options)
        time.sleep(min(_PAUSE, deadline.left()))
        again = True


def _exchange(channel: Any, method: str, request: Message, decode: Callable[[bytes], T], timeout: Callable[[], float],
              ending: Cancellation, *, wait_for_ready: bool | None = None) -> Callable[[], T]:
    """One call with one answer: what makes it and waits for its end. `timeout` is asked when it is made, and `ending` cancels it."""
    call = channel.unary_unary(method, request_serializer=type(request).SerializeToString, response_deserializer=decode)

    def exchange() -> T:
        under_way = call.future(request, timeout=timeout(), wait_for_ready=wait_for_ready)
        with ending.ends(under_way.cancel):
            result: T = under_way.result()
            return result

    return exchange


def _ask(channel: Any, options: ConnectionOptions, timeout: float, wait_for_ready: bool) -> server_pb2.ServerDescription:
    ending = Cancellation()
    # Decoded here: gRPC would say INTERNAL of an answer in another protocol.
    call = _exchange(channel, _METHOD, server_pb2.GetServerRequest(), bytes, lambda: timeout, ending, wait_for_ready=wait_for_ready)

    def exchange() -> bytes:
        try:
            return call()
        except grpc.RpcError as error:
            raise errors.from_rpc(error, options.target) from None

    try:
        return server_pb2.ServerDescription.FromString(run_apart(exchange, ending.cancel))
    except DecodeError:
        raise errors.FailedPrecondition(
            f"the server at {options.target} describes itself in another protocol than that of this client (lossd "
            f"{VERSION}): use the same version of both") from None


def _reason(options: ConnectionOptions) -> errors.LossdError | None:
    return _target.diagnose(options.target, options.credentials)


def _can_tell(options: ConnectionOptions) -> bool:
    return _target.can_diagnose(options.target)


def _no_server(options: ConnectionOptions, error: errors.LossdError) -> errors.Unavailable:
    return errors.Unavailable(f"no server at {options.target}: {error.message}")


def _gave_up(reason: errors.LossdError | None, options: ConnectionOptions) -> errors.Unavailable:
    waited = f"{options.connect_timeout} s"
    if reason is not None:
        return errors.Unavailable(f"{reason.message}; waited {waited}")
    does = "takes connections but has" if _can_tell(options) else "has"
    return errors.Unavailable(f"the server at {options.target} {does} not answered within {waited}: it is busy, or it is "
                              "another program than lossd")


# How many connections a client takes that chooses by itself. Times, in seconds, come from the caller.
#
# It begins with one, which is all that small jobs ever have. Once payload keeps the present ones busy, it tries one more for
# a while, and stays with it if that moved more; else it goes back, and tries again much later.
# client/cpp/connections.h does the same; tests/client/golden/connecting.json holds both to it.

MOST = 8

_ROUND_BYTES = 64 << 20  # a round has at least so much payload,
_ROUND_TIME = 0.2  # and is as long as that
_LONGEST_ROUND = 30.0  # one that takes longer says nothing: something else is slow
_BUSY = 0.9  # connections are busy if each of them has a stream for this part of the time
_GAIN = 1.1  # by which one more has to move more
_FIRST_REST, _LONGEST_REST = 8, 512  # rounds between trials: twice as many after each one in a row that fails


class Advice(Enum):
    STAY = "stay"
    ADD = "add"  # open one more connection, then call added() or refused()
    DROP = "drop"  # the last connection is not used any more


@dataclass
class _Round:
    moved_before: int = 0
    busy: float = 0.0  # with at least one stream under way
    streams_busy: float = 0.0  # summed over streams


class ConnectionChooser:
    """Used by one thread at a time."""

    def __init__(self) -> None:
        self.count = 1  # those that streams are spread over
        self.reason = "little was sent in messages so far"  # why there are so many, for people
        self._opening = False  # another one is being opened
        self._trying = False  # the last one is on trial
        self._before = 0.0  # bytes per second without it
        self._rest = 0  # rounds before the next trial
        self._failures = 0  # trials in a row
        self._under_way = 0  # streams
        self._last = 0.0  # when their number changed
        self._round = _Round()

    def _advance(self, now: float) -> None:
        if self._under_way:
            self._round.busy += now - self._last
            self._round.streams_busy += self._under_way * (now - self._last)
        self._last = now

    def begin(self, now: float) -> None:
        """A stream begins."""
        self._advance(now)
        self._under_way += 1

    def end(self, moved: int, now: float) -> Advice:
        """A stream has ended. `moved`: the bytes of payload that all streams have ever moved in messages, both ways."""
        self._advance(now)
        self._under_way -= 1
        here, size = self._round, moved - self._round.moved_before
        if here.busy > _LONGEST_ROUND:
            self._round = _Round(moved)
            return Advice.STAY
        if self._opening or size < _ROUND_BYTES or here.busy < _ROUND_TIME:
            return Advice.STAY
        self._round = _Round(moved)
        if not self._trying and here.streams_busy < _BUSY * self.count * here.busy:
            return Advice.STAY
        return self._decide(size / here.busy)

    def _decide(self, rate: float) -> Advice:
        if self._trying:
            self._trying = False
            self.reason = f"{self.count - 1} moved {self._before / 1e9:.2f} GB/s, {self.count} moved {rate / 1e9:.2f}"
            if rate < _GAIN * self._before:
                self.count -= 1
                self._take_rest()
                return Advice.DROP
            self._failures = 0
        if self.count == MOST:
            return Advice.STAY
        if self._rest > 0:
            self._rest -= 1
            return Advice.STAY
        self._before = rate
        self._opening = True
        return Advice.ADD

    def _take_rest(self) -> None:
        self._rest = min(_FIRST_REST << min(self._failures, 16), _LONGEST_REST)
        self._failures += 1

    def added(self, moved: int) -> None:
        """The connection that was advised stands; count is one more."""
        self._opening = False
        self._trying = True
        self.count += 1
        self._round = _Round(moved)

    def refused(self, why: str, moved: int) -> None:
        """It does not, for this reason."""
        self._opening = False
        self.reason = f"no further connection came about: {why}"
        self._take_rest()
        self._round = _Round(moved)


_REGION_SIZES = RegionSizes(least=4 << 20, most=256 << 20)  # asked for, of the host's memory and of the GPU's

_SHUNNED_SECONDS = 5.0  # so long others are preferred to a connection that broke

M = TypeVar("M", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True)
class ConnectionOptions:
    target: str
    channels: int | None  # None: as many as help
    connect_timeout: float
    wait_for_server: bool
    max_message_bytes: int
    dead_peer_timeout: float
    retry: RetryOptions
    credentials: Credentials = Credentials()
    transport: str = "grpc"
    shared_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        _require("channels", self.channels, self.channels is None or 1 <= self.channels <= 64, "in [1, 64]")
        size = self.max_message_bytes
        _require("max_message_bytes", size, 1024 <= size < 2**31, "in [1 KiB, 2 GiB)")
        shared = self.shared_memory_bytes
        _require("shared_memory_bytes", shared, shared is None or shared >= 1, "at least 1")
        _require("connect_timeout", self.connect_timeout, self.connect_timeout > 0, "positive")
        _require("dead_peer_timeout", self.dead_peer_timeout, 0 < self.dead_peer_timeout <= 86400, "in (0, 86400] s")
        _require("retry.max_attempts", self.retry.max_attempts, self.retry.max_attempts >= 1, "at least 1")


def _require(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise errors.InvalidArgument(f"{name} is {value!r}; it must be {rule}")


def _arguments(options: ConnectionOptions) -> list[tuple[str, int]]:
    return [
        ("grpc.use_local_subchannel_pool", 1),  # else channels share one connection
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # repeating is decided here, where it is known to be safe
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", options.max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Keepalive also sets TCP_USER_TIMEOUT, which ends a write to a peer that takes nothing any more. Pings are
        # rarer than the five minutes that servers tolerate by default.
        ("grpc.keepalive_time_ms", 10 * 60 * 1000),
        ("grpc.keepalive_timeout_ms", int(options.dead_peer_timeout * 1000)),
    ]


class Deadline:
    """A point in time that several attempts share."""

    def __init__(self, timeout: float) -> None:
        if not timeout > 0:
            raise errors.InvalidArgument(f"timeout is {timeout}; it must be positive")
        self._end = time.monotonic() + timeout

    def left(self) -> float:
        return max(self._end - time.monotonic(), 0.001)

    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def wait_before_repeat(self, retry: RetryOptions, error: errors.LossdError, attempt: int, *,
                           restartable: bool = False) -> float | None:
        """Seconds to wait after attempt number `attempt`, which ended with `error`; None: it is not repeated."""
        return wait_before_repeat(retry, error, attempt, self.left(), jitter(), restartable)


@dataclass
class Connection:
    channel: grpc.Channel
    lent: int = 0  # to so many streams
    broke: float = -_SHUNNED_SECONDS  # when a stream last ended without an answer of the server

    def is_shunned(self) -> bool:
        return time.monotonic() < self.broke + _SHUNNED_SECONDS


class Connections:
    def __init__(self, options: ConnectionOptions) -> None:
        """Opens all connections and waits until they stand; see await_server."""
        self.options = options
        self._pid = os.getpid()
        self._closed = False
        self._ended = ""  # why the server has ended, if something other than a call has told
        self._first = self._open()
        self._lock = threading.Lock()  # guards what follows
        self._all = [Connection(self._first)]
        self._all += [Connection(self._open()) for _ in range(1, options.channels or 1)]
        self._dropped: list[Connection] = []  # which streams still use
        self._chooser = ConnectionChooser()  # unless options.channels says how many
        self._moved = 0  # bytes of payload in messages, both ways
        self._next: grpc.Channel | None = None  # being opened
        self._next_ready = False
        self._next_deadline = 0.0
        self._server_version = ""
        server = server_pb2.ServerDescription()
        self.regions = RegionSource("grpc", _REGION_SIZES, "", str)
        self.device_regions = DeviceRegions("grpc", _REGION_SIZES, server, self._ask)
        deadline = Deadline(options.connect_timeout)
        try:
            for connection in self._all:
                server = await_server(connection.channel, options, deadline)
                self._server_version = server.version
            self._share_memory(server)
        except BaseException:
            self.close()
            raise

    def fail(self, why: str) -> None:
        """The server is known to have ended: calls under way and later ones raise Unavailable with this reason."""
        self._ended = why
        self._close()

    def close(self) -> None:
        """Ends the calls under way."""
        self._closed = True
        self._close()

    def _close(self) -> None:
        with self._lock:
            channels = [each.channel for each in (*self._all, *self._dropped)]
            if self._next is not None:
                channels.append(self._next)
        for channel in channels:
            channel.close()
        self.regions.close()
        self.device_regions.close()

    def _open(self) -> grpc.Channel:
        return self.options.credentials.open(self.options.target, _arguments(self.options))

    def _share_memory(self, server: server_pb2.ServerDescription) -> None:
        options = self.options
        size = options.shared_memory_bytes
        sizes = RegionSizes(size, size) if size else _REGION_SIZES
        if options.transport != "grpc":
            self.regions = RegionSource("auto", sizes, server.region_socket, lambda: self._ask().region_socket)
        if options.transport == "shared_memory":
            self.regions.check()
        self.device_regions = DeviceRegions(options.transport, sizes, server, self._ask)
        self.device_regions.check()

    def _ask(self) -> server_pb2.ServerDescription:
        return self.unary(_METHOD, server_pb2.GetServerRequest(), server_pb2.ServerDescription,
                          Deadline(2.0))

    def region_for(self, device: str, call_bytes: int) -> SharedRegion | None:
        """For a call whose rows have so many bytes and lie on `device`; None: they are to go in messages. May open a
        region."""
        if not device:
            return self.regions.get(call_bytes)
        region = self.device_regions.get(device, call_bytes)
        region = self.regions.get(call_bytes) if region is None else region
        if region is not None:
            region.pin_for(device)
        return region

    def shares_gpu(self, number: int | None) -> bool:
        """As Client.shares_gpu."""
        regions = self.device_regions
        if not regions:
            return False
        return run_apart(lambda: regions.any() if number is None else regions.get(_cuda.driver().uuid(number))) is not None

    def cuda_choice(self) -> tuple[str, str]:
        """How rows of CUDA arrays travel, and why."""
        return self.device_regions.choice()

    @property
    def closed(self) -> bool:
        return self._closed

    def check_usable(self) -> None:
        if self._pid != os.getpid():
            raise errors.ForkedClient(
                f"this client was made in process {self._pid}, before a fork; make a lossd.Client in this process, "
                "or start processes with multiprocessing's spawn")
        if self._closed:
            raise errors.ClientClosed("this client is closed; make a new lossd.Client")
        if self._ended:
            raise errors.Unavailable(self._ended)

    def unary(self, method: str, request: Message, answer: type[M], deadline: Deadline, *, repeat: bool = False,
              cancellation: Cancellation | None = None) -> M:
        """One call, repeated on errors.is_transient if that is safe. Cancelled if `cancellation` says so before it has ended."""
        self.check_usable()
        ending = Cancellation() if cancellation is None else cancellation
        exchange = _exchange(self._first, method, request, answer.FromString, deadline.left, ending)

        def attempt() -> M:
            return self.run(exchange, ending.cancel)

        return self.repeated(attempt, deadline, cancellation=cancellation) if repeat else attempt()

    def updates(self, method: str, request: Message, answer: type[M], deadline: Deadline) -> Iterator[M]:
        """One call that answers with a stream of messages; never repeated."""
        self.check_usable()
        call = self._first.unary_stream(
            method, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString)
        stream = self.run(lambda: call(request, timeout=deadline.left()))
        try:
            while (update := self.run(lambda: next(stream, None), stream.cancel)) is not None:
                yield update
        finally:
            run_apart(stream.cancel)

    def repeated(self, attempt: Callable[[], T], deadline: Deadline, *, restartable: bool = False,
                 cancellation: Cancellation | None = None) -> T:
        """Runs `attempt` until it succeeds or may not be repeated (py), waiting in between."""
        number = 1
        while True:
            try:
                return attempt()
            except errors.LossdError as error:
                wait = deadline.wait_before_repeat(self.options.retry, error, number, restartable=restartable)
                if wait is None:
                    raise with_attempts(error, number) from None
            time.sleep(wait) if cancellation is None else cancellation.wait(wait)
            number += 1

    def stream(self, method: str, connection: Connection | None = None) -> Any:
        """A method with streams of raw bytes in both directions, on that connection; None: on the first one."""
        self.check_usable()
        return (self._first if connection is None else connection.channel).stream_stream(method)

    def choice(self) -> tuple[int, str]:
        """How many connections there are, and why."""
        with self._lock:
            return len(self._all), self._chooser.reason if self.options.channels is None else "the client was told so"

    def idle(self) -> int:
        """How many connections no call has."""
        with self._lock:
            return sum(each.lent == 0 for each in self._all)

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """The connection that is lent to the fewest, for a stream of a loss computation; one that has just broken only if
        all have."""
        with self._lock:
            self._look_at_next()
            self._chooser.begin(time.monotonic())
            connection = min(self._all, key=lambda each: (each.is_shunned(), each.lent))
            connection.lent += 1
        try:
            yield connection
        except errors.Unavailable as error:
            if not error.incarnation:
                connection.broke = time.monotonic()
            raise
        finally:
            with self._lock:
                connection.lent -= 1
                unused = self._take_back()
            for each in unused:
                each.close()

    def count_moved(self, size: int) -> None:
        """Streams have moved so many bytes of payload in messages."""
        with self._lock:
            self._moved += size

    def _take_back(self) -> list[grpc.Channel]:
        """After the end of a stream: the channels that are not needed any more. Opens another one if that may help."""
        self._look_at_next()
        advice = self._chooser.end(self._moved, time.monotonic())
        if self.options.channels is None and not self._closed:
            if advice is Advice.DROP:
                self._dropped.append(self._all.pop())
            elif advice is Advice.ADD:
                self._next, self._next_ready = self._open(), False
                self._next_deadline = time.monotonic() + self.options.connect_timeout
                self._next.subscribe(self._on_state, try_to_connect=True)
        unused = [each.channel for each in self._dropped if not each.lent]
        self._dropped = [each for each in self._dropped if each.lent]
        return unused

    def _on_state(self, state: grpc.ChannelConnectivity) -> None:
        if state is grpc.ChannelConnectivity.READY:
            self._next_ready = True

    def _look_at_next(self) -> None:
        """Takes the connection that is being opened if it stands, or gives it up."""
        if self._next is None:
            return
        if self._next_ready:
            self._next.unsubscribe(self._on_state)
            self._all.append(Connection(self._next))
            self._chooser.added(self._moved)
        elif time.monotonic() > self._next_deadline:
            self._dropped.append(Connection(self._next))
            seconds = self.options.connect_timeout
            self._chooser.refused(f"the server did not take one within {seconds:g} s", self._moved)
        else:
            return
        self._next = None

    def exchange(self, method: str, messages: Iterator[bytes], handle: Callable[[bytes], None], deadline: Deadline,
                 ending: Cancellation) -> None:
        """One call with streams of raw bytes in both directions: sends `messages` and hands over each answer."""

        def body() -> None:
            call = self.stream(method)(messages, timeout=deadline.left())
            with ending.ends(call.cancel):
                try:
                    for data in call:
                        handle(data)
                finally:
                    call.cancel()

        self.run(body, ending.cancel)

    def run(self, rpc: Callable[[], T], cancel: Callable[[], None] | None = None) -> T:
        """Runs a piece of a call, apart from the main thread (run_apart), and turns its errors into ours."""
        def body() -> T:
            try:
                return rpc()
            except grpc.RpcError as error:  # reading it takes locks, too
                if self._ended:
                    raise errors.Unavailable(self._ended) from None
                raise errors.from_rpc(error, self.options.target, self._server_version) from None
            except grpc.FutureCancelledError:
                raise errors.Cancelled("cancelled by the caller") from None
            except ValueError:  # gRPC's answer on a closed channel
                self.check_usable()
                raise

        return run_apart(body, cancel)
