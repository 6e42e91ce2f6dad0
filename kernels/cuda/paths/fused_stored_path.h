// SPDX-License-Identifier: Apache-2.0
// Exact gradients on Hopper from one pass that computes logits and loss together (docs/kernels/hopper.md): it
// stores exponentials, whose rows lack one factor each to be the gradient.
#ifndef LOSSD_KERNELS_CUDA_PATHS_FUSED_STORED_PATH_H_
#define LOSSD_KERNELS_CUDA_PATHS_FUSED_STORED_PATH_H_

#include "kernels/cuda/kernels/hopper/fused_rows.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/split_rows.h"
#include "kernels/cuda/paths/stored_gradients.h"

namespace lossd::kernels::cuda {

class FusedStoredPath final : public ChunkPath {
 public:
  explicit FusedStoredPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.exact() && plan.fused(); }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  absl::Status HiddenGradient(const ChunkJob& job) override;
  absl::Status WeightGradient(const ChunkJob& job) override;
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override;

  // The steps of these phases, for paths that put others between them. Factors of the rows of exponentials in
  // Region::kLogits:
  const float* factors() const { return rows_.factor; }
  absl::Status HiddenGemm(const ChunkJob& job) const { return gradients_.HiddenGradient(job, Gradient()); }
  // Puts the rows' factors into job.hidden.
  absl::Status WeightGemm(const ChunkJob& job) const;

 private:
  StoredGradient Gradient() const { return {context_.memory[Region::kLogits], rows_.factor}; }

  const PathContext& context_;
  const StoredGradients gradients_;
  const RowMerger merger_;
  hopper::FusedRows rows_;  // the partials lie where dx will be: they are free before it is written
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_FUSED_STORED_PATH_H_
