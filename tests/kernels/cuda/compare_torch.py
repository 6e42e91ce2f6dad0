# SPDX-License-Identifier: Apache-2.0
"""Compares the CUDA backend with PyTorch on a GPU: fp64 as the truth, the same dtype as the yardstick.

    python3 compare_torch.py path/to/cuda_bench [--out results.json] [--fuse-always]

For every case the relative error ||a - ref|| / ||ref|| of loss, lse, grad_hidden and the parameter
gradients must be at most 1.5 times that of PyTorch in the same dtype on the same inputs, plus FLOOR.
Needs PyTorch with CUDA; exits with 1 if a case fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F

DEVICE = "cuda"
TORCH_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FACTOR = 1.5
# Where PyTorch happens to be exact, this much is allowed: a few units of the dtype in which gradients leave.
FLOOR = {"fp32": 2e-6, "fp16": 5e-4, "bf16": 4e-3}
DEFAULTS = dict(
    bias=False, class_weights=False, norm="none", norm_epsilon=1e-5, logit_scale=1.0, softcap=0.0,
    label_smoothing=0.0, z_loss=0.0, row_weights=False, ignored=0.0, chunks=1,
)
SHAPES = [(8, 8, 8), (252, 123, 507), (256, 128, 512), (188, 31, 123), (80, 64, 125), (129, 512, 32000),
          (1024, 520, 2049), (1024, 1024, 4096), (1536, 2048, 2048)]
OPTIONS = [
    {}, {"chunks": 2}, {"chunks": 4}, {"bias": True}, {"logit_scale": 1.5}, {"softcap": 20.0},
    {"label_smoothing": 0.1}, {"z_loss": 1e-4}, {"class_weights": True}, {"row_weights": True}, {"ignored": 0.2},
    {"norm": "layernorm"}, {"norm": "rmsnorm"},
    {"bias": True, "softcap": 30.0, "z_loss": 1e-4, "ignored": 0.2, "row_weights": True, "class_weights": True,
     "norm": "rmsnorm", "logit_scale": 0.7, "chunks": 2},
    {"bias": True, "softcap": 30.0, "label_smoothing": 0.1, "z_loss": 1e-4, "ignored": 0.2, "row_weights": True,
     "class_weights": True, "norm": "layernorm", "logit_scale": 0.7, "chunks": 2},
]


def make_inputs(case, generator):
    n, d, v = case["rows"], case["hidden"], case["vocab"]
    dtype = TORCH_DTYPE[case["compute"]]

    def normal(*shape):
        return torch.randn(*shape, device=DEVICE, generator=generator)

    inputs = {"weight": (normal(v, d) * 2 / d**0.5).to(dtype).float()}
    hidden = normal(n, d)
    targets = torch.randint(0, v, (n,), device=DEVICE, generator=generator)
    peaked = torch.arange(0, n, 2, device=DEVICE)  # every second row points at its target
    hidden[peaked] = inputs["weight"][targets[peaked]] * 2.5
    inputs["hidden"] = hidden.to(dtype).float()
    targets[torch.rand(n, device=DEVICE, generator=generator) < case["ignored"]] = -1
    inputs["targets"] = targets
    if case["bias"]:
        inputs["bias"] = normal(v).to(dtype).float()
    if case["class_weights"]:
        inputs["class_weights"] = 0.25 + torch.rand(v, device=DEVICE, generator=generator)
    if case["norm"] != "none":
        inputs["norm_gain"] = 0.5 + torch.rand(d, device=DEVICE, generator=generator)
    if case["norm"] == "layernorm":
        inputs["norm_shift"] = normal(d) * 0.1
    if case["row_weights"]:
        inputs["row_weights"] = torch.rand(n, device=DEVICE, generator=generator) * 2
    return inputs


def torch_loss(case, inputs, dtype):
    """Losses, lse and gradients with matrices in `dtype` and everything else in fp32 (fp64 for fp64)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {}
    for name, value in inputs.items():
        if name in ("hidden", "weight", "bias"):
            leaves[name] = value.to(dtype).requires_grad_(True)
        elif name.startswith("norm"):
            leaves[name] = value.to(wide).requires_grad_(True)
    y = leaves["hidden"]
    if case["norm"] == "layernorm":
        y = F.layer_norm(y.to(wide), (case["hidden"],), leaves["norm_gain"], leaves["norm_shift"], case["norm_epsilon"])
    elif case["norm"] == "rmsnorm":
        y = F.rms_norm(y.to(wide), (case["hidden"],), leaves["norm_gain"], case["norm_epsilon"])
    s = case["logit_scale"] * F.linear(y.to(dtype), leaves["weight"], leaves.get("bias")).to(wide)
    z = case["softcap"] * torch.tanh(s / case["softcap"]) if case["softcap"] else s
    valid = inputs["targets"] >= 0
    u = inputs["class_weights"].to(wide) if case["class_weights"] else None
    loss = F.cross_entropy(z, inputs["targets"], weight=u, ignore_index=-1, reduction="none",
                           label_smoothing=case["label_smoothing"])
    lse = torch.logsumexp(z, 1) * valid
    loss = loss + case["z_loss"] * lse**2
    if case["row_weights"]:
        loss = loss * inputs["row_weights"].to(wide)
    (loss.sum() * case["grad_scale"]).backward()
    result = {"loss": loss, "lse": lse}
    result.update({"grad_" + name: leaf.grad for name, leaf in leaves.items()})
    return {name: value.detach().double() for name, value in result.items()}


