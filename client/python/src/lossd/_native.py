# SPDX-License-Identifier: Apache-2.0
"""The library liblossd.so, which has the client and the server (client/library/lossd_client.h, server/app/lossd.h), and one
client of it. Functions of the library run without the interpreter's lock."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import os
import weakref
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message
from numpy.typing import NDArray

from lossd import errors
from lossd._interrupts import run_apart
from lossd.v1 import loss_pb2, types_pb2
from lossd.v1.library import FUNCTIONS, lossd_client_options, lossd_request, lossd_result

if TYPE_CHECKING:
    from lossd.types import RetryOptions

M = TypeVar("M", bound=Message)

VERSION: str = metadata.version("lossd")

_NAME = "liblossd.so"
_PLACES = ("/usr/lib/lossd", "/usr/local/lib/lossd")  # of the Debian package, and of `make install`
_NOT_HERE = ("lossd needs the library liblossd.so: the wheel lossd_server-*.whl of a release or of `make packages` brings it, as do "
             "the Debian package and `make install`, and the environment variable LOSSD_LIBRARY names it")
_TEXTS = ("target", "ca", "cert", "key", "token", "transport", "run")  # of the options of a client, in order


def _library_path() -> str:
    """The library: that of LOSSD_LIBRARY, that of the package lossd-server, or the system's."""
    if given := os.environ.get("LOSSD_LIBRARY"):
        if not Path(given).is_file():
            raise errors.Unavailable(f"LOSSD_LIBRARY is {given}, and there is no such file")
        return given
    with contextlib.suppress(ImportError, AttributeError):  # it is not there, or of an earlier version
        return str(importlib.import_module("lossd_server").library())
    return next((str(path) for path in (Path(place, _NAME) for place in _PLACES) if path.is_file()), _NAME)


@functools.lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    """Unavailable, saying where it is looked for, if the library is not there or of another version."""
    path = _library_path()
    try:
        # Its own gRPC, protobuf and Abseil go before those that another package has put before all (TensorFlow does).
        loaded = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
    except OSError as error:
        raise errors.Unavailable(f"{_NOT_HERE} ({error})") from None
    found = ""
    if hasattr(loaded, "lossd_version"):
        loaded.lossd_version.restype = ctypes.c_char_p
        found = loaded.lossd_version().decode()
    if found != VERSION:
        raise errors.Unavailable(f"{path} is of lossd {found}, and this client of lossd {VERSION}: install both of one release")
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def current_gpu() -> tuple[int, str] | None:
    """The GPU that the calling thread works on: its number and its UUID; None: it works on none."""
    name = ctypes.create_string_buffer(64)
    number = library().lossd_current_gpu(name)
    return None if number < 0 else (number, name.value.decode())


def gpu_of(name: str, address: int) -> str:
    """The UUID of the GPU whose memory is at this address. InvalidArgument, naming the argument `name`, if it is none's;
    Unavailable, saying why, if there is no driver."""
    uuid, call = ctypes.create_string_buffer(64), Call()
    if library().lossd_gpu_of(address, uuid, call.pointer) < 0:
        error = call.error()
        assert error is not None
        raise errors.InvalidArgument(f"{name} is {error}") if isinstance(error, errors.InvalidArgument) else error
    return uuid.value.decode()


def await_stream(stream: int, address: int) -> None:
    """Waits for what a stream has been given; `address`: memory of its GPU. Unavailable if that is lost."""
    call = Call()
    library().lossd_await_stream(stream, address, call.pointer)
    call.check()


class Call:
    """One function of the library that may be cancelled, and what it has become (lossd_call). Thread-safe."""

    def __init__(self) -> None:
        self._library = library()
        self.pointer: int = self._library.lossd_call_new()
        self._pid = os.getpid()

    def __del__(self) -> None:
        # A fork has the object, and not the threads that it belongs to.
        if getattr(self, "_pid", -1) == os.getpid():
            self._library.lossd_call_free(self.pointer)

    def cancel(self) -> None:
        self._library.lossd_call_cancel(self.pointer)

    def wait(self, seconds: float) -> int:
        """Whether it has ended within so many seconds. An interrupt does not shorten them."""
        return int(self._library.lossd_call_wait(self.pointer, seconds))

    def result(self) -> lossd_result:
        """Of a call that has ended, which keeps what it points to."""
        result = lossd_result()
        self._library.lossd_call_result(self.pointer, ctypes.byref(result))
        return result

    def error(self) -> errors.LossdError | None:
        """Of a call that has ended; None: it has ended well."""
        found = self.result()
        return None if found.code == 0 else errors.from_native(
            found.code, found.message.decode(errors="replace"), ctypes.string_at(found.detail or b"", found.detail_size),
            found.reason)

    def check(self) -> None:
        """Raises its error."""
        if (error := self.error()) is not None:
            raise error

    def answer(self) -> bytes:
        found = self.result()
        return ctypes.string_at(found.answer, found.answer_size)

    def progress(self) -> bytes | None:
        """What it has told since the last time; None: nothing. Before its end, too."""
        size = ctypes.c_size_t()
        address = self._library.lossd_call_progress(self.pointer, ctypes.byref(size))
        return None if address is None else ctypes.string_at(address, size.value)


