# SPDX-License-Identifier: Apache-2.0
"""The copy of the code in build/mutants/tree, with its changes behind switches, and its build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import mutate
import mutate_python
from mutate import Mutation

HOME = Path(__file__).resolve().parents[2]
WORK = HOME / "build" / "mutants"
TREE = WORK / "tree"
BUILD = TREE / "build" / "cpu-only"  # as in any checkout, so that ccache has what is not changed
PACKAGE = "client/python/src/lossd/"


@dataclass(frozen=True)
class Mutant:
    number: int
    folder: str
    file: str
    what: Mutation

    @property
    def key(self) -> str:
        """Three columns, as in results.txt and equivalent.txt."""
        return " | ".join([self.file, *(text.replace(" | ", "|") for text in (self.what.before, self.what.after))])


def listed(*patterns: str, untracked: bool = False) -> list[str]:
    """Files of the repository, by their paths in it."""
    which = ["--cached", "--others", "--exclude-standard"] if untracked else []
    done = subprocess.run(["git", "ls-files", "-z", *which, "--", *patterns], cwd=HOME, check=True, capture_output=True, text=True)
    return sorted({name for name in done.stdout.split("\0") if name and (HOME / name).is_file()})


def mutations(file: str) -> list[Mutation]:
    """All changes that can be made in a file of the repository."""
    return (mutate_python if file.endswith(".py") else mutate).mutations((HOME / file).read_text())


def changed_files(mutants: list[Mutant]) -> dict[str, bytes]:
    """What is in the files that differ from the repository's.

    The code of a .cc file is in a file beside it that counts as a system's header: warnings do not matter there. The checksum
    tells ccache, which does not look into such headers, that the code is another one.
    """
    changed: dict[str, bytes] = {}
    for file in sorted({mutant.file for mutant in mutants}):
        chosen = [(mutant.number, mutant.what) for mutant in mutants if mutant.file == file]
        text = (HOME / file).read_text()
        if file.endswith(".py"):
            changed[file] = mutate_python.switched(text, chosen).encode()
        else:
            header = f'#pragma GCC system_header\n#include "{HOME / "tests/mutants/mutant.h"}"\n#line 1\n'
            code = (header + mutate.switched(text, chosen)).encode()
            changed[f"{file}.mutants"] = code
            changed[file] = f'#include "{Path(file).name}.mutants"\n// {zlib.crc32(code)}\n'.encode()
    if any(file.startswith(PACKAGE) for file in changed):
        changed[PACKAGE + "_mutant.py"] = (HOME / "tests/mutants/mutant.py").read_bytes()
        first = PACKAGE + "__init__.py"  # reads the environment before a test changes it
        changed[first] = changed.get(first, (HOME / first).read_bytes()) + b"\nfrom lossd import _mutant as _mutant\n"
    return changed


def write(mutants: list[Mutant]) -> None:
    """Makes the copy the repository's code with these changes. What is as it was stays untouched: it is not compiled again."""
    changed = changed_files(mutants)
    files = {*listed(untracked=True), *changed}
    for name in files:
        content = changed[name] if name in changed else (HOME / name).read_bytes()
        path = TREE / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if (HOME / name).exists():
            shutil.copymode(HOME / name, path)
    for folder, folders, names in os.walk(TREE):
        folders[:] = [each for each in folders if Path(folder, each) != TREE / "build"]
        for path in (Path(folder, name) for name in names):
            if str(path.relative_to(TREE)) not in files:
                path.unlink()


def configure() -> None:
    """CMake's part; ctest knows its entries then."""
    if (BUILD / "build.ninja").exists():
        subprocess.run(["ninja", "-C", str(BUILD), "build.ninja"], check=True, stdout=subprocess.DEVNULL)
    else:
        subprocess.run(["cmake", "--preset", "cpu-only", "-DLOSSD_TESTS=ON"], cwd=TREE, check=True, stdout=subprocess.DEVNULL)


def compiled(mutants: list[Mutant], targets: list[str], jobs: int) -> list[Mutant]:
    """Builds the targets; returns the changes with which the code compiles."""
    while True:
        write(mutants)
        done = subprocess.run(["ninja", "-C", str(BUILD), "-k", "0", f"-j{jobs}", *targets], capture_output=True, text=True)
        if done.returncode == 0:
            return mutants
        bad = wrong(mutants, done.stdout)
        if not bad:
            sys.exit(done.stdout[-3000:] + "\nthe code does not compile, and no change is to blame")
        mutants = [mutant for mutant in mutants if mutant not in bad]


def wrong(mutants: list[Mutant], output: str) -> set[Mutant]:
    """The change at, or next before, the first error in each file: further errors may be its consequences.

    A place is in the file of changed code, whichever file of a unity build includes that.
    """
    first: dict[str, int] = {}
    for line in output.splitlines():
        if "error:" in line or "required from here" in line:
            for name, number in re.findall(r"([\w/.\-]+\.cc)\.mutants:(\d+):", line):
                first.setdefault(name, int(number))
    bad: set[Mutant] = set()
    for name, number in first.items():
        before = [mutant for mutant in mutants if name == f"{TREE / mutant.file}" and mutant.what.line <= number]
        bad |= set(sorted(before, key=lambda mutant: mutant.what.line)[-1:])
    return bad
