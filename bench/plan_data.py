# SPDX-License-Identifier: Apache-2.0
"""Makes two files from the recorded results in bench/results, for `lossctl plan`.

  - client/plan/measured.json has the rates from which `lossctl plan` predicts.
  - bench/results/predicted-steps.md has a table that compares steps of pipelines with their predictions.

    python3 bench/plan_data.py            # write both
    python3 bench/plan_data.py --check    # exit status 1 if the files differ from what this program would write

Every entry names its source: file, date and commit. Of results of the same kind, the one in the newest file counts. The only
derived values are rows and bytes per second, and the factors of step_factors.py. To add steps of pipelines, put the content of a
file of pipeline_bench.py into bench/results/h200/pipelines.json under a new name, and run this program.
"""

import argparse
import json
import pathlib
import sys

import step_factors

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "h200"
MEASURED = ROOT / "client" / "plan" / "measured.json"
PAGE = ROOT / "bench" / "results" / "predicted-steps.md"  # the page with the table of steps of pipelines

# The GPU that all results are from. The memory is from its data sheet; the other values are in the results.
CARD = {"name": "NVIDIA H200", "memory_bytes": 141_000_000_000, "multiprocessors": 132, "clusters": 66}

# The files with times of loss and gradients. If two files have the same case, the later one counts. Files that are not named
# here are older than a change that made the kernels slower or faster (bench/results/README.md tells which change).
LOSS_FILES = ("loss_flat.json", "loss_peaked.json", "loss_by_data.json", "loss_sampled.json")
# For results that name an "algorithm", as older files do: (logits, gradients).
EARLIER = {"cut": ("recomputed", "exact"), "cut-filtered": ("recomputed", "filtered"), "auto": ("stored", "auto"),
           "exact": ("stored", "exact"), "filtered": ("stored", "filtered")}
DEFAULT_THRESHOLD = 2.0 ** -10
# Names of local heads: in peers.py, and in the plan.
LAST_STAGE = {"torch": "torch", "torch.compile": "compiled", "liger": "liger", "cce": "cce"}
# The file with the results of pipeline_bench.py.
STEPS = "pipelines.json"
PEER_FILES = ("peers.json", "peers_real.json")


class Sources:
    """The list of sources. add() returns the index of a source, and adds the source if it is new."""

    def __init__(self):
        self.list = []

    def add(self, name, content, commit=""):
        source = {"file": f"bench/results/h200/{name}", "date": content["date"], "commit": commit or content.get("commit", "")}
        if source not in self.list:
            self.list.append(source)
        return self.list.index(source)


def read(name):
    with open(RESULTS / name, encoding="utf-8") as file:
        return json.load(file)


def runs_of(name):
    """The runs in a file. A file has one run, or several runs by name."""
    content = read(name)
    return [content] if "date" in content else list(content.values())


def way_of(result):
    """(logits, gradients) of a result of `cuda_bench loss`."""
    if "gradients" in result:
        return result["logits"], result["gradients"]
    return EARLIER[result["algorithm"]]


def loss_entries(sources):
    found = {}
    for name, content in ((name, run) for name in LOSS_FILES for run in runs_of(name)):
        source = sources.add(name, content)
        for result in content["loss"]:
            logits, gradients = way_of(result)
            # "auto" computes gradients in one of the other ways. Filtered gradients of stored logits are taken only from
            # loss_sampled.json: they cost 7 to 10 % more since logits are fp32.
            if gradients == "auto" or (logits, gradients) == ("stored", "filtered") and name != "loss_sampled.json":
                continue
            if gradients == "sampled" and result["sample_threshold"] != DEFAULT_THRESHOLD:
                continue  # another threshold, which was asked for or chosen because memory was short
            shape = result["shape"]
            entry = {"logits": logits, "gradients": gradients, "data": result["data"], "shape": shape["name"],
                     "hidden": shape["hidden"], "vocab": shape["vocab"], "rows": shape["rows"],
                     "ms": round(result["loss_and_gradients"]["median_ms"], 3), "source": source}
            found[logits, gradients, result["data"], shape["name"]] = entry
    return list(found.values())


def last_stage_entries(sources, shapes):
    found = {}
    for name in PEER_FILES:
        content = read(name)
        versions = ", ".join(f"{package} {version}" for package, version in sorted(content["versions"].items()))
        source = sources.add(name, content, commit=versions)
        for result in content["loss"]:
            for method, times in result["methods"].items():
                if method in LAST_STAGE:
                    shape = shapes[result["shape"]]
                    found[method, result["data"], result["shape"]] = {
                        "method": LAST_STAGE[method], "data": result["data"], "shape": result["shape"],
                        "hidden": shape["hidden"], "vocab": shape["vocab"], "rows": shape["rows"],
                        "ms": round(times["loss_and_gradients"]["median_ms"], 3),
                        "peak_mib": round(times["peak_mib"], 1), "source": source}
    return list(found.values())


def optimizer_entries(sources):
    content = read("optimizer.json")
    source = sources.add("optimizer.json", content)
    return [{"pass": run["name"], "bytes_per_parameter": round(run["bytes_per_parameter"]), "gbps": round(run["gbps"], 1),
             "source": source} for run in content["passes"] if not run["name"].startswith("lazy")]


