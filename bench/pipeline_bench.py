# SPDX-License-Identifier: Apache-2.0
"""Compares training steps of a pipeline whose head is on the last stage with those of a pipeline whose head is on a lossd server.

    python3 bench/pipeline_bench.py --lossd build/release/bin/lossd --shape gemma2-2b --layers 12 --json pipeline.json

There are several kinds of configurations. All of them use every GPU and train on the same tokens:

    local            A stage on each GPU, and the head on the last one. Each local head runs with the split of the layers that
                     its measured time predicts, the fastest head also with neighbouring splits.
    colocated        A stage on each GPU, and one server on the same GPUs, which divides the head's classes over them. Shares and
                     split are those of lossd.torch.balance() for the measured times of a layer and of the head (--shares gives
                     others). It runs with or without MPS (--mps), which this program starts and ends.
    embedded         Like colocated, but the server is not a program: the processes of the stages are its ranks
                     (lossd.torch.colocate()).
    server           A stage on each GPU but the last one, which the server has, with exact and sampled gradients and both
                     schedules.
    server replicas  Several pipelines, or several trainers of one stage, that share the server.
    local replicas   Several pipelines with a local head each; their gradients are averaged.

--embeddings selects the embedding of the first stage. "own" is a matrix of its own, the default. The others are for a tied
model, whose embedding is the head's matrix, in one pipeline of several stages. With "rows" the server serves the rows. With
"exchange" the first stage has a copy of the matrix; the gradient of this copy and its new values are sent once a step. With a
local head, "rows" is treated as "exchange": gradient and values go between first and last stage. Tied and untied models learn
differently, so tied configurations are compared only with tied ones.

The layers are blocks of examples/gpt_torch, and the tokens are random. With --model the layers are those of a known model in
Hugging Face transformers with random weights, and the embedding is tied if the model's is. With --text the tokens come from files:

    python3 bench/pipeline_bench.py --model llama-3.2-1b --text '/usr/lib/python3*/**/*.py' --kinds local,colocated --mps on

For each configuration the results have:

  - the median seconds of a step, tokens per second of all GPUs and of one, the peak memory of every GPU, and the losses;
  - what `lossctl plan` predicts from the measured time of a layer, and the time of a step if all work were divided evenly;
  - with a server: the transport of the rows (chosen by lossd.Client or given by --transport), the cores of the server, and the
    median time of a microbatch of the head from when its rows are complete until its gradient has arrived.

The losses of exact configurations, and the gradient norms of their first step, must agree within --tolerance. The file is
written after each configuration. The exit status is 1 if exact configurations disagree, or if a configuration fails for a reason
other than memory. Needs torch 2.11 or later; the local heads are those of peers.py.

A later run on the same machine can use the measured times of an earlier run: give its file to --parts.
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

import numpy as np
import torch
from pipeline_layouts import (
    BALANCED, EMBEDDINGS, EVEN, KINDS, ON_STAGES, ONE_F_ONE_B, OVERLAPPED, OWN, ROWS, Configuration, Wanted, configurations,
    evenly_divided_seconds, read_shares, read_splits, seconds_without_gaps)
from pipeline_models import MODELS
from pipeline_ranks import Settings, Shape, measure_parts, measure_server, reported, train
from pipeline_server import CONTROL, Mps, Server, of_trainer
from pipeline_text import draw, tokenize


# The command line.

SHAPES = {  # sizes for the model of examples/gpt_torch/model.py; --layers gives the number of layers
    "gemma2-2b": {"vocab_size": 256000, "hidden_size": 2304, "heads": 18, "context": 2048},
    "llama3-8b": {"vocab_size": 128256, "hidden_size": 4096, "heads": 32, "context": 2048},
}


def parse_arguments(given: list[str] | None = None, description: str | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lossd", default="build/release/bin/lossd", help="the server's program")
    parser.add_argument("--lossctl", help="for its plan [the program beside lossd]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--gpus", type=int, default=0, help="as many processes on the CPU [all]")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="[gemma2-2b, without --model]")
    parser.add_argument("--model", choices=tuple(MODELS), help="instead of a shape; needs transformers")
    for name in ("vocab_size", "hidden_size", "heads", "context"):
        parser.add_argument(f"--{name}", type=int, help="instead of that of shape or model")
    parser.add_argument("--layers", type=int, help="[12, or the model's]")
    parser.add_argument("--text", default="", help="files whose tokens are learnt: patterns with commas between them; needs tokenizers")
    parser.add_argument("--text_bytes", type=int, default=60_000_000, help="of these files at most")
    parser.add_argument("--text_folder", type=Path, default=Path("build/text"), help="for the tokens, which a later run takes again")
    parser.add_argument("--sequences", type=int, default=4, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=24, help="of a step, all replicas together")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of configurations, with commas between them")
    parser.add_argument("--local_heads", default="torch.compile,liger,cce,torch.linear_cross_entropy",
                        help="local ones, of peers.py")
    parser.add_argument("--splits", default="", help="layers of each stage, for local heads: 4-4-3-1,4-4-4-0")
    parser.add_argument("--neighbours", type=int, default=1, help="splits on each side of the predicted one")
    parser.add_argument("--most_splits", type=int, default=1000, help="of a local head, the fastest as predicted first")
    parser.add_argument("--fastest_local", action="store_true", help="train with that local head alone")
    parser.add_argument("--shares", default=BALANCED,
                        help=f"of a colocated head: {BALANCED}, {EVEN} or 3-1-1-3, with commas between them")
    parser.add_argument("--colocated_splits", default="", help="like --splits, for a colocated head [as --shares needs them]")
    parser.add_argument("--mps", default="off", help="for a colocated head: on, off or on,off")
    parser.add_argument("--mps_control", default=CONTROL, help="the program that starts MPS")
    parser.add_argument("--trainer_priority", type=int, default=1, choices=(0, 1),
                        help="CUDA_MPS_CLIENT_PRIORITY of the trainers: 0 is the server's, 1 below it")
    parser.add_argument("--server_flags", default="", help="further ones, with blanks between them")
    parser.add_argument("--gradients", default="exact,sampled", help="of the server")
    parser.add_argument("--embeddings", help="of the first stage, with commas between them: own, rows, exchange "
                        "[own; of a tied --model rows]")
    parser.add_argument("--schedules", default=f"{ONE_F_ONE_B},{OVERLAPPED}", help="with the server")
    parser.add_argument("--slack", default="1", help=f"of the {OVERLAPPED} schedule: 1 or 1,2")
    parser.add_argument("--warm_up", type=int, default=3, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=10, help="steps that are")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--lr_warm_up", type=int, default=0, help="steps in which it grows to that")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", help="of lossd.Client [its own choice]")
    parser.add_argument("--threads", type=int, default=1, help="of a rank on the CPU")
    parser.add_argument("--tolerance", type=float,
                        help="of losses in nats, and of gradient norms relatively [0.02, on the CPU 1e-4]")
    parser.add_argument("--compared_steps", type=int, help="the first ones, whose losses must agree: AdamW makes another run of the "
                        "smallest difference in time [all]")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a configuration is given up")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which none is started any more")
    parser.add_argument("--parts", type=Path,
                        help="an earlier file of this shape, whose measured times of layer and heads count")
    parser.add_argument("--commit", help="of the tree, for the file [what git says]")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args(given)
    if arguments.shape and arguments.model:
        parser.error(f"shape is {arguments.shape} and model is {arguments.model}; there can be one of them")
    model = MODELS.get(arguments.model)
    if model is None:
        arguments.shape = arguments.shape or "gemma2-2b"
    arguments.layers = arguments.layers if arguments.layers is not None else model.layers if model else 12
    if arguments.embeddings is None:
        arguments.embeddings = ROWS if model and model.tied else OWN
    for name, known in (("kinds", KINDS), ("gradients", ("exact", "sampled")), ("schedules", (ONE_F_ONE_B, OVERLAPPED)),
                        ("mps", ("on", "off")), ("embeddings", EMBEDDINGS)):
        setattr(arguments, name, list(filter(None, getattr(arguments, name).split(","))))
        for each in getattr(arguments, name):
            if each not in known:
                parser.error(f"{name} has {each!r}; there are {', '.join(known)}")
    for name in ("layers", "sequences", "microbatches", "warm_up", "steps", "threads", "most_splits", "text_bytes"):
        if getattr(arguments, name) < 1:
            parser.error(f"{name} is {getattr(arguments, name)}; it must be positive")
    if arguments.compared_steps is not None and arguments.compared_steps < 1:
        parser.error(f"compared_steps is {arguments.compared_steps}; it must be positive")
    if arguments.lr_warm_up < 0:
        parser.error(f"lr_warm_up is {arguments.lr_warm_up}; it must not be negative")
    available = torch.cuda.device_count() if arguments.device == "cuda" else 4
    arguments.gpus = arguments.gpus or available
    if not 1 <= arguments.gpus <= (available if arguments.device == "cuda" else 64):
        parser.error(f"gpus is {arguments.gpus}; there are {available}")
    if arguments.layers < arguments.gpus - 1:
        parser.error(f"layers is {arguments.layers}; {arguments.gpus} GPUs need {arguments.gpus - 1} at least")
    try:
        if model:
            shape = shape_of(arguments)
            model.config(shape.vocab_size, shape.hidden_size, shape.heads)
        arguments.splits = read_splits(arguments.splits, arguments.layers)
        arguments.colocated_splits = read_splits(arguments.colocated_splits, arguments.layers)
        arguments.slack = read_slacks(arguments.slack)
        arguments.shares = list(filter(None, arguments.shares.split(",")))
        for each in arguments.shares:
            if each not in (BALANCED, EVEN):
                read_shares(each, arguments.gpus)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    if any(len(split) != arguments.gpus for split in (*arguments.splits, *arguments.colocated_splits)):
        parser.error(f"splits must have {arguments.gpus} stages, one a GPU")
    if on_stages(arguments) and arguments.layers < arguments.gpus and not arguments.colocated_splits:
        parser.error(f"layers is {arguments.layers}; a head on the GPUs of {arguments.gpus} stages needs as many, or "
                     "--colocated_splits, or other --kinds")
    return arguments


def shape_of(arguments: argparse.Namespace) -> Shape:
    if arguments.model:
        model = MODELS[arguments.model]
        known = {"vocab_size": model.vocab_size, "hidden_size": model.hidden_size, "heads": model.heads, "context": 2048}
    else:
        known = SHAPES[arguments.shape]
    return Shape(**{name: getattr(arguments, name) or value for name, value in known.items()}, layers=arguments.layers)


def on_stages(arguments: argparse.Namespace) -> bool:
    """Whether the wanted kinds include one whose head is on the GPUs of the stages."""
    return not set(ON_STAGES).isdisjoint(arguments.kinds)


def read_flag(text: str) -> tuple[str, str]:
    """Name and value of a flag like "--name=value"."""
    name, _, value = text.removeprefix("--").partition("=")
    return name, value


def find_library(program: Path) -> Path | None:
    """The library of the server (liblossd.so) from the same build as the server's program; None if there is none."""
    near = (program.with_name("liblossd.so"), program.parent.parent / "lib" / "liblossd.so")
    return next((each.resolve() for each in near if each.exists()), None)


