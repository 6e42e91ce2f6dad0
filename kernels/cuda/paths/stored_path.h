// SPDX-License-Identifier: Apache-2.0
// Exact gradients of a chunk whose head stores logits: the library's GEMM computes the logits of a block of
// rows in fp32, the row loss kernel turns them into row results and their gradient in the compute dtype, and
// when all rows have it two GEMMs take it from there.
#ifndef LOSSD_KERNELS_CUDA_PATHS_STORED_PATH_H_
#define LOSSD_KERNELS_CUDA_PATHS_STORED_PATH_H_

#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/gemm_shapes.h"
#include "kernels/cuda/paths/split_gradients.h"
#include "kernels/cuda/paths/split_rows.h"
#include "kernels/cuda/paths/staged_logits.h"
#include "kernels/cuda/paths/stored_gradients.h"

namespace lossd::kernels::cuda {

class StoredPath final : public ChunkPath {
 public:
  explicit StoredPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.exact() && !plan.fused(); }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  absl::Status HiddenGradient(const ChunkJob& job) override;
  absl::Status WeightGradient(const ChunkJob& job) override;
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override;
  absl::Status Tune(const void* hidden) override;

  // The steps of these phases, for paths that put others between them. Row results, and the gradient if one
  // is wanted; Region::kHiddenGradient may be written.
  absl::Status RowLoss(const ChunkJob& job) const;
  // The gradient, or what takes its place: all of Region::kLogits.
  LogitMatrix elements() const;
  // dx and dW from that gradient; the rows of job.hidden that may not be added are 0.
  absl::Status HiddenGemm(const ChunkJob& job) const { return gradients_.HiddenGradient(job, Gradient()); }
  absl::Status WeightGemm(const ChunkJob& job) const { return gradients_.WeightGradient(job, Gradient()); }

 private:
  StoredGradient Gradient() const { return {context_.memory[Region::kLogits], nullptr}; }
  // Of a block of rows of which other devices have classes too, filtered if the plan is.
  absl::Status SplitRowLoss(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                            const LogitMatrix& gradient) const;

  const PathContext& context_;
  const GemmShapes shapes_;
  const StagedLogits staged_;
  const StoredGradients gradients_;
  const RowMerger merger_;
  const GradientMerger gradient_merger_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_STORED_PATH_H_
