// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/sample_plan.h"

#include <algorithm>

#include "kernels/cuda/kernels/scratch_sizes.h"
#include "kernels/cuda/paths/recomputed_plan.h"

namespace lossd::kernels::cuda {
namespace {

// Of an entry and what belongs to it in SampleBuffers, but for `listed`.
constexpr int64_t kEntryBytes = 44;
// What else there is, and what rounding adds.
constexpr int64_t kMatrixSlack = int64_t{4} << 20;

int64_t MatrixRowBytes(const FilterShape& shape) {
  return shape.padded_vocab * static_cast<int64_t>(SizeOf(shape.dtype));
}

// Buffers of hot classes.
void CarveHot(const FilterShape& shape, Carver& own, Carver& hidden, Carver& logits, SampleBuffers& b) {
  const int64_t elements = shape.chunk_rows * kHotClasses * static_cast<int64_t>(SizeOf(shape.dtype));
  b.hot_widths = own.Take<float>(shape.chunk_rows);
  b.hot_listed = hidden.Take<uint8_t>(elements);
  b.hot_elements = logits.Take<uint8_t>(elements);
  b.hot_weight =
      logits.Take<uint8_t>(kHotClasses * shape.padded_hidden * static_cast<int64_t>(SizeOf(shape.dtype)));
  b.hot_hidden = logits.Take<float>(shape.chunk_rows * shape.padded_hidden);
  b.hot_weight_gradient = logits.Take<float>(kHotClasses * shape.padded_hidden);
  b.hot_bias_gradient = logits.Take<float>(kHotClasses);
  b.hot_partials = logits.Take<float>(ColumnSumScratch(kHotClasses));
}

}  // namespace

int64_t PooledSamples(float threshold) {
  if (threshold >= 0x1p-10f) return 192;
  return threshold >= 0x1p-11f ? 288 : kMostPooledSamples;
}

int64_t SampleCapacity(const FilterShape& shape, int64_t rows, float threshold) {
  const int64_t in_matrix = rows * MatrixRowBytes(shape) / kEntryBytes;
  const int64_t wanted = std::min(rows * PooledSamples(threshold), in_matrix);
  const int64_t least = std::max(kLeastSamples, rows * (kSpareEntries + 1));
  return std::min(rows * (shape.vocab + kSpareEntries), std::max(wanted, least));
}

SampleBuffers SampleBuffers::Carve(const FilterShape& shape, Carver& own, Carver& hidden, Carver& logits) {
  const int64_t capacity = SampleCapacity(shape, shape.chunk_rows, 0.0f);
  SampleBuffers b;
  b.rows = own.Take<SampledRow>(shape.chunk_rows);
  b.counters = own.Take<SampleCounters>(1);
  b.runs = own.Take<RunCounters>(1);
  b.listed = hidden.Take<SampleEntry>(capacity);
  b.entries = logits.Take<SampleEntry>(capacity);
  b.kept = KeptBuffers::Carve(capacity, shape.padded_hidden, logits, logits);
  if (HasHotClasses(shape)) CarveHot(shape, own, hidden, logits, b);
  return b;
}

RecomputedSampleBuffers RecomputedSampleBuffers::Carve(const FilterShape& shape, Carver& own, Carver& hidden,
                                                       Carver& arena) {
  RecomputedSampleBuffers b;
  b.rows = own.Take<SampledRow>(shape.chunk_rows);
  b.counters = own.Take<SampleCounters>(1);
  b.runs = own.Take<RunCounters>(1);
  b.listed = hidden.Take<SampleEntry>(shape.entries());
  b.entries = arena.Take<SampleEntry>(shape.entries());
  b.kept = KeptBuffers::Carve(shape.entries(), shape.padded_hidden, arena, arena);
  return b;
}

SampledBlockArena SampledBlockArena::Carve(const FilterShape& shape, DType elements, int64_t rows,
                                           uint8_t* base) {
  SampledBlockArena arena;
  Carver carver(base);
  arena.elements = carver.Take<uint8_t>(rows * shape.padded_vocab * static_cast<int64_t>(SizeOf(elements)));
  arena.tiles = hopper::TilePartials::Carve(carver, rows, shape.vocab);
  arena.bytes = carver.used();
  return arena;
}

int64_t ChooseSampledRows(const FilterShape& shape, DType elements, int64_t rows, int64_t arena_bytes) {
  int64_t most = 1;  // in units of 8
  for (int64_t fails = rows / kLeastBlockRows + 1; fails - most > 1;) {
    const int64_t middle = most + (fails - most) / 2;
    const int64_t bytes = SampledBlockArena::Carve(shape, elements, middle * kLeastBlockRows, nullptr).bytes;
    (bytes <= arena_bytes ? most : fails) = middle;
  }
  return RoundUp(CeilDiv(rows, CeilDiv(rows, most * kLeastBlockRows)), kLeastBlockRows);
}

int64_t LeastSampledArenaBytes(const FilterShape& shape) {
  Carver own(nullptr), hidden(nullptr), arena(nullptr);
  RecomputedSampleBuffers::Carve(shape, own, hidden, arena);
  return std::max(arena.used(),
                  SampledBlockArena::Carve(shape, DType::kFloat32, kLeastBlockRows, nullptr).bytes);
}

absl::string_view WhyNotSampledOnDevice(const FilterShape& shape, const DeviceLimits& limits) {
  if (shape.vocab > kMostSampledClasses) return "too many classes for the memory of one block";
  return WhyNotFilteredOnDevice(shape, limits);
}

bool HasHotClasses(const FilterShape& shape) {
  if (shape.vocab < 12 * kHotClasses || shape.chunk_rows < kLeastHotRows) return false;
  Carver own(nullptr), hidden(nullptr), logits(nullptr);
  SampleBuffers b;
  CarveHot(shape, own, hidden, logits, b);
  const int64_t lists = SampleCapacity(shape, shape.chunk_rows, 0.0f) * kEntryBytes;
  return lists + logits.used() + kMatrixSlack <= shape.chunk_rows * MatrixRowBytes(shape);
}

float LeastTaken(int64_t rows) {
  constexpr float kShare = 90.0f / 8192.0f;
  constexpr float kSteady = 2.0f;  // popularity of what is taken once in every chunk
  return kSteady * kShare * static_cast<float>(rows);
}

HotClasses CarveHotClasses(const FilterShape& shape, Carver& carver) {
  HotClasses hot;
  if (!HasHotClasses(shape)) return hot;
  hot.vocab = shape.vocab;
  hot.bits = carver.Take<uint32_t>(hot.groups());
  hot.bases = carver.Take<int32_t>(hot.groups());
  hot.ids = carver.Take<int32_t>(kHotClasses);
  hot.count = carver.Take<int32_t>(1);
  hot.taken = carver.Take<int32_t>(hot.vocab);
  hot.popularity = carver.Take<float>(hot.vocab);
  hot.histogram = carver.Take<int32_t>(kHotBins);
  return hot;
}

}  // namespace lossd::kernels::cuda