def transport_entries(sources):
    content = read("transports.json")["slices_of_1mib"]
    source = sources.add("transports.json", content, commit=content["server"])
    kernels = {(run["shape"], run["gradients"]): run["rows_per_second"]
               for run in content["kernels"] if run["data"] == "flat"}
    names = {"phi": "phi3.5-mini", "llama": "llama3-8b"}
    entries = []
    for run in content["lossctl"]:
        head, gradients, way, connections = run["label"].split()
        result = run["result"]
        entries.append({"transport": {"shared": "shared_memory", "tcp": "tcp", "unix": "unix"}[way],
                        "connections": int(connections), "shape": names[head], "gradients": gradients,
                        "rows_per_second": round(result["rows_per_second"]),
                        "kernels_rows_per_second": round(kernels[names[head], gradients]),
                        "gigabytes_per_second": round(result["rows_per_second"] * result["hidden_size"] * 2 / 1e9, 3),
                        "server_cores": round(run["server_cpu_seconds"] / run["wall_seconds"], 2), "source": source})
    return entries + shared_memory_entries(sources) + cuda_ipc_entries(sources)


def shared_memory_entries(sources):
    """Entries for shared memory, from the session that also measured the server's CPU time."""
    content = read("transports.json")["shared_memory"]
    source = sources.add("transports.json", content)
    hidden = {"phi3.5-mini": 3072, "llama3-8b": 4096}
    return [{"transport": "shared_memory", "connections": 1, "shape": run["head"], "gradients": run["gradients"],
             "rows_per_second": run["lossctl"], "kernels_rows_per_second": run["kernels"],
             "gigabytes_per_second": round(run["lossctl"] * hidden[run["head"]] * 2 / 1e9, 3),
             "server_cores": run["server_cores"], "source": source}
            for run in content["runs"] if "server_cores" in run]


def cuda_ipc_entries(sources):
    content = read("transports.json")["cuda_ipc"]
    source = sources.add("transports.json", content)
    shapes = {"phi": ("phi3.5-mini", 3072), "llama3": ("llama3-8b", 4096)}
    entries = []
    for run in content["runs"]:
        name, gradients = run["head"].split("-")
        shape, hidden = shapes[name]
        rate = run["cuda"]["rows_per_second"]
        entries.append({"transport": "cuda_ipc", "connections": 1, "shape": shape, "gradients": gradients,
                        "rows_per_second": round(rate), "kernels_rows_per_second": run["in_process_rows_per_second"],
                        "gigabytes_per_second": round(rate * hidden * 2 / 1e9, 3),
                        "server_cores": round(run["cuda"]["server_cores"], 2), "source": source})
    return entries


def device_entries(sources):
    """Entries with the speedup of two GPUs: rows per second, divided by those of one GPU in the same session on the same host."""
    entries = []
    by_rows = read("by_rows.json")
    source = sources.add("by_rows.json", by_rows)
    for shape, runs in by_rows["service_bench"].items():
        if isinstance(runs, dict):
            entries.append({"split": "rows", "devices": 2, "shape": shape, "gradients": "exact",
                            "speedup": round(runs["2"]["kernels"] / runs["1"]["kernels"], 3), "source": source})
    by_vocabulary = read("by_vocabulary.json")["exact"]
    for run in by_vocabulary["runs"]:
        source = sources.add("by_vocabulary.json", by_vocabulary, commit=run["commit"])
        for split in ("vocabulary", "rows"):
            entries.append({"split": split, "devices": 2, "shape": run["shape"], "gradients": "exact",
                            "speedup": round(run[f"by_{split}"]["kernels"] / run["one_gpu"]["kernels"], 3),
                            "source": source})
    return entries


def pipeline_entries(sources):
    runs = read("pipeline.json")
    # bench/results/README.md has the settings.
    source = sources.add("pipeline.json", {"date": "2026-11-21", "commit": "370d704"})
    steps = {}
    for run in runs:
        key = run["head"], run["schedule"]
        stage = steps.setdefault(key, {"head": run["head"], "schedule": run["schedule"], "stages": 2, "layers": 8,
                                       "hidden": 2048, "vocab": 131072, "microbatches": 16, "rows": 65536,
                                       "peak_bytes": [], "source": source})
        stage["peak_bytes"].append(run["peak_bytes"])
        stage["step_seconds"] = round(max(run["step_seconds"], stage.get("step_seconds", 0)), 4)
    return list(steps.values())


def collect():
    sources = Sources()
    loss = loss_entries(sources)
    shapes = {entry["shape"]: entry for entry in loss}
    last_stage = last_stage_entries(sources, shapes)
    content = {"card": CARD, "loss": loss, "last_stage": last_stage,
               "optimizer": optimizer_entries(sources), "transports": transport_entries(sources),
               "devices": device_entries(sources), "pipelines": pipeline_entries(sources)}
    steps = step_factors.read(STEPS, read(STEPS), sources)
    return {"sources": sources.list, **content, "steps": steps, "step_factors": step_factors.fit(steps, loss, last_stage)}


def text(content):
    """The content as JSON with one entry per line, so that differences are easy to read."""
    parts = []
    for key, value in content.items():
        if isinstance(value, list):
            lines = ",\n".join("  " + json.dumps(entry) for entry in value)
            parts.append(f'"{key}": [\n{lines}\n]')
        else:
            parts.append(f'"{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def page(content):
    """The text of PAGE with a new table, made from `content`."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition("| model | GPUs | head |")
    table, end, after = rest.partition("\nA test compares every recorded step")
    if not begin or not end:
        sys.exit(f"{PAGE.relative_to(ROOT)} has no table of steps")
    return before + step_factors.table(content) + end + after


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    content = collect()
    for path, made in ((MEASURED, text(content)), (PAGE, page(content))):
        if not arguments.check:
            path.write_text(made, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != made:
            sys.exit(f"{path.relative_to(ROOT)} is not of bench/results as it is: python3 bench/plan_data.py")


if __name__ == "__main__":
    main()
