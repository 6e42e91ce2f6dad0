# SPDX-License-Identifier: Apache-2.0
"""A value of one row that the server would refuse, among rows that travel in several streams: nothing of the microbatch counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import lossd

N, D, V, K = 700, 16, 50, 3
ROW = 650  # of the last stream

SOFT = {"target_classes": np.tile(np.arange(K, dtype=np.int32), (N, 1)), "target_weights": np.full((N, K), 0.25, np.float32)}
PPO = lossd.LossOptions(objective=lossd.Objective("ppo", kl_coef=0.1))
PPO_NUMBERS = {name: np.full(N, -0.5, np.float32) for name in ("advantages", "old_logprobs", "ref_logprobs")}


def soft(rest: str) -> dict[str, Any]:
    return {**SOFT, "options": lossd.LossOptions(rest=rest)}  # type: ignore[arg-type]


@pytest.mark.parametrize("name, bad, message, given", [
    ("targets", V, rf"^open.targets\[{ROW}\] must be in \[0, {V}\) or ignore_index \(-100\), got {V}$", {}),
    ("targets", -1, rf"open.targets\[{ROW}\] .*, got -1$", {}),
    ("row_weights", math.nan, rf"open.row_weights\[{ROW}\] must be finite, got nan", {"row_weights": np.ones(N, np.float32)}),
    ("classes", V, rf"open.classes\[{ROW * K}\] must be in \[0, {V}\), got {V}", {"classes": SOFT["target_classes"]}),
    ("advantages", math.inf, rf"open.advantages\[{ROW}\] must be finite", {**PPO_NUMBERS, "options": PPO}),
    ("old_logprobs", -math.inf, rf"open.old_logprobs\[{ROW}\] must be finite", {**PPO_NUMBERS, "options": PPO}),
    ("ref_logprobs", math.nan, rf"open.ref_logprobs\[{ROW}\] must be finite", {**PPO_NUMBERS, "options": PPO}),
    ("target_classes", V, rf"open.target_classes\[{ROW * K}\] must be in \[0, {V}\) or -1, got {V}", soft("none")),
    ("target_classes", -1, rf"open.target_weights\[{ROW * K}\] must be 0 where target_classes is -1, got 0.25", soft("none")),
    ("target_weights", -0.5, rf"open.target_weights\[{ROW * K}\] must be finite and >= 0, got -0.5", soft("none")),
    ("target_weights", 1.0, rf"open.target_weights\[{ROW * K}\] begins a row whose weights must add up to at most 1.001 .*, got 1.5",
     soft("one_class")),
])
def test_nothing_of_the_microbatch_counts(client: lossd.Client, make_head: Any, name: str, bad: float, message: str,
                                          given: dict[str, Any]) -> None:
    head = make_head(hidden_size=D, vocab_size=V)
    arguments: dict[str, Any] = {"targets": np.arange(N) % V, **given}
    rows = arguments[name].copy()
    rows.reshape(N, -1)[ROW, 0] = bad
    hidden = np.random.default_rng().standard_normal((N, D), np.float32)
    for streams in (1, 4):
        with pytest.raises(lossd.InvalidArgument, match=message):
            client.compute_loss(head, hidden, **{**arguments, name: rows}, step=0, id=1, accumulate=True, streams=streams)
    assert client.describe_head(head).step_rows == 0
    result = client.compute_loss(head, hidden, **arguments, step=0, id=1, accumulate=True, streams=4)  # mended, under the same id
    assert result.accumulated_rows == N


def test_a_backward_pass_of_which_one_number_is_bad(client: lossd.Client, make_head: Any) -> None:
    head = make_head(hidden_size=D, vocab_size=V)
    hidden = np.random.default_rng().standard_normal((N, D), np.float32)
    client.compute_loss(head, hidden, np.arange(N) % V, step=0, id=1, reduction="none", retain=True)
    upstream = np.ones(N, np.float32)
    upstream[ROW] = math.nan
    for streams in (1, 4):
        with pytest.raises(lossd.InvalidArgument, match=rf"backward.grad_loss\[{ROW}\] must be finite"):
            client.backward(head, 1, upstream, hidden_size=D, step=0, accumulate=True, streams=streams)
    assert client.describe_head(head).step_rows == 0


def test_a_target_that_the_draft_vocabulary_lacks(client: lossd.Client, make_head: Any) -> None:
    """Also in the first row, and if the list was learnt before the head was made again with another one."""
    hidden, listed = np.ones((N, D), np.float32), list(range(10, 30))
    head = make_head(hidden_size=D, vocab_size=len(listed), class_list=listed, full_vocab_size=V)
    refusing = lossd.LossOptions(refuse_unlisted=True)
    for row in (0, ROW):
        targets = np.full(N, 10)
        targets[row] = 40
        with pytest.raises(lossd.InvalidArgument, match=rf"open.targets\[{row}\] must be in the head's class_list with .*, got 40"):
            client.compute_loss(head, hidden, targets, step=0, id=1, accumulate=True, options=refusing, streams=4)
    assert client.compute_loss(head, hidden, targets, streams=4).unlisted_rows == 1
    with lossd.Client(client.target) as other:
        other.delete_head(head)
        other.create_head(head, hidden_size=D, vocab_size=V)
    assert client.compute_loss(head, hidden, targets, options=refusing, streams=4).valid_rows == N
