// SPDX-License-Identifier: Apache-2.0
// The paths of exact gradients of a chunk whose head stores logits: StoredPath for every GPU, FusedStoredPath
// for Hopper. StagedLogits computes fp32 logits for StoredPath and for the filtered path.
//
// Driven by the backend's thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_STORED_PATH_H_
#define LOSSD_KERNELS_CUDA_PATHS_STORED_PATH_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/cuda/kernels/hopper/fused_rows.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/gemm_shapes.h"
#include "kernels/cuda/paths/gradient_gemms.h"
#include "kernels/cuda/paths/path_claims.h"
#include "kernels/cuda/paths/split_gradients.h"

namespace lossd::kernels::cuda {

// The fp32 logits of a chunk, a block of rows at a time (PlanStaging in path_claims.h). So no number of 16
// bits decides about a result of a row.
class StagedLogits {
 public:
  explicit StagedLogits(const PathContext& context);

  // Launches nothing.
  absl::Status Prepare(const ChunkJob& job, Kept kept) const;
  // Whether the logits of some rows lie in Region::kHiddenGradient.
  bool UsesSpare(const ChunkJob& job, Kept kept) const;
  // Enqueues the logits of each block and then calls step with them, which enqueues what becomes of them.
  // Region::kHiddenGradient may be written if it is used.
  absl::Status ForEachBlock(const ChunkJob& job, Kept kept,
                            absl::FunctionRef<absl::Status(const RowBlock&, const LogitMatrix&)> step) const;

  // The product of the largest block of a full chunk, and where its result lies.
  GemmShape LargestGemm() const;
  void* LargestBlock() const;

 private:
  std::vector<StagedBlock> Blocks(int64_t padded_rows, Kept kept) const {
    return PlanStaging(context_.config, context_.sizes, kept, padded_rows);
  }
  void* At(const StagedBlock& block) const {
    return context_.memory[block.in_spare ? Region::kHiddenGradient : Region::kLogits] + block.offset;
  }

  const PathContext& context_;
  const GemmShapes shapes_;
};

// The library's GEMM computes the logits of a block of rows in fp32, the row loss kernel turns them into row
// results and their gradient in the compute dtype, and when all rows have that gradient, two GEMMs compute dx
// and dW from it.
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

// Exact gradients on Hopper from one pass that computes logits and loss together (docs/kernels/hopper.md): it
// stores exponentials, whose rows lack one factor each to be the gradient.
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

#endif  // LOSSD_KERNELS_CUDA_PATHS_STORED_PATH_H_
