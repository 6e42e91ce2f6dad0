# SPDX-License-Identifier: Apache-2.0
"""Training steps of a pipeline on so many GPUs with the head on the last stage, and with one of these GPUs as a lossd server.

    python3 bench/pipeline_bench.py --lossd build/release/bin/lossd --shape gemma2-2b --layers 12 --json pipeline.json

Kinds of configurations, which all take every GPU and train on the same tokens:

    local            a stage on each GPU, the head on the last one: each local head with the split of the layers that its
                     measured time predicts, and the fastest head with neighbouring splits, too
    server           a stage on each GPU but the last, which is the server's: exact and sampled gradients, both schedules
    server replicas  several pipelines, or several trainers of one stage, that share the server
    local replicas   several pipelines with a local head each; their gradients are averaged

For each: seconds of a step (median), tokens a second of all GPUs and of one, peak memory of every GPU and the losses. Losses
of exact configurations, and gradient norms of the first step, have to agree within --tolerance. Beside them stands what
`lossctl plan` predicts from the measured time of a layer. Rows go to the server as lossd.Client chooses, which is through
memory of the host; with --transport=cuda_ipc from GPU to GPU. The file is written after each configuration. Exit status 1
if exact configurations disagree or one fails for another reason than memory. Needs torch 2.11 or later; local heads are
those of peer_losses.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pipeline_layouts import KINDS, ONE_F_ONE_B, OVERLAPPED, Configuration, configurations, read_splits, seconds_without_gaps
from pipeline_model import Shape
from pipeline_ranks import Settings, measure_parts, reported, train
from pipeline_results import compare, fastest, last_over_middle
from pipeline_server import Server

SHAPES = {  # of examples/gpt_torch/model.py; layers as --layers says
    "gemma2-2b": {"vocab_size": 256000, "hidden_size": 2304, "heads": 18, "context": 2048},
    "llama3-8b": {"vocab_size": 128256, "hidden_size": 4096, "heads": 32, "context": 2048},
}
METHODS = {"compiled": "torch.compile"}  # names of `lossctl plan`, where peer_losses.py has others


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lossd", default="build/release/bin/lossd", help="the server's program")
    parser.add_argument("--lossctl", help="for its plan [the program beside lossd]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--gpus", type=int, default=0, help="as many processes on the CPU [all]")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="gemma2-2b")
    for name in ("vocab_size", "hidden_size", "heads", "context"):
        parser.add_argument(f"--{name}", type=int, help="instead of the shape's")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequences", type=int, default=4, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=24, help="of a step, all replicas together")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of configurations, with commas between them")
    parser.add_argument("--local_heads", default="torch.compile,liger,cce", help="local ones, of peer_losses.py")
    parser.add_argument("--splits", default="", help="layers of each stage, for local heads: 4-4-3-1,4-4-4-0")
    parser.add_argument("--neighbours", type=int, default=1, help="splits on each side of the predicted one")
    parser.add_argument("--gradients", default="exact,sampled", help="of the server")
    parser.add_argument("--schedules", default=f"{ONE_F_ONE_B},{OVERLAPPED}", help="with the server")
    parser.add_argument("--warm_up", type=int, default=3, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=10, help="steps that are")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", help="of lossd.Client [its own choice]")
    parser.add_argument("--threads", type=int, default=1, help="of a rank on the CPU")
    parser.add_argument("--tolerance", type=float,
                        help="of losses in nats, and of gradient norms relatively [0.02, on the CPU 1e-4]")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a configuration is given up")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which none is started any more")
    parser.add_argument("--commit", help="of the tree, for the file [what git says]")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args(given)
    for name, known in (("kinds", KINDS), ("gradients", ("exact", "sampled")), ("schedules", (ONE_F_ONE_B, OVERLAPPED))):
        setattr(arguments, name, list(filter(None, getattr(arguments, name).split(","))))
        for each in getattr(arguments, name):
            if each not in known:
                parser.error(f"{name} has {each!r}; there are {', '.join(known)}")
    for name in ("layers", "sequences", "microbatches", "warm_up", "steps", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"{name} is {getattr(arguments, name)}; it must be positive")
    try:
        arguments.splits = read_splits(arguments.splits, arguments.layers)
    except ValueError as error:
        parser.error(str(error))
    available = torch.cuda.device_count() if arguments.device == "cuda" else 4
    arguments.gpus = arguments.gpus or available
    if not 1 <= arguments.gpus <= (available if arguments.device == "cuda" else 64):
        parser.error(f"gpus is {arguments.gpus}; there are {available}")
    if arguments.layers < arguments.gpus - 1:
        parser.error(f"layers is {arguments.layers}; {arguments.gpus} GPUs need {arguments.gpus - 1} at least")
    if any(len(split) != arguments.gpus for split in arguments.splits):
        parser.error(f"splits must have {arguments.gpus} stages, one a GPU")
    return arguments


def run_processes(context: Any, count: int, limit: float, work: Any, *arguments: Any) -> list[dict[str, Any]]:
    """What work(rank, *arguments) returned in each of `count` processes, or one {"error": ...}. None outlives the call."""
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{rank}.json") for rank in range(count)]
        rendezvous = str(Path(folder, "rendezvous"))
        processes = [context.Process(target=reported, args=(paths[rank], work, rank, rendezvous, *arguments))
                     for rank in range(count)]
        for process in processes:
            process.start()
        while True:
            codes = [process.exitcode for process in processes]
            running = [process.sentinel for process, code in zip(processes, codes) if code is None]
            left = deadline - time.monotonic()
            failed = any(codes) or (left <= 0 and running)
            if failed or not running:
                break
            multiprocessing.connection.wait(running, left)
        if failed:  # the others would wait for it; a moment for those that failed for the same reason
            for process in processes:
                process.join(2.0)
                process.kill()
        for process in processes:
            process.join()
        results = [json.loads(path.read_text()) if path.exists() and path.read_text() else {} for path in paths]
    errors = [result for result in results if "error" in result]
    if errors or any(process.exitcode for process in processes):
        codes = [process.exitcode for process in processes]
        why = f"no answer within {limit:.0f} s" if time.monotonic() > deadline else f"processes ended with {codes}"
        return [next((each for each in errors if "out_of_memory" in each), (errors or [{"error": why}])[0])]
    return results


def measure(_rank: int, _rendezvous: str, settings: Settings, heads: list[str], repeats: int) -> dict[str, Any]:
    return measure_parts(settings, heads, repeats)


def server_flags(arguments: argparse.Namespace) -> list[str]:
    if arguments.device == "cuda":
        return ["--backend=cuda", f"--device={arguments.gpus - 1}"]
    return ["--backend=cpu", f"--threads={arguments.threads}"]


def run_configuration(context: Any, configuration: Configuration, settings: Settings,
                      arguments: argparse.Namespace) -> dict[str, Any]:
    """What one configuration measured, or {"error": ...}."""
    entry: dict[str, Any] = {
        "name": configuration.name, "kind": configuration.kind, "head": configuration.head,
        "gradients": configuration.gradients, "schedule": configuration.schedule, "replicas": configuration.replicas,
        "layers": list(configuration.layers), "gpus": configuration.gpus, "exact": configuration.exact}
    if settings.microbatches % configuration.replicas:
        return entry | {"error": f"{settings.microbatches} microbatches do not divide among {configuration.replicas} replicas"}
    try:
        with Server(arguments.lossd, *server_flags(arguments)) if configuration.on_server else nullcontext() as server:
            ranks = run_processes(context, configuration.trainers, arguments.limit, train, configuration, settings,
                                  server.target if server else "", server.http if server else "", arguments.limit)
            resident = server.peak_resident_bytes() if server else 0
    except (OSError, RuntimeError) as error:  # of the server
        return entry | {"error": str(error)}
    if "error" in ranks[0]:
        return entry | ranks[0]
    entry |= summary(ranks, configuration, settings, resident)
    return entry | {"last_stage_over_middle_memory": last_over_middle(entry)}


def summary(ranks: list[dict[str, Any]], configuration: Configuration, settings: Settings,
            resident_bytes: int) -> dict[str, Any]:
    """`resident_bytes`: of the server's process on the host, at most."""
    timed = np.max([rank["seconds"] for rank in ranks], axis=0)[settings.warm_up:]
    seconds = float(np.median(timed))
    tokens = settings.microbatches * settings.rows / seconds
    keys = ("replica", "stage", "peak_bytes", "reserved_bytes", "device_used_bytes")
    found: dict[str, Any] = {
        "step_seconds": seconds, "all_step_seconds": timed.tolist(), "tokens_per_second": tokens,
        "tokens_per_second_and_gpu": tokens / configuration.gpus,
        "memory": [{"role": "trainer", **{key: rank[key] for key in keys if key in rank}} for rank in ranks],
        "losses": np.mean([rank["losses"] for rank in ranks if rank["losses"]], axis=0).tolist(),
        "gradient_norms": {key: sum(rank["squared_norms"].get(key, 0.0) for rank in ranks if rank["replica"] == 0)**0.5
                           for key in ("layers", "head")}}
    if configuration.on_server:
        watched = next(rank for rank in ranks if rank["after"])
        after = watched["after"]
        rose = {name: value - watched["before"].get(name, 0.0) for name, value in after.items()}
        found["memory"].append({"role": "server", "peak_bytes": after["lossd_memory_peak_bytes"],
                                "device_used_bytes": after.get("lossd_gpu_memory_used_bytes"),
                                "resident_bytes": resident_bytes})
        microbatches = rose["lossd_rows_total"] / settings.rows
        found["server"] = {"transport": watched["transport"],
                           "busy_share": rose["lossd_device_busy_seconds_total"] / float(timed.sum()),
                           "microbatch_seconds": rose["lossd_head_device_seconds_total"] / microbatches,
                           "cores": rose["process_cpu_seconds_total"] / float(timed.sum())}
    return found


