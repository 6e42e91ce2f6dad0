# SPDX-License-Identifier: Apache-2.0
"""Draws all figures of docs/figures from the recorded results in bench/results.

    make figures                     # in a virtual environment with the versions of figures-requirements.txt
    python3 bench/figures.py         # with the matplotlib that this Python has

With the same versions, the same results give figures with the same bytes, so `git diff` shows what changed. Each figure
contains a digest of the files that it was drawn from; tests/bench/results_test.py compares the digest, without matplotlib.
"""

import argparse
import csv
import hashlib
import json
import math
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
    """Reads {name of a run: losses by step} from a CSV file with a column `step` and a column for each run."""
    rows = read_csv(path)
    return {name: [float(row[name]) for row in rows] for name in rows[0] if name != "step"}


def draw_curves(path):
    return plots.loss_curves(curves(path))


def draw_pipeline(path):
    return plots.pipeline_stages(read_json(path))


def draw_sweeps(path):
    """Time and memory of loss and gradients over V, N and D, with a line for each method."""
    rows = read_csv(path)
    methods = sorted({row["method"] for row in rows}, key=lambda name: (name != "lossd", name))
    figure, panels = plots.pyplot().subplots(4, 3, figsize=(15, 16))
    lines = [(dtype, field, label) for dtype in ("bf16", "fp32")
             for field, label in (("full_ms", "loss and gradients, ms"), ("peak_mib", "memory, MiB"))]
    for (dtype, field, label), line_of_panels in zip(lines, panels):
        for axis, panel in zip(SWEEP_AXES, line_of_panels):
            for color, method in enumerate(methods):  # a method has the same color in every panel
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


def name_of(result):
    """The name in a figure for a result of `cuda_bench loss`: the kind of gradients, the sampling threshold, and whether logits
    were recomputed."""
    name = result["gradients"]
    if result["sample_threshold"] > 0:
        name += f" 2^{math.log2(result['sample_threshold']):.0f}"
    return name if result["logits"] == "stored" else f"{name}, recomputed"


def draw_error_time(loss_path, peers_path, shape="llama3-8b"):
    """Error of dx over time for one shape, with a panel for each kind of data. Circles are lossd's, crosses those of peers."""
    ours, peers = read_json(loss_path)["loss"], read_json(peers_path)["loss"]
    kinds = ("real", "peaked", "flat")
    figure, panels = plots.pyplot().subplots(1, len(kinds), figsize=(15, 5), sharey=True, constrained_layout=True)
    for kind, panel in zip(kinds, panels):
        points = [(f"lossd {name_of(each)}", each["ratio"], each["errors"]["hidden_gradient"], "o")
                  for each in ours if (each["shape"]["name"], each["data"]) == (shape, kind)]
        for each in peers:
            if (each["shape"], each["data"]) == (shape, kind):
                floor = each["floor"]["total_ms"]
                points += [(name, result["loss_and_gradients"]["median_ms"] / result.get("floor_total_ms", floor),
                            result["errors"]["hidden_gradient"], "x") for name, result in each["methods"].items()]
        for i, (name, time, error, marker) in enumerate(points):
            panel.plot(time, error, marker, color=f"C{i % 10}", markersize=8, label=name)
        panel.axvline(1, color="gray", linewidth=0.8)
        panel.set(xscale="log", yscale="log", xlabel="time / three bare products", title=f"{kind} data")
        panel.set_xticks([0.4, 0.5, 0.7, 1, 1.5, 2, 4], ["0.4", "0.5", "0.7", "1", "1.5", "2", "4"])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    panels[0].set_ylabel("relative error of dx")
    return figure


def mean_and_range(values):
    """The means, the minima and the maxima of several sequences of numbers, element by element."""
    return [[f(each) for each in zip(*values)] for f in (lambda x: sum(x) / len(x), min, max)]


