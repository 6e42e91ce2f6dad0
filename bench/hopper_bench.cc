// SPDX-License-Identifier: Apache-2.0
// Times each Hopper kernel against cuBLASLt's product of the same shape. Both run alternately in one process.
//
//   cuda_bench hopper [--shapes=gemma2-2b,...] [--data=real,peaked,flat] [--rows=0] [--rounds=3]
//                     [--groups=4,8,...]
//
// For each shape and kind of data it compares three products: the logits (LogitPass, which does not store
// them, but statistics of the rows, or also their exponentials), dx and dW (GradientGemm, which read the
// exponentials that the first comparison has stored).
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "bench/command.h"
#include "bench/cuda_bench.h"
#include "bench/gpu_data.h"
#include "bench/gpu_timer.h"
#include "kernels/cuda/device/gemm.h"
#include "kernels/cuda/kernels/hopper/cluster_launch.h"
#include "kernels/cuda/kernels/hopper/gradient_gemm.h"
#include "kernels/cuda/kernels/hopper/logit_pass.h"
#include "kernels/cuda/kernels/row_loss.h"

namespace lossd::bench::hopper_kernels {
namespace {

struct Flags : CommandFlags {
  Flag<std::vector<std::string>> shapes{this,
                                        "shapes",
                                        {"gemma2-2b", "llama3-8b", "phi3.5-mini", "mistral-nemo", "n4096"},
                                        "names of shapes to run"};
  Flag<std::vector<std::string>> data{this, "data", {"real"}, "real, peaked, flat"};
  Flag<int64_t> rows{this, "rows", 0, "rows instead of the shapes' own; 0: those"};
  Flag<int> rounds{this, "rounds", 3, "timed rounds; a round runs every candidate for a while"};
  Flag<std::vector<std::string>> groups{
      this, "groups", {}, "groups of row tiles to try for the gradients beside the planned one"};
} flags;

namespace cuda = ::lossd::kernels::cuda;
namespace hopper = ::lossd::kernels::cuda::hopper;
using kernels::DType;

// Device memory that lives as long as the object.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : data_(DeviceAlloc<T>(count)) {
    Check(cudaMemset(data_, 0, static_cast<size_t>(count) * sizeof(T)), "cudaMemset");
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return data_; }

 private:
  T* data_;
};

// One way to compute a product; the first candidate of a comparison is cuBLASLt's.
struct Candidate {
  std::string name;
  std::function<void()> run;
};

// The data that all candidates of one shape share.
struct Bench {
  std::string name;  // names the shape and the data
  DataShape shape;
  LossData data;
  cuda::Gemms& gemms;
  Timer& timer;
  int clusters;
  hopper::ClusterOrder order;
  uint16_t* exponentials;  // [rows, vocab]
  uint8_t* scratch;        // [kGemmWorkspaceBytes]
};

// Prints the times of all candidates, and their ratios to the first candidate's time. The card's power limit
// depends on the mean power over some tenths of a second. So each candidate first runs alone for that time,
// before it is timed.
void Compare(const Bench& b, const std::vector<Candidate>& candidates) {
  constexpr double kSettleMs = 400.0, kTimedMs = 200.0;
  std::vector<std::vector<double>> times(candidates.size());
  for (int round = 0; round < *flags.rounds; ++round) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      // The mean time of a run, over as many runs as take about `duration`.
      const auto run = [&](double duration, double once) {
        const int count = std::max(static_cast<int>(duration / once), 1);
        return b.timer.MeasureOnce([&] {
          for (int n = 0; n < count; ++n) candidates[i].run();
        }) / count;
      };
      // run(0, 1) is one run, whose time is the first estimate.
      const double settled = run(kSettleMs, run(0.0, 1.0));
      times[i].push_back(run(kTimedMs, settled));
    }
  }
  const double flop = 2.0 * static_cast<double>(b.shape.rows * b.shape.vocab * b.shape.hidden);
  const double base = Summarise(times[0]).median;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Times t = Summarise(times[i]);
    std::printf("%-20s %-22s %8.3f ms (%8.3f %8.3f) %6.1f TFLOP/s  %.3f\n", b.name.c_str(),
                candidates[i].name.c_str(), t.median, t.min, t.max, flop / t.median * 1e-9, t.median / base);
  }
  std::fflush(stdout);
}