def check_options(options: loss_pb2.LossOptions) -> None:
    """InvalidArgument, naming field and value, for what no server of this version takes."""
    call, message = Call(), options.SerializeToString()
    if not library().lossd_check_options(message, len(message), call.pointer):
        call.check()


def completed(context: str | None, texts: Mapping[str, str | None]) -> dict[str, str]:
    """Texts of the options of a client; the environment and the server that `context` names say what is None
    (lossd_client_complete)."""
    call = Call()
    given = lossd_client_options(**{name: _encoded(name, text) for name, text in texts.items()})
    library().lossd_client_complete(ctypes.byref(given), _encoded("context", context), call.pointer)
    call.check()
    return dict(zip(_TEXTS, map(os.fsdecode, call.answer().split(b"\0"))))


def _encoded(name: str, text: Any) -> bytes | None:
    """InvalidArgument, naming it, if it is no text, and for a certificate no path either."""
    if text is None:
        return None
    if not isinstance(text, (str, os.PathLike) if name in ("ca", "cert", "key") else str):
        raise errors.InvalidArgument(f"{name} is {text!r}; it must be a string", types_pb2.ErrorDetail(field=name, value=str(text)))
    encoded = os.fsencode(text)
    if b"\0" in encoded:
        raise errors.InvalidArgument(f"{name} is no text: it has a NUL character")
    return encoded


def _filled(values: Mapping[str, Any]) -> lossd_client_options:
    """The options with those of the values that are not None; fields has_NAME say which are. InvalidArgument, naming it, if a
    number does not fit its field."""
    made = lossd_client_options()
    for name, value in values.items():
        if value is None:
            continue
        setattr(made, name, value)
        if hasattr(made, f"has_{name}"):
            setattr(made, f"has_{name}", 1)
        if isinstance(value, int) and getattr(made, name) != value:  # the field has some of its bits
            raise errors.InvalidArgument(f"{name} is {value}; it must fit in {8 * getattr(lossd_client_options, name).size} bits")
    return made


def _close(loaded: ctypes.CDLL, pointer: int, pid: int) -> None:
    if pid == os.getpid():  # a fork has no client
        loaded.lossd_client_close(pointer)


def _free(loaded: ctypes.CDLL, pointer: int, pid: int, closing: Callable[[], Any]) -> None:
    closing()  # once: it does not come later
    if pid == os.getpid():
        loaded.lossd_client_free(pointer)


def _with_hint(error: errors.LossdError, wait_for_server: bool) -> errors.LossdError:
    """What to do if there is no server."""
    if isinstance(error, errors.Unavailable) and error.field == "options.target":
        error.field = "target"
        error.add("; start lossd, or give the address that its --listen names (LOSSD_SERVER)")
        if not wait_for_server:
            error.add("; if it is being started, wait_for_server=True waits for it")
    return error