def draw_convergence(path):
    """Training and held-out losses of bench/convergence.py, minus the losses of exact gradients with the same seed."""
    recorded = read_json(path)
    exact = {run["seed"]: run for run in recorded["runs"] if run["kind"] == "exact"}
    figure, (left, right) = plots.pyplot().subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    for i, kind in enumerate(dict.fromkeys(run["kind"] for run in recorded["runs"])):
        runs = [run for run in recorded["runs"] if run["kind"] == kind]
        for axes, key, begin in ((left, "curve", 1), (right, "deciles", 0)):
            apart = [[a - b for a, b in zip(run[key][begin:], exact[run["seed"]][key][begin:])] for run in runs]
            mean, least, greatest = mean_and_range(apart)
            step = recorded["settings"]["steps"] / len(runs[0]["curve"]) if key == "curve" else 1
            places = [step * (begin + place + 0.5) if key == "curve" else 1 + place for place in range(len(mean))]
            axes.plot(places, mean, "-" if key == "curve" else "o-", color=f"C{i}", label=kind, linewidth=1.2)
            axes.fill_between(places, least, greatest, color=f"C{i}", alpha=0.2, linewidth=0)
    left.set(xlabel="step", ylabel="training loss minus exact's, nats a token")
    right.set(xlabel="decile of tokens by frequency (1: the rarest)",
              ylabel="held-out loss minus exact's, nats a token")
    right.set_xticks(range(1, 11))
    for axes in (left, right):
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.grid(alpha=0.3)
    left.legend()
    return figure


def draw_trainer_memory(published_path, planned_path):
    """For each model: the memory of a batch on a trainer's GPUs with and without logits, and the largest batch in both cases."""
    published, planned = read_json(published_path), read_json(planned_path)["models"]
    rows, gib = published["setting"]["rows"], 2 ** 30
    figure, (left, right) = plots.pyplot().subplots(1, 2, figsize=(12, 7.5), sharey=True, width_ratios=(3, 2),
                                                    constrained_layout=True)
    parts = {"state_bytes": ("weights, gradients, optimizer", "tab:gray"),
             "activation_bytes": ("activations", "tab:blue"), "logit_bytes": ("logits", "tab:orange")}
    for place, model in enumerate(planned):
        stored, fused, _ = model["heads"]
        for head, y in ((stored, place - 0.2), (fused, place + 0.2)):
            begin = 0.0
            for part, (label, color) in parts.items():
                share = 100 * head[part] / stored["total_bytes"]
                left.barh(y, share, 0.34, left=begin, color=color, label=label if y < 0 else None)
                begin += share
            left.text(begin + 0.8, y, f"{head['total_bytes'] / gib:.0f} GiB", va="center", fontsize=7)
        before, after = stored["largest_batch"], fused["largest_batch"]
        right.plot((before, after), (place, place), color="lightgray", linewidth=3, zorder=1)
        for batch, color, label in ((before, "tab:orange", "stored logits"), (after, "tab:blue", "without logits")):
            right.plot(batch, place, "o", color=color, markersize=7, label=label if place == 0 else None)
        right.text(after * 1.2, place, f"{after / before:.1f} times", va="center", fontsize=8)
        batches = published["models"][place]["largest_batch"]
        right.plot(list(batches.values()), (place, place), "k|", markersize=12,
                   label="published" if place == 0 else None)
    left.set_yticks(range(len(planned)), [model["name"] for model in planned])
    left.invert_yaxis()
    left.set(xlim=(0, 112), xlabel=f"memory of a batch of {rows:,} rows, % of that with stored logits\n"
             "(above with stored logits, below without)")
    right.set(xscale="log", xlim=(2.5e5, 2.5e8), xlabel="largest batch, rows")
    right.grid(axis="x", alpha=0.3)
    for axes in (left, right):
        figure.legend(*axes.get_legend_handles_labels(), loc=f"outside upper {'left' if axes is left else 'right'}",
                      ncols=3)
    return figure


def fastest_runs(result):
    """From a file of pipeline_bench.py, by the name in a figure: the fastest configuration with a local head, and then the fastest
    with lossd for each kind of gradients."""
    runs = {}
    for entry in result["configurations"]:
        if "step_seconds" in entry:
            name = f"lossd {entry['gradients']}" if entry["head"] == "lossd" else "head on the last stage"
            if name not in runs or entry["step_seconds"] < runs[name]["step_seconds"]:
                runs[name] = entry
    return dict(sorted(runs.items(), key=lambda run: run[1]["head"] == "lossd"))


