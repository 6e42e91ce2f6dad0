// SPDX-License-Identifier: Apache-2.0
// The memory of a list of elements of ds that becomes a weight gradient (kept_entries.h). Pure functions;
// thread-safe.
#ifndef LOSSD_KERNELS_CUDA_PATHS_KEPT_BUFFERS_H_
#define LOSSD_KERNELS_CUDA_PATHS_KEPT_BUFFERS_H_

#include <cstdint>

#include "kernels/cuda/device/device_memory.h"

namespace lossd::kernels::cuda {

// Bits of an entry's key: those of the row, and all that a sort has to look at.
int RowBits(int64_t rows);
int KeyBits(int64_t rows, int64_t vocab);

// Where the entries are, [capacity] each unless said otherwise.
struct KeptBuffers {
  uint64_t* keys = nullptr;  // as in KeptList
  float* coefs = nullptr;
  float* weight_sum = nullptr;  // [padded_hidden], of label smoothing

  // Used when all entries are there.
  uint64_t* spare_keys = nullptr;
  float* spare_coefs = nullptr;
  int32_t* runs = nullptr;  // [2 * capacity]
  uint8_t* sort_scratch = nullptr;
  float* hidden_sum = nullptr;  // [padded_hidden]
  float* partials = nullptr;    // ColumnSumScratch(padded_hidden); also of weight_sum

  // Takes the two groups from these, which may be the same.
  static KeptBuffers Carve(int64_t capacity, int64_t padded_hidden, Carver& lists, Carver& scratch);
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_KEPT_BUFFERS_H_