Candidate Library(const Bench& b, std::string name, const cuda::GemmShape& shape,
                  const cuda::GemmOperands& operands) {
  return {std::move(name), [&b, shape, operands] {
            Check(b.gemms.Run(shape, operands, b.scratch, b.timer.stream()), "cublasLtMatmul");
          }};
}

void CompareLogits(const Bench& b) {
  const DataShape& shape = b.shape;
  const int64_t tiles = hopper::VocabTiles(shape.vocab);
  const Buffer<int32_t> targets(shape.rows);
  const Buffer<float> reference(shape.rows), threshold(shape.rows), max(tiles * shape.rows),
      sum(tiles * shape.rows), target(shape.rows);
  const Buffer<uint8_t> arg(tiles * shape.rows);
  const size_t row_bytes = static_cast<size_t>(shape.rows) * sizeof(float);
  Check(cudaMemcpy(targets.get(), b.data.targets.data(), row_bytes, cudaMemcpyDefault), "cudaMemcpy");
  Check(cuda::LaunchTargetDots({b.data.hidden, b.data.weight, DType::kBFloat16, shape.hidden, shape.rows,
                                targets.get(), threshold.get()},
                               b.timer.stream()),
        "target dots");
  Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::vector<float> references(static_cast<size_t>(shape.rows));
  Check(cudaMemcpy(references.data(), threshold.get(), row_bytes, cudaMemcpyDefault), "cudaMemcpy");
  // A reference for each row, in units of log 2 (1.4427 = log2 e): the target's logit plus 48. So the
  // exponentials 2^(z - reference) stay below the largest sum (logit_pass.h), although other logits of the
  // row may be larger than the target's.
  for (float& z : references) z = z * 1.4427f + 48.0f;
  Check(cudaMemcpy(reference.get(), references.data(), row_bytes, cudaMemcpyDefault), "cudaMemcpy");
  const Buffer<uint32_t> claimed(hopper::kMostClusters);
  const hopper::LogitOperands operands = {.hidden = b.data.hidden,
                                          .weight = b.data.weight,
                                          .inner = shape.hidden,
                                          .rows = shape.rows,
                                          .classes = shape.vocab,
                                          .padded_classes = shape.vocab,
                                          .targets = targets.get()};
  const hopper::StatisticsPass statistics = {
      {reference.get(), threshold.get()},
      {shape.rows, max.get(), sum.get(), nullptr, arg.get(), target.get()},
      hopper::AllPanels{&b.order, claimed.get()}};
  const hopper::ExponentialsPass storing = {statistics, b.exponentials};
  const cuda::GemmShape product = {.transpose_a = true,
                                   .m = shape.vocab,
                                   .n = shape.rows,
                                   .k = shape.hidden,
                                   .lda = shape.hidden,
                                   .ldb = shape.hidden,
                                   .ldc = shape.vocab};
  const auto run = [&](const auto& pass) {
    return [&] {
      Check(cudaMemsetAsync(claimed.get(), 0, hopper::kMostClusters * sizeof(uint32_t), b.timer.stream()),
            "cudaMemsetAsync");
      Check(hopper::LaunchLogitPass(operands, pass, b.clusters, b.timer.stream()), "logit pass");
    };
  };
  Compare(b, {Library(b, "logits: cublas", product,
                      {.a = b.data.weight, .b = b.data.hidden, .c = b.exponentials}),
              {"logits: statistics", run(statistics)},
              {"logits: exponentials", run(storing)}});
}

// Adds the candidates for one product with our kernel (GradientGemmPlan in plan.h): as planned; with all
// tiles computed as a whole, if the plan divides some tiles into segments; and with each of --groups as the
// number of row tiles that are worked on together.
void AddProducts(const Bench& b, const std::string& name, hopper::GradientGemmParams p,
                 std::vector<Candidate>& candidates) {
  p.order = &b.order;
  const auto add = [&](const std::string& variant, const hopper::GradientGemmPlan& plan) {
    candidates.push_back({absl::StrCat(name, variant), [&b, p, plan] {
                            Check(hopper::LaunchGradientGemm(p, plan, b.timer.stream()), "product");
                          }});
  };
  const hopper::GradientGemmPlan plan = hopper::PlanGradientGemm(p.rows, p.columns, p.inner, b.clusters);
  add("", plan);
  if (plan.segmented > 0) {
    hopper::GradientGemmPlan whole = plan;
    whole.whole += whole.segmented;
    whole.segmented = 0;
    whole.units = whole.whole;
    add(" whole", whole);
  }
  for (const std::string& text : *flags.groups) {
    hopper::GradientGemmPlan grouped = plan;
    if (!absl::SimpleAtoi(text, &grouped.group) || grouped.group < 1) continue;
    add(absl::StrCat(" group ", grouped.group), grouped);
  }
}

