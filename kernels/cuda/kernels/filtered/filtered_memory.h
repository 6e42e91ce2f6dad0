// SPDX-License-Identifier: Apache-2.0
// What the kernels behind filtered gradients (filtered.h) keep of a row, and which rows they can take. Plain
// data and pure functions; also of programs without CUDA.
//
// The file is shorter than 60 lines because plans without CUDA (paths/filter_plan.h) need nothing else of
// filtered.h.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_FILTERED_FILTERED_MEMORY_H_
#define LOSSD_KERNELS_CUDA_KERNELS_FILTERED_FILTERED_MEMORY_H_

#include <cstdint>

#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// Most candidates of one row; 1 / epsilon of the default.
inline constexpr int kMaxRowCandidates = 4096;

// Threads of a block that holds four 16-byte vectors a thread, the most.
inline constexpr int kMostFilterThreads = 512;
// Whether rows of `ld` elements are short enough for LaunchFilterRows.
constexpr bool CanFilterRows(int64_t ld, DType dtype) {
  return ld * static_cast<int64_t>(SizeOf(dtype)) / 16 <= 4 * kMostFilterThreads;
}

// A row and its candidates: the classes whose probability may reach epsilon, the target left out. The sums
// are over classes other than the target, in units and relative to M as in row_loss.cu.
struct SelectedRow {
  int32_t begin;  // of its candidates in the pool
  int32_t count;
  int32_t finite;  // whether lse and loss are
  float max;       // of z, the target's included: M = max f
  float sum;       // of 2^d
  float spread;    // of 2^d d
  float weighted;  // of u (z - z_y)
  float total;     // sum with the target
  float target_dot;
  float listed_sum;  // of 2^d over the candidates
  float listed_spread;
};

// Runs of entries of one class, and how many of the short ones have been taken up.
struct RunCounters {
  int32_t short_runs = 0;
  int32_t long_runs = 0;
  unsigned long long next_item = 0;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_FILTERED_FILTERED_MEMORY_H_
