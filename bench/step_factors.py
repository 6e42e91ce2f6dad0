# SPDX-License-Identifier: Apache-2.0
"""Reads the steps of pipelines that bench/pipeline_bench.py measured, and fits the factors with which `lossctl plan` predicts
steps.

predict() computes the time of a step in the same way as client/plan/plan.h, whose tests compare the plan with every step here.
Pure functions. plan_data.py uses them.
"""

import itertools

HIDDEN_AND_VOCABULARY = {"gemma2-2b": (2304, 256000), "llama3-8b": (4096, 128256)}  # of the shapes in pipeline_bench.py
KINDS = ("local", "server", "colocated")


def read(file, runs, sources):
    """The entries of all steps in a file. `runs`: the results of pipeline_bench.py in the file, by name. `sources`: see
    plan_data.Sources.

    Of configurations of the same kind and size, those of the latest day count. If several of these have the same layers and shares
    (with different schedules or transports), the fastest counts."""
    found = {}
    for name, content in sorted(runs.items()):
        source = sources.add(file, content)
        for run in content["configurations"]:
            if "step_seconds" not in run or run["kind"] not in KINDS or run["replicas"] != 1:
                continue
            if run["kind"] == "local" and run["head"] != "torch.compile":
                continue  # the plan compares only with the fastest local head
            if run["kind"] != "local" and run["schedule"] == "1F1B":
                continue
            entry = entry_of(name, content, run, source)
            key = (entry["kind"], entry["gradients"], entry["mps"], entry["hidden"], entry["vocab"], sum(entry["layers"]), run["gpus"])
            found.setdefault(key, {}).setdefault(content["date"], []).append(entry)
    return [entry for days in found.values() for entry in fastest(days[max(days)])]


def fastest(entries):
    """The fastest entry for each combination of layers and shares."""
    best = {}
    for entry in sorted(entries, key=lambda each: each["step_seconds"]):
        best.setdefault((tuple(entry["layers"]), tuple(entry["shares"])), entry)
    return [entry for entry in entries if entry in best.values()]


def entry_of(name, content, run, source):
    settings = content.get("settings", {})
    shape = settings.get("shape") or ("llama3-8b" if name.startswith("llama") else "gemma2-2b")  # older files have no settings
    hidden, vocab = HIDDEN_AND_VOCABULARY[shape]
    hidden, vocab = settings.get("hidden_size") or hidden, settings.get("vocab_size") or vocab
    rows = settings.get("sequences", 4) * (settings.get("context") or 2048)
    tokens = round(run["tokens_per_second"] * run["step_seconds"])
    colocated = run["kind"] == "colocated"
    return {"kind": run["kind"], "gradients": run["gradients"],
            "mps": colocated and bool(run.get("mps", "_mps" in name)), "shape": shape, "hidden": hidden, "vocab": vocab,
            "microbatches": tokens // rows, "microbatch_rows": rows, "layers": run["layers"],
            "shares": list(run.get("shares") or []), "layer_seconds": round(content["measured_seconds"]["layer"], 6),
            "step_seconds": round(run["step_seconds"], 4),
            "peak_bytes": [each["peak_bytes"] for each in run["memory"] if each["role"] == "trainer"], "source": source}


def head_seconds(entry, loss, last_stage):
    """The seconds of an entry's head for a microbatch alone on one GPU. Taken from the rates, as the plan does; None if the head's
    shape was not measured."""
    if entry["kind"] == "local":
        rates = [each for each in last_stage if each["method"] == "compiled"]
    else:
        rates = [each for each in loss if (each["logits"], each["gradients"]) == ("stored", entry["gradients"])]
    for each in rates:
        if each["data"] == "real" and (each["hidden"], each["vocab"]) == (entry["hidden"], entry["vocab"]):
            return each["ms"] * 1e-3 * entry["microbatch_rows"] / each["rows"]
    return None


def predict(entry, head, layer, local_head=1.0, colocated=1.0):
    """The seconds of a step, as in client/plan/plan.h: the first microbatch passes through all stages and the head, and each of the
    others takes the time of the slowest of them. `head`: head_seconds() of the entry. `layer`, `local_head`, `colocated`: the
    factors."""
    busy = [count * entry["layer_seconds"] * layer for count in entry["layers"]]  # seconds of a microbatch in each stage
    more = entry["microbatches"] - 1
    if entry["kind"] == "local":
        busy[-1] += local_head * head
        return sum(busy) + more * max(busy)
    if entry["kind"] == "server":
        return sum(busy) + head + more * max(*busy, head)
    shares = entry["shares"] or [1] * len(busy)
    parts = [colocated * head * share / sum(shares) for share in shares]
    return sum(busy) + max(parts) + more * max(each + part for each, part in zip(busy, parts))


def worst(entries, heads, **factors):
    """The largest relative error of the predictions with these factors."""
    return max((abs(predict(entry, head, **factors) / entry["step_seconds"] - 1) for entry, head in zip(entries, heads)), default=0.0)


def with_heads(entries, loss, last_stage):
    """(entry, head_seconds()) of all entries whose head's time is known."""
    return [(entry, head) for entry in entries if (head := head_seconds(entry, loss, last_stage)) is not None]


