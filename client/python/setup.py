# SPDX-License-Identifier: Apache-2.0
"""Makes lossd.v1 while the package is built, from the protocol's .proto files and the headers of liblossd.so; the rest is
pyproject.toml."""

import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
PROTOS = [f"lossd/v1/{name}.proto" for name in ("types", "loss", "head", "region", "server")]
HEADERS = ["client/library/lossd_client.h", "server/app/lossd.h"]
# The repository, or in a source distribution its files that the package is made of.
ROOT = HERE if (HERE / "VERSION").exists() else HERE.parent.parent
VERSION = (ROOT / "VERSION").read_text().strip()


def protoc() -> list[str]:
    """A compiler that knows `optional` and writes .pyi files: of grpcio-tools (not Debian's 1.14), or the system's."""
    try:
        if int(metadata.version("grpcio-tools").split(".")[1]) >= 51:
            return [sys.executable, "-m", "grpc_tools.protoc"]
    except metadata.PackageNotFoundError:
        pass
    if program := shutil.which("protoc"):
        return [program]
    raise SystemExit("setup.py: needs protoc (Debian: protobuf-compiler) or grpcio-tools 1.51 or later (PyPI)")


def generate(out: Path) -> None:
    out = out.resolve()
    made = out / "lossd/v1"
    made.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile() as described:
        subprocess.run([*protoc(), f"-I{ROOT / 'proto'}", f"--python_out={out}", f"--pyi_out={out}", "--include_source_info",
                        f"--descriptor_set_out={described.name}", *PROTOS], check=True)
        subprocess.run([sys.executable, HERE / "describe.py", made / "descriptions.py", described.name], check=True)
    subprocess.run([sys.executable, HERE / "bind.py", made / "library.py", *(ROOT / header for header in HEADERS)], check=True)


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        generate(HERE / "src" if self.editable_mode else Path(self.build_lib))


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for name in ("VERSION", *HEADERS, *(f"proto/{proto}" for proto in PROTOS)):
            target = Path(base_dir) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
        for script in ("describe.py", "bind.py"):
            shutil.copyfile(HERE / script, Path(base_dir) / script)


setup(version=VERSION, cmdclass={"build_py": BuildPy, "sdist": Sdist})
