# SPDX-License-Identifier: Apache-2.0
"""Every golden case of tests/client/golden, which the C++ client runs too (tests/client/cpp/golden_test.cc)."""

import json
from pathlib import Path

import pytest
from golden_runs import RUNS

FOLDER = Path(__file__).parents[1] / "golden"
FILES = {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.iterdir()) if path.name != "README.md"}


def test_every_file_has_a_kind_of_its_own_that_is_known():
    kinds = {name: content["kind"] for name, content in FILES.items()}
    assert sorted(kinds.values()) == sorted(RUNS)
    for name, content in FILES.items():
        assert set(content) == {"kind", "cases"} and content["cases"], name
        names = [case["name"] for case in content["cases"]]
        assert len(set(names)) == len(names), f"{name}: two cases of one name"


@pytest.mark.parametrize("kind, case", [
    pytest.param(content["kind"], case, id=f"{content['kind']}: {case['name']}")
    for content in FILES.values() for case in content["cases"]])
def test_case(kind, case):
    assert kind in RUNS, f"no test knows how to run cases of kind {kind}"
    RUNS[kind](case)
