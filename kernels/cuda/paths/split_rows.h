// SPDX-License-Identifier: Apache-2.0
// The rows of a chunk of a head that is split by vocabulary, between the kernels that sum over the classes
// here and those that need the sums over all (kernels/split_rows.h). For a head that is not split every step
// is nothing.
//
// Each function enqueues on the device's compute stream. Driven by the backend's thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_SPLIT_ROWS_H_
#define LOSSD_KERNELS_CUDA_PATHS_SPLIT_ROWS_H_

#include "absl/status/status.h"
#include "kernels/cuda/kernels/split_rows.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/split_row_memory.h"

namespace lossd::kernels::cuda {

class RowMerger {
 public:
  explicit RowMerger(const PathContext& context);

  // Sums of rows become those over the classes of all parts.
  absl::Status Merge(const LossTerms& terms, const RowInputs& in, const hopper::FusedRows& rows) const;
  absl::Status Merge(const LossTerms& terms, const RowInputs& in, RunningRow* rows) const;
  // Where merged sums of fused rows are relative to something else than what is stored.
  void UseIn(hopper::FusedRows& rows) const;

 private:
  const PathContext& context_;
  const SplitRows rows_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_SPLIT_ROWS_H_