def fit(entries, loss, last_stage):
    """Finds the factors whose largest error is the smallest, in steps of 0.01. First fits the factors of layers and of a local head
    to the steps without a colocated server, and then one factor to each kind of colocated steps."""
    known = with_heads(entries, loss, last_stage)

    def those(wanted):
        chosen = [(entry, head) for entry, head in known if wanted(entry)]
        return [entry for entry, _ in chosen], [head for _, head in chosen]

    def hundredths(least, most):
        return [number / 100 for number in range(least, most)]

    apart = those(lambda entry: entry["kind"] != "colocated")
    layer, local_head = min(itertools.product(hundredths(90, 140), hundredths(90, 140)),
                            key=lambda pair: round(worst(*apart, layer=pair[0], local_head=pair[1]), 4))
    errors, colocated = [worst(*apart, layer=layer, local_head=local_head)], []
    for mps, gradients in itertools.product((True, False), ("exact", "sampled")):
        same = those(lambda entry: entry["kind"] == "colocated" and (entry["mps"], entry["gradients"]) == (mps, gradients))
        if not same[0]:
            continue
        factor = min(hundredths(50, 500), key=lambda each: round(worst(*same, layer=layer, colocated=each), 4))
        colocated.append({"gradients": gradients, "mps": mps, "factor": factor})
        errors.append(worst(*same, layer=layer, colocated=factor))
    return {"layer": layer, "local_head": local_head, "colocated": colocated, "worst_error": round(max(errors), 4)}


def factors_of(entry, fitted):
    """The factors of fit() as arguments of predict() for an entry. None if no colocated step of this kind was measured."""
    found = {"layer": fitted["layer"], "local_head": fitted["local_head"]}
    if entry["kind"] != "colocated":
        return found
    same = [each["factor"] for each in fitted["colocated"] if (each["gradients"], each["mps"]) == (entry["gradients"], entry["mps"])]
    return found | {"colocated": same[0]} if same else None


def group_of(entry):
    """The model of an entry (shape and number of layers) and its number of GPUs."""
    return entry["shape"], sum(entry["layers"]), len(entry["layers"]) + (entry["kind"] == "server")


def left_out_error(entries, loss, last_stage):
    """The largest error if the steps of each group (model and number of GPUs) are predicted with factors that are fitted to the
    steps of the other groups. None if this is not possible."""
    errors = []
    for group in sorted({group_of(entry) for entry in entries}):
        others = [entry for entry in entries if group_of(entry) != group]
        if not any(each["kind"] == "local" for each in others):
            continue
        fitted = fit(others, loss, last_stage)
        for entry, head in with_heads([entry for entry in entries if group_of(entry) == group], loss, last_stage):
            if (factors := factors_of(entry, fitted)) is not None:
                errors.append(worst([entry], [head], **factors))
    return max(errors, default=None)


def table(content):
    """The table for bench/results/predicted-steps.md: every step and its prediction."""
    loss, last_stage, fitted = content["loss"], content["last_stage"], content["step_factors"]
    def order(pair):
        entry = pair[0]
        shape, layers, gpus = group_of(entry)
        return shape, gpus, -layers, KINDS.index(entry["kind"]), not entry["mps"], entry["gradients"], entry["layers"]
    lines = ["| model | GPUs | head | layers of stages | measured | predicted | error |", "|---|---|---|---|---|---|---|"]
    for entry, head in sorted(with_heads(content["steps"], loss, last_stage), key=order):
        shape, layers, gpus = group_of(entry)
        seconds = predict(entry, head, **factors_of(entry, fitted))
        kind = ", ".join(filter(None, (entry["kind"], entry["gradients"], "no MPS" if entry["kind"] == "colocated" and not entry["mps"] else "")))
        shares = f", shares {','.join(map(str, entry['shares']))}" if entry["shares"] else ""
        lines.append(f"| {shape}, {layers} layers | {gpus} | {kind} | {'-'.join(map(str, entry['layers']))}{shares} | {entry['step_seconds'] * 1e3:.0f} ms "
                     f"| {seconds * 1e3:.0f} ms | {(seconds / entry['step_seconds'] - 1) * 100:+.1f} % |")
    factors = ", ".join(f"{each['factor']:.2f} ({each['gradients']}{'' if each['mps'] else ', no MPS'})" for each in fitted["colocated"])
    runs = sorted({(content["sources"][entry["source"]]["date"], content["sources"][entry["source"]]["commit"]) for entry in content["steps"]})
    left_out = left_out_error(content["steps"], loss, last_stage)
    lines += ["", f"On {content['card']['name']}s, {', '.join(f'{date} at {commit}' for date, commit in runs)}. Factors: `layer` {fitted['layer']:.2f}, `local_head` "
              f"{fitted['local_head']:.2f}, `colocated` {factors}.",
              f"The largest error is {fitted['worst_error'] * 100:.1f} %" + ("" if left_out is None else
              f"; of a model whose steps the factors are not fitted to, {left_out * 100:.1f} %") + "."]
    return "\n".join(lines) + "\n"
