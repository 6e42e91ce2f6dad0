# SPDX-License-Identifier: Apache-2.0
"""Training steps of a pipeline on so many GPUs with the head on the last stage, and with one of these GPUs as a lossd server.

    python3 bench/pipeline_bench.py --lossd build/release/bin/lossd --shape gemma2-2b --layers 12 --json pipeline.json

Kinds of configurations, which all take every GPU and train on the same tokens:

    local            a stage on each GPU, the head on the last one: each local head with the split of the layers that its
                     measured time predicts, and the fastest head with neighbouring splits, too
    colocated        a stage on each GPU and one server on the same GPUs, which divides the head's classes over them: shares and
                     split of lossd.torch.balance() for the measured times of a layer and of the head (--shares has others);
                     with or without MPS (--mps), which this starts and ends
    server           a stage on each GPU but the last, which is the server's: exact and sampled gradients, both schedules
    server replicas  several pipelines, or several trainers of one stage, that share the server
    local replicas   several pipelines with a local head each; their gradients are averaged

For each: seconds of a step (median), tokens a second of all GPUs and of one, peak memory of every GPU and the losses. Losses
of exact configurations, and gradient norms of the first step, have to agree within --tolerance. Beside them stands what
`lossctl plan` predicts from the measured time of a layer, and what a step takes if all work is divided evenly. Rows go to the
server as lossd.Client chooses, or as --transport says; the file has how they went, how long the last stage waits for a
microbatch of the head (median, from when its rows are there until the gradient is), and the server's cores. The file is
written after each configuration. Exit status 1 if exact configurations disagree or one fails for another reason than memory.
Needs torch 2.11 or later; local heads are those of peer_losses.py.

Of several runs on one machine, those after the first take its measured times by --parts.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from pipeline_arguments import SHAPES, parse_arguments
from pipeline_layouts import Configuration, Wanted, configurations, evenly_divided_seconds, seconds_without_gaps
from pipeline_model import Shape
from pipeline_mps import Mps, of_trainer
from pipeline_ranks import Settings, measure_parts, measure_server, reported, train
from pipeline_results import compare, fastest, last_over_middle, server_line, summary, table
from pipeline_server import Server



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


def measure(_rank: int, _rendezvous: str, settings: Settings, heads: list[str], gradients: list[str], target: str,
            http: str, environment: dict[str, str], repeats: int) -> dict[str, Any]:
    os.environ.update(environment)
    parts = measure_parts(settings, heads, repeats)
    return parts | {"server": measure_server(settings, target, http, gradients, repeats) if gradients else {}}


def measured(context: Any, settings: Settings, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the parts of which times are predicted; of those that an earlier run has measured, its."""
    if arguments.parts:
        earlier = json.loads(arguments.parts.read_text())
        for name in ("shape", "device", "sequences", "vocab_size", "hidden_size", "heads", "context"):
            if earlier["settings"][name] != getattr(arguments, name):
                sys.exit(f"{arguments.parts} has {name} {earlier['settings'][name]}, not {getattr(arguments, name)}")
        needed = arguments.gradients if "colocated" in arguments.kinds else []
        missing = set(needed) - set(earlier["measured_seconds"].get("server", {}))
        if missing:
            sys.exit(f"{arguments.parts} has no time of a head with {' and '.join(missing)} gradients")
        return {"card": earlier["card"], **earlier["measured_seconds"]}
    heads = list(filter(None, arguments.local_heads.split(",")))
    gradients = arguments.gradients if "colocated" in arguments.kinds else []
    with ExitStack() as stack:
        environment, server = {}, None
        if gradients and "on" in arguments.mps:
            try:
                environment = stack.enter_context(Mps(arguments.mps_control)).environment
            except RuntimeError as error:
                print(f"the head is measured without MPS: {error}", flush=True)
        if gradients:
            flags = ["--backend=cuda", "--device=0"] if arguments.device == "cuda" else ["--backend=cpu", "--threads=1"]
            try:
                server = stack.enter_context(Server(arguments.lossd, *flags, environment=environment))
            except (OSError, RuntimeError) as error:
                sys.exit(f"the head cannot be measured: {error}")
        found = run_processes(context, 1, arguments.limit, measure, settings, heads, gradients,
                              server.target if server else "", server.http if server else "", environment, 10)[0]
    if "error" in found:
        sys.exit(f"the layer and the heads cannot be measured: {found['error']}")
    return found


