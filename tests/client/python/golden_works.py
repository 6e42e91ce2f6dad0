# SPDX-License-Identifier: Apache-2.0
"""The works of calls that golden cases describe, as the Python client makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from golden_cases import Case

from lossd import types
from lossd._arrays import HostRows
from lossd._work import BackwardWork, ForwardWork, Outputs, Scale, Work


def host_rows(data: bytes) -> HostRows:
    return HostRows(np.frombuffer(data, np.uint8))


def _stale(size: int) -> HostRows:
    return HostRows(np.full(size, 255, np.uint8))


def _forward(call: Case) -> ForwardWork:
    options = dict(call["options"])
    kind = types.NUMPY_DTYPES[call["dtype"]]
    rows = len(call["targets"])
    gradient = _stale(rows * call["hidden_size"] * kind.itemsize) if call["grad_hidden"] else None
    results = {name: np.full(rows, 77, np.int32 if name == "argmax" else np.float32) for name in call["row_results"]}
    weights = call["row_weights"]
    return ForwardWork(
        head=call["head"], step=call["step"], id=call["id"], accumulate=call["accumulate"],
        hidden=host_rows(b""),
        hidden_dtype=types.DTYPES[call["dtype"]], hidden_size=call["hidden_size"], element_size=kind.itemsize,
        targets=np.array(call["targets"], "<i4"), row_weights=None if weights is None else np.array(weights, "<f4"),
        options=types.LossOptions(**options),
        scale=Scale(call["reduction"], call["normalizer"], call["grad_output"]),
        reduction=types.REDUCTIONS[call["reduction"]], retain=call["retain"], outputs=Outputs(gradient, results))


def _backward(call: Case) -> BackwardWork:
    def floats(name: str) -> Any:
        return None if call[name] is None else np.array(call[name], "<f4")

    size = types.NUMPY_DTYPES[call["dtype"]].itemsize
    rows = len(call["grad_loss"])
    gradient = _stale(rows * call["hidden_size"] * size) if call["grad_hidden"] else None
    return BackwardWork(
        head=call["head"], step=call["step"], id=call["id"], accumulate=call["accumulate"],
        hidden_size=call["hidden_size"], element_size=size, grad_loss=floats("grad_loss"),
        grad_lse=floats("grad_lse"), grad_entropy=floats("grad_entropy"), outputs=Outputs(gradient))


def work_of(call: Case) -> Work:
    return _backward(call) if "grad_loss" in call else _forward(call)