def plan(configuration: Configuration, settings: Settings, layer_seconds: float, lossctl: str) -> dict[str, Any]:
    """What `lossctl plan` says of such a pipeline, on the card that it knows: {"least_step_seconds", ...} or {"reason"}."""
    rows = settings.microbatches // configuration.replicas * settings.rows
    command = [lossctl, "--json", "plan", f"--hidden={settings.shape.hidden_size}", f"--vocab={settings.shape.vocab_size}",
               f"--rows={rows}", f"--microbatch={settings.rows}", f"--layers={settings.shape.layers}",
               f"--stages={configuration.stages}", f"--trainers={configuration.replicas}", f"--layer-seconds={layer_seconds}"]
    try:
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
    except (OSError, subprocess.SubprocessError) as error:
        return {"reason": f"{error} {getattr(error, 'stderr', None) or ''}".strip()}
    for each in answer["pipelines"]:
        same = each["gradients"] == configuration.gradients if configuration.on_server else each["gradients"] is None
        if same and each["gpus"] == configuration.gpus:
            return {"card": answer["card"], "head": METHODS.get(each["head"], each["head"]), "layers": each["layers"],
                    "least_step_seconds": each["least_step_seconds"], "server_bound": each["server_bound"]}
    return {"card": answer["card"], "reason": "it has no such pipeline, as times of this head were not measured"}


