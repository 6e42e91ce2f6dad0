// SPDX-License-Identifier: Apache-2.0
// Times the passes of the CUDA backend over a head's parameters: the optimizer, the gradient norm, and adding
// a contribution to the gradient. The copy bandwidth is measured in the same run, for comparison.
//
//   cuda_bench optimizer --out=results.json --commit=abc123 [--parameters=525336576]
//
// The bytes of a pass are the bytes that it must move, each counted once. AdamW with a 16-bit copy of the
// weights reads gradient, two moments and value (16 bytes a parameter), and writes these four and the copy
// (18 bytes). Lazy steps are timed with a gradient in every row, in one row of 32, and in no row; of a row
// without a gradient only the gradient is read (4 bytes).
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "bench/command.h"
#include "bench/cuda_bench.h"
#include "bench/gpu_timer.h"
#include "kernels/cuda/kernels/tensor_ops.h"
#include "nlohmann/json.hpp"

namespace lossd::bench::cuda_optimizer {
namespace {

struct Flags : CommandFlags {
  Flag<std::string> out{this, "out", "", "JSON file to write; empty: none"};
  Flag<std::string> commit{this, "commit", "", "commit of the program, recorded in the results"};
  Flag<int64_t> parameters{this, "parameters", int64_t{128256} * 4096,
                           "of the weight matrix; a multiple of 4096"};
  Flag<int> iterations{this, "iterations", 20, "timed passes"};
} flags;

constexpr int64_t kCols = 4096;

namespace cuda = ::lossd::kernels::cuda;
using kernels::DType;
using kernels::OptimizerOptions;

// The parameters of a head, filled with numbers that are not a special case for any pass.
class Parameters {
 public:
  explicit Parameters(int64_t count) : count_(count) {
    for (float*& tensor : tensors_) tensor = DeviceAlloc<float>(count);
    copy_ = DeviceAlloc<uint16_t>(count);
    slice_ = DeviceAlloc<uint16_t>(count);
    partials_ = DeviceAlloc<double>(cuda::kSquareSumPartials + 1);
  }
  ~Parameters() {
    for (float* tensor : tensors_) cudaFree(tensor);
    cudaFree(copy_);
    cudaFree(slice_);
    cudaFree(partials_);
  }

  // Writes the gradients again before the next pass, because every optimizer pass sets them to zero.
  void Fill(cudaStream_t stream) {
    for (float* tensor : tensors_)
      Check(cuda::LaunchFillPattern(tensor, DType::kFloat32, count_, stream), "LaunchFillPattern");
    // The second moment must be positive.
    Check(cuda::LaunchFill(tensors_[3], count_, 0.5f, stream), "LaunchFill");
    Check(cuda::LaunchFillPattern(slice_, DType::kBFloat16, count_, stream), "LaunchFillPattern");
  }
  // Zeroes the gradient except in one row of every `interval`; 0: in all rows.
  void MakeIdle(int64_t interval, cudaStream_t stream) {
    for (int64_t row = 0; row < count_ / kCols; ++row) {
      if (interval > 0 && row % interval == 0) continue;
      Check(cudaMemsetAsync(tensors_[1] + row * kCols, 0, kCols * sizeof(float), stream), "cudaMemsetAsync");
    }
  }

  void Step(const OptimizerOptions& options, DType compute, cudaStream_t stream) {
    cuda::OptimizerStepParams p;
    p.options = options;
    p.update = 10;
    p.count = p.matrix_count = count_;
    p.matrix_cols = kCols;
    p.values = tensors_[0];
    p.gradients = tensors_[1];
    p.moment1 = tensors_[2];
    p.moment2 = tensors_[3];
    if (compute != DType::kFloat32) p.compute_copy = copy_;
    p.compute_dtype = compute;
    Check(cuda::LaunchOptimizerStep(p, stream), "LaunchOptimizerStep");
  }
  void Norm(cudaStream_t stream) {
    Check(cuda::LaunchSquareSum(tensors_[1], count_, partials_, partials_ + cuda::kSquareSumPartials, stream),
          "LaunchSquareSum");
  }
  void Add(cudaStream_t stream) {
    const cuda::DeviceMatrix from = {slice_, DType::kBFloat16, kCols, kCols};
    const cuda::DeviceMatrix to = {tensors_[1], DType::kFloat32, kCols, kCols};
    Check(cuda::LaunchAddScaled(from, to, count_ / kCols, 0.5f, stream), "LaunchAddScaled");
  }

