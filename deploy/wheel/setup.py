# SPDX-License-Identifier: Apache-2.0
"""Packs programs that are built already; the rest is pyproject.toml. scripts/packages calls it.

LOSSD_STAGE: a folder with bin/ and lib/ as `scripts/bundle --stage` leaves them.
"""

import os
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py
from wheel.bdist_wheel import bdist_wheel

HERE = Path(__file__).resolve().parent


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        for name in ("bin", "lib"):
            target = Path(self.build_lib) / "lossd_server" / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(Path(os.environ["LOSSD_STAGE"]) / name, target)


class Wheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python, this platform."""
        return "py3", "none", super().get_tag()[2]


class Binary(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(version=(HERE.parent.parent / "VERSION").read_text().strip(), cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel},
      distclass=Binary)
