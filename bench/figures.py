"""Draws every figure of docs/figures from the recorded runs in bench/results.

    make figures                     # in a virtual environment with the versions of figures-requirements.txt
    python3 bench/figures.py         # with the matplotlib that this Python has

The same files give the same bytes with the same versions, so `git diff` shows what changed. Each figure carries a
digest of the files that it was drawn from; tests/bench/figures_test.py compares it, without matplotlib.
"""

import argparse
import csv
import hashlib
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
FOLDER = ROOT / "docs" / "figures"

sys.path.insert(0, str(ROOT / "examples" / "gpt_torch"))

import plots  # noqa: E402

SWEEP_AXES = {"V": ("classes", "N 8192, D 2048"), "N": ("rows", "D 2048, V 32768"),
              "D": ("hidden size", "N 8192, V 32768")}


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def read_json(path):
    with open(path) as file:
        return json.load(file)


def curves(path):
    """{name: losses by step} of a CSV file with a column `step` and one for each run."""
    rows = read_csv(path)
    return {name: [float(row[name]) for row in rows] for name in rows[0] if name != "step"}


def draw_curves(path):
    return plots.loss_curves(curves(path))


def draw_pipeline(path):
    return plots.pipeline_stages(read_json(path))


def draw_sweeps(path):
    """Time and memory of loss and gradients over V, N and D, one line a method."""
    rows = read_csv(path)
    methods = sorted({row["method"] for row in rows}, key=lambda name: (name != "lossd", name))
    figure, panels = plots.pyplot().subplots(4, 3, figsize=(15, 16))
    lines = [(dtype, field, label) for dtype in ("bf16", "fp32")
             for field, label in (("full_ms", "loss and gradients, ms"), ("peak_mib", "memory, MiB"))]
    for (dtype, field, label), line_of_panels in zip(lines, panels):
        for axis, panel in zip(SWEEP_AXES, line_of_panels):
            for color, method in enumerate(methods):  # the same one in every panel
                points = sorted((int(row[axis]), float(row[field])) for row in rows
                                if (row["axis"], row["dtype"], row["method"]) == (axis, dtype, method))
                if points:
                    panel.plot(*zip(*points), color=f"C{color}", marker="o", label=method,
                               linewidth=2.5 if method == "lossd" else 1.2)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xlabel("{} ({})".format(*SWEEP_AXES[axis]))
            panel.set_ylabel(f"{dtype}: {label}")
            panel.grid(alpha=0.3)
    panels[0][0].legend()
    figure.tight_layout()
    return figure


# Name in docs/figures: files in bench/results, and what draws them.
FIGURES = {
    "loss-curves-h200.svg": (("h200/loss_curves.csv",), draw_curves),
    "loss-curves-by-gradients-h200.svg": (("h200/loss_curves_by_gradients.csv",), draw_curves),
    "pipeline-h200.svg": (("h200/pipeline.json",), draw_pipeline),
    "sweeps-h200.svg": (("h200/sweeps.csv",), draw_sweeps),
}


def digest(files):
    """Of the content of these files in bench/results: what a figure's identifier has to be."""
    content = hashlib.sha256()
    for file in files:
        content.update((RESULTS / file).read_bytes())
    return f"sha256:{content.hexdigest()}"


def draw(name, folder):
    """The figure of this name as an SVG file without anything that differs from run to run (dates, random ids)."""
    files, draw_files = FIGURES[name]
    figure = draw_files(*(RESULTS / file for file in files))
    sources = ", ".join(f"bench/results/{file}" for file in files)
    figure.savefig(folder / name, metadata={"Date": None, "Source": sources, "Identifier": digest(files)})
    plots.pyplot().close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    plots.pyplot().rcParams["svg.hashsalt"] = "lossd"
    for name in FIGURES:
        draw(name, args.folder)


if __name__ == "__main__":
    main()