def read_slacks(text: str) -> list[int]:
    """Parses numbers like "1,2". ValueError if one of them is not a positive integer."""
    try:
        slacks = [int(part) for part in text.split(",")]
    except ValueError:
        slacks = [0]
    if min(slacks) < 1:
        raise ValueError(f"slack is {text!r}; it must be positive numbers with commas between them")
    return slacks


# Results. These are pure functions of the entries in the results file, one for each configuration that ran. An entry with an
# error has neither times nor losses.


def summary(ranks: list[dict[str, Any]], configuration: Configuration, settings: Settings,
            resident_bytes: int | None) -> dict[str, Any]:
    """The members of an entry that come from the results of a configuration's ranks. `resident_bytes`: the most host memory of
    the server's process; None if the server has no process of its own."""
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
        # The server also reports "sum of PHASE" in seconds and "count of PHASE" for each phase of slices.
        rose = {name: value - watched["before"].get(name, 0.0) for name, value in after.items()}
        found["memory"].append({"role": "server", "peak_bytes": after["lossd_memory_peak_bytes"],
                                "device_used_bytes": after.get("lossd_gpu_memory_used_bytes"),
                                "resident_bytes": resident_bytes})
        microbatches = (rose["lossd_rows_total"] - rose.get("lossd_embedding_rows_total", 0.0)) / settings.rows
        found["server"] = {"transport": watched["transport"], "latency_seconds": watched["latency_seconds"],
                           "devices": [{"classes": now["classes"],
                                        **{key.replace("seconds", "share"): (now[key] - then[key]) / float(timed.sum())
                                           for key in ("busy_seconds", "exchange_seconds")}}
                                       for then, now in zip(watched["devices_before"], watched["devices_after"])],
                           "slice_seconds": {name.removeprefix("count of "): rose[name.replace("count", "sum")] / slices
                                             for name, slices in rose.items() if name.startswith("count of ") and slices},
                           "busy_share": rose["lossd_device_busy_seconds_total"] / float(timed.sum()),
                           "microbatch_seconds": rose["lossd_head_device_seconds_total"] / microbatches,
                           # The process of an embedded server is also the trainer's, so its CPU time does not tell the server's.
                           "cores": None if configuration.embedded else rose["process_cpu_seconds_total"] / float(timed.sum())}
    return found