def probe_loss(case, inputs, program, folder):
    dtype = TORCH_DTYPE[case["compute"]]

    def write(name, value):
        value.contiguous().cpu().view(torch.uint8).numpy().tofile(f"{folder}/{name}.bin")

    for name in os.listdir(folder):
        os.remove(f"{folder}/{name}")
    for name, value in inputs.items():
        if name == "hidden":
            value = value.to(dtype)
        write(name, value.int() if name == "targets" else value)
    with open(f"{folder}/spec.json", "w") as file:
        json.dump({**case, "hidden_dtype": case["compute"]}, file)
    subprocess.run([program, "probe", folder], check=True)

    def read(name, like):
        kind = dtype if name == "grad_hidden" else torch.float32
        size = os.path.getsize(f"{folder}/{name}.bin")
        raw = torch.from_file(f"{folder}/{name}.bin", size=size // kind.itemsize, dtype=kind)
        return raw.to(DEVICE).double().reshape(like.shape)

    result = {"loss": read("loss", inputs["targets"]), "lse": read("lse", inputs["targets"])}
    for name in ("hidden", "weight", "bias", "norm_gain", "norm_shift"):
        if name in inputs:
            result["grad_" + name] = read("grad_" + name, inputs[name])
    return result


def relative(got, want):
    norm = want.norm()
    return ((got - want).norm() / (norm if norm > 0 else 1)).item()


def run_case(case, program, folder, generator):
    inputs = make_inputs(case, generator)
    want = torch_loss(case, inputs, torch.float64)
    torch_result = torch_loss(case, inputs, TORCH_DTYPE[case["compute"]])
    ours = probe_loss(case, inputs, program, folder)
    rows = []
    for name in want:
        mine, theirs = relative(ours[name], want[name]), relative(torch_result[name], want[name])
        ok = mine <= FACTOR * theirs + FLOOR[case["compute"]]
        rows.append(dict(tensor=name, ours=mine, torch=theirs, ok=ok))
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", help="cuda_bench")
    parser.add_argument("--out")
    parser.add_argument("--fuse-always", action="store_true", help="the fused loss at every size")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    seed = int.from_bytes(os.urandom(4), "little")
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    print("seed", seed, torch.__version__, torch.cuda.get_device_name())
    results, failed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for compute in ("bf16", "fp16", "fp32"):
            worst = {}
            for index, shape in enumerate(SHAPES):
                # Every option on one shape; the plain case and everything at once, with and without smoothing, on
                # all.
                options = OPTIONS if shape == (252, 123, 507) else [OPTIONS[0], *OPTIONS[-2:]]
                for option in options:
                    case = {**DEFAULTS, **option, "rows": shape[0], "hidden": shape[1], "vocab": shape[2],
                            "compute": compute, "grad_scale": 1.0 / shape[0],
                            "fuse_always": args.fuse_always}
                    for row in run_case(case, args.program, folder, generator):
                        results.append({**case, **row})
                        ratio = row["ours"] / max(row["torch"], 1e-12)
                        worst[row["tensor"]] = max(worst.get(row["tensor"], (0, 0, 0)), (row["ours"], row["torch"], ratio))
                        if not row["ok"]:
                            failed += 1
                            print("FAILED", compute, shape, option, row)
            for tensor, (ours, theirs, _) in worst.items():
                print(f"{compute} {tensor:16s} largest error {ours:.2e}, torch's there {theirs:.2e}")
    if args.out:
        with open(args.out, "w") as file:
            json.dump(dict(card=torch.cuda.get_device_name(), torch=torch.__version__, seed=seed, results=results), file)
    print(len(results), "comparisons,", failed, "failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