void CompareHiddenGradients(const Bench& b) {
  const DataShape& shape = b.shape;
  const Buffer<uint16_t> gradient(shape.rows * shape.hidden);
  const Buffer<float> factors(shape.rows);
  const cuda::GemmShape product = {.m = shape.hidden,
                                   .n = shape.rows,
                                   .k = shape.vocab,
                                   .lda = shape.hidden,
                                   .ldb = shape.vocab,
                                   .ldc = shape.hidden};
  hopper::GradientGemmParams p;
  p.a = b.exponentials;
  p.b = b.data.weight;
  p.c = gradient.get();
  p.rows = shape.rows;
  p.columns = shape.hidden;
  p.inner = shape.vocab;
  p.factors = factors.get();
  p.scratch = b.scratch;
  std::vector<Candidate> candidates = {
      Library(b, "dx: cublas", product, {.a = b.data.weight, .b = b.exponentials, .c = gradient.get()})};
  AddProducts(b, "dx: ours", p, candidates);
  Compare(b, candidates);
}

void CompareWeightGradients(const Bench& b) {
  const DataShape& shape = b.shape;
  const Buffer<float> gradient(shape.vocab * shape.hidden);
  cuda::GemmShape product = {.transpose_b = true,
                             .m = shape.hidden,
                             .n = shape.vocab,
                             .k = shape.rows,
                             .lda = shape.hidden,
                             .ldb = shape.vocab,
                             .ldc = shape.hidden};
  cuda::GemmOperands operands = {.a = b.data.hidden, .b = b.exponentials, .c = gradient.get()};
  hopper::GradientGemmParams p;
  p.transpose_a = true;
  p.a = b.exponentials;
  p.b = b.data.hidden;
  p.c = gradient.get();
  p.output = DType::kFloat32;
  p.rows = shape.vocab;
  p.columns = shape.hidden;
  p.inner = shape.rows;
  p.scratch = b.scratch;
  std::vector<Candidate> candidates = {Library(b, "dW: cublas bf16", product, operands)};
  product.output = DType::kFloat32;
  candidates.push_back(Library(b, "dW: cublas", product, operands));
  operands.beta = 1.0f;
  candidates.push_back(Library(b, "dW: cublas add", product, operands));
  AddProducts(b, "dW: ours", p, candidates);
  p.add = true;
  AddProducts(b, "dW: ours add", p, candidates);
  Compare(b, candidates);
}

int Main() {
  auto gemms = cuda::Gemms::Create();
  Check(gemms.status(), "cuBLASLt");
  const Buffer<uint8_t> scratch(cuda::kGemmWorkspaceBytes);
  Timer timer;
  const int clusters = hopper::LogitPassClusters();
  for (NamedShape named : kShapes) {
    const auto& names = *flags.shapes;
    if (std::find(names.begin(), names.end(), named.name) == names.end()) continue;
    if (const int64_t rows = *flags.rows; rows > 0) named.shape.rows = rows;
    for (const std::string& data : *flags.data) {
      const Buffer<uint16_t> exponentials(named.shape.rows * named.shape.vocab);
      Bench b = {absl::StrCat(named.name, " ", data),
                 named.shape,
                 MakeData(ParseDataKind(data), named.shape, 1234),
                 **gemms,
                 timer,
                 clusters,
                 hopper::FindClusterOrder(),
                 exponentials.get(),
                 scratch.get()};
      CompareLogits(b);  // stores the exponentials, which the next two functions use
      CompareHiddenGradients(b);
      CompareWeightGradients(b);
      Free(b.data);
    }
  }
  return 0;
}

}  // namespace
}  // namespace lossd::bench::hopper_kernels

namespace lossd::bench {

int RunHopperBench(int argc, char** argv) {
  hopper_kernels::flags.Parse(argc, argv);
  return hopper_kernels::Main();
}

}  // namespace lossd::bench
