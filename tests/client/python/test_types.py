"""The package's annotations, checked by mypy as strictly as it can."""

import subprocess
import sys
from pathlib import Path

import pytest

import lossd

pytest.importorskip("mypy", reason="mypy is not installed")


def test_mypy_finds_nothing(tmp_path):
    package = Path(lossd.__file__).parent
    assert (package / "py.typed").exists()
    (tmp_path / "lossd").symlink_to(package)  # mypy refuses to check what lies among installed packages
    config = Path(__file__).parents[3] / "client/python/pyproject.toml"
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={config}", f"--cache-dir={tmp_path / 'cache'}", "-p", "lossd"],
        cwd=tmp_path, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
