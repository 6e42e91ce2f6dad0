# SPDX-License-Identifier: Apache-2.0
"""Makes the Markdown tables of a results page from the results of `cuda_bench loss` and peers.py.

    cuda_bench loss --data=peaked,flat --logits=stored,recomputed --gradients=exact,filtered,auto \
        --norm=false --parts=false --out=loss.json
    python3 peers.py --out peers.json
    python3 report.py loss.json --peers peers.json > report.md
    python3 report.py sweep_bf16.json sweep_fp32.json --sweeps sweeps.csv --csv merged.csv

The first table has a line for each shape and kind of data. It has columns for the floor, for each way to compute gradients, for
the loss without gradients, and for each peer. If several results have the same shape, data and way, the last one counts. Ratios
are to the bare matrix products of the same run: to all three, or to the first one for the loss without gradients. TFLOP/s count
all three products, even if a way does not compute them. The last command above merges sweeps into one file, which figures.py draws.
"""

import argparse
import csv
import json


# The order of the columns. Ways that were not run have no column; ways that are not named here come last.
WAYS = ("exact", "filtered", "auto", "recomputed exact", "recomputed filtered", "recomputed auto")
# The names of some ways in older results, under the key "algorithm".
EARLIER_NAMES = {"cut": "recomputed exact", "cut-filtered": "recomputed filtered"}
PEERS = ("torch", "torch.compile", "cce", "cce_exact", "liger", "quack", "quack_untuned")
ERRORS = ("hidden_gradient", "weight_gradient", "lse", "loss")


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def timed(milliseconds, floor):
    return f"{milliseconds:.2f} ({milliseconds / floor:.3f})"


def teraflops(shape, products, milliseconds):
    return products * 2e-9 * shape["rows"] * shape["hidden"] * shape["vocab"] / milliseconds


def columns(known, groups):
    """The names that occur in any of the groups: first those in `known`, in that order, then the others."""
    found = {name: None for group in groups for name in group}
    return [name for name in known if name in found] + [name for name in found if name not in known]


def median(result, key):
    return result[key]["median_ms"]


def way_of(result):
    """The way of a result: how gradients were computed. "recomputed" comes before it if logits were not stored."""
    if "gradients" not in result:
        name = result.get("algorithm", "exact")
        return EARLIER_NAMES.get(name, name)
    return result["gradients"] if result["logits"] == "stored" else f"{result['logits']} {result['gradients']}"


def read_results(paths):
    """Reads {(shape, data): {way: result}}, in the order of the files, and a line of text about each run."""
    found, sources = {}, []
    for path in paths:
        with open(path) as file:
            content = json.load(file)
        for run in [content] if "loss" in content else content.values():  # a file has one run, or several by name
            sources.append(f"{path}: {run['card']}, {run['date']}, commit {run.get('commit') or 'unknown'}")
            for result in run["loss"]:
                key = result["shape"]["name"], result["data"]
                found.setdefault(key, {})[way_of(result)] = result
    return found, sources


def read_peers(path):
    if path is None:
        return None
    with open(path) as file:
        return json.load(file)


def title(result):
    shape = result["shape"]
    return f"{shape['name']} ({shape['rows']}, {shape['hidden']}, {shape['vocab']})"


def time_table(results, peers=()):
    """The table of times, with a line for each shape and kind of data. Each ratio is to the floor of the same run."""
    ran = columns(WAYS, results.values())
    peers_ran = columns(PEERS, (entry["methods"] for entry in peers))
    peer_of = {(entry["shape"], entry["data"]): entry for entry in peers}
    rows = []
    for key, ways in results.items():
        first = next(iter(ways.values()))
        floor = first["floor"]
        line = [title(first), first["data"],
                f"{floor['total_ms']:.2f} ({teraflops(first['shape'], 3, floor['total_ms']):.0f})"]
        for name in ran:
            result = ways.get(name)
            line.append(timed(median(result, "loss_and_gradients"), result["floor"]["total_ms"]) if result else "-")
        exact = ways.get("exact", first)
        line.append(timed(median(exact, "loss_only"), median(exact["floor"], "logits")))
        for name in peers_ran:
            line.append(peer_time(peer_of.get(key), name))
        line.append(f"{teraflops(exact['shape'], 3, median(exact, 'loss_and_gradients')):.0f}")
        line.append(f"{max(result['workspace_mib'] for result in ways.values()):.0f}")
        rows.append(line)
    return table(["shape (N, D, V)", "data", "floor ms (TFLOP/s)", *ran, "loss alone", *peers_ran,
                  "TFLOP/s of exact", "workspace MiB"], rows)


