# SPDX-License-Identifier: Apache-2.0
"""A lossd server inside this process: embedded() and EmbeddedClient."""

from __future__ import annotations

import _thread
import ctypes
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lossd import _native, errors
from lossd.client import Client

T = TypeVar("T")

_DRAIN_SECONDS = 5.0
_DEVICE_LOST = 2  # LOSSD_DEVICE_LOST
_LAST_WORDS = 2.0  # the time in which a server that still lives can tell the client itself what is lost


def run_uninterrupted(body: Callable[[], T]) -> T:
    """Returns or raises what `body` does. An interrupt is raised only before `body` begins or after it has ended, because half a start or
    half a stop would leave a folder behind. Signal handlers run on the main thread, so it has another thread run `body`."""
    if threading.current_thread() is not threading.main_thread():
        return body()
    # The thread that takes `begins` first decides whether `body` is run.
    begins, under_way = threading.Lock(), threading.Lock()
    under_way.acquire()
    outcome: list[tuple[list[T], BaseException | None]] = []

    def work() -> None:
        if begins.acquire(blocking=False):
            try:
                outcome.append(([body()], None))
            except BaseException as error:
                outcome.append(([], error))
            under_way.release()

    try:
        try:
            _thread.start_new_thread(work, ())  # Thread.start() takes a lock that an interrupt may keep
        except RuntimeError:  # the interpreter is ending
            work()
        while not outcome:  # an interrupt may leave the lock taken; then each wait takes its full time
            under_way.acquire(timeout=0.5)
    except BaseException:
        if not begins.acquire(blocking=False):  # `body` has begun
            while not outcome:
                under_way.acquire(timeout=0.5)
        raise
    value, error = outcome[0]
    if error is not None:
        raise error
    return value[0]


def _stop(library: ctypes.CDLL, server: int, pid: int, drain: float, watch: list[threading.Thread]) -> None:
    caller = threading.current_thread()
    begun = False

    def stop() -> None:
        nonlocal begun
        begun = True
        library.lossd_drain(server, drain)
        for each in watch:  # these threads use the server
            if each is not caller:
                each.join()
        library.lossd_stop(server)

    interrupt: BaseException | None = None
    while pid == os.getpid() and not begun:  # a forked process has no server
        try:
            run_uninterrupted(stop)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


