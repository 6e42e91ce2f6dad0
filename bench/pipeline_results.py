# SPDX-License-Identifier: Apache-2.0
"""What the configurations that pipeline_bench.py ran say together. Pure functions of their entries in its file; an entry
with an error has neither times nor losses."""

from __future__ import annotations

from typing import Any

import numpy as np


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
    """The fastest configuration of each kind and way to compute gradients, and its tokens a second and GPU over those of
    the fastest with local heads, whatever its kind; None if none ran."""
    ran = [entry for entry in entries if "step_seconds" in entry]
    speed = "tokens_per_second_and_gpu"
    local = max((entry[speed] for entry in ran if entry["head"] != "lossd"), default=None)
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in ran:
        key = (entry["kind"], entry["gradients"])
        if key not in best or entry[speed] > best[key][speed]:
            best[key] = entry
    return [{"kind": kind, "gradients": gradients, "name": entry["name"], speed: entry[speed],
             "over_local": entry[speed] / local if local else None} for (kind, gradients), entry in best.items()]


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
