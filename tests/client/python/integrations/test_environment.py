# SPDX-License-Identifier: Apache-2.0
"""What the other tests of this folder rely on: every framework is there, and a skip fails."""

import importlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest


MODULES = {"megatron-core": "megatron.core"}  # of packages that are called otherwise


@pytest.mark.parametrize("name", ["torch", "transformers", "accelerate", "trl", "lightning", "peft", "deepspeed",
                                  "megatron-core", "torchtitan"])
def test_the_pinned_version_is_installed(name):
    importlib.import_module(MODULES.get(name, name))
    pins = [pin for file in Path(__file__).parent.glob("*.txt") for pin in file.read_text().split()]
    assert f"{name}=={metadata.version(name).split('+')[0]}" in pins


@pytest.mark.parametrize("skip", ["pytest.skip('no reason')", "pytest.importorskip('no_such_module')",
                                  "pytest.skip('no reason', allow_module_level=True)"])
def test_a_skip_is_a_failure(tmp_path, skip):
    in_module = "allow_module_level" in skip
    body = skip if in_module else f"def test():\n    {skip}"
    (tmp_path / "test_it.py").write_text(f"import pytest\n{body}\ndef test_fine(): pass\n")

    def run(*options):
        return subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(tmp_path)],
                              cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert run().returncode in (0, 5)
    strict = run("-p", "no_skips")
    assert strict.returncode in (1, 2) and "A skip is a failure here" in strict.stdout, strict.stdout
