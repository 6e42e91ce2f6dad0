// SPDX-License-Identifier: Apache-2.0
// Facts about kernel launches that are known without a GPU: the scratch memory that a launch needs in
// addition to operands and results, and which kernel computes a norm (NormPlan). Pure functions; thread-safe.
// The header needs no CUDA, so plans can be made on any machine.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_LAUNCH_PLAN_H_
#define LOSSD_KERNELS_CUDA_KERNELS_LAUNCH_PLAN_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace lossd::kernels::cuda {

// The most groups of rows into which a column sum is divided (rows.h).
inline constexpr int64_t kColumnSplits = 64;
// Number of floats of LaunchColumnSum's `partials`.
constexpr int64_t ColumnSumScratch(int64_t cols) { return kColumnSplits * cols; }

// Number of doubles of LaunchSquareSum's `partials` (tensor_ops.h).
inline constexpr int kSquareSumPartials = 1024;

// Number of floats that LaunchNormBackward needs for its first stage (norm.h).
constexpr int64_t NormPartialFloats(int64_t hidden_size, int multiprocessors) {
  return 2 * int64_t{multiprocessors} * hidden_size;
}

// Bytes of SortParams::scratch (filtered/filtered.h). This is an upper bound, because CUB tells the exact
// size only on a machine with a device. CUB needs counters for each tile of a few thousand entries, for up to
// eight passes.
constexpr size_t SortScratchBytes(int64_t count) {
  return (size_t{512} << 10) + 2 * static_cast<size_t>(count);
}

// Where a norm kernel keeps a row between its passes over the row. Faster kernels come first.
enum class NormRows : uint8_t {
  kRegisters,  // forward
  // Backward on Hopper (hopper/norm_backward.cu): in a ring in shared memory; one thread copies whole rows.
  kBulkCopies,
  kWarpCopies,  // backward: in a ring in shared memory; each warp copies its part of a row
  kNowhere,     // works for any row: each pass reads the row again
};
inline absl::string_view Name(NormRows rows) {
  switch (rows) {
    case NormRows::kRegisters:
      return "rows in registers";
    case NormRows::kBulkCopies:
      return "rows by bulk copies";
    case NormRows::kWarpCopies:
      return "rows by copies of warps";
    case NormRows::kNowhere:
      return "rows read again for each pass";
  }
  return "";
}

// Which kernel the launch of a norm (norm.h) uses. This depends only on dtypes, sizes, alignment and the
// device.
struct NormPlan {
  NormRows rows = NormRows::kNowhere;
  // Why the launch does not use a faster kernel of the same direction (forward or backward). "": `rows` is
  // the fastest kernel of its direction.
  absl::string_view reason;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_LAUNCH_PLAN_H_
