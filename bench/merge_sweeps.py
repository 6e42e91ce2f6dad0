# SPDX-License-Identifier: Apache-2.0
"""Merges the sweeps of peers.py with those of cuda_loss_bench into one CSV file, which figures.py draws.

    python3 merge_sweeps.py --peers sweeps.csv --ours sweep_bf16.json sweep_fp32.json --csv merged.csv

The JSON files come from: cuda_loss_bench --compute=bf16 (or fp32) --data=flat --errors=false --parts=false
--norm=false --shapes=8192x2048x2048,... with the points of peers.sweep_points(). Our memory is the head's
workspace plus its weight gradient; a peer's is the peak above its inputs, gradients included.
"""

import argparse
import csv
import json

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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--ours", nargs="+", required=True)
    parser.add_argument("--csv", required=True)
    args = parser.parse_args()
    with open(args.peers, newline="") as file:
        rows = [[row[name] for name in COLUMNS] for row in csv.DictReader(file)]
    for path in args.ours:
        rows += read_ours(path)
    with open(args.csv, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS] + rows)


if __name__ == "__main__":
    main()
