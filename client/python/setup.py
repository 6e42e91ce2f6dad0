# SPDX-License-Identifier: Apache-2.0
"""Makes the protocol's messages, and the classes that describe them, from the .proto files while the package is built; the rest is
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


def proto_root() -> Path:
    """The folder that .proto files name each other from: the repository's, or the copy in a source distribution."""
    for root in (HERE / "proto", HERE.parent.parent / "proto"):
        if (root / PROTOS[0]).exists():
            return root
    raise SystemExit(f"setup.py: no proto/{PROTOS[0]} beside {HERE} nor two folders above")


def version() -> str:
    """Of the repository's file VERSION, or of its copy in a source distribution."""
    for root in (HERE, HERE.parent.parent):
        if (root / "VERSION").exists():
            return (root / "VERSION").read_text().strip()
    raise SystemExit(f"setup.py: no VERSION beside {HERE} nor two folders above")


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
    root, out = proto_root(), out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile() as described:
        subprocess.run([*protoc(), f"-I{root}", f"--python_out={out}", f"--pyi_out={out}", "--include_source_info",
                        f"--descriptor_set_out={described.name}", *PROTOS], check=True, cwd=root)
        subprocess.run([sys.executable, HERE / "describe.py", described.name, out / "lossd/v1/descriptions.py"], check=True)


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        generate(HERE / "src" if self.editable_mode else Path(self.build_lib))


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for name in PROTOS:
            target = Path(base_dir) / "proto" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(proto_root() / name, target)
        shutil.copyfile(HERE / "describe.py", Path(base_dir) / "describe.py")
        (Path(base_dir) / "VERSION").write_text(version() + "\n")


setup(version=version(), cmdclass={"build_py": BuildPy, "sdist": Sdist})
