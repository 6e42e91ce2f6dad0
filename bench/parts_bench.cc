// SPDX-License-Identifier: Apache-2.0
// Benchmarks parts of a server on the CPU: computing a chunk, and counting its rows exactly once (the
// ledger).
//
//   server_bench parts [--benchmark_filter=BM_Chunk] [more flags of Google Benchmark]
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "absl/types/span.h"
#include "bench/server_bench.h"
#include "benchmark/benchmark.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/row_loss.h"
#include "kernels/cpu/threads_and_memory.h"
#include "server/engine/ledger.h"

// BM_Chunk: rows per second and GFLOP/s of one chunk on the CPU backend, with loss, dx and dW (three
// products), or with the loss alone (one product). Arguments: rows, hidden size, vocabulary, whether
// gradients are wanted. BM_RowPass times one part of BM_Chunk, the loops over the logits.
namespace lossd::kernels {
namespace {

std::vector<float> Normal(int64_t n, float deviation) {
  std::mt19937_64 rng(20240501);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = normal(rng);
  return values;
}

std::vector<int32_t> Targets(int64_t n, int64_t vocab_size) {
  std::mt19937_64 rng(7);
  std::uniform_int_distribution<int32_t> uniform(0, static_cast<int32_t>(vocab_size - 1));
  std::vector<int32_t> targets(static_cast<size_t>(n));
  for (int32_t& target : targets) target = uniform(rng);
  return targets;
}

void BM_Chunk(benchmark::State& state) {
  const int64_t n = state.range(0);
  const int64_t d = state.range(1);
  const int64_t v = state.range(2);
  const bool gradients = state.range(3) != 0;
  auto backend = CreateCpuBackend({.workspace_bytes = int64_t{1} << 30});
  HeadConfig config;
  config.hidden_size = d;
  config.vocab_size = v;
  config.optimizer_state = OptimizerState::kNone;
  auto head = (*backend)->CreateHead(config);
  const std::vector<float> weight = Normal(v * d, 0.05f);
  if (!(*head)
           ->WriteTensor({Param::kWeight, Role::kValue}, 0, v, DType::kFloat32,
                         {reinterpret_cast<const uint8_t*>(weight.data()), weight.size() * sizeof(float)})
           .ok()) {
    state.SkipWithError("cannot write the weight");
    return;
  }
  const std::vector<float> hidden = Normal(n * d, 1.0f);
  const std::vector<int32_t> targets = Targets(n, v);
  std::vector<float> grad_hidden(hidden.size());
  Slice slice;
  slice.rows = n;
  slice.hidden = hidden.data();
  slice.targets = targets.data();
  if (gradients) slice.grad_hidden = grad_hidden.data();
  Chunk chunk;
  chunk.hidden_dtype = DType::kFloat32;
  chunk.accumulate_gradients = gradients;
  chunk.slices = absl::MakeSpan(&slice, 1);
  for (auto _ : state) {
    bool ok = false;
    (*head)->Submit(&chunk, {[](absl::Status) {}, [&ok](absl::Status status) { ok = status.ok(); }});
    if (!ok) state.SkipWithError("the chunk failed");
  }
  const double flops = 2.0 * static_cast<double>(n * d * v) * (gradients ? 3 : 1);
  state.SetItemsProcessed(state.iterations() * n);
  state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_Chunk)
    ->Args({2048, 128, 8192, 1})
    ->Args({512, 512, 32000, 1})
    ->Args({2048, 128, 8192, 0})
    ->Args({512, 512, 32000, 0})
    ->Unit(benchmark::kMillisecond)
    ->MeasureProcessCPUTime()
    ->UseRealTime();

// The row pass alone, with the same number of threads. Arguments: rows, vocabulary, whether gradients are
// wanted.
void BM_RowPass(benchmark::State& state) {
  const int64_t n = state.range(0);
  const int64_t v = state.range(1);
  const bool gradients = state.range(2) != 0;
  ThreadPool pool(static_cast<int>(std::thread::hardware_concurrency()));
  RowLossContext context;
  context.vocab_size = v;
  context.classes = v;
  context.class_weight_sum = static_cast<double>(v);
  const RowLoss row_loss(SelectRowLoops(), context);
  const std::vector<float> logits = Normal(n * v, 1.0f);
  const std::vector<int32_t> targets = Targets(n, v);
  std::vector<float> work;
  for (auto _ : state) {
    state.PauseTiming();
    work = logits;  // the pass writes exponentials or gradients over them
    state.ResumeTiming();
    pool.ParallelFor(n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        RowRequest request;
        request.target = targets[static_cast<size_t>(i)];
        request.want_gradient = gradients;
        float* const row = &work[static_cast<size_t>(i * v)];
        const RowStatistics own = row_loss.Summarise(request, row);
        benchmark::DoNotOptimize(row_loss.Finish(request, own, own, row));
      }
    });
  }
  state.SetItemsProcessed(state.iterations() * n);
}
BENCHMARK(BM_RowPass)
    ->Args({2048, 8192, 1})
    ->Args({512, 32000, 1})
    ->Args({2048, 8192, 0})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace
}  // namespace lossd::kernels