def compare(entries: list[dict[str, Any]], tolerance: float, steps: int | None = None) -> dict[str, Any]:
    """How far each configuration is from its reference, the first exact configuration with the same tying. The distance of losses
    is the largest difference in nats over the first `steps` steps (None: over all steps). The distance of the gradient norms of
    the first step is the relative difference. Losses alone would not show a wrong factor of gradients, because AdamW hides
    it."""
    ran = [entry for entry in entries if "losses" in entry]
    references = {tied: next((entry for entry in ran if entry["exact"] and is_tied(entry) == tied), None) for tied in (False, True)}
    apart = {}
    for entry in ran:
        if (reference := references[is_tied(entry)]) is None:
            continue
        norms = reference["gradient_norms"]
        apart[entry["name"]] = {"losses": float(np.abs(np.subtract(entry["losses"], reference["losses"])[:steps]).max()),
                                **{key: abs(entry["gradient_norms"][key] / norms[key] - 1.0) for key in norms}}
    agree = all(value <= tolerance for entry in ran if entry["exact"] for value in apart[entry["name"]].values())
    first = references[False] or references[True]
    return {"tolerance": tolerance, "reference": first and first["name"], "apart": apart, "agree": agree}  # False if a value is NaN


def is_tied(entry: dict[str, Any]) -> bool:
    """Whether the model's embedding is its head's matrix."""
    return entry.get("embedding", "own") != "own"


