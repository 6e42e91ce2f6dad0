"""Merges the sweeps of peers.py with those of cuda_loss_bench and draws them as one figure.

    python3 plot_sweeps.py --peers sweeps.csv --ours sweep_bf16.json sweep_fp32.json --csv merged.csv --figure sweeps.svg

The JSON files come from: cuda_loss_bench --compute=bf16 (or fp32) --data=flat --errors=false --parts=false
--norm=false --shapes=8192x2048x2048,... with the points of peers.sweep_points(). Our memory is the head's
workspace plus its weight gradient; a peer's is the peak above its inputs, gradients included.
"""

import argparse
import csv
import json

AXES = {"V": ("classes", "N 8192, D 2048"), "N": ("rows", "D 2048, V 32768"), "D": ("hidden size", "N 8192, V 32768")}
COLUMNS = ["axis", "dtype", "N", "D", "V", "method", "forward_ms", "full_ms", "peak_mib"]


def axes_of(n, d, v):
    """The sweeps a point belongs to."""
    found = []
    if (n, d) == (8192, 2048):
        found.append("V")
    if (d, v) == (2048, 32768):
        found.append("N")
    if (n, v) == (8192, 32768):
        found.append("D")
    return found


def read_ours(path):
    with open(path) as file:
        results = json.load(file)["loss"]
    rows = {}
    for result in results:
        shape = result["shape"]
        n, d, v = shape["rows"], shape["hidden"], shape["vocab"]
        for axis in axes_of(n, d, v):
            rows[axis, n, d, v] = [axis, result["compute"], n, d, v, "lossd",
                                   f"{result['loss_only']['median_ms']:.4f}",
                                   f"{result['loss_and_gradients']['median_ms']:.4f}",
                                   f"{result['workspace_mib'] + result['gradients_mib']:.1f}"]
    return list(rows.values())


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    methods = sorted({row["method"] for row in rows}, key=lambda name: (name != "lossd", name))
    figure, panels = plt.subplots(4, 3, figsize=(15, 16))
    for line, (dtype, field, label) in enumerate(
            (dtype, field, label) for dtype in ("bf16", "fp32")
            for field, label in (("full_ms", "loss and gradients, ms"), ("peak_mib", "memory, MiB"))):
        for column, axis in enumerate(AXES):
            panel = panels[line][column]
            for method in methods:
                points = sorted((int(row[axis]), float(row[field])) for row in rows
                                if (row["axis"], row["dtype"], row["method"]) == (axis, dtype, method))
                if points:
                    panel.plot(*zip(*points), marker="o", label=method, linewidth=2.5 if method == "lossd" else 1.2)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xlabel(f"{AXES[axis][0]} ({AXES[axis][1]})")
            panel.set_ylabel(f"{dtype}: {label}")
            panel.grid(alpha=0.3)
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--ours", nargs="+", required=True)
    parser.add_argument("--csv", required=True)
    parser.add_argument("--figure")
    args = parser.parse_args()
    with open(args.peers, newline="") as file:
        rows = [[row[name] for name in COLUMNS] for row in csv.DictReader(file)]
    for path in args.ours:
        rows += read_ours(path)
    with open(args.csv, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS] + rows)
    if args.figure:
        draw([dict(zip(COLUMNS, row)) for row in rows], args.figure)


if __name__ == "__main__":
    main()
