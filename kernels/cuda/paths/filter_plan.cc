// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/filter_plan.h"

namespace lossd::kernels::cuda {

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