class NativeClient:
    """The part of lossd.Client that is about connections: a client of the library (lossd_client). Thread-safe."""

    def __init__(self, context: str | None, retry: RetryOptions, **options: Any) -> None:
        """`options` are those of lossd_client_options. A text that is None is left to the environment and to the server that
        `context` names, a number that is None to the library."""
        found = completed(context, {name: options.pop(name) for name in _TEXTS})
        # Of the thread that connects, as the library does that on another one.
        gpu = current_gpu() if found["transport"] == "cuda_ipc" else None
        given = _filled({**{name: os.fsencode(text) for name, text in found.items()}, **options, **dataclasses.asdict(retry),
                         "gpu": -1 if gpu is None else gpu[0]})
        self._target, self._run = found["target"], found["run"]
        self._loss_timeout, self._transfer_timeout = given.loss_timeout, given.transfer_timeout
        self._library = library()
        self._pid = os.getpid()
        self._closed = False
        self._ended = ""  # why the server has ended, if something other than a call has told
        call = Call()
        pointer = run_apart(lambda: self._library.lossd_client_connect(ctypes.byref(given), call.pointer), call.cancel)
        if pointer is None:
            error = call.error()
            assert error is not None
            raise _with_hint(error, given.wait_for_server)
        self._pointer: int = pointer
        # At the end of the process the client is closed and not freed: daemon threads may still call it.
        closing = weakref.finalize(self, _close, self._library, pointer, self._pid)
        weakref.finalize(self, _free, self._library, pointer, self._pid, closing).atexit = False

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    @property
    def target(self) -> str:
        """The address of the server, as it was given."""
        return self._target

    @property
    def run(self) -> str:
        """The name under which this client trains: the argument `run`, or what stands for it."""
        return self._run

    @property
    def transport(self) -> tuple[str, str]:
        """How rows travel, "shared_memory" or "grpc", and why; decided with the first loss computation."""
        found = self._ways()
        return found[0], found[1]

    @property
    def cuda_transport(self) -> tuple[str, str]:
        """How rows of CUDA arrays travel, and why: "cuda_ipc", through memory of a GPU of the server, or "grpc", as rows of
        the host after a copy; decided with the first of them on each GPU, or with shares_gpu. If some go one way and some the
        other, "grpc", and the reason has the way of each GPU."""
        found = self._ways()
        return found[4], found[5]

    @property
    def connections(self) -> tuple[int, str]:
        """How many connections loss computations are spread over, and why; changes unless `channels` says how many."""
        found = self._ways()
        return int(found[2]), found[3]

    def _ways(self) -> list[str]:
        """The texts of lossd_client_describe."""
        call = Call()
        self._library.lossd_client_describe(self._pointer, call.pointer)
        if call.error() is not None:
            return ["grpc", "the client is closed", "0", "the client is closed", "grpc", "the client is closed"]
        return call.answer().decode(errors="replace").split("\0")

    def shares_gpu(self, device: int | None = None) -> bool:
        """Whether rows of CUDA arrays, of this GPU of the process (None: of the first one that is the server's), go through
        memory of a GPU of the server. Opens that memory when asked first, which takes some milliseconds."""
        return bool(run_apart(
            lambda: self._library.lossd_client_open_memory(self._pointer, -1 if device is None else device)))

    def check_usable(self) -> None:
        """ClientClosed or ForkedClient if no call can be made, Unavailable if the server is known to have ended."""
        if self._pid != os.getpid():
            raise errors.ForkedClient(
                f"this client was made in process {self._pid}, before a fork; make a lossd.Client in this process, "
                "or start processes with multiprocessing's spawn")
        if self._closed:
            raise errors.ClientClosed("this client is closed; make a new lossd.Client")
        if self._ended:
            raise errors.Unavailable(self._ended)

    def acknowledge_restart(self, head: str) -> None:
        """The trainer starts the open step again: Restarted and StepDiscarded are not raised for it any more.

        Not needed after load_checkpoint, create_head, reset_head, delete_head or zero_gradients of this client on the head.
        """
        self.check_usable()
        self._library.lossd_client_acknowledge_restart(self._pointer, head.encode())

    def _end(self) -> None:
        """Ends the calls under way and waits for them. May be repeated."""
        self._closed = True
        _close(self._library, self._pointer, self._pid)

    def _fail(self, why: str) -> None:
        """The server is known to have ended: calls under way and later ones raise Unavailable with this reason."""
        self._ended = why
        self._library.lossd_client_close(self._pointer)

    def _meant(self, error: errors.LossdError) -> errors.LossdError:
        """The error of a call as the caller should see it."""
        if isinstance(error, errors.Cancelled):
            if self._closed:
                return errors.ClientClosed("this client was closed during the call")
            if self._ended:
                return errors.Unavailable(self._ended)
        return error

    def _call(self, method: str, request: Message, answer: type[M], timeout: float | None, *,
              payload: NDArray[Any] | None = None, head: Message | None = None, if_exists: int = 0,
              on_progress: Callable[[bytes], None] | None = None) -> M:
        """One method of the services (lossd_client_request). `payload`: a C-contiguous array, which is read or written."""
        self.check_usable()
        call, message = Call(), request.SerializeToString()
        asked = lossd_request(method=method.encode(), message=message, message_size=len(message), timeout=timeout or 0.0,
                                 if_exists=if_exists)
        if payload is not None:
            asked.payload, asked.payload_size = payload.ctypes.data, payload.nbytes
            asked.shape, asked.dimensions = (ctypes.c_uint64 * payload.ndim)(*payload.shape), payload.ndim
        if head is not None:
            asked.head, asked.head_size = head.SerializeToString(), head.ByteSize()

        def body(kept: Any = payload) -> None:  # also when interrupts leave the call to itself
            self._library.lossd_client_request(self._pointer, ctypes.byref(asked), call.pointer)

        def tell() -> None:
            if on_progress is not None and (told := call.progress()) is not None:
                on_progress(told)

        run_apart(body, call.cancel, None if on_progress is None else tell)
        if (error := call.error()) is not None:
            raise self._meant(error)
        return answer.FromString(call.answer())
