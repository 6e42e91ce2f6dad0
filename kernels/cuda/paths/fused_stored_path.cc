// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/fused_stored_path.h"

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/hopper/fused_loss.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/paths/path_choices.h"

namespace lossd::kernels::cuda {

FusedStoredPath::FusedStoredPath(const PathContext& context)
    : context_(context), gradients_(context), merger_(context) {
  const HeadSizes& sizes = context.sizes;
  Carver rows(context.memory[Region::kFusedRows]);
  rows_ = hopper::FusedRows::Carve(rows, sizes.chunk_rows);
  merger_.UseIn(rows_);
  Carver partials(context.memory[Region::kHiddenGradient]);
  rows_.partials = hopper::TilePartials::Carve(partials, sizes.chunk_rows, sizes.most_classes);
}

absl::Status FusedStoredPath::Prepare(const ChunkJob& job) {
  return gradients_.GemmsOf(job.plan).Prepare(job);
}

absl::Status FusedStoredPath::Loss(const ChunkJob& job) {
  const DeviceLimits& limits = context_.device->limits();
  const cudaStream_t stream = context_.device->compute();
  const HeadSizes& sizes = context_.sizes;
  const hopper::FusedLossParams p = {.operands = {job.hidden, context_.weight, context_.config.compute_dtype,
                                                  sizes.padded_hidden, sizes.padded_vocab},
                                     .terms = job.terms,
                                     .in = job.in,
                                     .out = job.out,
                                     .rows = rows_,
                                     .order = &limits.cluster_order};
  LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, stream));  // the partials lie where dx does
  void* const exponentials = job.wants_gradient() ? context_.memory[Region::kLogits] : nullptr;
  LOSSD_RETURN_IF_CUDA_ERROR(hopper::LaunchFusedSums(p, exponentials, limits.fused_clusters, stream),
                             "fused loss kernels");
  LOSSD_RETURN_IF_ERROR(merger_.Merge(job.terms, job.in, rows_));
  return ToStatus(hopper::LaunchFusedFinish(p, exponentials, nullptr, stream), "fused loss kernels");
}

// Where dx goes was free when the partials were written there (Loss).
absl::Status FusedStoredPath::HiddenGradient(const ChunkJob& job) { return HiddenGemm(job); }

absl::Status FusedStoredPath::WeightGradient(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(WeightGemm(job));
  context_.accumulators->weight_is_zero = false;
  return absl::OkStatus();
}

absl::Status FusedStoredPath::WeightGemm(const ChunkJob& job) const {
  const int64_t ld = context_.sizes.padded_hidden;
  const DeviceMatrix hidden = {job.hidden, context_.config.compute_dtype, ld, ld};
  LOSSD_RETURN_IF_CUDA_ERROR(
      LaunchScaleRows(hidden, rows_.factor, 1.0f, context_.keep, job.rows(), context_.device->compute()),
      "kernel over hidden states");
  return gradients_.WeightGradient(job, Gradient());
}

absl::StatusOr<std::vector<Choice>> FusedStoredPath::Describe(const ChunkPlan& plan) {
  std::vector<Choice> choices = cuda::Describe(plan);
  choices.push_back(FusedLogitsChoice(context_.device->limits()));
  LOSSD_RETURN_IF_ERROR(gradients_.GemmsOf(plan).Describe(choices));
  return choices;
}

}  // namespace lossd::kernels::cuda
