// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/split_row_memory.h"

#include "kernels/cuda/device/device_memory.h"

namespace lossd::kernels::cuda {

SplitRows SplitRows::Carve(const HeadSizes& sizes, uint8_t* base, int64_t* bytes) {
  Carver carver(base);
  SplitRows rows;
  rows.columns = carver.Take<int32_t>(sizes.chunk_rows);
  rows.own = carver.Take<RowRecord>(sizes.chunk_rows);
  rows.all = carver.Take<RowRecord>(sizes.parts * sizes.chunk_rows);
  rows.sum_reference = carver.Take<float>(sizes.chunk_rows);
  rows.norm_sums = carver.Take<float>(2 * sizes.padded_hidden);
  rows.levels = carver.Take<int32_t>(sizes.parts);
  rows.own_sums = carver.Take<float>(2 * sizes.chunk_rows);
  rows.all_sums = carver.Take<float>(2 * sizes.parts * sizes.chunk_rows);
  if (bytes != nullptr) *bytes = carver.used();
  return rows;
}

void SplitRows::Claim(const HeadSizes& sizes, PathClaims& claims) {
  if (!sizes.is_split()) return;
  int64_t bytes = 0;
  Carve(sizes, nullptr, &bytes);
  claims.Claim(Region::kSplitRows, bytes);
}

}  // namespace lossd::kernels::cuda