def server_flags(configuration: Configuration, arguments: argparse.Namespace) -> list[str]:
    flags = ["--split=vocabulary"] if configuration.colocated else []
    if arguments.device == "cuda":
        devices = ",".join(map(str, range(arguments.gpus)))
        flags += ["--backend=cuda", f"--devices={devices}" if configuration.colocated else f"--device={arguments.gpus - 1}"]
    elif configuration.colocated:
        flags += ["--backend=cpu", f"--cpu_devices={arguments.gpus}", f"--threads={arguments.gpus * arguments.threads}"]
    else:
        flags += ["--backend=cpu", f"--threads={arguments.threads}"]
    return flags + arguments.server_flags.split()


def run_configuration(context: Any, configuration: Configuration, settings: Settings,
                      arguments: argparse.Namespace) -> dict[str, Any]:
    """What one configuration measured, or {"error": ...}."""
    entry: dict[str, Any] = {
        "name": configuration.name, "kind": configuration.kind, "head": configuration.head,
        "gradients": configuration.gradients, "schedule": configuration.schedule, "replicas": configuration.replicas,
        "layers": list(configuration.layers), "gpus": configuration.gpus, "exact": configuration.exact,
        "shares": list(configuration.shares), "mps": configuration.mps, "slack": configuration.slack}
    if settings.microbatches % configuration.replicas:
        return entry | {"error": f"{settings.microbatches} microbatches do not divide among {configuration.replicas} replicas"}
    with ExitStack() as stack:
        environment, server = {}, None
        try:
            if configuration.mps:
                environment = stack.enter_context(Mps(arguments.mps_control)).environment
            if configuration.on_server:
                flags = server_flags(configuration, arguments)
                server = stack.enter_context(Server(arguments.lossd, *flags, environment=environment))
        except (OSError, RuntimeError) as error:
            return entry | {"error": str(error)}
        ranks = run_processes(
            context, configuration.trainers, arguments.limit, train, configuration, settings, server.target if server else "",
            server.http if server else "", arguments.limit, of_trainer(environment, arguments.trainer_priority))
        resident = server.peak_resident_bytes() if server else 0
    if "error" in ranks[0]:
        return entry | ranks[0]
    entry |= summary(ranks, configuration, settings, resident)
    return entry | {"last_stage_over_middle_memory": last_over_middle(entry)}


def predict(entry: dict[str, Any], configuration: Configuration, settings: Settings, parts: dict[str, Any]) -> None:
    """Adds to an entry what its step takes at least, by the measured times of its parts."""
    server = entry.get("server", {}).get("microbatch_seconds", 0.0)
    layer, microbatches = parts["layer"], settings.microbatches
    if configuration.colocated:
        server = parts["server"][configuration.gradients]
        evenly = evenly_divided_seconds(configuration.gpus, microbatches, layer * settings.shape.layers, server)
        entry["evenly_divided_seconds"] = evenly
        if "step_seconds" in entry:
            entry["over_evenly_divided"] = entry["step_seconds"] / evenly
    entry["seconds_without_gaps"] = seconds_without_gaps(configuration, microbatches, layer,
                                                         parts["heads"].get(configuration.head, 0.0), server)


