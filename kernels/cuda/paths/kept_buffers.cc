// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/kept_buffers.h"

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

}  // namespace lossd::kernels::cuda
