# SPDX-License-Identifier: Apache-2.0
"""lossd.torch.balance against all divisions of small models, and `lossctl plan` against lossd.torch.balance."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import lossd.torch


def all_divisions(layers: int, stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, layers), stages - 1)
    return [tuple(end - begin for begin, end in zip((0, *cut), (*cut, layers))) for cut in cuts]


def best_of_all(times: list[float], head: float, besides: list[float]) -> float:
    """The time of the slowest stage in the best division, its head divided as finely as one likes."""
    best = math.inf
    for layers in all_divisions(len(times), len(besides)):
        ends = list(itertools.accumulate(layers))
        loads = [sum(times[end - count:end]) + more for end, count, more in zip(ends, layers, besides)]
        best = min(best, max(max(loads), (sum(loads) + head) / len(loads)))
    return best


def test_is_the_best_division(rng: np.random.Generator) -> None:
    for _ in range(60):
        stages = int(rng.integers(1, 5))
        times = rng.uniform(0.5, 2.0, int(rng.integers(stages, 10))).tolist()
        besides = (rng.uniform(0, 1, stages) * rng.integers(0, 2)).tolist()
        head = float(rng.choice([0.0, 0.3, 2.0, 20.0]))
        got = lossd.torch.balance(times, head, stages, stage_seconds=besides, least_share=0)
        assert sum(got.layers) == len(times) and min(got.layers) >= 1
        best = best_of_all(times, head, besides)
        assert max(got.seconds) == pytest.approx(best, abs=head * 0.01 + 1e-9)
        assert sum(got.seconds) == pytest.approx(sum(times) + sum(besides) + head)
        assert got.bound <= best + 1e-9


def test_layers_that_do_not_divide() -> None:
    got = lossd.torch.balance([2.0] * 13, 12.0, 4)
    assert sorted(got.layers) == [3, 3, 3, 4]
    assert got.seconds == pytest.approx([9.5] * 4, abs=0.05)
    assert min(got.shares) == pytest.approx(125, abs=2)


def test_a_stage_that_has_no_time_left() -> None:
    assert lossd.torch.balance([10.0, 1.0, 1.0], 4.0, 3, least_share=1).shares == (1, 500, 500)
    assert lossd.torch.balance([10.0, 1.0, 1.0], 4.0, 3).shares == (0, 500, 500)
    assert lossd.torch.balance([1.0, 1.0], 0.0, 2).shares == (1, 1)


@pytest.mark.parametrize("head", [1e-17, 1e-300, 1e-3])
def test_a_head_that_takes_hardly_any_time_has_shares(head: float) -> None:
    assert lossd.torch.balance([1.0] * 4, head, 4).shares == (250, 250, 250, 250)
    uneven = lossd.torch.balance([1.0] * 5, head, 4)
    assert sorted(zip(uneven.layers, uneven.shares)) == [(1, 333), (1, 333), (1, 333), (2, 0)]
    assert max(uneven.seconds) == pytest.approx(2.0)


def test_the_least_share_is_one_of_the_head(rng: np.random.Generator) -> None:
    """Not of what the shares add up to, which would be above 1000 if late stages had theirs on top."""
    assert lossd.torch.balance([1.0] * 5, 0.1, 2, least_share=500).shares == (500, 500)
    assert lossd.torch.balance([10.0, 1.0, 1.0], 4.0, 3, least_share=200).shares == (200, 400, 400)
    for _ in range(60):
        stages = int(rng.integers(1, 9))
        least = int(rng.integers(0, 1000 // stages + 1))
        times = rng.uniform(0.001, 0.03, int(rng.integers(stages, 20))).tolist()
        got = lossd.torch.balance(times, float(rng.choice([1e-9, 0.01, 0.2])), stages, least_share=least)
        assert min(got.shares) >= least
        assert abs(sum(got.shares) - 1000) <= stages


@pytest.mark.parametrize("arguments, named", [
    (dict(layer_seconds=[1.0], head_seconds=1.0, stages=2), "stages is 2"),
    (dict(layer_seconds=[1.0, -1.0], head_seconds=1.0, stages=2), r"layer_seconds\[1\] is -1.0"),
    (dict(layer_seconds=[1.0], head_seconds=math.nan, stages=1), "head_seconds is nan"),
    (dict(layer_seconds=[1.0], head_seconds=1.0, stages=1, stage_seconds=[1.0, 2.0]), "2 entries for 1 stages"),
    (dict(layer_seconds=[1.0], head_seconds=1.0, stages=1, least_share=1001), "least_share is 1001")])
def test_bad_input(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        lossd.torch.balance(**arguments)  # type: ignore[arg-type]


def loads(times: list[float], embedding: float, layers: Sequence[int]) -> list[float]:
    """Of the stages, without the head."""
    ends = list(itertools.accumulate(layers))
    return [math.fsum(times[end - count:end]) + (0.0 if index else embedding)
            for index, (end, count) in enumerate(zip(ends, layers))]


def planned(lossctl: Path, arguments: list[str]) -> list[dict[str, Any]]:
    done = subprocess.run([str(lossctl), "--json", "plan", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [each for each in json.loads(done.stdout)["pipelines"] if each["kind"] == "colocated"]


def test_lossctl_plan_divides_in_the_same_way(rng: np.random.Generator) -> None:
    """Not about the same: the same layers and the same shares, of times with all their digits. Where several divisions are
    equally even, either may come first by a rounding."""
    lossctl = Path(os.environ["LOSSD_BINARY"]).with_name("lossctl")
    for case in range(40):
        stages = int(rng.integers(1, 9))
        layers = int(rng.integers(stages, 5 * stages + 2))
        times = [float(rng.uniform(0.001, 0.03))] * layers if case % 2 else rng.uniform(0.001, 0.03, layers).tolist()
        embedding = float(rng.choice([0.0, rng.uniform(0, 0.05)]))
        exact, sampled = rng.uniform(0.001, 0.2, 2).tolist()
        given = ",".join(map(repr, times if case % 4 else [times[0]]))
        times = times if case % 4 else [times[0]] * layers
        colocated = planned(lossctl, [
            "--hidden=2304", "--vocab=256000", "--rows=65536", f"--layers={layers}", f"--stages={stages}",
            f"--layer-seconds={given}", f"--embedding-seconds={embedding!r}", f"--head-seconds={exact!r}",
            f"--sampled-seconds={sampled!r}"])
        assert [each["head_seconds"] for each in colocated] == [exact, sampled, exact, sampled]
        for each in colocated:
            got = lossd.torch.balance(times, each["head_seconds"], stages, stage_seconds=[embedding] + [0.0] * (stages - 1),
                                      least_share=each["least_share"])
            if list(got.layers) == each["layers"]:
                assert list(got.shares) == each["shares"], (case, times, each)
            else:
                ours, theirs = (sorted(loads(times, embedding, layers)) for layers in (got.layers, each["layers"]))
                assert ours == pytest.approx(theirs, rel=1e-12), (case, times, each)
                assert sorted(got.shares) == sorted(each["shares"]), (case, times, each)