def fastest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest configuration of each kind, embedding and way to compute gradients, with and without MPS. "over_local" is the
    ratio of its tokens per second and GPU to those of the fastest configuration, of any kind, with a local head; None if no
    local head ran."""
    ran = [entry for entry in entries if "step_seconds" in entry]
    speed = "tokens_per_second_and_gpu"
    local = max((entry[speed] for entry in ran if entry["head"] != "lossd"), default=None)
    best: dict[tuple[str, str, bool, str], dict[str, Any]] = {}
    for entry in ran:
        key = (entry["kind"], entry["gradients"], entry.get("mps", False), entry.get("embedding", "own"))
        if key not in best or entry[speed] > best[key][speed]:
            best[key] = entry
    return [{"kind": kind, "gradients": gradients, "mps": mps, "embedding": embedding, "name": entry["name"], speed: entry[speed],
             "over_local": entry[speed] / local if local else None} for (kind, gradients, mps, embedding), entry in best.items()]


def last_over_middle(entry: dict[str, Any]) -> float | None:
    """The peak memory of the last stage, divided by the mean over the stages between the first and the last. The largest of all
    replicas; None if there are fewer than three stages."""
    stages = len(entry["layers"])
    if stages < 3:
        return None
    found = []
    for replica in range(entry["replicas"]):
        peaks = {each["stage"]: each["peak_bytes"] for each in entry["memory"] if each.get("replica") == replica}
        found.append(peaks[stages - 1] / np.mean([peaks[stage] for stage in range(1, stages - 1)]))
    return float(max(found))


def server_line(entry: dict[str, Any]) -> str:
    """A line of text about what a configuration's server did."""
    server, transport = entry["server"], entry["server"]["transport"]
    latency = "not measured" if server["latency_seconds"] is None else f"{server['latency_seconds'] * 1e3:.1f} ms"
    cores = "" if server["cores"] is None else f"{server['cores']:.2f} cores; "
    took = ", ".join(f"{name} {calls}" for name, calls in transport["took"].items())
    devices = ", ".join(f"{each['classes']} classes {each['busy_share']:.2f}" for each in server["devices"])
    return (f"  a microbatch of the head: {latency} until its gradient was there, {server['microbatch_seconds'] * 1e3:.1f} ms on "
            f"the device; {cores}busy {server['busy_share']:.2f} of the time"
            f"{f' (devices: {devices})' if devices else ''}; a slice "
            f"{', '.join(f'{phase} {seconds * 1e3:.1f}' for phase, seconds in server['slice_seconds'].items())} ms; "
            f"computations by {took} "
            f"(rows on the host: {': '.join(transport['host'])}; on a GPU: {': '.join(transport['gpu'])})")