// The cost of exactly-once: the ledger's work for one microbatch, as the engine does it.
//
// A microbatch takes one Declare for each stream (its targets are stored and compared), then Reserve and
// Commit for each slice. Arguments: rows of the microbatch, rows of a slice, streams.
namespace lossd::engine {
namespace {

std::vector<int32_t> RandomTargets(int64_t rows) {
  std::mt19937 rng(1);
  std::vector<int32_t> targets(static_cast<size_t>(rows));
  for (int32_t& target : targets)
    target = rng() % 16 == 0 ? kernels::kIgnoredTarget : static_cast<int32_t>(rng() % 128256);
  return targets;
}

void RunMicrobatch(Ledger& ledger, uint64_t id, const std::vector<int32_t>& targets, int64_t slice_rows,
                   int64_t streams) {
  const auto rows = static_cast<int64_t>(targets.size());
  const MicrobatchTerms terms{.microbatch_rows = rows};
  const auto all = absl::MakeConstSpan(targets);
  for (int64_t i = 0; i < streams; ++i) {
    const RowRange part{rows * i / streams, rows * (i + 1) / streams};
    const auto piece = all.subspan(static_cast<size_t>(part.begin), static_cast<size_t>(part.size()));
    if (!ledger.Declare(id, terms, part, {piece}).ok()) std::abort();
    for (int64_t row = part.begin; row < part.end; row += slice_rows) {
      const RowRange slice{row, std::min(part.end, row + slice_rows)};
      std::vector<uint8_t> mask(static_cast<size_t>(slice.size()));
      benchmark::DoNotOptimize(ledger.AnyReserved(id, slice));
      benchmark::DoNotOptimize(ledger.Reserve(id, slice, absl::MakeSpan(mask)));
      benchmark::DoNotOptimize(ledger.Commit(id, slice));
    }
  }
}

// A step of 16 new microbatches. The reported time is the time of one microbatch.
void BM_NewMicrobatch(benchmark::State& state) {
  const std::vector<int32_t> targets = RandomTargets(state.range(0));
  Ledger ledger(int64_t{1} << 26, int64_t{1} << 18);
  uint64_t id = 0;
  for (auto _ : state) {
    if (id == 16) {
      ledger.Clear();
      id = 0;
    }
    RunMicrobatch(ledger, id++, targets, state.range(1), state.range(2));
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

// A microbatch that is sent again.
void BM_RepeatedMicrobatch(benchmark::State& state) {
  const std::vector<int32_t> targets = RandomTargets(state.range(0));
  Ledger ledger(int64_t{1} << 26, int64_t{1} << 18);
  for (auto _ : state) RunMicrobatch(ledger, 0, targets, state.range(1), state.range(2));
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void Shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"rows", "slice_rows", "streams"});
  benchmark->Args({1024, 512, 1})->Args({4096, 512, 1})->Args({4096, 256, 4})->Args({16384, 512, 4});
}
BENCHMARK(BM_NewMicrobatch)->Apply(Shapes)->Unit(benchmark::kMicrosecond);
BENCHMARK(BM_RepeatedMicrobatch)->Apply(Shapes)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace lossd::engine

namespace lossd::bench {

int RunPartsBench(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

}  // namespace lossd::bench
