// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/filtered_stored_path.h"

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/paths/decision_branch.h"
#include "kernels/cuda/paths/kept_entries.h"
#include "kernels/cuda/paths/path_choices.h"

namespace lossd::kernels::cuda {

FilteredStoredPath::FilteredStoredPath(const PathContext& context)
    : context_(context), exact_(context), staged_(context), filter_(context, buffers_) {
  Carver own(context.memory[Region::kFilter]), logits(context.memory[Region::kLogits]);
  buffers_ = FilterBuffers::Carve(FilterShapeOf(context.config, context.sizes), own, logits, logits);
}

absl::Status FilteredStoredPath::Prepare(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(staged_.Prepare(job, Kept::kNothing));
  return exact_.Prepare(job);
}

absl::Status FilteredStoredPath::Select(const ChunkJob& job) const {
  return staged_.ForEachBlock(job, Kept::kNothing, [&](const RowBlock& rows, const LogitMatrix& logits) {
    return ToStatus(
        LaunchSelectRows({logits, job.terms, rows.in, rows.out, filter_.Selection(job, rows.begin)},
                         context_.device->compute()),
        "selection kernel");
  });
}

// Row results and dx, either way.
absl::Status FilteredStoredPath::Loss(const ChunkJob& job) {
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_ERROR(filter_.Begin(job));
  LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, stream));
  LOSSD_RETURN_IF_ERROR(Select(job));
  LOSSD_RETURN_IF_ERROR(filter_.Decide(job));
  return BranchByDecision(
      context_, job, *job.loss_branch,
      [&]() -> absl::Status {
        LOSSD_RETURN_IF_ERROR(ZeroDroppedMass(job, stream));
        LOSSD_RETURN_IF_ERROR(exact_.RowLoss(job));
        return job.wants_hidden_gradient ? exact_.HiddenGemm(job) : absl::OkStatus();
      },
      [&]() -> absl::Status {
        LOSSD_RETURN_IF_ERROR(filter_.PrepareRows(job));
        return filter_.FilterRows(job, job.in, job.out, 0);
      });
}

absl::Status FilteredStoredPath::WeightGradient(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(ZeroDroppedHidden(context_, job));
  LOSSD_RETURN_IF_ERROR(BranchByDecision(
      context_, job, *job.weight_branch, [&] { return exact_.WeightGemm(job); },
      [&] { return filter_.AddKept(job); }));
  context_.accumulators->weight_is_zero = false;
  return absl::OkStatus();
}

std::vector<Choice> FilteredStoredPath::DescribeMemory(const ChunkPlan& plan) const {
  return {FilterChoice(context_)};
}

}  // namespace lossd::kernels::cuda
