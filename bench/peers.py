# SPDX-License-Identifier: Apache-2.0
"""Times linear cross-entropy of PyTorch, Cut Cross-Entropy, Liger and QuACK, and the norms of PyTorch and QuACK, on one GPU. The
results are compared with those of `cuda_bench loss`, which has the same shapes and the same kinds of data.

    python3 peers.py --out peers.json                 # the shapes of cuda_bench loss, with errors
    python3 peers.py --sweep --csv sweeps.csv         # time and memory over V, N and D, fp32 and bf16
    python3 peers.py --norm --shapes=                 # LayerNorm and RMSNorm bandwidth
    python3 peers.py --distill                        # KL(teacher || student) with gradients of the student

A peer is measured if it can be imported. Times are medians in ms by CUDA events. Memory is the peak beyond the inputs, with
gradients. Errors are ||a - ref|| / ||ref||, where ref is computed in fp64 for sampled rows and classes.
"""

import argparse
import csv
import gc
import importlib.metadata
import json
import subprocess
import tempfile
import time

import numpy
import torch
import torch.nn.functional as F


# Linear cross-entropy of PyTorch, Cut Cross-Entropy, Liger and QuACK: functions of (hidden, weight, targets).


def eager(hidden, weight, targets):
    return F.cross_entropy((hidden @ weight.T).float(), targets)


def compiled_for_each_shape():
    """The peers whose kernels are compiled again for each shape."""
    found = {}
    try:
        from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as sm90

        found["liger_sm90"] = lambda e, w, t: first(sm90.LigerFusedLinearCrossEntropySM90Function.apply(e, w, t))
    except ImportError as error:
        print("without Liger's function for SM90:", error)
    try:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy as quack

        found["quack"] = quack  # it tunes its kernels first, for a minute per shape
        for size in (2048, 4096, 8192):  # rows of a chunk; QuACK fails if this equals the hidden size
            found[f"quack_untuned_{size}"] = lambda e, w, t, size=size: quack(e, w, t, chunk_size=size, tuned=False)
    except (ImportError, TypeError) as error:  # TypeError: QuACK does not know the version of its compiler
        print("without quack:", error)
    return found


def first(result):
    return result[0] if isinstance(result, tuple) else result


def of_torch():
    """torch's own linear_cross_entropy, which computes some rows at a time. torch has it from 2.13 on."""
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


# Forward KL of PyTorch and Liger: functions of (hidden, weight, teacher's hidden, teacher's weight).


def eager_kl(hidden, weight, teacher_hidden, teacher_weight):
    student = F.log_softmax((hidden @ weight.T).float(), 1)
    with torch.no_grad():
        teacher = F.log_softmax((teacher_hidden @ teacher_weight.T).float(), 1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def distillers():
    found = {"torch": eager_kl, "torch.compile": torch.compile(eager_kl)}
    try:
        from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction as jsd

        found["liger"] = lambda e, w, te, tw: first(jsd.apply(e, w, te, tw, None, 0.0, -100, 1.0))
    except ImportError as error:
        print("without liger_kernel:", error)
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        chunked = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0)
        found["liger_chunked"] = lambda e, w, te, tw: first(chunked(
            e, w, te, tw, torch.zeros(len(e), dtype=torch.long, device=e.device)))
    except ImportError as error:
        print("without liger_kernel's chunked losses:", error)
    return found


# The measurements.

DEVICE = "cuda"
REAL_DATA = ""  # the path of the program real_data, from --real-data
SHAPES = {
    "gemma2-2b": (8192, 2304, 256000),
    "llama3-8b": (8192, 4096, 128256),
    "phi3.5-mini": (8192, 3072, 32064),
    "mistral-nemo": (8192, 5120, 131072),
    "n4096": (4096, 4096, 128256),
}
CANDIDATES, FIRST_LOGIT, SLOPE, OFFSET = 100, 17.0, 1.92, 50.0  # of peaked data, as in gpu_data.cu
SAMPLED_ROWS, SAMPLED_CLASSES = 32, 1024
NORM_ROWS, NORM_COLUMNS = 4096, (1024, 2048, 4096, 5120, 8192, 12288, 15872)


