# SPDX-License-Identifier: Apache-2.0
"""The commands that the pages tell people to run, as they stand there."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Records of the past, and what nobody reads to run something.
LEFT_OUT = re.compile(r"docs/lab/|bench/results/|tests/|CHANGELOG\.md|docs/math\.md|\.github/")
PROGRAMS = {"make", "lossd", "lossctl", "pip", "python", "python3", "apt", "apt-get", "systemctl", "systemd-analyze", "cmake", "ctest",
            "source", "curl", "kubectl", "docker", "podman", "buildah", "helm", "sbatch", "srun", "torchrun", "git", "promtool", "export",
            "printf", "openssl", "journalctl", "mkdir", "cp"}


@dataclass
class Command:
    page: str  # from the root of the repository
    line: int
    text: str  # with its comment
    said: list[str] = field(default_factory=list)  # what the page shows below it, for a line that begins with "$ "

    @property
    def key(self) -> tuple[str, str]:
        """Page and command without the comment."""
        return self.page, without_comment(self.text)


def without_comment(text: str) -> str:
    return re.sub(r"\s+#(\s.*)?$", "", text).strip()


def is_command(line: str) -> bool:
    """Whether a line of an indented block is one: it begins with a program, after settings of variables."""
    words = line.split()
    while words and re.match(r"^[A-Z_]+=", words[0]):
        words = words[1:]
    return bool(words) and (words[0] in PROGRAMS or re.match(r"^(scripts|build|bench|\.ci|\./[a-z])", words[0]) is not None)


def pages() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not listed:  # an archive without its history
        listed = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.md") if "build" not in path.parts and "dist" not in path.parts]
    return sorted(page for page in listed if not LEFT_OUT.match(page))


def commands_of(page: str, text: str) -> list[Command]:
    """Lines of blocks fenced as sh, bash or console; lines that begin with "$ " in other fenced blocks; and lines of indented blocks
    that begin with a program. Lines that end with a backslash are joined with the next."""
    found: list[Command] = []
    fence: str | None = None
    block: list[tuple[int, str]] = []
    previous = ""
    indented = False
    for number, line in enumerate(text.split("\n"), 1):
        opened = re.match(r"^\s*```(\w*)", line)
        if opened:
            if fence is None:
                fence, block = opened[1], []
            else:
                found += _of_fence(page, fence, block)
                fence = None
        elif fence is not None:
            block.append((number, line))
        else:
            indented = line.startswith("    ") and (indented or not previous.strip())
            if indented and is_command(line):
                found.append(Command(page, number, line.strip()))
        previous = line
    return found


def _of_fence(page: str, language: str, block: list[tuple[int, str]]) -> list[Command]:
    found: list[Command] = []
    transcript = any(line.startswith("$ ") for _, line in block)
    going_on = False
    for number, line in block:
        if transcript:
            if line.startswith("$ "):
                found.append(Command(page, number, line[2:].strip()))
            elif found:
                found[-1].said.append(line.rstrip())
        elif language in ("sh", "bash", "shell", "console") and line.strip() and not line.lstrip().startswith("#"):
            if going_on:
                found[-1].text += "\n" + line
            else:
                found.append(Command(page, number, line.rstrip()))
            going_on = line.endswith("\\")
    for command in found:
        while command.said and not command.said[-1]:
            command.said.pop()
    return found


def all_commands() -> list[Command]:
    return [command for page in pages() for command in commands_of(page, (ROOT / page).read_text())]


def shape(text: str) -> list[str]:
    """What stays the same from run to run of what a program has printed: numbers, identifiers, times and sizes become signs."""
    shaped = []
    for line in text.rstrip("\n").split("\n"):
        line = re.sub(r"\b[0-9a-f]{16}\b", "ID", line)
        line = re.sub(r"-?\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "#", line)
        line = re.sub(r"# (ns|µs|ms|s)\b", "# TIME", line)
        line = re.sub(r"# ([KMGT]i)?B\b", "# SIZE", line)
        line = re.sub(r"\b(avx512|avx2|baseline)\b", "LOOPS", line)
        shaped.append(" ".join(line.split()))
    return shaped
