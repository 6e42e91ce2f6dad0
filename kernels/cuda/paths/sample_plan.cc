#include "kernels/cuda/paths/sample_plan.h"

#include <algorithm>

namespace lossd::kernels::cuda {

int64_t PooledSamples(float threshold) {
  if (threshold >= 0x1p-10f) return 192;
  return threshold >= 0x1p-11f ? 288 : kMostPooledSamples;
}

int64_t SampleCapacity(const FilterShape& shape, int64_t rows, float threshold) {
  return std::min(rows * shape.vocab, std::max(rows * PooledSamples(threshold), kLeastSamples));
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
  return b;
}

}  // namespace lossd::kernels::cuda