def peaked(n, d, v):
    """Peaked data, made like MakeData(kPeaked) in gpu_data.cu: the softmax is a power law over candidates, whose popularity is
    Zipf-like. Returns hidden states [n, d], weight [v, d], targets [n]."""
    weight = F.normalize(torch.randn(v, d, device=DEVICE))
    popularity = torch.randperm(v, device=DEVICE)
    step = (torch.arange(CANDIDATES, device=DEVICE) + torch.rand(n, CANDIDATES, device=DEVICE)) / CANDIDATES
    ranks = (OFFSET * ((v + OFFSET) / OFFSET) ** step - OFFSET).long().clamp(0, v - 1)
    ranks = ranks.gather(1, torch.rand(n, CANDIDATES, device=DEVICE).argsort(1))
    classes = popularity[ranks]
    place = torch.arange(1, CANDIDATES + 1, device=DEVICE, dtype=torch.float32)
    logits = FIRST_LOGIT - SLOPE * place.log()
    hidden = torch.zeros(n, d, device=DEVICE)
    for i in range(CANDIDATES):
        hidden += logits[i] * weight[classes[:, i]]
    drawn = torch.multinomial(place**-SLOPE, n, replacement=True)
    return hidden.bfloat16(), weight.bfloat16(), classes.gather(1, drawn[:, None])[:, 0]


def real(n, d, v):
    """Real data, made like MakeData(kReal) in gpu_data.cu, from the output of the program real_data (kernels/data/real_rows.h).
    Returns hidden states [n, d], weight [v, d], targets [n].

    Each hidden state begins as noise. It is moved 16 times toward the logits that its candidates should have, each time by 0.9 of
    what is missing (kMoves and kMovePart there). Element 0 of all hidden states is `shared` (kShared) and does not move."""
    shared = 8.0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([REAL_DATA, f"--rows={n}", f"--hidden={d}", f"--vocab={v}",
                        f"--seed={torch.randint(2**31, ()).item()}", f"--out={folder}"], check=True)
        arrays = {name: torch.from_numpy(numpy.load(f"{folder}/{name}.npy")).to(DEVICE)
                  for name in ("classes", "logits", "counts", "noise", "targets", "first_elements")}
    weight = torch.cat([arrays["first_elements"][:, None], F.normalize(torch.randn(v, d - 1, device=DEVICE))], 1)
    hidden = torch.empty(n, d, device=DEVICE, dtype=torch.bfloat16)
    places = torch.arange(arrays["classes"].shape[1], device=DEVICE)
    for begin in range(0, n, 256):
        rows = slice(begin, min(begin + 256, n))
        used = (places < arrays["counts"][rows, None]).float()
        candidates = weight[arrays["classes"][rows].long()] * used[:, :, None]
        noise = F.normalize(torch.randn(used.shape[0], d - 1, device=DEVICE)) * arrays["noise"][rows, None]
        x = torch.cat([torch.full_like(noise[:, :1], shared), noise], 1)
        for _ in range(16):
            missing = 0.9 * (arrays["logits"][rows] * used - torch.einsum("nkd,nd->nk", candidates, x))
            x[:, 1:] += torch.einsum("nk,nkd->nd", missing, candidates[:, :, 1:])
        hidden[rows] = x.bfloat16()
    return hidden, weight.bfloat16(), arrays["targets"].long()


def flat(n, d, v, dtype=torch.bfloat16):
    deviation = d**-0.25
    return ((torch.randn(n, d, device=DEVICE) * deviation).to(dtype),
            (torch.randn(v, d, device=DEVICE) * deviation).to(dtype), torch.randint(0, v, (n,), device=DEVICE))


