# SPDX-License-Identifier: Apache-2.0
"""What the configurations that pipeline_bench.py ran say together. Pure functions of their entries in its file; an entry
with an error has neither times nor losses."""

from __future__ import annotations

from typing import Any

import numpy as np
from pipeline_layouts import Configuration
from pipeline_ranks import Settings


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
        found["server"] = {"transport": watched["transport"], "latency_seconds": watched["latency_seconds"],
                           "devices": [{"classes": now["classes"],
                                        **{key.replace("seconds", "share"): (now[key] - then[key]) / float(timed.sum())
                                           for key in ("busy_seconds", "exchange_seconds")}}
                                       for then, now in zip(watched["devices_before"], watched["devices_after"])],
                           "slice_seconds": {name.removeprefix("count of "): rose[name.replace("count", "sum")] / slices
                                             for name, slices in rose.items() if name.startswith("count of ") and slices},
                           "busy_share": rose["lossd_device_busy_seconds_total"] / float(timed.sum()),
                           "microbatch_seconds": rose["lossd_head_device_seconds_total"] / microbatches,
                           "cores": rose["process_cpu_seconds_total"] / float(timed.sum())}
    return found


def compare(entries: list[dict[str, Any]], tolerance: float) -> dict[str, Any]:
    """How far configurations are from the first exact one: in losses, in nats, at most over all steps; and in gradient
    norms of the first step, relatively. AdamW would hide a factor of gradients from losses."""
    ran = [entry for entry in entries if "losses" in entry]
    reference = next((entry for entry in ran if entry["exact"]), None)
    if reference is None:
        return {"tolerance": tolerance, "reference": None, "apart": {}, "agree": True}
    norms = reference["gradient_norms"]
    apart = {entry["name"]: {"losses": float(np.abs(np.subtract(entry["losses"], reference["losses"])).max()),
                             **{key: abs(entry["gradient_norms"][key] / norms[key] - 1.0) for key in norms}} for entry in ran}
    agree = all(value <= tolerance for entry in ran if entry["exact"] for value in apart[entry["name"]].values())
    return {"tolerance": tolerance, "reference": reference["name"], "apart": apart, "agree": agree}  # NaN: disagree


def fastest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest configuration of each kind and way to compute gradients, with and without MPS, and its tokens a second and
    GPU over those of the fastest with local heads, whatever its kind; None if none ran."""
    ran = [entry for entry in entries if "step_seconds" in entry]
    speed = "tokens_per_second_and_gpu"
    local = max((entry[speed] for entry in ran if entry["head"] != "lossd"), default=None)
    best: dict[tuple[str, str, bool], dict[str, Any]] = {}
    for entry in ran:
        key = (entry["kind"], entry["gradients"], entry.get("mps", False))
        if key not in best or entry[speed] > best[key][speed]:
            best[key] = entry
    return [{"kind": kind, "gradients": gradients, "mps": mps, "name": entry["name"], speed: entry[speed],
             "over_local": entry[speed] / local if local else None} for (kind, gradients, mps), entry in best.items()]


def last_over_middle(entry: dict[str, Any]) -> float | None:
    """Peak memory of the last stage over the mean of the stages between it and the first, in the replica with most; None
    if there are fewer than three stages."""
    stages = len(entry["layers"])
    if stages < 3:
        return None
    found = []
    for replica in range(entry["replicas"]):
        peaks = {each["stage"]: each["peak_bytes"] for each in entry["memory"] if each.get("replica") == replica}
        found.append(peaks[stages - 1] / np.mean([peaks[stage] for stage in range(1, stages - 1)]))
    return float(max(found))


def server_line(entry: dict[str, Any]) -> str:
    """What a configuration's server did."""
    server, transport = entry["server"], entry["server"]["transport"]
    latency = "not measured" if server["latency_seconds"] is None else f"{server['latency_seconds'] * 1e3:.1f} ms"
    took = ", ".join(f"{name} {calls}" for name, calls in transport["took"].items())
    devices = ", ".join(f"{each['classes']} classes {each['busy_share']:.2f}" for each in server["devices"])
    return (f"  a microbatch of the head: {latency} until its gradient was there, {server['microbatch_seconds'] * 1e3:.1f} ms on "
            f"the device; {server['cores']:.2f} cores; busy {server['busy_share']:.2f} of the time"
            f"{f' (devices: {devices})' if devices else ''}; a slice "
            f"{', '.join(f'{phase} {seconds * 1e3:.1f}' for phase, seconds in server['slice_seconds'].items())} ms; "
            f"computations by {took} "
            f"(rows on the host: {': '.join(transport['host'])}; on a GPU: {': '.join(transport['gpu'])})")


def table(entries: list[dict[str, Any]]) -> list[str]:
    """Of all configurations that ran: milliseconds of a step; tokens a second over those of the fastest with a local head; the
    step over one of evenly divided work, and over what `lossctl plan` predicts."""
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
