"""Times linear cross-entropy of PyTorch, Cut Cross-Entropy and Liger on one GPU, for comparison with
cuda_loss_bench on the same shapes and the same kind of data.

    python3 peers.py --out peers.json                 # the shapes of cuda_loss_bench, with errors
    python3 peers.py --sweep --csv sweeps.csv         # time and memory over V, N and D, fp32 and bf16
    python3 peers.py --norm                           # LayerNorm bandwidth

Peers are used when they can be imported. Times are medians in ms by CUDA events; memory is the peak above
the inputs, gradients included; errors are ||a - ref|| / ||ref|| against fp64 over sampled rows and classes.
"""

import argparse
import csv
import gc
import json
import time

import torch
import torch.nn.functional as F

DEVICE = "cuda"
SHAPES = {
    "gemma2-2b": (8192, 2304, 256000),
    "llama3-8b": (8192, 4096, 128256),
    "phi3.5-mini": (8192, 3072, 32064),
    "mistral-nemo": (8192, 5120, 131072),
    "n4096": (4096, 4096, 128256),
}
CANDIDATES, FIRST_LOGIT, SLOPE, OFFSET = 100, 17.0, 1.92, 50.0
SAMPLED_ROWS, SAMPLED_CLASSES = 32, 64


def peaked(n, d, v):
    """As MakeData(kPeaked) of gpu_data.cu: a power-law softmax over candidates of Zipf-like popularity."""
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


def flat(n, d, v, dtype=torch.bfloat16):
    deviation = d**-0.25
    return ((torch.randn(n, d, device=DEVICE) * deviation).to(dtype),
            (torch.randn(v, d, device=DEVICE) * deviation).to(dtype), torch.randint(0, v, (n,), device=DEVICE))


def eager(hidden, weight, targets):
    return F.cross_entropy((hidden @ weight.T).float(), targets)


def methods(dynamic):
    found = {"torch": eager, "torch.compile": torch.compile(eager, dynamic=dynamic)}
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["cce"] = lambda e, w, t: linear_cross_entropy(e, w, t, impl="cce")
        if not dynamic:
            found["cce_exact"] = lambda e, w, t: linear_cross_entropy(e, w, t, impl="cce_exact")
    except ImportError as error:
        print("without cut_cross_entropy:", error)
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def liger(e, w, t):
            result = LigerFusedLinearCrossEntropyFunction.apply(e, w, t)
            return result[0] if isinstance(result, tuple) else result

        found["liger"] = liger
    except ImportError as error:
        print("without liger_kernel:", error)
    return found


def milliseconds(work, iterations, warm_ups=3):
    times = []
    for i in range(warm_ups + iterations):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if i >= warm_ups:
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
    """fp64 gradients of the mean loss for some rows and classes."""

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
    """The three bare products, 16-bit output."""
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
    hidden, weight, targets = data
    hidden.requires_grad_(True)
    weight.requires_grad_(True)

    def forward():
        with torch.no_grad():
            function(hidden, weight, targets)

    def full():
        hidden.grad = weight.grad = None
        loss = function(hidden, weight, targets)
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


def compare_shapes(names, iterations):
    results = []
    for name in names:
        data = peaked(*SHAPES[name])
        reference = Reference(*data)
        bare = floor(data[0], data[1], iterations)
        print(f"{name}: floor {bare['total_ms']:.2f} ms ({bare['logits']['median_ms']:.2f} forward)", flush=True)
        entry = {"shape": name, "data": "peaked", "floor": bare, "methods": {}}
        for method, function in methods(dynamic=False).items():
            try:
                result = run_method(function, data, iterations, reference)
            except (RuntimeError, ValueError, TypeError) as error:
                print(f"  {method} failed: {str(error)[:200]}", flush=True)
                gc.collect()
                torch.cuda.empty_cache()
                continue
            entry["methods"][method] = result
            full = result["loss_and_gradients"]["median_ms"]
            print(f"  {method:14s} loss {result['loss_only']['median_ms']:7.2f}  loss+grad {full:7.2f} "
                  f"x{full / bare['total_ms']:.3f}  peak {result['peak_mib']:7.0f} MiB  errors "
                  + " ".join(f"{key} {value:.1e}" for key, value in result["errors"].items()), flush=True)
        results.append(entry)
        torch.compiler.reset()
    return results


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
                    continue  # computes in 16 bits only
                try:
                    result = run_method(function, data, iterations)
                except (RuntimeError, ValueError, TypeError) as error:
                    print(f"  {method} failed at {dtype} {n} {d} {v}: {str(error)[:120]}", flush=True)
                    continue
                writer.writerow([axis, dtype, n, d, v, method, f"{result['loss_only']['median_ms']:.4f}",
                                 f"{result['loss_and_gradients']['median_ms']:.4f}", f"{result['peak_mib']:.1f}"])
            file.flush()
    print(f"sweep took {time.time() - begin:.0f} s")


def layer_norms():
    results = []
    for columns in (1024, 4096, 8192, 15872):
        x = torch.randn(4096, columns, device=DEVICE, dtype=torch.float16, requires_grad=True)
        gain = torch.rand(columns, device=DEVICE, dtype=torch.float16, requires_grad=True)
        shift = torch.rand(columns, device=DEVICE, dtype=torch.float16, requires_grad=True)
        dy = torch.randn_like(x)
        with torch.no_grad():
            forward = milliseconds(lambda: F.layer_norm(x, (columns,), gain, shift), 20)["median_ms"]
        y = F.layer_norm(x, (columns,), gain, shift)
        backward = milliseconds(lambda: torch.autograd.grad(y, (x, gain, shift), dy, retain_graph=True), 20)["median_ms"]
        size = x.numel() * x.element_size() / 1e6
        results.append({"columns": columns, "forward_gbps": 2 * size / forward, "backward_gbps": 3 * size / backward})
        print("torch layernorm", results[-1], flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--out")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--csv", default="sweeps.csv")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which the sweep stops")
    parser.add_argument("--norm", action="store_true")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    result = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    if args.norm:
        result["layernorm"] = layer_norms()
    if args.sweep:
        sweep(args.csv, 5, args.budget)
    else:
        result["loss"] = compare_shapes([name for name in args.shapes.split(",") if name], args.iterations)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
