#include "kernels/cuda/paths/filter_plan.h"

#include <bit>

#include "kernels/cuda/kernels/rows.h"

namespace lossd::kernels::cuda {

FilterShape FilterShapeOf(const HeadConfig& config, const HeadSizes& sizes) {
  return {.chunk_rows = sizes.chunk_rows,
          .vocab = sizes.vocab,
          .padded_vocab = sizes.padded_vocab,
          .padded_hidden = sizes.padded_hidden,
          .dtype = config.compute_dtype};
}

absl::string_view WhyNotFilteredOnDevice(const FilterShape& shape, const DeviceLimits& limits) {
  if (!limits.has_branches) return "the driver is too old for branches on the device";
  if (!CanFilterRows(shape.padded_hidden, shape.dtype)) return "the hidden size is too large for one block";
  return "";
}

FilterBuffers FilterBuffers::Carve(const FilterShape& shape, Carver& own, Carver& lists, Carver& scratch) {
  FilterBuffers b;
  const int64_t entries = shape.entries();
  b.pool = own.Take<int32_t>(shape.capacity());
  b.rows = own.Take<SelectedRow>(shape.chunk_rows);
  b.counters = own.Take<FilterCounters>(1);
  b.keys = lists.Take<uint64_t>(entries);
  b.coefs = lists.Take<float>(entries);
  b.weight_sum = lists.Take<float>(shape.padded_hidden);
  b.spare_keys = scratch.Take<uint64_t>(entries);
  b.spare_coefs = scratch.Take<float>(entries);
  b.runs = scratch.Take<int32_t>(2 * entries);
  b.sort_scratch = scratch.Take<uint8_t>(static_cast<int64_t>(SortScratchBytes(entries)));
  b.hidden_sum = scratch.Take<float>(shape.padded_hidden);
  b.partials = scratch.Take<float>(ColumnSumScratch(shape.padded_hidden));
  return b;
}

int64_t FilterBuffers::LogitsBytes(const FilterShape& shape) {
  Carver own(nullptr), logits(nullptr);
  Carve(shape, own, logits, logits);
  return logits.used();
}

int RowBits(int64_t rows) { return std::bit_width(static_cast<uint64_t>(rows - 1)); }

// One class more than there are: an empty entry, all bits set, comes after every other.
int KeyBits(int64_t rows, int64_t vocab) {
  return RowBits(rows) + std::bit_width(static_cast<uint64_t>(vocab));
}

}  // namespace lossd::kernels::cuda
