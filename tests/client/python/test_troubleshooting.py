# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md: every error class of the client is there, and every message is one that a program can print. Those of the server
are brought about by tests/docs/test_server_troubleshooting.py."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import lossd

ROOT = Path(__file__).parents[3]
CLIENT = ROOT / "client" / "python" / "src" / "lossd"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Errors of the server\n")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| `")]


def error_classes() -> set[str]:
    """Classes of the client's sources that derive from an exception, at whatever distance; not those of the quickstart, which
    is a program."""
    bases: dict[str, set[str]] = {}
    for file in CLIENT.rglob("*.py"):
        if "quickstart" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}

    def is_error(name: str) -> bool:
        return name.endswith(("Error", "Exception", "Warning")) or any(map(is_error, bases.get(name, ())))
    return {name for name in bases if is_error(name)} - {"LossdError"}


def sources() -> str:
    """All text that client and server may print, with string literals that stand in several parts put together."""
    texts = []
    for folder, pattern in (("client/python/src/lossd", "*.py"), ("client/cli", "*.cc"), ("server", "*.cc"), ("server", "*.h"),
                            ("kernels", "*.cc"), ("proto", "*.cc")):
        for file in sorted(ROOT.joinpath(folder).rglob(pattern)):
            texts.append(re.sub(r"[\"']\s*\n\s*f?[\"']", "", file.read_text()))
    return "\n".join(texts)


def test_every_error_class_is_in_the_table() -> None:
    described = {row[0].strip("`") for row in ROWS if len(row) == 4}
    assert described == error_classes()


def test_the_walk_over_the_sources_finds_what_the_package_has() -> None:
    def below(kind: type[lossd.LossdError]) -> set[str]:
        return {each.__name__ for each in kind.__subclasses__()} | {
            name for each in kind.__subclasses__() for name in below(each)}
    assert below(lossd.LossdError) <= error_classes()
    assert {"InvalidArgument", "Restarted", "ForkedClient"} <= error_classes()
    assert all(hasattr(lossd, name) for name in error_classes())


TEXT = sources()
MESSAGES = [message for row in ROWS for message in re.findall(r"`([^`]+)`", row[1 if len(row) == 4 else 0])]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_of_the_sources(message: str) -> None:
    parts = [part.strip() for part in message.split("…") if part.strip()]
    assert parts
    for part in parts:
        assert part in TEXT, part


def test_rows_are_complete() -> None:
    assert len(ROWS) > 30
    for row in ROWS:
        assert len(row) in (3, 4) and all(row), row
