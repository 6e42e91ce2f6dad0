# SPDX-License-Identifier: Apache-2.0
"""How much shared memory a client asks for, and when: as much as its calls need. What is asked for which calls is in the golden cases.

The same as tests/server/service/shared_memory_test.cc asks of the C++ client.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from typing import Any

import numpy as np
import pytest
from server_process import ServerProcess

import lossd
from lossd import _plan, _regions, _slice_places

D, V = 16, 23
MIB = 1 << 20


def source_of(server: ServerProcess, least: int, most: int) -> _regions.RegionSource:
    with lossd.Client(server.target, transport="grpc") as client:
        name = client.get_server().region_socket
    return _regions.RegionSource("auto", _plan.RegionSizes(least, most), name, lambda: "")


def test_pauses_grow_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_regions, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(_regions, "_LONGEST_PAUSE", 3600.0)
    attempts = []
    source = _regions.RegionSource("auto", _plan.RegionSizes(4096, 4096), "/nowhere", lambda: attempts.append(1) or "/nowhere")
    start = time.monotonic()
    for _ in range(200):
        assert source.get() is None
        time.sleep(0.0002)
    assert 2 <= len(attempts)
    assert 2 ** len(attempts) - 1 <= 1000 * (time.monotonic() - start)


def test_it_grows_with_the_calls(server: ServerProcess) -> None:
    source = source_of(server, MIB, 32 * MIB)
    first = source.get()
    assert first is not None and first.size == MIB
    assert source.get(MIB // 4) is first
    second = source.get(MIB)
    assert second is not None and second.size == 4 * MIB
    assert source.get(1) is second, "smaller calls use what is there"
    third = source.get(100 * MIB)
    assert third is not None and third.size == 32 * MIB
    assert first.usable(), "for calls that have it"
    source.close()


def test_it_grows_when_calls_find_no_room(server: ServerProcess) -> None:
    source = source_of(server, MIB, 32 * MIB)
    first = source.get()
    assert first is not None and first.take(MIB) == 0
    assert source.get() is first, "nobody needs more yet"
    assert first.take(1) is None
    second = source.get()
    assert second is not None and second.size == 4 * MIB
    assert source.get() is second
    source.close()


def test_a_region_that_was_outgrown_goes_back_when_nobody_uses_it(server: ServerProcess) -> None:
    source = source_of(server, MIB, 32 * MIB)
    with lossd.Client(server.target, transport="grpc") as client:
        first = source.get()
        both = source.get(8 * MIB)
        assert first is not None and both is not None
        held = client.get_server().memory.staging
        del first
        # The session ends with the object; the server sees that at its next look.
        for _ in range(1000):
            if client.get_server().memory.staging <= held - MIB:
                break
        assert client.get_server().memory.staging <= held - MIB
    source.close()


def test_a_region_goes_back_although_a_child_has_inherited_it(server: ServerProcess) -> None:
    """As the workers of a DataLoader do."""
    source = source_of(server, MIB, 32 * MIB)
    with lossd.Client(server.target, transport="grpc") as client:
        assert source.get() is not None
        held = client.get_server().memory.staging
        child = subprocess.Popen(["sleep", "600"], close_fds=False, pass_fds=[source.get()._socket.fileno()])  # type: ignore[union-attr]
        try:
            source.close()
            for _ in range(1000):
                if client.get_server().memory.staging <= held - MIB:
                    break
            assert client.get_server().memory.staging <= held - MIB
        finally:
            child.kill()
            child.wait()


def test_a_region_that_no_call_uses_makes_room_for_a_larger_one() -> None:
    process = ServerProcess(f"--shared_memory_bytes={8 * MIB}")
    try:
        source = source_of(process, MIB, 32 * MIB)
        assert source.get() is not None
        region = source.get(2 * MIB)
        assert region is not None and region.size == 8 * MIB
        source.close()
    finally:
        process.stop()


def test_it_asks_again_for_what_it_did_not_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a region that calls use there is less; later, when no call is under way, there is all of it."""
    monkeypatch.setattr(_regions, "_LONGEST_PAUSE", 0.001)
    process = ServerProcess(f"--shared_memory_bytes={8 * MIB}")
    try:
        source = source_of(process, MIB, 8 * MIB)
        used = source.get()
        assert used is not None and used.begin()
        second = source.get(2 * MIB)
        assert second is not None and MIB < second.size < 8 * MIB and second.begin()
        used.leave()
        second.leave()
        for _ in range(1000):
            region = source.get(2 * MIB)
            if region is not None and region.size == 8 * MIB:
                break
            time.sleep(0.002)
        assert region is not None and region.size == 8 * MIB
        source.close()
    finally:
        process.stop()


def test_a_call_that_finds_its_region_given_back_does_without(server: ServerProcess) -> None:
    """Between the moment that it gets the region and the moment that it begins to use it, another call may have grown it."""
    source = source_of(server, MIB, 32 * MIB)
    region = source.get()
    assert region is not None
    larger = source.get(2 * MIB)
    assert larger is not None and larger is not region
    with _slice_places.SlicePlaces(region, may_wait=True) as places:
        assert places.region is None
    with _slice_places.SlicePlaces(larger, may_wait=True) as places:
        assert places.region is larger
    source.close()


def test_it_grows_while_other_threads_begin_and_end_calls(server: ServerProcess) -> None:
    rng = np.random.default_rng(5)
    rows = [(rng.standard_normal((n, D), dtype=np.float32), rng.integers(0, V, n).astype(np.int32)) for n in (10, 3000, 60000)]
    failures: list[BaseException] = []
    with lossd.Client(server.target, transport="shared_memory") as client:
        name = f"growing-{id(client)}"
        client.create_head(name, hidden_size=D, vocab_size=V)
        wanted = [client.compute_loss(name, hidden, targets).loss for hidden, targets in rows]

        def train(seed: int) -> None:
            order = np.random.default_rng(seed)
            try:
                for _ in range(12):
                    i = int(order.integers(0, len(rows)))
                    assert client.compute_loss(name, *rows[i]).loss == pytest.approx(wanted[i], rel=1e-5)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.delete_head(name)
        assert not failures
        assert client.transport[0] == "shared_memory"


def test_it_stays_where_the_server_gives_no_larger_one() -> None:
    process = ServerProcess(f"--shared_memory_bytes={4 * MIB}")
    try:
        source = source_of(process, 2 * MIB, 32 * MIB)
        region = source.get()
        assert region is not None
        for _ in range(3):
            assert source.get(20 * MIB) is region
        assert source.choice()[0] == "shared_memory"
        source.close()
    finally:
        process.stop()


def test_many_clients_of_small_microbatches_share_what_there_is() -> None:
    """They had a quarter of what the server gives each, whatever they sent."""
    process = ServerProcess(f"--shared_memory_bytes={256 * MIB}")
    rng = np.random.default_rng(12)
    hidden: Any = rng.standard_normal((50, D), dtype=np.float32)
    targets = rng.integers(0, V, 50).astype(np.int32)
    try:
        with contextlib.ExitStack() as clients:
            for i in range(12):
                client = clients.enter_context(lossd.Client(process.target, transport="shared_memory"))
                if i == 0:
                    client.create_head("lm", hidden_size=D, vocab_size=V)
                client.compute_loss("lm", hidden, targets)
                assert client.transport[0] == "shared_memory", client.transport
    finally:
        process.stop()