def milliseconds(work, iterations, warm_up_seconds=0.4):
    """Milliseconds of work() in `iterations` runs. At least three runs warm up, for as long as in `cuda_bench loss`, because a GPU
    lowers its clock after it has worked for a while."""
    started, warm_ups, times = time.time(), 0, []
    while warm_ups < 3 or time.time() - started < warm_up_seconds:
        work()
        torch.cuda.synchronize()
        warm_ups += 1
    for _ in range(iterations):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    times.sort()
    return {"median_ms": times[len(times) // 2], "min_ms": times[0], "max_ms": times[-1]}


def peak_mib(work):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


class Reference:
    """The mean loss in fp64, and its gradients for some rows and classes."""

    def __init__(self, hidden, weight, targets):
        n, v = hidden.shape[0], weight.shape[0]
        wide = weight.double()
        lse = torch.cat([(part.double() @ wide.T).logsumexp(1) for part in hidden.split(256)])
        self.rows = torch.randint(0, n, (SAMPLED_ROWS,), device=DEVICE)
        half = SAMPLED_CLASSES // 2
        self.classes = torch.cat([targets[torch.randint(0, n, (half,), device=DEVICE)],
                                  torch.randint(0, v, (half,), device=DEVICE)])
        p = (hidden[self.rows].double() @ wide.T - lse[self.rows, None]).exp()
        p[torch.arange(SAMPLED_ROWS, device=DEVICE), targets[self.rows]] -= 1
        self.hidden_gradient = p @ wide / n
        p = (hidden.double() @ wide[self.classes].T - lse[:, None]).exp()
        p -= (targets[:, None] == self.classes[None, :]).double()
        self.weight_gradient = p.T @ hidden.double() / n
        self.loss = (lse - (hidden.double() * wide[targets]).sum(1)).mean()

    def errors(self, loss, hidden_gradient, weight_gradient):
        def relative(got, want):
            return ((got.double() - want).norm() / want.norm()).item()

        return {"mean_loss": relative(loss, self.loss),
                "hidden_gradient": relative(hidden_gradient[self.rows], self.hidden_gradient),
                "weight_gradient": relative(weight_gradient[self.classes], self.weight_gradient)}


def floor(hidden, weight, iterations):
    """Milliseconds of the three bare matrix products, with 16-bit output."""
    n, v = hidden.shape[0], weight.shape[0]
    with torch.no_grad():
        logits = torch.empty(n, v, device=DEVICE, dtype=hidden.dtype)
        first = milliseconds(lambda: torch.mm(hidden, weight.T, out=logits), iterations)
        for part in logits.split(512):
            part.copy_(torch.softmax(part.float(), 1))
        dx, dw = torch.empty_like(hidden), torch.empty_like(weight)
        second = milliseconds(lambda: torch.mm(logits, weight, out=dx), iterations)
        third = milliseconds(lambda: torch.mm(logits.T, hidden, out=dw), iterations)
    return {"logits": first, "hidden_gradient": second, "weight_gradient": third,
            "total_ms": first["median_ms"] + second["median_ms"] + third["median_ms"]}


def run_method(function, data, iterations, reference=None):
    hidden, weight, *others = data  # others: the targets, or the teacher's hidden states and weight
    hidden.requires_grad_(True)
    weight.requires_grad_(True)

    def forward():
        with torch.no_grad():
            function(hidden, weight, *others)

    def full():
        hidden.grad = weight.grad = None
        loss = function(hidden, weight, *others)
        loss.backward()
        return loss.detach()

    result = {"loss_only": milliseconds(forward, iterations), "loss_and_gradients": milliseconds(full, iterations)}
    loss = full()
    if reference is not None:
        result["errors"] = reference.errors(loss, hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    result["peak_mib"] = peak_mib(full)
    hidden.grad = weight.grad = None
    hidden.requires_grad_(False)
    weight.requires_grad_(False)
    return result


DATA = {"real": real, "peaked": peaked, "flat": flat}


def compare(found, arguments, entry, iterations, reference=None):
    """Measures methods and adds the results to the entry of a shape. `found`: {name: function}; `arguments`: those of each
    function."""
    for method, function in found.items():
        try:
            result = run_method(function, arguments, iterations, reference)
        except Exception as error:  # peers raise errors of many kinds
            print(f"  {method} failed: {str(error)[:200]}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            continue
        entry["methods"][method] = result
        full = result["loss_and_gradients"]["median_ms"]
        print(f"  {method:14s} loss {result['loss_only']['median_ms']:7.2f}  loss+grad {full:7.2f} "
              f"x{full / entry['floor']['total_ms']:.3f}  peak {result['peak_mib']:7.0f} MiB  "
              + " ".join(f"error of {key} {value:.1e}" for key, value in result.get("errors", {}).items()), flush=True)


def compare_shapes(cases, iterations, wanted, distill, done):
    """Measures all methods for each case.

    Args:
      cases: (name of a shape, kind of data) of each case.
      wanted: the names of the methods to measure; empty: all.
      distill: measure forward KL. Its teacher has the student's weight and 0.8 times the student's hidden states, as in
        `cuda_bench loss`.
      done: called with all results so far after each case.
    """
    results = []
    for name, kind in cases:
        data = DATA[kind](*SHAPES[name])
        reference = None if distill else Reference(*data)
        bare = floor(data[0], data[1], iterations)
        print(f"{name} {kind}: floor {bare['total_ms']:.2f} ms ({bare['logits']['median_ms']:.2f} forward)", flush=True)
        entry = {"shape": name, "data": kind, "floor": bare, "methods": {}}
        found = distillers() if distill else methods(dynamic=False)
        arguments = (data[0], data[1], data[0] * 0.8, data[1].clone()) if distill else data
        compare({method: function for method, function in found.items() if not wanted or method in wanted}, arguments, entry,
                iterations, reference)
        results.append(entry)
        done(results)
        torch.compiler.reset()


def sweep_points():
    for dtype in ("bf16", "fp32"):
        for v in (2048, 4096, 8192, 16384, 32768, 65536):
            yield "V", dtype, 8192, 2048, v
        for n in (1024, 2048, 4096, 8192, 16384):
            yield "N", dtype, n, 2048, 32768
        for d in (1024, 2048, 4096, 8192):
            yield "D", dtype, 8192, d, 32768


def sweep(path, iterations, budget_seconds):
    torch.backends.cuda.matmul.allow_tf32 = False
    begin = time.time()
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["axis", "dtype", "N", "D", "V", "method", "forward_ms", "full_ms", "peak_mib"])
        found = methods(dynamic=True)
        for axis, dtype, n, d, v in sweep_points():
            if time.time() - begin > budget_seconds:
                print("stopped: out of time")
                return
            data = flat(n, d, v, torch.float32 if dtype == "fp32" else torch.bfloat16)
            for method, function in found.items():
                if method == "cce" and dtype == "fp32":
                    continue  # it computes only in 16 bits
                try:
                    result = run_method(function, data, iterations)
                except (RuntimeError, ValueError, TypeError) as error:
                    print(f"  {method} failed at {dtype} {n} {d} {v}: {str(error)[:120]}", flush=True)
                    continue
                writer.writerow([axis, dtype, n, d, v, method, f"{result['loss_only']['median_ms']:.4f}",
                                 f"{result['loss_and_gradients']['median_ms']:.4f}", f"{result['peak_mib']:.1f}"])
            file.flush()
    print(f"sweep took {time.time() - begin:.0f} s")


def norms(gain, shift):
    """The norms of PyTorch and of QuACK, if it can be imported: {name: {method: (forward, backward)}}. forward(x) returns
    (y, *saved), and backward(dy, x, *saved) returns all gradients. The functions call kernels directly, without autograd."""
    aten, shape = torch.ops.aten, gain.shape
    found = {
        "layernorm": {"torch": (
            lambda x: aten.native_layer_norm(x, shape, gain, shift, 1e-5),
            lambda dy, x, mean, r: aten.native_layer_norm_backward(dy, x, shape, mean, r, gain, shift, [True] * 3))},
        "rmsnorm": {"torch": (
            lambda x: aten._fused_rms_norm(x, shape, gain, 1e-5),
            lambda dy, x, r: aten._fused_rms_norm_backward(dy, x, shape, r, gain, [True] * 2))}}
    try:
        from quack.rmsnorm import layernorm_bwd, layernorm_fwd, rmsnorm_bwd, rmsnorm_fwd

        wide_gain, wide_shift = gain.float(), shift.float()  # QuACK's LayerNorm takes only this dtype
        found["layernorm"]["quack"] = (
            lambda x: layernorm_fwd(x, wide_gain, wide_shift, 1e-5, True, True),
            lambda dy, x, r, mean: layernorm_bwd(x, wide_gain, dy, r, mean))
        found["rmsnorm"]["quack"] = (
            lambda x: (lambda out: (out[0], out[-1]))(rmsnorm_fwd(x, gain, eps=1e-5, store_rstd=True)),
            lambda dy, x, r: rmsnorm_bwd(x, gain, dy, r)[:2])
    except ImportError as error:
        print("without quack:", error)
    return found


def captured_milliseconds(calls, launches=16):
    """Milliseconds of device time for one of `calls`. A CUDA graph runs them in turn, so that the host does not slow them down."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [calls[i % len(calls)]() for i in range(launches)]  # each call keeps its output, so that outputs exceed the L2 cache
    time = milliseconds(graph.replay, 10)["median_ms"] / launches
    del kept
    return time


def compare_norms():
    results = []
    for columns in NORM_COLUMNS:
        count = max(2, min(16, 2**29 // (NORM_ROWS * columns * 6)))  # so many inputs that they exceed the L2 cache
        gain, shift = (torch.rand(columns, device=DEVICE, dtype=torch.float16) for _ in range(2))
        sets = [[torch.randn(NORM_ROWS, columns, device=DEVICE, dtype=torch.float16) for _ in range(2)]
                for _ in range(count)]
        size = NORM_ROWS * columns * 2 / 1e6
        for norm, found in norms(gain, shift).items():
            for method, (forward, backward) in found.items():
                try:
                    saved = [forward(x)[1:] for x, _ in sets]
                    forward_ms = captured_milliseconds([lambda x=x: forward(x) for x, _ in sets])
                    backward_ms = captured_milliseconds([lambda x=x, dy=dy, s=s: backward(dy, x, *s)
                                                         for (x, dy), s in zip(sets, saved)])
                except (RuntimeError, ValueError, TypeError, AssertionError) as error:
                    print(f"{norm} {method} failed at {columns}: {str(error)[:200]}", flush=True)
                    continue
                results.append({"norm": norm, "method": method, "rows": NORM_ROWS, "columns": columns,
                                "forward_gbps": 2 * size / forward_ms, "backward_gbps": 3 * size / backward_ms})
                print(f"{norm:9s} {method:6s} fp16 {NORM_ROWS} x {columns:5d}  forward {2 * size / forward_ms:5.0f} GB/s  "
                      f"backward {3 * size / backward_ms:5.0f} GB/s", flush=True)
    return results


def versions(*others):
    found = {}
    for name in ("torch", "triton", "cut-cross-entropy", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl", *others):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--data", default="real", help="real, peaked, flat, separated by commas")
    parser.add_argument("--real-data", default="bin/real_data", help="the program real_data, for real data")
    parser.add_argument("--methods", default="", help="those to run on the shapes, separated by commas; empty: all")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--out")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--csv", default="sweeps.csv")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which the sweep stops")
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--distill", action="store_true")
    args = parser.parse_args()
    global REAL_DATA
    REAL_DATA = args.real_data
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    result = {"card": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "versions": versions()}

    def save(**part):
        result.update(part)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(result, file, indent=1)

    if args.norm:
        save(norm=compare_norms())
    if args.sweep:
        sweep(args.csv, args.iterations, args.budget)
    else:
        cases = [(name, kind) for name in args.shapes.split(",") if name for kind in args.data.split(",")]
        wanted = [name for name in args.methods.split(",") if name]
        key = "distillation" if args.distill else "loss"
        compare_shapes(cases, args.iterations, wanted, args.distill, lambda results: save(**{key: results}))


if __name__ == "__main__":
    main()
