// SPDX-License-Identifier: Apache-2.0
// What exactly-once costs: the ledger's work for one microbatch, as the engine does it.
//
// Per microbatch: one Declare for each stream (targets kept and compared), then Reserve and Commit for each
// slice. Arguments: rows of the microbatch, rows of a slice, streams.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#include "absl/types/span.h"
#include "kernels/backend.h"
#include "server/engine/ledger.h"

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

// A step of 16 new microbatches; the time is one microbatch's.
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

// The same microbatch sent again.
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
