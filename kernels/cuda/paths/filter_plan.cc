// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/filter_plan.h"

#include <algorithm>
#include <bit>

#include "kernels/cuda/kernels/scratch_sizes.h"

namespace lossd::kernels::cuda {

int RowBits(int64_t rows) { return std::bit_width(static_cast<uint64_t>(rows - 1)); }

// One class more than there are: an empty entry, all bits set, comes after every other. A sort looks at one
// bit at least.
int KeyBits(int64_t rows, int64_t vocab) {
  return RowBits(rows) + std::bit_width(static_cast<uint64_t>(std::max<int64_t>(vocab, 1)));
}

KeptBuffers KeptBuffers::Carve(int64_t capacity, int64_t padded_hidden, Carver& lists, Carver& scratch) {
  KeptBuffers b;
  b.keys = lists.Take<uint64_t>(capacity);
  b.coefs = lists.Take<float>(capacity);
  b.weight_sum = lists.Take<float>(padded_hidden);
  b.spare_keys = scratch.Take<uint64_t>(capacity);
  b.spare_coefs = scratch.Take<float>(capacity);
  b.runs = scratch.Take<int32_t>(2 * capacity);
  b.sort_scratch = scratch.Take<uint8_t>(static_cast<int64_t>(SortScratchBytes(capacity)));
  b.hidden_sum = scratch.Take<float>(padded_hidden);
  b.partials = scratch.Take<float>(ColumnSumScratch(padded_hidden));
  return b;
}

FilterShape FilterShapeOf(const HeadConfig& config, const HeadSizes& sizes) {
  return {.chunk_rows = sizes.chunk_rows,
          .vocab = sizes.vocab,
          .padded_vocab = sizes.padded_vocab,
          .padded_hidden = sizes.padded_hidden,
          .dtype = config.compute_dtype,
          .pooled = config.logits == Logits::kRecomputed ? kPooledRecomputed : kPooledCandidates};
}

FilterShape PlannedShapeOf(const HeadConfig& config, const HeadSizes& sizes) {
  FilterShape shape = FilterShapeOf(config, sizes);
  if (sizes.is_split()) shape.vocab = sizes.most_classes;
  shape.padded_vocab = sizes.planned_vocab();
  return shape;
}

absl::string_view WhyNotFilteredOnDevice(const FilterShape& shape, const DeviceLimits& limits) {
  if (!limits.has_branches) return "the driver is too old for branches on the device";
  if (!CanFilterRows(shape.padded_hidden, shape.dtype)) return "the hidden size is too large for one block";
  return "";
}

FilterBuffers FilterBuffers::Carve(const FilterShape& shape, Carver& own, Carver& lists, Carver& scratch) {
  FilterBuffers b;
  b.pool = own.Take<int32_t>(shape.capacity());
  b.rows = own.Take<SelectedRow>(shape.chunk_rows);
  b.counters = own.Take<FilterCounters>(1);
  b.kept = KeptBuffers::Carve(shape.entries(), shape.padded_hidden, lists, scratch);
  return b;
}

int64_t FilterBuffers::LogitsBytes(const FilterShape& shape) {
  Carver own(nullptr), logits(nullptr);
  Carve(shape, own, logits, logits);
  return logits.used();
}

}  // namespace lossd::kernels::cuda
