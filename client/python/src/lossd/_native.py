# SPDX-License-Identifier: Apache-2.0
"""Loads the library liblossd.so, which has the client and the server (client/library/lossd_client.h, server/app/lossd.h), and
calls its functions. They run without the interpreter's lock.

Python runs signal handlers on the main thread, between two calls of functions there. So library functions that may take long
return at once, and waits for them are cut into short ones (await_end). The main thread uses no locks that an exception in a
handler may leave taken, such as those of Condition and Future.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from lossd import errors
from lossd.v1 import types_pb2
from lossd.v1.library import FUNCTIONS, lossd_result

VERSION: str = metadata.version("lossd")

# Installed by the Debian package, and by `make install`.
_PLACES = ("/usr/lib/lossd/liblossd.so", "/usr/local/lib/lossd/liblossd.so")
_NOT_HERE = ("lossd needs the library liblossd.so: the wheel lossd_server-*.whl of a release or of `make packages` brings it, as do "
             "the Debian package and `make install`, and the environment variable LOSSD_LIBRARY names it")
_PATH = (str, os.PathLike)
_TEXTS: Mapping[str, Any] = {  # the types of a client's options
    "target": str, "context": str, "token": str, "transport": str, "run": str, "ca": _PATH, "cert": _PATH, "key": _PATH}


def _library_path() -> str:
    """The path of the library: LOSSD_LIBRARY, or the library of the package lossd-server, or the system's."""
    if given := os.environ.get("LOSSD_LIBRARY"):
        if not Path(given).is_file():
            raise errors.Unavailable(f"LOSSD_LIBRARY is {given}, and there is no such file")
        return given
    with contextlib.suppress(ImportError, AttributeError):  # the package is not installed, or is an earlier version
        return str(importlib.import_module("lossd_server").library())
    return next(filter(os.path.isfile, _PLACES), "liblossd.so")


@functools.lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    """The loaded library. Unavailable, naming the places, if the library is missing or is another version."""
    path = _library_path()
    try:
        # Prefers the library's own gRPC, protobuf and Abseil to copies that another package has made global, as TensorFlow does.
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
    """The GPU that the calling thread uses: its number and its UUID. None: the thread uses no GPU."""
    name = ctypes.create_string_buffer(64)
    number = library().lossd_current_gpu(name)
    return None if number < 0 else (number, name.value.decode())


def gpu_of(name: str, address: int) -> str:
    """The UUID of the GPU of this address. InvalidArgument, naming the argument `name`, if no GPU has it; Unavailable without a driver."""
    uuid = ctypes.create_string_buffer(64)
    try:
        Call().run("lossd_gpu_of", address, uuid)
    except errors.InvalidArgument as error:
        raise errors.InvalidArgument(f"{name} is {error}") from None
    return uuid.value.decode()


def option_texts(options: Mapping[str, Any]) -> Any:
    """Options of a client or a server in the form that the library takes, texts "name=value". None means that an option is not given.
    InvalidArgument, naming the option, if a text option of a client is not a string (for certificates also a path is allowed)."""
    texts = []
    for name, value in options.items():
        if value is None:
            continue
        if not isinstance(value, _TEXTS.get(name, object)):
            raise errors.InvalidArgument(f"{name} is {value!r}; it must be a string", types_pb2.ErrorDetail(field=name, value=str(value)))
        text = os.fsencode(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
        if b"\0" in text:
            raise errors.InvalidArgument(f"{name} is no text: it has a NUL character")
        texts.append(text)
    return (ctypes.c_char_p * (len(texts) + 1))(*texts, None)


def await_end(wait: Callable[[float], int], timeout: float | None = None) -> bool:
    """Waits until `wait` returns true, and returns whether that was within the timeout (None: no limit). `wait` waits in the
    library for the given number of seconds. Signal handlers run between two of these waits."""
    most = 0.05 if threading.current_thread() is threading.main_thread() else math.inf
    end = math.inf if timeout is None else time.monotonic() + timeout
    while not wait(min(most, max(0.0, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
    return True


class Call:
    """One call of a library function that can be cancelled, and its outcome (lossd_call). Thread-safe."""

    def __init__(self, *kept: Any) -> None:
        """`kept`: memory that the function uses until the call has ended."""
        self._library = library()
        # On threads without signal handlers, library functions do their work before they return.
        self.pointer: int = self._library.lossd_call_new(threading.current_thread() is not threading.main_thread())
        self._pid = os.getpid()
        self._kept = kept

    def __del__(self) -> None:
        # A forked process has a copy of the object, but not the threads that belong to it.
        if getattr(self, "_pid", -1) == os.getpid():
            self._library.lossd_call_free(self.pointer)

    def cancel(self) -> None:
        self._library.lossd_call_cancel(self.pointer)

    def wait(self, seconds: float) -> int:
        """Whether the call ends within this number of seconds. An interrupt does not make the wait shorter."""
        return int(self._library.lossd_call_wait(self.pointer, seconds))

    def run(self, function: str, *arguments: Any, meanwhile: Callable[[], None] | None = None) -> bytes:
        """Calls a function whose last argument is the call, and returns its answer. `meanwhile` is called a few times a
        second, and once after the end.

        An exception of a signal handler or of `meanwhile` cancels the call, and is raised at its end; a second one at once.
        """
        try:
            getattr(self._library, function)(*arguments, self.pointer)
            while not await_end(self.wait, None if meanwhile is None else 0.1):
                if meanwhile is not None:
                    meanwhile()
            if meanwhile is not None:
                meanwhile()
        except BaseException:
            self.cancel()
            await_end(self.wait)
            raise
        return self.answer()

    def result(self) -> lossd_result:
        """The result of a call that has ended. The call owns the memory that the result points to."""
        result = lossd_result()
        self._library.lossd_call_result(self.pointer, ctypes.byref(result))
        return result

    def answer(self) -> bytes:
        """The answer of a call that has ended. Raises the call's error."""
        found = self.result()
        if found.code == 0:
            return ctypes.string_at(found.answer, found.answer_size)
        raise errors.from_native(found.code, found.message.decode(errors="replace"),
                                 ctypes.string_at(found.detail or b"", found.detail_size), found.reason)

    def progress(self) -> bytes | None:
        """The progress that the call has reported since the last time; None: nothing new. May be called before the call has ended."""
        size = ctypes.c_size_t()
        address = self._library.lossd_call_progress(self.pointer, ctypes.byref(size))
        return None if address is None else ctypes.string_at(address, size.value)
