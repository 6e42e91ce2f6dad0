# SPDX-License-Identifier: Apache-2.0
"""Heads that are deleted and made again with another shape while a call moves a tensor of them."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lossd
from lossd import _tensors

FORMER = (4, 6)  # D, V
LATTER = [(8, 10), (4, 10), (4, 5)]  # with the same D, the rows of one fit into the other


@pytest.fixture(params=LATTER)
def between(request, server, client, make_head, monkeypatch):
    """Has the head be made again with another shape between what a call asks first and the transfer."""
    name = make_head(hidden_size=FORMER[0], vocab_size=FORMER[1], bias=True)
    describe = client._describe
    asked: list[Any] = []

    shape = request.param

    def describe_and_change(head: str, *arguments: Any, **named: Any) -> Any:
        description = describe(head, *arguments, **named)
        if not asked:
            asked.append(head)
            with lossd.Client(server.target) as other:
                other.delete_head(name)
                other.create_head(name, hidden_size=shape[0], vocab_size=shape[1], bias=True)
        return description

    monkeypatch.setattr(client, "_describe", describe_and_change)
    return name


@pytest.mark.parametrize("param", ["weight", "bias"])
@pytest.mark.parametrize("rows", [None, (2, 5)])
def test_a_read_says_that_the_head_is_another_one(client, between, param, rows):
    with pytest.raises(lossd.Aborted, match=r"made again during the call: .* has shape \(.*\), and had \((6, 4|6,)\)"):
        client.read_tensor(between, param, rows=rows)


@pytest.mark.parametrize("param", ["weight", "bias"])
def test_a_write_says_that_the_head_is_another_one(client, between, param):
    shape = FORMER[::-1] if param == "weight" else FORMER[1:]
    with pytest.raises(lossd.Aborted, match="made again during the call"):
        client.write_tensor(between, param, np.ones(shape, np.float32))


@pytest.mark.parametrize("param", ["weight", "bias"])
def test_a_gradient_says_that_the_head_is_another_one(client, between, param):
    shape = FORMER[::-1] if param == "weight" else FORMER[1:]
    with pytest.raises(lossd.Aborted, match="made again during the call"):
        client.add_gradient(between, param, np.ones(shape, np.float32), step=0, id=1)


def test_errors_of_the_head_that_is_meant_stay(client, make_head):
    name = make_head(hidden_size=FORMER[0], vocab_size=FORMER[1])
    with pytest.raises(lossd.FailedPrecondition, match="not the open step"):
        client.add_gradient(name, "weight", np.ones(FORMER[::-1], np.float32), step=3, id=1)


@pytest.mark.parametrize("param", ["weight", "bias"])
def test_a_head_that_is_the_former_one_again_when_it_is_asked_for(server, client, make_head, monkeypatch, param):
    """The shape is another one during the transfer alone: a repeat finds what was described."""
    name = make_head(hidden_size=FORMER[0], vocab_size=FORMER[1], bias=True)
    read_rows = _tensors._read_rows
    reads: list[int] = []

    def make_again(shape: tuple[int, int]) -> None:
        with lossd.Client(server.target) as other:
            other.delete_head(name)
            other.create_head(name, hidden_size=shape[0], vocab_size=shape[1], bias=True)

    def read_of_another(*arguments: Any) -> None:
        reads.append(1)
        if len(reads) > 1:
            return read_rows(*arguments)
        make_again(LATTER[0])
        try:
            read_rows(*arguments)
        finally:
            make_again(FORMER)

    monkeypatch.setattr(_tensors, "_read_rows", read_of_another)
    assert len(client.read_tensor(name, param)) == FORMER[1]
    assert len(reads) == 2


def test_a_head_that_is_gone_when_it_is_asked_for(server, client, between_and_gone):
    for call in (lambda: client.read_tensor(between_and_gone, "weight"),
                 lambda: client.write_tensor(between_and_gone, "weight", np.ones(FORMER[::-1], np.float32))):
        with pytest.raises(lossd.NotFound, match=between_and_gone):
            call()


@pytest.fixture
def between_and_gone(server, client, monkeypatch):
    """Has the head be deleted between what a call asks first and the transfer; it comes back before the next call."""
    name = "gone-between"
    describe = client._describe
    asked: list[Any] = []

    def describe_and_delete(head: str, *arguments: Any, **named: Any) -> Any:
        asked.append(head)
        if len(asked) % 2 == 0:
            return describe(head, *arguments, **named)
        with lossd.Client(server.target) as other:
            other.create_head(name, hidden_size=FORMER[0], vocab_size=FORMER[1])
            description = describe(head, *arguments, **named)
            other.delete_head(name)
        return description

    monkeypatch.setattr(client, "_describe", describe_and_delete)
    yield name
    if any(head.name == name for head in client.list_heads()):
        client.delete_head(name)


def test_whatever_meets_a_head_that_is_made_again_is_told_why(server, seed):
    """Calls of every kind while one thread deletes the head and makes it again, each time with another shape."""
    name = "unsteady"
    end = time.monotonic() + 6
    fine = (lossd.Aborted, lossd.NotFound, lossd.FailedPrecondition, lossd.InvalidArgument, lossd.AlreadyExists,
            lossd.ResourceExhausted)
    outcomes: collections.Counter[str] = collections.Counter()
    wrong: list[BaseException] = []

    def change() -> None:
        with lossd.Client(server.target) as own:
            turn = 0
            while time.monotonic() < end:
                turn += 1
                shape = [FORMER, *LATTER][turn % 4]
                try:
                    own.create_head(name, hidden_size=shape[0], vocab_size=shape[1], bias=turn % 3 > 0)
                    time.sleep(0.002)
                    own.delete_head(name)
                except fine:
                    time.sleep(0.001)

    def calls(client: lossd.Client, turn: int) -> list[Callable[[], Any]]:
        d, v = [FORMER, *LATTER][turn % 4]
        ones = np.ones((v, d), np.float32)
        return [lambda: client.read_tensor(name, "weight"), lambda: client.read_tensor(name, "bias", dtype="bf16"),
                lambda: client.read_tensor(name, "weight", "gradient", rows=(1, 4)),
                lambda: client.read_tensor(name, "weight", "moment1"),
                lambda: client.write_tensor(name, "weight", ones),
                lambda: client.write_tensor(name, "weight", ones[1:3], rows=(1, 3)),
                lambda: client.add_gradient(name, "weight", ones, step=0, id=turn),
                lambda: client.save_checkpoint(name, f"s{turn}"), lambda: client.save_checkpoint(name),
                lambda: client.load_checkpoint(f"{name}/s{max(0, turn - 3)}"),
                lambda: client.reset_head(name, "all", seed=1), lambda: client.zero_gradients(name, 0),
                lambda: client.apply_step(name, 0, lossd.SGD(lr=0.1)), lambda: client.grad_norm(name)]

    def use(numbers: Any) -> None:
        with lossd.Client(server.target) as own:
            turn = 0
            while time.monotonic() < end and not wrong:
                turn += 1
                which = int(numbers.integers(14))
                try:
                    calls(own, turn)[which]()
                    outcomes["done"] += 1
                except fine as error:
                    outcomes[type(error).__name__] += 1
                except lossd.Unavailable as error:  # another thread creates it for longer than calls are repeated
                    if "is being created" not in str(error):
                        wrong.append(error)
                except BaseException as error:
                    wrong.append(error)

    threads = [threading.Thread(target=change)]
    threads += [threading.Thread(target=use, args=(numbers,)) for numbers in
                (np.random.default_rng((seed, i)) for i in range(3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(dict(outcomes))
    if wrong:
        raise wrong[0]
    assert outcomes["done"] > 20 and outcomes["NotFound"] > 5
