#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the seeds of fuzzers: the inputs that a fuzzer starts from. tests/fuzz/corpus/NAME.txt holds the seeds of NAME_fuzzer.

  tests/fuzz/seeds.py write NAME DIR         makes a file of each seed in DIR, which holds nothing else afterwards
  tests/fuzz/seeds.py add NAME FILE SEED     adds the bytes of FILE to the seeds of a fuzzer, as the seed with this name
  tests/fuzz/seeds.py check                  checks all seeds; exit status 1 if a file cannot be read, or names a fuzzer that does not exist

A seed is a line with its name and, below it, indented lines with its bytes: strings with the escapes of Python's bytes, one after the other.
`"a" * 3000` stands for 3,000 times this string. Empty lines and lines that begin with # are comments:

  long
    "GET /"
    "a" * 3000
    " HTTP/1.1\\r\\n\\r\\n"
"""

import argparse
import ast
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAME = re.compile(r"\w+")
PIECE = re.compile(r"""  (".*"|'.*')(?: \* ([1-9]\d*))?""")
WIDTH = 100  # bytes on a line; the last one of a text may have half as many more
REPEATED = 24  # fewer bytes are written out


def parse(text):
    """{name of a seed: its bytes}; ValueError names the line that is none."""
    seeds = {}
    name = None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        piece = PIECE.fullmatch(line)
        if NAME.fullmatch(line) and line not in seeds:
            name = line
            seeds[name] = b""
        elif piece and name:
            try:
                seeds[name] += ast.literal_eval("b" + piece[1]) * int(piece[2] or 1)
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"line {number}: {error}") from error
        else:
            raise ValueError(f"line {number}: neither a new name nor a string below one: {line!r}")
    return seeds


def repetition(data, at):
    """The shortest string that stands at data[at:] so often that `string * N` is worth it, and N; otherwise an empty one."""
    for size in range(1, 41):
        unit = data[at:at + size]
        count = 1
        while data[at + count * size:at + (count + 1) * size] == unit:
            count += 1
        if count > 3 and count * size >= REPEATED:
            return unit, count
    return b"", 0


def lines_of(data):
    """The indented lines of a seed: a line ends behind a line feed, around a repetition, and where it gets long."""
    lines = []
    begin = at = 0

    def end_line(end):
        if begin < end:
            lines.append(f"  {repr(data[begin:end])[1:]}")

    while at < len(data):
        unit, count = repetition(data, at)
        if count:
            end_line(at)
            lines.append(f"  {repr(unit)[1:]} * {count}")
            begin = at = at + len(unit) * count
            continue
        at += 1
        long = at - begin >= WIDTH and data[at - 1] in b" ," and b"\n" not in data[at:at + WIDTH // 2] and at + WIDTH // 2 < len(data)
        if data[at - 1] == ord("\n") or long:
            end_line(at)
            begin = at
    end_line(len(data))
    return lines


def text_of(name, data):
    return "\n".join([name, *lines_of(data)]) + "\n"


def read(fuzzer):
    return parse((FOLDER / "corpus" / f"{fuzzer}.txt").read_text(encoding="ascii"))


def write(fuzzer, folder):
    seeds = read(fuzzer)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, data in seeds.items():
        (folder / name).write_bytes(data)


def add(fuzzer, file, name):
    data = file.read_bytes()
    path = FOLDER / "corpus" / f"{fuzzer}.txt"
    before = path.read_text(encoding="ascii")
    after = before + "\n" + text_of(name, data)
    if parse(after) != {**parse(before), name: data}:
        raise ValueError("the seeds of this fuzzer would not be read as they are written")
    path.write_text(after, encoding="ascii")


def check():
    """What is wrong with the seeds, a line each."""
    fuzzers = {path.name.removesuffix("_fuzzer.cc") for path in FOLDER.glob("*_fuzzer.cc")}
    files = {path.stem for path in (FOLDER / "corpus").iterdir()}
    yield from (f"{fuzzer}_fuzzer.cc has no corpus/{fuzzer}.txt" for fuzzer in sorted(fuzzers - files))
    yield from (f"corpus/{file}.txt belongs to no fuzzer" for file in sorted(files - fuzzers))
    for fuzzer in sorted(fuzzers & files):
        try:
            seeds = read(fuzzer)
        except ValueError as error:
            yield f"corpus/{fuzzer}.txt: {error}"
            continue
        if len(set(seeds.values())) < len(seeds) or not seeds:
            yield f"corpus/{fuzzer}.txt: the same seed twice, or none"
        if parse("".join(text_of(name, data) for name, data in seeds.items())) != seeds:
            yield f"corpus/{fuzzer}.txt: its seeds, written again, are others"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("write")
    command.add_argument("fuzzer")
    command.add_argument("folder", type=Path)
    command = commands.add_parser("add")
    command.add_argument("fuzzer")
    command.add_argument("file", type=Path)
    command.add_argument("seed")
    commands.add_parser("check")
    arguments = parser.parse_args()
    if arguments.command == "check":
        faults = list(check())
        print("\n".join(faults) or "all seeds can be read")
        return 1 if faults else 0
    try:
        if arguments.command == "write":
            write(arguments.fuzzer, arguments.folder)
        else:
            add(arguments.fuzzer, arguments.file, arguments.seed)
    except (OSError, ValueError) as error:
        print(f"seeds.py: {arguments.fuzzer}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
