// SPDX-License-Identifier: Apache-2.0
// What a head that is split by vocabulary keeps of the rows of a chunk (split_rows.h), and where it lies.
// Pure functions; also of programs without CUDA.
#ifndef LOSSD_KERNELS_CUDA_PATHS_SPLIT_ROW_MEMORY_H_
#define LOSSD_KERNELS_CUDA_PATHS_SPLIT_ROW_MEMORY_H_

#include <cstdint>

#include "kernels/cuda/kernels/row_sums.h"
#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/cuda/paths/path_memory.h"

namespace lossd::kernels::cuda {

// In Region::kSplitRows.
struct SplitRows {
  int32_t* columns = nullptr;      // [chunk_rows], RowInputs::targets
  RowRecord* own = nullptr;        // [chunk_rows]
  RowRecord* all = nullptr;        // [parts, chunk_rows]
  float* sum_reference = nullptr;  // [chunk_rows], FusedRows::sum_reference
  float* norm_sums = nullptr;      // [2, padded_hidden]
  // Of gradients that are not exact.
  int32_t* levels = nullptr;  // [parts], SampleCounters::level
  // Variances and squares, or dropped masses: [2, chunk_rows] of the classes here, and of all parts.
  float* own_sums = nullptr;
  float* all_sums = nullptr;

  static SplitRows Carve(const HeadSizes& sizes, uint8_t* base, int64_t* bytes = nullptr);
  static void Claim(const HeadSizes& sizes, PathClaims& claims);
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_SPLIT_ROW_MEMORY_H_