def table(entries: list[dict[str, Any]]) -> list[str]:
    """A table of all configurations that ran, as lines of text. Its columns are milliseconds of a step, and three ratios: tokens
    per second over those of the fastest local head; the step's time over that of evenly divided work; and the step's time over
    what `lossctl plan` predicts."""
    ran = [entry for entry in entries if "step_seconds" in entry]
    local = max((entry["tokens_per_second"] for entry in ran if entry["head"] != "lossd"), default=None)

    def text(value: float | None, width: int, digits: int) -> str:
        return " " * width if value is None else f"{value:{width}.{digits}f}"

    lines = ["step ms  over local  over bound  over plan  cores  latency ms  configuration"] if ran else []
    for entry in ran:
        server = entry.get("server", {})
        latency = server.get("latency_seconds")
        lines.append("  ".join((
            text(entry["step_seconds"] * 1e3, 7, 1), text(entry["tokens_per_second"] / local if local else None, 10, 3),
            text(entry.get("over_evenly_divided"), 10, 3), text(entry.get("plan", {}).get("measured_over_predicted"), 9, 3),
            text(server.get("cores"), 5, 2), text(latency * 1e3 if latency is not None else None, 10, 1), entry["name"])))
    return lines


# Running configurations.


def run_processes(context: Any, count: int, limit: float, work: Any, *arguments: Any) -> list[dict[str, Any]]:
    """Runs work(rank, rendezvous, *arguments) in `count` processes. Returns their results by rank, or one {"error": ...} if a
    process fails or `limit` seconds pass. No process outlives the call."""
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
        if failed:  # kills the other processes, which would wait; first leaves them 2 s to fail for the same reason
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
    """The measured seconds of a layer and of the heads, from which times of steps are predicted. Takes them from the file of an
    earlier run if --parts names one."""
    if arguments.parts:
        earlier = json.loads(arguments.parts.read_text())
        for name in ("shape", "model", "device", "sequences", "vocab_size", "hidden_size", "heads", "context"):
            if earlier["settings"].get(name) != getattr(arguments, name):
                sys.exit(f"{arguments.parts} has {name} {earlier['settings'].get(name)}, not {getattr(arguments, name)}")
        needed = arguments.gradients if on_stages(arguments) else []
        missing = set(needed) - set(earlier["measured_seconds"].get("server", {}))
        if missing:
            sys.exit(f"{arguments.parts} has no time of a head with {' and '.join(missing)} gradients")
        return {"card": earlier["card"], **earlier["measured_seconds"]}
    heads = list(filter(None, arguments.local_heads.split(",")))
    gradients = arguments.gradients if on_stages(arguments) else []
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
    """Runs one configuration. Returns its entry, which has the results or "error"."""
    entry: dict[str, Any] = {
        "name": configuration.name, "kind": configuration.kind, "head": configuration.head,
        "gradients": configuration.gradients, "schedule": configuration.schedule, "replicas": configuration.replicas,
        "layers": list(configuration.layers), "gpus": configuration.gpus, "exact": configuration.exact,
        "shares": list(configuration.shares), "mps": configuration.mps, "slack": configuration.slack,
        "embedding": configuration.embedding}
    if settings.microbatches % configuration.replicas:
        return entry | {"error": f"{settings.microbatches} microbatches do not divide among {configuration.replicas} replicas"}
    with ExitStack() as stack:
        environment, server = {}, None
        try:
            if configuration.mps:
                environment = stack.enter_context(Mps(arguments.mps_control)).environment
            if configuration.on_server and not configuration.embedded:
                flags = server_flags(configuration, arguments)
                server = stack.enter_context(Server(arguments.lossd, *flags, environment=environment))
        except (OSError, RuntimeError) as error:
            return entry | {"error": str(error)}
        ranks = run_processes(
            context, configuration.trainers, arguments.limit, train, configuration, settings, server.target if server else "",
            server.http if server else "", arguments.limit, of_trainer(environment, arguments.trainer_priority))
        resident = server.peak_resident_bytes() if server else None
    if "error" in ranks[0]:
        return entry | ranks[0]
    entry |= summary(ranks, configuration, settings, resident)
    return entry | {"last_stage_over_middle_memory": last_over_middle(entry)}