def describe_run(arguments: argparse.Namespace) -> dict[str, Any]:
    import peers
    commit = arguments.commit or subprocess.run(
        ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
        check=False).stdout.strip()
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit, "versions": peers.versions(), "settings": settings}


def show(entry: dict[str, Any]) -> None:
    if "error" in entry:
        print(f"{entry['name']}: {entry['error'].strip().splitlines()[-1]}", flush=True)
        return
    memory = " ".join(f"{each['peak_bytes'] / 2**30:.2f}" for each in entry["memory"])
    print(f"{entry['name']}: step {entry['step_seconds'] * 1e3:.1f} ms (without gaps "
          f"{entry['seconds_without_gaps'] * 1e3:.1f}), {entry['tokens_per_second_and_gpu']:.0f} tokens/s a GPU, "
          f"peak memory {memory} GiB, last loss {entry['losses'][-1]:.4f}", flush=True)


def main() -> None:
    arguments = parse_arguments()
    begin = time.monotonic()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast, which not every host has
    shape = Shape(**{name: getattr(arguments, name) or value for name, value in SHAPES[arguments.shape].items()},
                  layers=arguments.layers)
    settings = Settings(shape, arguments.device, arguments.sequences, arguments.microbatches, arguments.warm_up,
                        arguments.steps, arguments.lr, arguments.seed, arguments.transport, arguments.threads)
    tolerance = arguments.tolerance or (0.02 if arguments.device == "cuda" else 1e-4)
    lossctl = arguments.lossctl or str(Path(arguments.lossd).with_name("lossctl"))
    # No process may be forked from one that has used CUDA, which the modules below may.
    context = multiprocessing.get_context("spawn" if arguments.device == "cuda" else "forkserver")
    if arguments.device == "cpu":
        context.set_forkserver_preload(["torch._dynamo", "lossd.torch", "torch.distributed.pipelining"])
    heads = list(filter(None, arguments.local_heads.split(",")))
    parts = run_processes(context, 1, arguments.limit, measure, settings, heads, 10)[0]
    if "error" in parts:
        sys.exit(f"the layer cannot be measured: {parts['error']}")
    for head, why in parts["without"].items():
        print(f"without {head}: {why}")
    wanted = configurations(
        gpus=arguments.gpus, layers=arguments.layers, kinds=arguments.kinds, layer_seconds=parts["layer"],
        head_seconds=parts["heads"], gradients=arguments.gradients, schedules=arguments.schedules, splits=arguments.splits,
        neighbours=arguments.neighbours)
    result: dict[str, Any] = {"card": parts.pop("card"), **describe_run(arguments), "measured_seconds": parts,
                              "configurations": [], "left_out": []}
    print(f"a layer takes {parts['layer'] * 1e3:.2f} ms, heads "
          + ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in parts["heads"].items()))
    for configuration in wanted:
        if time.monotonic() - begin > arguments.budget:
            result["left_out"].append(configuration.name)
            continue
        entry = run_configuration(context, configuration, settings, arguments)
        entry["seconds_without_gaps"] = seconds_without_gaps(configuration, arguments.microbatches, parts["layer"],
                                                             parts["heads"].get(configuration.head, 0.0),
                                                             entry.get("server", {}).get("microbatch_seconds", 0.0))
        entry["plan"] = plan(configuration, settings, parts["layer"], lossctl)
        if "step_seconds" in entry and "least_step_seconds" in entry["plan"]:
            entry["plan"]["measured_over_least"] = entry["step_seconds"] / entry["plan"]["least_step_seconds"]
        result["configurations"].append(entry)
        result["agreement"] = compare(result["configurations"], tolerance)
        result["fastest"] = fastest(result["configurations"])
        show(entry)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if result["left_out"]:
        print(f"left out, as {arguments.budget:.0f} s have passed: {'; '.join(result['left_out'])}")
    agreement = result.get("agreement", {"agree": True, "apart": {}})
    for each in result.get("fastest", []):
        over = f", {each['over_local']:.3f} of the fastest local one" if each["over_local"] else ""
        print(f"fastest {each['kind']} {each['gradients']}: {each['tokens_per_second_and_gpu']:.0f} tokens/s a GPU{over}, "
              f"{each['name']}")
    apart = max((each["losses"] for each in agreement["apart"].values()), default=0.0)
    print(f"losses are apart by {apart:.6f} at most; exact configurations {'agree' if agreement['agree'] else 'DISAGREE'} "
          f"within {tolerance} in losses and gradient norms")
    failed = [entry for entry in result["configurations"] if "error" in entry and not entry.get("out_of_memory")]
    sys.exit(0 if agreement["agree"] and not failed else 1)


if __name__ == "__main__":
    main()
