// SPDX-License-Identifier: Apache-2.0
// When a chunk can be filtered on the GPU (WhyNotFilteredOnDevice), and the memory that this takes
// (FilterBuffers). Sampled gradients use FilterShape and KeptBuffers too. Pure functions; thread-safe.
#ifndef LOSSD_KERNELS_CUDA_PATHS_FILTER_PLAN_H_
#define LOSSD_KERNELS_CUDA_PATHS_FILTER_PLAN_H_

#include <algorithm>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/filtered/filtered_memory.h"
#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// Bits of an entry's key: those of the row, and all that a sort has to look at.
int RowBits(int64_t rows);
int KeyBits(int64_t rows, int64_t vocab);

// The memory of a list of elements of ds that becomes a weight gradient (kept_entries.h): where the entries
// are, [capacity] each unless said otherwise.
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

// Candidates that a chunk has room for, per row on average, but kLeastPool if its rows are few; more make the
// chunk exact.
inline constexpr int64_t kPooledCandidates = 128;
// The same for a head that recomputes logits; its sampled entries have the same room.
inline constexpr int64_t kPooledRecomputed = 192;
inline constexpr int64_t kLeastPool = int64_t{16} * kMaxRowCandidates;

// What the plan needs to know of a head, or of one chunk of it.
struct FilterShape {
  int64_t chunk_rows = 0;  // of a chunk: those it has
  int64_t vocab = 0;
  int64_t padded_vocab = 0;
  int64_t padded_hidden = 0;
  DType dtype = DType::kBFloat16;
  int64_t pooled = kPooledCandidates;  // a row on average

  int64_t capacity() const { return std::min(chunk_rows * vocab, std::max(chunk_rows * pooled, kLeastPool)); }
  // Kept elements at most: the candidates and one target a row.
  int64_t entries() const { return capacity() + chunk_rows; }
};

FilterShape FilterShapeOf(const HeadConfig& config, const HeadSizes& sizes);
// What all parts of a head that is split plan with, though some have one class less. Of other heads the same.
FilterShape PlannedShapeOf(const HeadConfig& config, const HeadSizes& sizes);

// Why this GPU computes a chunk of such a head exactly although its options ask for a filter, or "".
absl::string_view WhyNotFilteredOnDevice(const FilterShape& shape, const DeviceLimits& limits);

// Numbers that kernels hand to each other, zeroed before each chunk.
struct FilterCounters {
  int32_t used = 0;  // of the pool
  int32_t kept = 0;  // entries
  RunCounters runs;
};

struct FilterBuffers {
  int32_t* pool = nullptr;      // [capacity]
  SelectedRow* rows = nullptr;  // [chunk_rows]
  FilterCounters* counters = nullptr;

  // Written row by row. Where logits are stored this group and the next lie in their memory, because a chunk
  // that is known to be filtered reads its logits no more; where they are recomputed they lie beside them,
  // because the logits of other rows are still to come.
  KeptBuffers kept;

  // Takes the three groups, one after the other, from these.
  static FilterBuffers Carve(const FilterShape& shape, Carver& own, Carver& lists, Carver& scratch);
  // Bytes of the second and third group.
  static int64_t LogitsBytes(const FilterShape& shape);
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_FILTER_PLAN_H_
