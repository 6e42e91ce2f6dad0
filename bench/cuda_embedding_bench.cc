// SPDX-License-Identifier: Apache-2.0
// Times the embedding rows of a head on one GPU. In the same run, times copies of the same number of bytes,
// for comparison.
//
//   cuda_bench embedding --out=results.json --commit=abc123 [--shapes=8192x2304x256000,8192x4096x128256]
//
// "gather" and "add" time single kernels. "gather" copies rows of a bf16 weight to other memory of the GPU;
// it must move 2 N D elements. "add" checks and guards gradients of rows and adds them to the fp32 gradient
// by class; it must move N D elements, and 8 D bytes for each class that has rows. "rows" and "gradients"
// time whole chunks of a head, with rows in memory of the GPU: from Submit until the results are complete,
// and from Submit until the chunk is done.
//
// The token ids are either "text" or "uniform". With "text", the share of the r-th most frequent class is
// about 1 / (r + 2.7), like the shares of words in a language.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "bench/command.h"
#include "bench/cuda_bench.h"
#include "bench/gpu_timer.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/kernels/embedding.h"
#include "kernels/cuda/kernels/tensor_ops.h"
#include "kernels/cuda/paths/chunk_plan.h"
#include "nlohmann/json.hpp"

namespace lossd::bench::cuda_embedding {
namespace {

struct Flags : CommandFlags {
  Flag<std::string> out{this, "out", "", "JSON file to write; empty: none"};
  Flag<std::string> commit{this, "commit", "", "commit of the program, recorded in the results"};
  Flag<std::vector<std::string>> shapes{
      this, "shapes", {"8192x2304x256000", "8192x4096x128256"}, "NxDxV, D a multiple of 8, V at least 3 N"};
  Flag<int> iterations{this, "iterations", 20, "timed passes"};
} flags;

namespace cuda = ::lossd::kernels::cuda;
using kernels::DType;

struct Shape {
  int64_t rows = 0, hidden = 0, vocab = 0;
  int64_t row_bytes() const { return hidden * 2; }
};

Shape ParseShape(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, 'x');
  Shape shape;
  if (parts.size() == 3) {
    shape = {std::atoll(parts[0].c_str()), std::atoll(parts[1].c_str()), std::atoll(parts[2].c_str())};
  }
  if (shape.rows < 1 || shape.hidden < 8 || shape.hidden % 8 != 0 || shape.vocab < 3 * shape.rows) {
    std::cerr << "--shapes: must be NxDxV, D a multiple of 8, V at least 3 N, got " << text << std::endl;
    std::exit(2);
  }
  return shape;
}

std::vector<int32_t> MakeIds(const Shape& shape, bool text, std::mt19937_64& rng) {
  std::vector<double> below;  // cumulative shares
  double sum = 0.0;
  for (int64_t rank = 0; rank < shape.vocab; ++rank) {
    below.push_back(sum += text ? 1.0 / (static_cast<double>(rank) + 2.7) : 1.0);
  }
  std::vector<int32_t> class_of_rank(static_cast<size_t>(shape.vocab));
  for (size_t i = 0; i < class_of_rank.size(); ++i) class_of_rank[i] = static_cast<int32_t>(i);
  std::shuffle(class_of_rank.begin(), class_of_rank.end(), rng);
  std::uniform_real_distribution<double> uniform(0.0, sum);
  std::vector<int32_t> ids;
  for (int64_t row = 0; row < shape.rows; ++row) {
    const auto rank = std::lower_bound(below.begin(), below.end(), uniform(rng)) - below.begin();
    ids.push_back(class_of_rank[static_cast<size_t>(std::min<int64_t>(rank, shape.vocab - 1))]);
  }
  return ids;
}

// The device memory for one shape. `weight` and `rows` (gradients of rows) are in bf16, and their elements
// are neither all zero nor all equal. `out` is for gathered rows, `gradient` is the fp32 gradient by class,
// and `inputs` holds the layout of a chunk. `bad`, `keep` and `first_bad` are for the guard, which finds rows
// that are not finite.
class Buffers {
 public:
  explicit Buffers(const Shape& shape) : shape_(shape) {
    const int64_t elements = shape.vocab * shape.hidden;
    weight = DeviceAlloc<uint16_t>(elements);
    rows = DeviceAlloc<uint16_t>(shape.rows * shape.hidden);
    out = DeviceAlloc<uint16_t>(shape.rows * shape.hidden);
    gradient = DeviceAlloc<float>(elements);
    inputs = DeviceAlloc<uint8_t>(cuda::InputBlockBytes(shape.rows));
    bad = DeviceAlloc<float>(shape.rows);
    keep = DeviceAlloc<int32_t>(shape.rows);
    first_bad = DeviceAlloc<int32_t>(shape.rows);
    Check(cuda::LaunchFillPattern(weight, DType::kBFloat16, elements, nullptr), "LaunchFillPattern");
    Check(cuda::LaunchFillPattern(rows, DType::kBFloat16, shape.rows * shape.hidden, nullptr),
          "LaunchFillPattern");
    Check(cudaMemset(gradient, 0, static_cast<size_t>(elements) * sizeof(float)), "cudaMemset");
    Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  ~Buffers() {
    for (void* p : {static_cast<void*>(weight), static_cast<void*>(rows), static_cast<void*>(out),
                    static_cast<void*>(gradient), static_cast<void*>(inputs), static_cast<void*>(bad),
                    static_cast<void*>(keep), static_cast<void*>(first_bad)}) {
      cudaFree(p);
    }
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  // Lays out a chunk with these ids in the way a head does, and copies the layout to `inputs`.
  cuda::ClassRuns LayOut(const std::vector<int32_t>& ids) {
    std::vector<uint8_t> host(static_cast<size_t>(cuda::InputBlockBytes(shape_.rows)));
    cuda::Carver on_host(host.data()), on_device(inputs);
    const auto block = cuda::RowInputBlock::Carve(on_host, shape_.rows);
    in = cuda::RowInputBlock::Carve(on_device, shape_.rows);
    kernels::Slice slice;
    slice.rows = shape_.rows;
    slice.targets = ids.data();
    kernels::Chunk chunk;
    chunk.options.embedding = kernels::Embedding::kGradients;
    chunk.slices = absl::MakeSpan(&slice, 1);
    cuda::LayoutHead head;
    head.config.hidden_size = shape_.hidden;
    head.config.vocab_size = shape_.vocab;
    head.chunk_rows = shape_.rows;
    const cuda::ChunkLayout layout = cuda::LayOutChunk(head, chunk, block);
    const cuda::ClassRuns runs = cuda::OrderByClass(layout, shape_.vocab, block);
    Check(cudaMemcpy(inputs, host.data(), host.size(), cudaMemcpyDefault), "cudaMemcpy");
    return runs;
  }

  uint16_t *weight = nullptr, *rows = nullptr, *out = nullptr;
  float* gradient = nullptr;
  uint8_t* inputs = nullptr;
  float* bad = nullptr;
  int32_t *keep = nullptr, *first_bad = nullptr;
  cuda::RowInputBlock in;

 private:
  const Shape shape_;
};

Times TimeGather(const Shape& shape, const Buffers& b, Timer& timer) {
  const int64_t d = shape.hidden;
  const cuda::GatherClassesParams p = {.weight = {b.weight, DType::kBFloat16, d, d},
                                       .classes = shape.vocab,
                                       .map = b.in.compact_of_raw,
                                       .targets = b.in.target,
                                       .rows = shape.rows,
                                       .out = {b.out, DType::kBFloat16, d, d}};
  return timer.Measure(*flags.iterations,
                       [&](int) { Check(LaunchGatherClasses(p, timer.stream()), "LaunchGatherClasses"); });
}

Times TimeAdd(const Shape& shape, const Buffers& b, const cuda::ClassRuns& runs, Timer& timer) {
  const cuda::RawRows rows = {
      .first = b.rows, .second = b.rows, .dtype = DType::kBFloat16, .cols = shape.hidden};
  const cuda::CheckRowGradientsParams check = {.gradients = rows,
                                               .raw_of_compact = b.in.raw_of_compact,
                                               .factors = b.in.coef_loss,
                                               .rows = shape.rows,
                                               .bad = b.bad};
  const cuda::GuardRowGradientsParams guard = {.slices = 1,
                                               .slice_begin = b.in.slice_begin,
                                               .bad = b.bad,
                                               .accumulate = b.in.accumulate,
                                               .first_bad = b.first_bad,
                                               .keep = b.keep};
  const cuda::AddClassRunsParams add = {.gradients = rows,
                                        .raw_of_compact = b.in.raw_of_compact,
                                        .factors = b.in.coef_loss,
                                        .keep = b.keep,
                                        .targets = b.in.target,
                                        .row_order = b.in.row_order(),
                                        .run_begin = b.in.run_begin(),
                                        .run_rows = b.in.run_rows(),
                                        .runs = runs.runs,
                                        .long_runs = runs.long_runs,
                                        .weight_gradient = b.gradient,
                                        .ld = shape.hidden};
  return timer.Measure(*flags.iterations, [&](int) {
    Check(LaunchCheckRowGradients(check, timer.stream()), "LaunchCheckRowGradients");
    Check(LaunchGuardRowGradients(guard, timer.stream()), "LaunchGuardRowGradients");
    Check(LaunchAddClassRuns(add, timer.stream()), "LaunchAddClassRuns");
  });
}

// Times a copy that moves `bytes` in total, reads and writes together.
Times TimeCopy(const Buffers& b, int64_t bytes, Timer& timer) {
  return timer.Measure(*flags.iterations, [&](int) {
    Check(cudaMemcpyAsync(b.gradient, b.weight, static_cast<size_t>(bytes / 2), cudaMemcpyDeviceToDevice,
                          timer.stream()),
          "cudaMemcpyAsync");
  });
}

// Times whole chunks of `head`: milliseconds until the results are complete, and until the chunk is done.
Json TimeChunks(kernels::HeadKernels& head, kernels::Embedding embedding, const Shape& shape,
                const std::vector<int32_t>& ids, uint16_t* rows) {
  std::vector<double> results, done;
  const int64_t most = std::min(shape.rows, head.chunk_rows());
  for (int i = 0; i < kWarmUps + *flags.iterations; ++i) {
    kernels::Slice slice;
    slice.rows = most;
    slice.targets = ids.data();
    if (embedding == kernels::Embedding::kRows) {
      slice.grad_hidden = rows;
    } else {
      slice.hidden = rows;
    }
    kernels::Chunk chunk;
    chunk.options.embedding = embedding;
    chunk.hidden_dtype = DType::kBFloat16;
    chunk.accumulate_gradients = embedding == kernels::Embedding::kGradients;
    chunk.slices = absl::MakeSpan(&slice, 1);
    absl::Notification ended;
    double until_results = 0.0;
    const Clock::time_point begin = Clock::now();
    kernels::ChunkCallbacks callbacks;
    callbacks.on_results = [&](absl::Status status) {
      Check(status, "on_results");
      until_results = 1e3 * SecondsSince(begin);
    };
    callbacks.on_done = [&](absl::Status status) {
      Check(status, "on_done");
      ended.Notify();
    };
    head.Submit(&chunk, std::move(callbacks));
    ended.WaitForNotification();
    if (i < kWarmUps) continue;
    results.push_back(until_results);
    done.push_back(1e3 * SecondsSince(begin));
  }
  return {{"rows", most}, {"results", ToJson(Summarise(results))}, {"done", ToJson(Summarise(done))}};
}

Json Compare(const char* what, const Times& t, const Times& copy, double bytes) {
  Json result = {{"time", ToJson(t)},
                 {"copy", ToJson(copy)},
                 {"gbps", bytes / t.median / 1e6},
                 {"of_copy", copy.median / t.median}};
  std::cout << absl::StrFormat("  %-7s %.4f ms, %5.0f GB/s, %.2f of a copy (%.4f ms)", what, t.median,
                               result["gbps"].get<double>(), result["of_copy"].get<double>(), copy.median)
            << std::endl;
  return result;
}

Json RunIds(const Shape& shape, bool text, kernels::HeadKernels& head, Timer& timer) {
  std::mt19937_64 rng(std::random_device{}());
  const std::vector<int32_t> ids = MakeIds(shape, text, rng);
  Buffers buffers(shape);
  const cuda::ClassRuns runs = buffers.LayOut(ids);
  const double row_bytes = static_cast<double>(shape.rows * shape.row_bytes());
  const double gather_bytes = 2.0 * row_bytes;
  const double add_bytes = row_bytes + 8.0 * static_cast<double>(runs.runs * shape.hidden);
  std::cout << absl::StrFormat("%dx%dx%d, ids %s: %d classes, %d of %d rows and more", shape.rows,
                               shape.hidden, shape.vocab, text ? "text" : "uniform", runs.runs,
                               runs.long_runs, cuda::kLongClassRun)
            << std::endl;
  Json result = {{"shape", {{"rows", shape.rows}, {"hidden", shape.hidden}, {"vocab", shape.vocab}}},
                 {"ids", text ? "text" : "uniform"},
                 {"classes", runs.runs},
                 {"classes_of_many_rows", runs.long_runs}};
  const Times gather = TimeGather(shape, buffers, timer);
  result["gather"] =
      Compare("gather", gather, TimeCopy(buffers, static_cast<int64_t>(gather_bytes), timer), gather_bytes);
  const Times add = TimeAdd(shape, buffers, runs, timer);
  result["add"] = Compare("add", add, TimeCopy(buffers, static_cast<int64_t>(add_bytes), timer), add_bytes);
  result["rows"] = TimeChunks(head, kernels::Embedding::kRows, shape, ids, buffers.out);
  result["gradients"] = TimeChunks(head, kernels::Embedding::kGradients, shape, ids, buffers.rows);
  std::cout << result.dump() << std::endl;
  return result;
}

int Main() {
  Timer timer;
  Json results = StartResults(*flags.commit, timer);
  auto backend = Take(kernels::CreateCudaBackend({.deterministic = true}), "CreateCudaBackend");
  for (const std::string& text : *flags.shapes) {
    const Shape shape = ParseShape(text);
    auto head = Take(backend->CreateHead({.hidden_size = shape.hidden,
                                          .vocab_size = shape.vocab,
                                          .compute_dtype = DType::kBFloat16,
                                          .optimizer_state = kernels::OptimizerState::kNone}),
                     "CreateHead");
    for (const bool as_text : {true, false}) {
      results["embedding"].push_back(RunIds(shape, as_text, *head, timer));
    }
  }
  WriteResults(results, *flags.out);
  return 0;
}

}  // namespace
}  // namespace lossd::bench::cuda_embedding

namespace lossd::bench {

int RunCudaEmbeddingBench(int argc, char** argv) {
  cuda_embedding::flags.Parse(argc, argv);
  return cuda_embedding::Main();
}

}  // namespace lossd::bench