def memory_of(trainer):
    """GiB of a trainer's GPU in three parts: the most that tensors took; what torch reserved in addition; and everything else on
    the GPU, which is a server's head and the contexts of CUDA. On the CPU, the first part is the memory of the process."""
    tensors = trainer["peak_bytes"]
    kept = trainer.get("reserved_bytes", tensors)
    return [size / 2**30 for size in (tensors, kept - tensors, trainer.get("device_used_bytes", kept) - kept)]


def draw_real_model(path):
    """Losses by step, tokens per second, and memory of each GPU, from a file of pipeline_bench.py whose heads are on the GPUs of the
    stages."""
    result = read_json(path)
    runs = fastest_runs(result)
    figure, ((loss, speed), (apart, memory)) = plots.pyplot().subplots(2, 2, figsize=(12, 6.5), height_ratios=(3, 2),
                                                                       constrained_layout=True)
    first = next(iter(runs))
    figure.suptitle(f"{result['settings']['model']}, random weights, {result['settings']['gpus']} x {result['card']}, {result['date']}")
    parts = (("tensors of the trainer, at most", 1.0), ("kept by torch beyond", 0.3), ("head of lossd, and CUDA", 0.6))
    places = {}
    for i, (name, entry) in enumerate(runs.items()):
        style = ("-", "--", ":")[i % 3]
        loss.plot(entry["losses"], style, color=f"C{i}", linewidth=1.4, label=name)
        apart.plot([a - b for a, b in zip(entry["losses"], runs[first]["losses"])], style, color=f"C{i}", linewidth=1.0)
        tokens = entry["tokens_per_second_and_gpu"]
        speed.barh(name, tokens / 1e3, color=f"C{i}")
        speed.text(tokens / 1e3, name, f" {tokens / 1e3:.1f} ({entry['step_seconds'] * 1e3:.0f} ms a step)", va="center", fontsize=8)
        trainers = [each for each in entry["memory"] if each["role"] == "trainer"]
        for trainer in trainers:
            place, begin = i * (len(trainers) + 1) + trainer["stage"], 0.0
            for (label, alpha), size in zip(parts, memory_of(trainer)):
                memory.bar(place, size, bottom=begin, color=f"C{i}", alpha=alpha, edgecolor="white",
                           label=label if i == 0 and trainer["stage"] == 0 else None)
                begin += size
            memory.text(place, begin, f"{begin:.1f}", ha="center", va="bottom", fontsize=8)
            places[place] = trainer["stage"]
    most = max(sum(memory_of(each)) for entry in runs.values() for each in entry["memory"] if each["role"] == "trainer")
    fastest = max(entry["tokens_per_second_and_gpu"] for entry in runs.values()) / 1e3
    loss.set(ylabel="loss, nats a token", xlabel="step")
    apart.set(ylabel=f"minus {first}", xlabel="step")
    speed.set(xlim=(0, 1.6 * fastest), xlabel="thousand tokens a second and GPU")
    speed.invert_yaxis()
    memory.set(ylim=(0, 1.75 * most), ylabel="memory of a GPU, GiB", xlabel="GPU")
    memory.set_xticks(list(places), list(places.values()))
    loss.legend()
    memory.legend(fontsize=7, loc="upper right")
    for axes in (loss, apart):
        axes.grid(alpha=0.3)
    return figure


# For each file in docs/figures: the files in bench/results that it is drawn from, and the function that draws it.
FIGURES = {
    "convergence-h200.svg": (("h200/convergence.json",), draw_convergence),
    "error-time-h200.svg": (("h200/loss_by_data.json", "h200/peers_real.json"), draw_error_time),
    "loss-curves-h200.svg": (("h200/loss_curves.csv",), draw_curves),
    "pipeline-h200.svg": (("h200/pipeline.json",), draw_pipeline),
    "real-model-h200.svg": (("h200/real_model.json",), draw_real_model),
    "sweeps-h200.svg": (("h200/sweeps.csv",), draw_sweeps),
    "trainer-memory.svg": (("published_memory.json", "trainer_memory.json"), draw_trainer_memory),
}


def digest(files):
    """The digest of the content of these files in bench/results. A figure has it as its identifier."""
    content = hashlib.sha256()
    for file in files:
        content.update((RESULTS / file).read_bytes())
    return f"sha256:{content.hexdigest()}"


def draw(name, folder):
    """Writes the figure of this name to an SVG file, without dates and random ids, which would differ from run to run."""
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
