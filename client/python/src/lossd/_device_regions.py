# SPDX-License-Identifier: Apache-2.0
"""Where the loss calls of a client get their regions from whose rows are CUDA arrays.

There is a source for each GPU of the server that shares memory. Rows on one of these GPUs take memory of that GPU. Rows on
another GPU take memory of the nearest one if the client was told so ("cuda_ipc"), and else go as rows of the host do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from lossd import _cuda, errors
from lossd._plan import RegionSizes
from lossd._region_source import RegionSource
from lossd._regions import SharedRegion, no_region
from lossd.v1 import server_pb2


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
        """How rows of CUDA arrays travel, and why, over all GPUs that rows came from: "cuda_ipc", or "grpc" if some go as rows
        of the host do."""
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
