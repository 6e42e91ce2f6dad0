# SPDX-License-Identifier: Apache-2.0
"""The package's annotations, checked by mypy as strictly as it can."""

import subprocess
import sys
from pathlib import Path

import pytest

import lossd

pytest.importorskip("mypy", reason="mypy is not installed")


_CONFIGURATION = Path(__file__).parents[3] / "client/python/pyproject.toml"
_WRONG_PROGRAM = """
import numpy as np
import lossd
from lossd.torch import HeadOptimizer, LossHead, ServedEmbedding

client = lossd.Client()
hidden = np.ones((1, 2), np.float32)
client.compute_loss("lm", hidden, [1], acumulate=True)
client.compute_loss("lm", hidden, [1], reduction="average")
client.backward("lm", 1, [1.0])
LossHead(client, "lm", label_smothing=0.1)
LossHead(client, "lm", gradients="precise")
HeadOptimizer(LossHead(client, "lm"), learning_rate=1.0)
client.create_head("lm", hidden_size=2, vocab_size=3, norm="batchnorm")
client.describe_head("lm").specification
client.apply_step("lm", 0, lossd.SGD(lr=1.0)).grad_norm.upper()
client.embed("lm", [1], dtype="fp64")
client.embed("lm", [1]).row_gradients
client.add_row_gradients("lm", [1], hidden, step=0)
ServedEmbedding(client, "lm", sparse=True)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "lossd").symlink_to(Path(lossd.__file__).parent)  # mypy refuses to check what lies among installed packages
    return tmp_path


def mypy(folder, *what):
    return subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={_CONFIGURATION}", f"--cache-dir={folder / 'cache'}", *what],
        cwd=folder, capture_output=True, text=True, check=False)


def test_mypy_finds_nothing(folder):
    assert (folder / "lossd/py.typed").exists()
    checked = mypy(folder, "-p", "lossd")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_mypy_sees_what_users_do_wrong(folder):
    """Every line of the program that uses the package wrongly, and no other."""
    (folder / "wrong.py").write_text(_WRONG_PROGRAM)
    checked = mypy(folder, "wrong.py")
    found = {int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error:" in line}
    assert found == set(range(8, 21)), checked.stdout + checked.stderr
