# SPDX-License-Identifier: Apache-2.0
"""Runs every `$ lossctl ...` of docs/plan.md and compares what it prints with the page.

    plan_test.py PAGE LOSSCTL            # exit status 1 and the differences if something differs
    plan_test.py PAGE LOSSCTL --write    # writes what is printed into the page

A block that begins with `$ cat > FILE <<EOF` makes the file first, in the folder that the commands run in. What a command prints may go
through a pipe.
"""

import difflib
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

BLOCK = re.compile(r"^```\n(\$ .*?)^```$", re.MULTILINE | re.DOTALL)


def commands(block):
    """Pairs of a command line, with what follows it up to the next one."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    for part in parts:
        line, _, rest = part.partition("\n")
        yield line, rest


def run(line, rest, folder, lossctl):
    """What the page should have after the command."""
    heredoc = re.fullmatch(r"cat > (\S+) <<EOF", line)
    if heredoc:
        text, _, after = rest.partition("EOF\n")
        (folder / heredoc[1]).write_text(text, encoding="utf-8")
        return text + "EOF\n" + after
    if shlex.split(line)[0] != "lossctl":
        raise SystemExit(f"not a command of this page: {line}")
    path = {"PATH": f"{pathlib.Path(lossctl).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=os.environ | path, capture_output=True, text=True, timeout=60)
    printed = done.stdout + done.stderr
    return printed + ("\n" if rest.endswith("\n\n") and not printed.endswith("\n\n") else "")


def main():
    page, lossctl = pathlib.Path(sys.argv[1]), str(pathlib.Path(sys.argv[2]).resolve())
    text = page.read_text(encoding="utf-8")
    count = 0

    with tempfile.TemporaryDirectory() as name:
        def replaced(match):
            nonlocal count
            made = ""
            for line, rest in commands(match[1]):
                made += f"$ {line}\n" + run(line, rest, pathlib.Path(name), lossctl)
                count += 1
            return f"```\n{made}```"

        now = BLOCK.sub(replaced, text)
    if count == 0:
        sys.exit(f"{page}: no command found")
    if sys.argv[3:] == ["--write"]:
        page.write_text(now, encoding="utf-8")
    elif now != text:
        sys.stdout.writelines(difflib.unified_diff(text.splitlines(True), now.splitlines(True), str(page), "now"))
        sys.exit(f"{page}: {sys.argv[0]} {page} {lossctl} --write")
    print(f"{count} commands print what {page.name} says")


if __name__ == "__main__":
    main()