class Member:
    """A server of this process, or the ranks of this process in a server of several. It runs until stop() is called, the
    object is deleted or the process ends. Thread-safe."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._library = _native.library()
        code, error = ctypes.c_int(), ctypes.c_void_p()
        server = self._library.lossd_start(_native.option_texts(options), ctypes.byref(code), ctypes.byref(error))
        if server is None:
            raise errors.from_native(code.value, f"the embedded server does not start: {self._taken(error)}")
        self._server: int = server
        self._watch: list[threading.Thread] = []
        # With several ranks, calls of other processes may be open.
        drain = _DRAIN_SECONDS if "ranks" in options else 0.0
        # Only the first call of stop() stops the server.
        self.stop = weakref.finalize(self, _stop, self._library, server, os.getpid(), drain, self._watch)
        self.address = os.fsdecode(self._library.lossd_address(server))
        self.http_address = os.fsdecode(self._library.lossd_http_address(server))

    def _taken(self, text: ctypes.c_void_p) -> str:
        """The text that the library has written; "" if there is none. Frees it."""
        words = ctypes.string_at(text).decode(errors="replace") if text else ""
        self._library.lossd_free(text)
        return words

    def watch(self, tell: Callable[[str], None]) -> None:
        """Starts a thread that calls `tell` with the reason if the server or its part here ends without stop(). May be called once."""
        library, server, me = self._library, self._server, weakref.ref(self)

        def wait() -> None:
            state = library.lossd_wait(server, -1.0)
            alive = me()
            if alive is None or not alive.stop.alive:
                return
            if state == _DEVICE_LOST:
                time.sleep(_LAST_WORDS)
                why = ctypes.c_void_p()
                library.lossd_live(server, ctypes.byref(why))
                tell(f"a rank of the server is lost: {alive._taken(why)}")
            else:
                tell("the server has ended, because one of its ranks has closed its client or has ended")
        self._watch.append(threading.Thread(target=wait, name="lossd-ranks", daemon=True))
        self._watch[0].start()


class EmbeddedClient(Client):
    """A Client whose server is in this process; closing the client, or the end of the process, stops the server.

    Thread-safe, as Client is. Other processes of the same user reach the server at `target` while it runs, for
    example lossctl. A forked process has neither the client nor the server.
    """

    def __init__(self, server: Member, options: Mapping[str, Any], address: str | None = None) -> None:
        """lossd.embedded() calls this. `address`: the address of a server of several ranks."""
        self._server = server
        # The environment variables are meant for servers that are already running, so they are not used here.
        given: dict[str, Any] = {"ca": "", "cert": "", "key": "", "token": "", "transport": "auto", **options}
        super().__init__((address or server.address).partition(",")[0], **given)
        if address is not None:
            mine = weakref.ref(self)
            server.watch(lambda why: None if (client := mine()) is None else client._fail(why))
            # The client opens its memory with the first call, and then the GPUs of all ranks register it. While the ranks train,
            # registering may have to wait for a collective that waits for a rank that waits for the head. So the memory is opened now.
            if (gpu := _native.current_gpu()) is not None:
                self.shares_gpu(gpu[0])

    @property
    def http_address(self) -> str:
        """host:port of the status page and of the metrics; "" without the option `http`."""
        return self._server.http_address

    def close(self) -> None:
        """Closes the client as Client.close does, then stops the server, and its heads are lost. May be called again."""
        try:
            super().close()
        finally:  # stops the server also after an interrupt
            self._server.stop()


def check_client(options: Mapping[str, Any] | None) -> None:
    """InvalidArgument if an option is not an argument of Client that the caller of an embedded server may choose."""
    for name in options or {}:
        if name in ("target", "context") or name not in inspect.signature(Client).parameters:
            raise errors.InvalidArgument(f"client has {name}, which is not among the arguments of Client that can be given here")


def options_of(*, flags: Mapping[str, Any] | None, **arguments: Any) -> dict[str, Any]:
    """The options of a server: the arguments of embedded() that were given, and `flags`."""
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, value in (flags or {}).items():
        if name in given:
            raise errors.InvalidArgument(f"{name} is an argument, and one of flags too")
        given[name] = value
    if not {"device", "devices"} & {*given} and given.get("backend") != "cpu" and (gpu := _native.current_gpu()) is not None:
        given["device"] = gpu[1]
    return given


def embedded(
        *, checkpoint_dir: str | os.PathLike[str] | None = None, restore: str | None = None, backend: str | None = None,
        device: str | int | None = None, threads: int | None = None, deterministic: bool | None = None, http: str | None = None,
        log_level: str | None = None, flags: Mapping[str, Any] | None = None, client: Mapping[str, Any] | None = None) -> EmbeddedClient:
    """Starts a lossd server in this process and returns a client of it.

        client = lossd.embedded(checkpoint_dir="checkpoints")
        client.create_head("lm", hidden_size=64, vocab_size=1000)

    The server is the same as the program lossd: the same kernels, optimizers, checkpoints, metrics and errors. It listens on a Unix socket
    in a folder that only the user of this process can enter, and on no port. If a run outgrows the process, replace `lossd.embedded()` by
    `lossd.Client(address)`; load_checkpoint restores the heads there. Heads that were not saved are lost when the process ends.

    Args:
      checkpoint_dir: the folder of checkpoints and tensor files. None: ./lossd-checkpoints.
      restore: "latest": the server loads the newest checkpoint of every head that has one below `checkpoint_dir`.
      backend: "cpu", "cuda", or "auto", which uses a GPU if there is one. None: "auto".
      device: the GPU, as its index among the visible GPUs or its UUID. None: the GPU that the calling thread uses, or 0 if
        the thread uses none.
      threads: the number of threads of the CPU backend. None: as many as the process may use.
      deterministic: accumulate gradients in the order of microbatch ids, so that the same microbatches give the same weights, bit for bit.
      http: the address of the status page and of the metrics, "127.0.0.1:7071"; port 0 means any free port. None: no status
        page and no metrics.
      log_level: "debug", "info", "warning", "error" or "off"; it applies to all servers of the process. None: "warning".
      flags: further flags of the program (`lossd --help`), by name, as numbers, bools or strings: `{"staging_bytes": "64MiB",
        "max_heads": 4}`.
      client: arguments of Client, by name: `{"loss_timeout": 60.0}`; not `target` and `context`.

    A process that is ended by a signal, such as SIGTERM without a handler, does not stop its server. The system frees
    everything that the server has, except the folder of the socket.

    Raises:
      Unavailable: the library of the server is not installed, or is of another version, or the server cannot start.
      InvalidArgument: an option or an argument is wrong; the message names it and its value.
      ResourceExhausted: there is not enough memory for the server's buffers.
    """
    check_client(client)
    options = options_of(checkpoint_dir=checkpoint_dir, restore=restore, backend=backend, device=device, threads=threads,
                         deterministic=deterministic, http=http, log_level=log_level, flags=flags)
    return EmbeddedClient(run_uninterrupted(lambda: Member(options)), client or {})
