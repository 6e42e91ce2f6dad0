# SPDX-License-Identifier: Apache-2.0
"""Lets PyPI's torch for Linux, which is built with CUDA, be imported without CUDA's libraries.

    python empty_libraries.py VENV

torch's own libraries name CUDA's (cuBLAS, cuDNN, NCCL, ...; more than 2 GB), and the loader wants files of these names
with all their functions before any of them is called. On a CPU none is called. So this writes a library into torch/lib
for each such name, in which every function that torch asks for says that it is absent and aborts. libcudart is not
among them: torch asks it whether there is a GPU. Needs gcc and readelf; does nothing for a torch built without CUDA.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

_CUDA = re.compile(r"lib(cu(?!dart|da\.)|nccl|nv)")
_SOURCE = """#include <stdio.h>
#include <stdlib.h>
static void absent(void) {{
  fputs("{name} is an empty library of lossd's tests: there is no CUDA in this environment\\n", stderr);
  abort();
}}
"""


class Wanted:
    """What torch's libraries ask of others."""

    def __init__(self, libraries: list[Path]) -> None:
        self.names: set[str] = set()
        self.versions: dict[str, set[str]] = defaultdict(set)  # by library
        self.symbols: dict[str, set[str]] = defaultdict(set)  # by version; "" has those without one
        for library in libraries:
            self._read(library)

    def _read(self, library: Path) -> None:
        self.names |= set(re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf("--dynamic", library)))
        of: set[str] = set()
        for line in _readelf("--version-info", library).splitlines():
            if match := re.search(r"Version: 1 +File: (\S+)", line):
                of = self.versions[match[1]]
            elif match := re.search(r"Name: (\S+) +Flags: ", line):
                of.add(match[1])
        for symbol, _, version in re.findall(r" UND (\w+)(@(\S+))?", _readelf("--dyn-syms", library)):
            if version or re.match("cu|nccl|nv", symbol):
                self.symbols[version].add(symbol)

    def write_empty(self, name: str, folder: Path) -> None:
        """Symbols without a version may be in any library; a library whose own have none gets them all."""
        versions = sorted(self.versions[name]) or [""]
        with tempfile.TemporaryDirectory() as work:
            source, script = Path(work, "empty.c"), Path(work, "versions")
            source.write_text(_SOURCE.format(name=name) + "".join(
                f'void {symbol}(void) __attribute__((alias("absent")));\n'
                for version in versions for symbol in sorted(self.symbols[version])))
            script.write_text("".join(f"{version} {{ global: {'; '.join(sorted(self.symbols[version]))}; }};\n"
                                      for version in versions if version))
            subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", str(source), "-o", str(folder / name),
                            *([f"-Wl,--version-script={script}"] if self.versions[name] else [])], check=True)


def _readelf(option: str, library: Path) -> str:
    return subprocess.run(["readelf", option, "--wide", str(library)], check=True, capture_output=True, text=True).stdout


def main() -> None:
    found = list(Path(sys.argv[1]).glob("lib/python*/site-packages/torch/lib"))
    if len(found) != 1:
        sys.exit(f"empty_libraries.py: {sys.argv[1]} holds torch {len(found)} times, not once")
    wanted = Wanted([each for each in sorted(found[0].glob("lib*.so*")) if not _CUDA.match(each.name)])
    names = sorted(filter(_CUDA.match, wanted.names))
    for name in names:
        wanted.write_empty(name, found[0])
    print(f"empty libraries: {', '.join(names) or 'none'}")


main()
