// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/split_rows.h"

#include "kernels/cuda/device/cuda_status.h"

namespace lossd::kernels::cuda {

RowMerger::RowMerger(const PathContext& context)
    : context_(context), rows_(SplitRows::Carve(context.sizes, context.memory[Region::kSplitRows])) {}

void RowMerger::UseIn(hopper::FusedRows& rows) const {
  if (context_.sizes.is_split()) rows.sum_reference = rows_.sum_reference;
}

absl::Status RowMerger::Merge(const LossTerms& terms, const RowInputs& in,
                              const hopper::FusedRows& rows) const {
  if (!context_.sizes.is_split()) return absl::OkStatus();
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchRecordRows(terms, in, rows, rows_.own, stream), "record kernel");
  LOSSD_RETURN_IF_ERROR(context_.link->exchange->Gather(rows_.own, rows_.all,
                                                        in.rows * static_cast<int64_t>(sizeof(RowRecord))));
  return ToStatus(LaunchMergeRows(terms, in, rows_.all, context_.sizes.parts, rows, stream), "merge kernel");
}

absl::Status RowMerger::Merge(const LossTerms& terms, const RowInputs& in, RunningRow* rows) const {
  if (!context_.sizes.is_split()) return absl::OkStatus();
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchRecordRows(terms, in, rows, rows_.own, stream), "record kernel");
  LOSSD_RETURN_IF_ERROR(context_.link->exchange->Gather(rows_.own, rows_.all,
                                                        in.rows * static_cast<int64_t>(sizeof(RowRecord))));
  return ToStatus(LaunchMergeRows(terms, in, rows_.all, context_.sizes.parts, rows, stream), "merge kernel");
}

}  // namespace lossd::kernels::cuda
