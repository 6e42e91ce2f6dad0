# SPDX-License-Identifier: Apache-2.0
"""Heads that are deleted and made again with another shape while a call moves a tensor of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lossd

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