 private:
  const int64_t count_;
  float* tensors_[4];  // value, gradient, first and second moment
  uint16_t* copy_;
  uint16_t* slice_;
  double* partials_;
};

int Main() {
  Timer timer;
  const cudaStream_t stream = timer.stream();
  const int64_t count = *flags.parameters;
  Json results = StartResults(*flags.commit, timer);
  const double copy_gbps = results["copy_gbps"];
  results["parameters"] = count;
  std::cout << count << " parameters" << std::endl;
  Parameters parameters(count);
  const auto run = [&](const std::string& name, double bytes_per_parameter, const std::function<void()>& pass,
                       int64_t interval = 1) {
    std::vector<double> times;
    for (int i = 0; i < kWarmUps + *flags.iterations; ++i) {
      parameters.Fill(stream);
      if (interval != 1) parameters.MakeIdle(interval, stream);
      const double ms = timer.MeasureOnce(pass);
      if (i >= kWarmUps) times.push_back(ms);
    }
    const Times t = Summarise(std::move(times));
    const double gbps = static_cast<double>(count) * bytes_per_parameter / t.median / 1e6;
    std::cout << absl::StrFormat("%-16s %7.3f ms (%.3f ... %.3f)  %5.0f GB/s, %.3f of copy", name, t.median,
                                 t.min, t.max, gbps, gbps / copy_gbps)
              << std::endl;
    Json result = ToJson(t);
    result["name"] = name;
    result["bytes_per_parameter"] = bytes_per_parameter;
    result["gbps"] = gbps;
    result["of_copy"] = gbps / copy_gbps;
    results["passes"].push_back(std::move(result));
  };
  using Kind = OptimizerOptions::Kind;
  const OptimizerOptions adamw{.weight_decay = 0.1};
  const OptimizerOptions sgd{.kind = Kind::kSgd, .weight_decay = 0.1};
  const OptimizerOptions momentum{.kind = Kind::kSgd, .weight_decay = 0.1, .momentum = 0.9};
  // The second argument: bytes read and written for a parameter (see the top of the file).
  run("adamw bf16", 34, [&] { parameters.Step(adamw, DType::kBFloat16, stream); });
  run("adamw fp16", 34, [&] { parameters.Step(adamw, DType::kFloat16, stream); });
  run("adamw fp32", 32, [&] { parameters.Step(adamw, DType::kFloat32, stream); });
  run("momentum bf16", 26, [&] { parameters.Step(momentum, DType::kBFloat16, stream); });
  run("sgd bf16", 18, [&] { parameters.Step(sgd, DType::kBFloat16, stream); });
  OptimizerOptions lazy = adamw;
  lazy.lazy_rows = true;
  const auto lazy_step = [&] { parameters.Step(lazy, DType::kBFloat16, stream); };
  run("lazy, all rows", 34, lazy_step);
  run("lazy, 1 of 32", 4 + 30.0 / 32, lazy_step, 32);  // all gradients; everything else of one row in 32
  run("lazy, none", 4, lazy_step, 0);
  run("gradient norm", 4, [&] { parameters.Norm(stream); });
  run("add bf16", 10, [&] { parameters.Add(stream); });
  WriteResults(results, *flags.out);
  return 0;
}

}  // namespace
}  // namespace lossd::bench::cuda_optimizer

namespace lossd::bench {

int RunCudaOptimizerBench(int argc, char** argv) {
  cuda_optimizer::flags.Parse(argc, argv);
  return cuda_optimizer::Main();
}

}  // namespace lossd::bench
