# SPDX-License-Identifier: Apache-2.0
"""Linear cross-entropy of PyTorch, Cut Cross-Entropy, Liger and QuACK: functions of (hidden, weight, targets)."""

import torch
import torch.nn.functional as F


def eager(hidden, weight, targets):
    return F.cross_entropy((hidden @ weight.T).float(), targets)


def compiled_for_each_shape():
    """Peers whose kernels are compiled anew for each shape."""
    found = {}
    try:
        from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as sm90

        found["liger_sm90"] = lambda e, w, t: first(sm90.LigerFusedLinearCrossEntropySM90Function.apply(e, w, t))
    except ImportError as error:
        print("without Liger's function for SM90:", error)
    try:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy as quack

        found["quack"] = quack  # times its kernels first, for a minute a shape
        for size in (2048, 4096, 8192):  # rows of a chunk; it fails where they are as many as the hidden size
            found[f"quack_untuned_{size}"] = lambda e, w, t, size=size: quack(e, w, t, chunk_size=size, tuned=False)
    except (ImportError, TypeError) as error:  # TypeError: a version of its compiler that it does not know
        print("without quack:", error)
    return found


def first(result):
    return result[0] if isinstance(result, tuple) else result


def of_torch():
    """That of torch itself, from 2.13 on, which computes some rows at a time."""
    try:
        from torch.nn import LinearCrossEntropyOptions
        from torch.nn.functional import linear_cross_entropy
    except ImportError as error:
        print("without torch's linear_cross_entropy:", error)
        return {}
    return {"torch.linear_cross_entropy": lambda e, w, t: linear_cross_entropy(e, w, t, options=LinearCrossEntropyOptions())}


def methods(dynamic):
    found = {"torch": eager, "torch.compile": torch.compile(eager, dynamic=dynamic), **of_torch()}
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["cce"] = lambda e, w, t: linear_cross_entropy(e, w, t, impl="cce")
        if not dynamic:
            found["cce_exact"] = lambda e, w, t: linear_cross_entropy(e, w, t, impl="cce_exact")
    except ImportError as error:
        print("without cut_cross_entropy:", error)
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        found["liger"] = lambda e, w, t: first(LigerFusedLinearCrossEntropyFunction.apply(e, w, t))
    except ImportError as error:
        print("without liger_kernel:", error)
    if not dynamic:
        found.update(compiled_for_each_shape())
    return found