def plan(configuration: Configuration, settings: Settings, parts: dict[str, Any], lossctl: str) -> dict[str, Any]:
    """What `lossctl plan` predicts of such a pipeline from the measured `parts`, with the layers and shares that it chooses:
    {"step_seconds", "least_step_seconds", ...} or {"reason"}."""
    rows = settings.microbatches // configuration.replicas * settings.rows
    command = [lossctl, "--json", "plan", f"--hidden={settings.shape.hidden_size}", f"--vocab={settings.shape.vocab_size}",
               f"--rows={rows}", f"--microbatch={settings.rows}", f"--layers={settings.shape.layers}",
               f"--stages={configuration.stages}", f"--trainers={configuration.replicas}", f"--layer-seconds={parts['layer']}"]
    for option, seconds in (("head", parts["server"].get("exact")), ("sampled", parts["server"].get("sampled")),
                            ("local-head", parts["heads"].get(configuration.head))):
        if seconds:
            command.append(f"--{option}-seconds={seconds}")
    try:
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
    except (OSError, subprocess.SubprocessError) as error:
        return {"reason": f"{error} {getattr(error, 'stderr', None) or ''}".strip()}
    for each in answer["pipelines"]:
        if (each["kind"] == configuration.kind.removesuffix(" replicas") and each["gpus"] == configuration.gpus
                and (each["gradients"] or "") == configuration.gradients
                and (not configuration.colocated or each["mps"] == configuration.mps)):
            return {"card": answer["card"], **{key: each[key] for key in (
                "layers", "shares", "step_seconds", "least_step_seconds", "server_bound", "over_local") if key in each}}
    return {"card": answer["card"], "reason": "it has no such pipeline, as times of this head were not measured"}


def describe_run(arguments: argparse.Namespace) -> dict[str, Any]:
    import peers
    commit = arguments.commit or subprocess.run(
        ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
        check=False).stdout.strip()
    settings = {key: value.name if isinstance(value, Path) else value  # names of files, without the folders of this machine
                for key, value in vars(arguments).items() if key not in ("lossd", "lossctl")}
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit, "versions": peers.versions(), "settings": settings}


def show(entry: dict[str, Any]) -> None:
    if "error" in entry:
        print(f"{entry['name']}: {entry['error'].strip().splitlines()[-1]}", flush=True)
        return
    memory = " ".join(f"{each['peak_bytes'] / 2**30:.2f}" for each in entry["memory"])
    print(f"{entry['name']}: step {entry['step_seconds'] * 1e3:.1f} ms (without gaps "
          f"{entry['seconds_without_gaps'] * 1e3:.1f}), {entry['tokens_per_second_and_gpu']:.0f} tokens/s a GPU, "
          f"peak memory {memory} GiB, last loss {entry['losses'][-1]:.4f}", flush=True)
    if "server" in entry:
        print(server_line(entry), flush=True)


def main() -> None:
    arguments = parse_arguments(description=__doc__)
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
    parts = measured(context, settings, arguments)
    for head, why in parts["without"].items():
        print(f"without {head}: {why}")
    wanted = configurations(
        Wanted(arguments.gpus, arguments.layers, arguments.kinds, arguments.gradients, arguments.schedules, arguments.splits,
               arguments.neighbours, arguments.most_splits, arguments.fastest_local, arguments.colocated_splits,
               arguments.shares, [each == "on" for each in arguments.mps], arguments.slack),
        parts["layer"], parts["heads"], parts["server"])
    result: dict[str, Any] = {"card": parts.pop("card"), **describe_run(arguments), "measured_seconds": parts,
                              "configurations": [], "left_out": []}
    print(f"a layer takes {parts['layer'] * 1e3:.2f} ms, heads "
          + ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in parts["heads"].items())
          + "".join(f", lossd {gradients} {seconds * 1e3:.2f}" for gradients, seconds in parts["server"].items()), flush=True)
    for configuration in wanted:
        if time.monotonic() - begin > arguments.budget:
            result["left_out"].append(configuration.name)
            continue
        entry = run_configuration(context, configuration, settings, arguments)
        predict(entry, configuration, settings, parts)
        entry["plan"] = plan(configuration, settings, parts, lossctl)
        if "step_seconds" in entry and "step_seconds" in entry["plan"]:
            entry["plan"]["measured_over_predicted"] = entry["step_seconds"] / entry["plan"]["step_seconds"]
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
    for line in table(result["configurations"]):
        print(line)
    apart = max((each["losses"] for each in agreement["apart"].values()), default=0.0)
    print(f"losses are apart by {apart:.6f} at most; exact configurations {'agree' if agreement['agree'] else 'DISAGREE'} "
          f"within {tolerance} in losses and gradient norms")
    failed = [entry for entry in result["configurations"] if "error" in entry and not entry.get("out_of_memory")]
    sys.exit(0 if agreement["agree"] and not failed else 1)


if __name__ == "__main__":
    main()
