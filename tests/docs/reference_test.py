# SPDX-License-Identifier: Apache-2.0
"""The reference pages say what the programs say: docs/reference/flags.md what `lossd --help` prints, and docs/reference/metrics.md the
type and the labels that each family of a server on the CPU has after some steps and a save. (scripts/check-docs finds families that are
missing on the page, those of GPUs and ranks too.)

    reference_test.py REFERENCE_FOLDER LOSSD            # exit status 1 and the differences if something differs; lossctl is beside LOSSD
    reference_test.py REFERENCE_FOLDER LOSSD --write    # writes flags.md
"""

import contextlib
import difflib
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FLAG = re.compile(r"^    --(\w+) \((.*?)\);\s+default: (.*?);$", re.MULTILINE | re.DOTALL)
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? ")
TABLE_ROW = re.compile(r"^\| (`(?:lossd|process)_[^|]*) \| ([^|]*) \|([^|]*)\| ", re.MULTILINE)
START_SECONDS = 120
HEAD = """# Flags of lossd

`lossd --help` prints these flags of the server. [Running lossd](../operations.md) says which to set.
`--flagfile=FILE` reads flags from a file, one a line.

| flag | default | meaning |
|---|---|---|
"""


def cell(text):
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", " ".join(text.split()))


def flags_page(lossd):
    text = subprocess.run([lossd, "--help"], stdout=subprocess.PIPE, text=True, check=False).stdout
    flags = FLAG.findall(text)
    if len(flags) != len(re.findall(r"^    --\w", text, re.MULTILINE)) or "listen" not in {name for name, _, _ in flags}:
        sys.exit(f"{lossd} --help lists flags in another form")
    return HEAD + "".join(f"| `--{name}` | {cell(default) if default != chr(34) * 2 else ''} | {cell(meaning)} |\n" for name, meaning, default in sorted(flags))


@contextlib.contextmanager
def server(lossd, folder):
    ports = folder / "ports"
    with subprocess.Popen([lossd, "--backend=cpu", "--cpu_devices=2", "--threads=2", "--listen=127.0.0.1:0", "--http=127.0.0.1:0",
                           f"--port_file={ports}", f"--checkpoint_dir={folder}/checkpoints", "--log_level=error"]) as process:
        try:
            end = time.monotonic() + START_SECONDS
            while not (ports.exists() and ports.read_text(encoding="utf-8")):
                if process.poll() is not None or time.monotonic() > end:
                    sys.exit(f"{lossd} does not start")
                time.sleep(0.02)
            yield json.loads(ports.read_text(encoding="utf-8"))
        finally:
            process.terminate()


def scrape(lossd):
    with tempfile.TemporaryDirectory() as name, server(lossd, Path(name)) as addresses:
        def run(*arguments, check=True):
            command = [lossd.parent / "lossctl", f"--server={addresses['grpc']}", *arguments]
            return subprocess.run(command, check=check, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout

        run("create", "lm_head", "--hidden", "16", "--vocab", "100", "--gradients", "sampled")
        run("loss", "lm_head", "--random", "64", "--accumulate", "--step", "0")
        run("step", "lm_head", "--lr", "1e-3")
        run("bench", "lm_head", "--rows", "64", "--seconds", "0.2")
        run("save", "lm_head")
        run("load", "nothing/here", check=False)  # for lossd_errors_total
        return run("metrics", "--http", addresses["http"])


def families(text):
    """type, labels of each family."""
    found = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line[7:].split(" ", 1)
            found[name] = (kind, [])
        elif sample := SAMPLE.match(line):
            name = sample[1] if sample[1] in found else re.sub(r"_(bucket|sum|count)$", "", sample[1])
            for label in re.findall(r"(\w+)=\"", sample[2] or ""):
                if label != "le" and label not in found[name][1]:
                    found[name][1].append(label)
    return found


def documented(page):
    rows = {}
    for names, kinds, labels in TABLE_ROW.findall(page):
        names, kinds = re.findall(r"`(\w+)`", names), kinds.split(", ")
        for name, kind in zip(names, kinds if len(kinds) == len(names) else kinds * len(names)):
            rows[name] = (kind, [label.strip() for label in labels.split(",") if label.strip()])
    return rows


def main():
    folder, lossd = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    flags, page = flags_page(lossd), folder / "flags.md"
    if sys.argv[3:] == ["--write"]:
        page.write_text(flags, encoding="utf-8")
    faults = list(difflib.unified_diff(page.read_text(encoding="utf-8").splitlines(True), flags.splitlines(True), str(page), "lossd --help"))
    if faults:
        faults.append(f"To write the page: {sys.argv[0]} {folder} {lossd} --write\n")
    rows, shown = documented((folder / "metrics.md").read_text(encoding="utf-8")), families(scrape(lossd))
    if not {"lossd_rows_total", "lossd_phase_seconds", "lossd_rank_up", "lossd_errors_total"} <= shown.keys():
        sys.exit("the scrape has no rows, ranks or errors")
    for name, (kind, labels) in sorted(shown.items()):
        labels, on_page = sorted(labels), sorted(rows.get(name, ("", []))[1])
        if name not in rows:
            faults.append(f"metrics.md: {name} is not there\n")
        elif rows[name][0] != kind or (labels and on_page != labels):  # no labels: it has no value yet
            faults.append(f"metrics.md: {name} is a {rows[name][0]} with the labels {on_page}, on a server a {kind} with {labels}\n")
    sys.stdout.writelines(faults)
    print(f"{flags.count('| `--')} flags, {len(shown)} families of a server, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
