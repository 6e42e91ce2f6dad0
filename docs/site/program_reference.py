# SPDX-License-Identifier: Apache-2.0
"""Makes reference pages from what the programs say of themselves: flags of lossd, commands of lossctl, metrics of a running server.

  python -m program_reference BIN OPERATIONS_MD OUT

BIN has lossd and lossctl. The server runs on the CPU, on ports of its own, while lossctl trains two steps of a head and saves it. The
metrics that it does not have then (of GPUs, TLS, several processes) are taken from the table of OPERATIONS_MD.
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FLAG = re.compile(r"^    --(\w+) \((.*?)\);\s+default: (.*?);$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^  (\w[\w-]*) {2,}(\S.*)$", re.MULTILINE)
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? ")
TABLE_ROW = re.compile(r"^\| (`(?:lossd|process)_[^|]*) \| ([^|]*) \| ([^|]*) \| (.*) \|$", re.MULTILINE)
START_SECONDS = 60


def cell(text):
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", " ".join(text.split()))


def output(*command):
    # Every program ends its --help with success or with 1 (Abseil).
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{' '.join(map(str, command))}: status {done.returncode}, {done.stdout}")
    return done.stdout


def flags_page(lossd):
    flags = FLAG.findall(output(lossd, "--help"))
    if "listen" not in {name for name, _, _ in flags}:
        raise RuntimeError(f"{lossd} --help lists no flags")
    rows = [f"| `--{name}` | {cell(default) if default != chr(34) * 2 else ''} | {cell(text)} |" for name, text, default in sorted(flags)]
    return "\n".join(["# Flags of lossd", "", "What `lossd --help` says. [Running lossd](../docs/operations.md) groups the flags by what they decide.", "",
                      "| flag | default | meaning |", "|---|---|---|", *rows, ""])


def commands_page(lossctl):
    help_text = output(lossctl, "--help")
    commands = COMMAND.findall(help_text.split("Subcommands:")[1].split("\n\n")[0])
    if len(commands) < 10:
        raise RuntimeError(f"{lossctl} --help lists no commands")
    parts = ["# Commands of lossctl", "What `lossctl --help` and `lossctl COMMAND --help` say. [lossctl](../docs/lossctl.md) shows how they are used.",
             f"```text\n{help_text.strip()}\n```"]
    for name, _ in commands:
        text = output(lossctl, name, "--help")
        # The end is that of every command.
        parts += [f"## lossctl {name}", f"```text\n{text.split('Exit codes:')[0].strip()}\n```"]
    return "\n\n".join(parts) + "\n"


@contextlib.contextmanager
def server(lossd, folder):
    ports = folder / "ports"
    with subprocess.Popen([lossd, "--backend=cpu", "--threads=1", "--listen=127.0.0.1:0", "--http=127.0.0.1:0", f"--port_file={ports}",
                           f"--checkpoint_dir={folder}/checkpoints", "--log_level=error"]) as process:
        try:
            end = time.monotonic() + START_SECONDS
            while not (ports.exists() and ports.read_text()):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{lossd} does not start")
                time.sleep(0.02)
            yield json.loads(ports.read_text())
        finally:
            process.terminate()


def scrape(binaries):
    with tempfile.TemporaryDirectory() as name, server(binaries / "lossd", Path(name)) as addresses:
        def run(*arguments):
            command = [binaries / "lossctl", f"--server={addresses['grpc']}", *arguments]
            return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

        run("create", "lm_head", "--hidden", "16", "--vocab", "100", "--gradients", "sampled")
        run("bench", "lm_head", "--rows", "64", "--seconds", "0.2")
        run("save", "lm_head")
        return run("metrics", "--http", addresses["http"])


def families(text):
    """name, type, labels, help of each family."""
    found = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, help_text = line[7:].split(" ", 1)
            found[name] = {"help": help_text, "type": "", "labels": []}
        elif line.startswith("# TYPE "):
            name, kind = line[7:].split(" ", 1)
            found[name]["type"] = kind
        elif sample := SAMPLE.match(line):
            name = sample[1] if sample[1] in found else re.sub(r"_(bucket|sum|count)$", "", sample[1])
            for label in re.findall(r"(\w+)=\"", sample[2] or ""):
                if label != "le" and label not in found[name]["labels"]:
                    found[name]["labels"].append(label)
    return found


def metrics_page(binaries, operations):
    shown = families(scrape(binaries))
    if not {"lossd_rows_total", "lossd_phase_seconds"} <= shown.keys():
        raise RuntimeError("the scrape has no rows")
    rows = [f"| `{name}` | {family['type']} | {', '.join(family['labels'])} | {cell(family['help'])} |" for name, family in sorted(shown.items())]
    # Links of the table begin in the folder of OPERATIONS_MD.
    table = re.sub(r"\]\((?=[\w./-]+\.md[#)])", "](../docs/", operations)
    others = [row for row in TABLE_ROW.findall(table) if not any(name in shown for name in re.findall(r"`(\w+)`", row[0]))]
    return "\n".join(["# Metrics", "", "What `/metrics` of a server on the CPU has after some steps and a save. "
                      "[Running lossd](../docs/operations.md#metrics) says what to look at.", "",
                      "| family | type | labels | meaning |", "|---|---|---|---|", *rows, "",
                      "## With a GPU, TLS, several processes or errors", "", "A family appears with its first value. These have one elsewhere:", "",
                      "| family | type | labels | meaning |", "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in others), ""])


def main(binaries, operations, out):
    (out / "flags.md").write_text(flags_page(binaries / "lossd"), encoding="utf-8")
    (out / "lossctl.md").write_text(commands_page(binaries / "lossctl"), encoding="utf-8")
    (out / "metrics.md").write_text(metrics_page(binaries, operations.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