def error_table(results):
    rows = []
    for (_, data), ways in results.items():
        for name in columns(WAYS, [ways]):
            result = ways[name]
            if "errors" not in result:
                continue
            errors = [f"{result['errors'][key]:.1e}" for key in ERRORS]
            rows.append([title(result), data, name, *errors, f"{result.get('dropped_mass', 0.0):.4f}"])
    return table(["shape (N, D, V)", "data", "gradients", "dx", "dW", "lse", "loss", "dropped mass a row"], rows)


def peer_time(entry, name):
    method = entry["methods"].get(name) if entry else None
    return timed(median(method, "loss_and_gradients"), entry["floor"]["total_ms"]) if method else "-"


def peer_table(peers):
    """The table of the peers' times and memory. Ratios are to the floor of the peers' own run."""
    ran = columns(PEERS, (entry["methods"] for entry in peers))
    rows = []
    for entry in peers:
        line = [entry["shape"], entry["data"], f"{entry['floor']['total_ms']:.2f}"]
        for name in ran:
            method = entry["methods"].get(name)
            line.append(f"{peer_time(entry, name)}, {method['peak_mib']:.0f} MiB" if method else "-")
        rows.append(line)
    return table(["shape", "data", "floor ms", *ran], rows)


def torch_versions(peers):
    """The versions of torch in a file of peers.py. The file has one run, or several that were put together under "runs"."""
    runs = peers["runs"].values() if "runs" in peers else [peers]
    return ", ".join(sorted({run["versions"]["torch"] for run in runs}))


def report(paths, peers_path=None):
    results, sources = read_results(paths)
    peers = read_peers(peers_path)
    parts = ["Medians in ms, in parentheses the ratio to the floor of the same run. " + "; ".join(sources) + ".",
             time_table(results, peers["loss"] if peers else ())]
    if any("errors" in result for ways in results.values() for result in ways.values()):
        parts += ["Errors ||a - ref|| / ||ref|| against fp64, over sampled rows and classes:", error_table(results)]
    if peers:
        parts += [f"Peers ({peers['card']}, {peers['date']}, torch {torch_versions(peers)}), with the floor of their own "
                  "run; memory is the peak above the inputs:", peer_table(peers["loss"])]
    return "\n\n".join(parts) + "\n"


# Merges the sweeps of peers.py with those of `cuda_bench loss` into one CSV file, which figures.py draws.
#
# This makes the JSON files: cuda_bench loss --compute=bf16 (or fp32) --data=flat --errors=false --parts=false
# --norm=false --shapes=8192x2048x2048,... with the points of peers.sweep_points(). The memory of lossd is the head's
# workspace plus its weight gradient. The memory of a peer is its peak beyond the inputs, with gradients.

COLUMNS = ["axis", "dtype", "N", "D", "V", "method", "forward_ms", "full_ms", "peak_mib"]


def axes_of(n, d, v):
    """The sweeps (axes) to which a point belongs."""
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


def merge_sweeps(results, sweeps, csv_file):
    with open(sweeps, newline="") as file:
        rows = [[row[name] for name in COLUMNS] for row in csv.DictReader(file)]
    for path in results:
        rows += read_ours(path)
    with open(csv_file, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS] + rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="JSON files of cuda_bench loss")
    parser.add_argument("--peers", help="JSON file of peers.py")
    parser.add_argument("--sweeps", metavar="CSV", help="sweeps of peers.py: merged with those in the JSON files, instead of a table")
    parser.add_argument("--csv", help="where the merged sweeps go")
    args = parser.parse_args()
    if args.sweeps:
        merge_sweeps(args.results, args.sweeps, args.csv)
    else:
        print(report(args.results, args.peers), end="")


if __name__ == "__main__":
    main()