def predict(entry: dict[str, Any], configuration: Configuration, settings: Settings, parts: dict[str, Any]) -> None:
    """Adds seconds_without_gaps, the least time of a step, to an entry. For a colocated head, also adds evenly_divided_seconds and
    the ratio of the step's time to it. Both are computed from the measured times of layer and head in `parts`; but the time of a
    separate server is the one measured in this run."""
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
    """What `lossctl plan` predicts for a pipeline of this kind from the measured `parts`: {"step_seconds", "least_step_seconds",
    ...}, or {"reason": why there is no prediction}. The plan chooses layers and shares itself."""
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
        kind = "colocated" if configuration.embedded else configuration.kind.removesuffix(" replicas")
        if (each["kind"] == kind and each["gpus"] == configuration.gpus
                and (each["gradients"] or "") == configuration.gradients
                and (not configuration.colocated or each["mps"] == (configuration.mps or configuration.embedded))):
            return {"card": answer["card"], **{key: each[key] for key in (
                "layers", "shares", "step_seconds", "least_step_seconds", "server_bound", "over_local") if key in each}}
    return {"card": answer["card"], "reason": "it has no such pipeline, as times of this head were not measured"}


def describe_run(arguments: argparse.Namespace) -> dict[str, Any]:
    import peers
    commit = arguments.commit or subprocess.run(
        ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
        check=False).stdout.strip()
    settings = {key: value.name if isinstance(value, Path) else value  # paths without the folders of this machine
                for key, value in vars(arguments).items() if key not in ("lossd", "lossctl", "text", "text_folder")}
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit, "versions": peers.versions(), "settings": settings}


def read_text(arguments: argparse.Namespace, shape: Shape) -> tuple[str, dict[str, Any] | None]:
    """The path of the file with the tokens of --text, and what tokenize() says about them. "" and None without --text."""
    if not arguments.text:
        return "", None
    begin = time.monotonic()
    try:
        path, text = tokenize(list(filter(None, arguments.text.split(","))), arguments.text_bytes, shape.vocab_size,
                              arguments.text_folder)
        draw(str(path), 1, shape.context, arguments.seed, 0)
    except ValueError as error:
        sys.exit(f"--text: {error}")
    print(f"{text['tokens']} tokens of a vocabulary of {text['vocabulary']} in {text['files']} files of {text['bytes']} bytes, after "
          f"{time.monotonic() - begin:.0f} s", flush=True)
    return str(path.resolve()), text


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
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast, because not every host has it
    shape = shape_of(arguments)
    tokens, text = read_text(arguments, shape)
    settings = Settings(shape, arguments.device, arguments.sequences, arguments.microbatches, arguments.warm_up,
                        arguments.steps, arguments.lr, arguments.seed, arguments.transport, arguments.threads,
                        tuple(read_flag(each) for each in arguments.server_flags.split()), MODELS.get(arguments.model),
                        tokens, arguments.lr_warm_up)
    tolerance = arguments.tolerance or (0.02 if arguments.device == "cuda" else 1e-4)
    lossctl = arguments.lossctl or str(Path(arguments.lossd).with_name("lossctl"))
    if library := find_library(Path(arguments.lossd)):
        os.environ.setdefault("LOSSD_LIBRARY", str(library))
    # A process that has used CUDA must not fork, and the imported modules may use CUDA. So processes are not forked from this one.
    context = multiprocessing.get_context("spawn" if arguments.device == "cuda" else "forkserver")
    if arguments.device == "cpu":
        context.set_forkserver_preload(["torch._dynamo", "lossd.torch", "torch.distributed.pipelining",
                                        *(["transformers.models.llama.modeling_llama"] if arguments.model else [])])
    parts = measured(context, settings, arguments)
    for head, why in parts["without"].items():
        print(f"without {head}: {why}")
    wanted = configurations(
        Wanted(arguments.gpus, arguments.layers, arguments.kinds, arguments.gradients, arguments.schedules, arguments.splits,
               arguments.neighbours, arguments.most_splits, arguments.fastest_local, arguments.colocated_splits,
               arguments.shares, [each == "on" for each in arguments.mps], arguments.slack, arguments.embeddings),
        parts["layer"], parts["heads"], parts["server"])
    if not wanted:
        sys.exit(f"no configuration of {', '.join(arguments.kinds)} has an embedding of {', '.join(arguments.embeddings)}: a tied "
                 "model is one pipeline of several stages")
    result: dict[str, Any] = {"card": parts.pop("card"), **describe_run(arguments), "text": text, "measured_seconds": parts,
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
        result["agreement"] = compare(result["configurations"], tolerance, arguments.compared_steps)
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
