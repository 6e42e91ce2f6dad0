// Times the Hopper kernels one by one beside cuBLASLt's product of the same shape, in one process.
//
//   hopper_bench [--shapes=gemma2-2b,...] [--data=peaked,flat]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "bench/gpu_data.h"
#include "bench/gpu_timer.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/hopper/logit_pass.h"
#include "kernels/cuda/row_loss.h"

ABSL_FLAG(std::vector<std::string>, shapes,
          std::vector<std::string>({"gemma2-2b", "llama3-8b", "phi3.5-mini", "mistral-nemo", "n4096"}),
          "names of shapes to run");
ABSL_FLAG(std::vector<std::string>, data, std::vector<std::string>({"peaked"}), "peaked, flat");
ABSL_FLAG(int, rounds, 5, "timed rounds; a round runs every candidate once");

namespace lossd::bench {
namespace {

namespace cuda = ::lossd::kernels::cuda;
using kernels::DType;

template <typename T>
T* Allocate(int64_t count) {
  void* data = nullptr;
  Check(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)), "cudaMalloc");
  Check(cudaMemset(data, 0, static_cast<size_t>(count) * sizeof(T)), "cudaMemset");
  return static_cast<T*>(data);
}

struct Candidate {
  std::string name;
  std::function<void()> run;
  std::vector<double> times;
};

double Time(const std::function<void()>& run) {
  static cudaEvent_t begin = nullptr, end = nullptr;
  if (begin == nullptr) {
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
  }
  Check(cudaEventRecord(begin), "record");
  run();
  Check(cudaEventRecord(end), "record");
  Check(cudaEventSynchronize(end), "synchronize");
  float ms = 0.0f;
  cudaEventElapsedTime(&ms, begin, end);
  return ms;
}

void Run(const NamedShape& named, DataKind kind, cuda::Gemms& gemms, void* scratch) {
  const DataShape& shape = named.shape;
  LossData data = MakeData(kind, shape, 1234);
  const int64_t tiles = cuda::hopper::VocabTiles(shape.vocab);
  auto* logits = Allocate<uint16_t>(shape.rows * shape.vocab);
  auto* targets = Allocate<int32_t>(shape.rows);
  cudaMemcpy(targets, data.targets.data(), shape.rows * 4, cudaMemcpyDefault);
  auto* reference = Allocate<float>(shape.rows);
  auto* threshold = Allocate<float>(shape.rows);
  Check(cuda::LaunchTargetDots(
            {data.hidden, data.weight, DType::kBFloat16, shape.hidden, shape.rows, targets, threshold},
            nullptr),
        "target dots");
  std::vector<float> host(shape.rows);
  cudaMemcpy(host.data(), threshold, shape.rows * 4, cudaMemcpyDefault);
  for (float& z : host) z = z * 1.4427f + 48.0f;
  cudaMemcpy(reference, host.data(), shape.rows * 4, cudaMemcpyDefault);
  cuda::hopper::LogitPassParams p;
  p.reference = reference;
  p.threshold = threshold;
  p.hidden = data.hidden;
  p.weight = data.weight;
  p.inner = shape.hidden;
  p.rows = shape.rows;
  p.vocab = p.padded_vocab = shape.vocab;
  p.targets = targets;
  p.partials = {shape.rows, Allocate<float>(tiles * shape.rows),   Allocate<float>(tiles * shape.rows),
                nullptr,    Allocate<uint8_t>(tiles * shape.rows), Allocate<float>(shape.rows)};
  const cuda::GemmShape product = {.transpose_a = true,
                                   .m = shape.vocab,
                                   .n = shape.rows,
                                   .k = shape.hidden,
                                   .lda = shape.hidden,
                                   .ldb = shape.hidden,
                                   .ldc = shape.vocab};
  std::vector<Candidate> candidates;
  candidates.push_back(
      {"cublas", [&] {
         Check(gemms.Run(product, {.a = data.weight, .b = data.hidden, .c = logits}, scratch, nullptr),
               "product");
       }});
  const int clusters = cuda::hopper::LogitPassClusters();
  candidates.push_back(
      {"statistics", [&] { Check(cuda::hopper::LaunchLogitPass(p, clusters, nullptr), "pass"); }, {}});
  cuda::hopper::LogitPassParams storing = p;
  storing.exponentials = logits;
  candidates.push_back({"exponentials",
                        [&] { Check(cuda::hopper::LaunchLogitPass(storing, clusters, nullptr), "pass"); },
                        {}});
  for (Candidate& c : candidates) c.run();
  Check(cudaDeviceSynchronize(), "synchronize");
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    for (Candidate& c : candidates) {
      c.times.push_back(Time(c.run));
    }
  }
  const double flop = 2.0 * shape.rows * shape.vocab * shape.hidden;
  double base = 0.0;
  for (Candidate& c : candidates) {
    std::sort(c.times.begin(), c.times.end());
    const double median = c.times[c.times.size() / 2];
    if (base == 0.0) base = median;
    std::printf("%-13s %-7s %-16s %8.3f ms (%8.3f %8.3f) %6.1f TFLOP/s  %.3f of cublas\n", named.name.c_str(),
                kind == DataKind::kPeaked ? "peaked" : "flat", c.name.c_str(), median, c.times.front(),
                c.times.back(), flop / median * 1e-9, median / base);
  }
  std::fflush(stdout);
  for (void* q : {static_cast<void*>(logits), static_cast<void*>(targets), static_cast<void*>(reference),
                  static_cast<void*>(p.partials.max), static_cast<void*>(p.partials.sum),
                  static_cast<void*>(p.partials.arg), static_cast<void*>(p.partials.target)}) {
    cudaFree(q);
  }
  Free(data);
}

void Main() {
  auto gemms = cuda::Gemms::Create();
  Check(gemms.status(), "cuBLASLt");
  auto* scratch = Allocate<uint8_t>(cuda::kGemmWorkspaceBytes);
  for (const NamedShape& named : kShapes) {
    const auto& names = absl::GetFlag(FLAGS_shapes);
    if (std::find(names.begin(), names.end(), named.name) == names.end()) continue;
    for (const std::string& data : absl::GetFlag(FLAGS_data)) {
      Run(named, data == "flat" ? DataKind::kFlat : DataKind::kPeaked, **gemms, scratch);
    }
  }
}

}  // namespace
}  // namespace lossd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  lossd::bench::Main();
  return 0;
}
