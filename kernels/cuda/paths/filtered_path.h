// SPDX-License-Identifier: Apache-2.0
// The paths of filtered gradients (docs/kernels/filtered.md): FilteredStoredPath for heads that store logits,
// FilteredRecomputedPath for heads that recompute them.
//
// A candidate is a class of a row whose probability may reach epsilon. All functions are called by the
// backend's driving thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_FILTERED_PATH_H_
#define LOSSD_KERNELS_CUDA_PATHS_FILTERED_PATH_H_

#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/path_steps.h"
#include "kernels/cuda/paths/recomputed_path.h"
#include "kernels/cuda/paths/stored_path.h"

namespace lossd::kernels::cuda {

// The path computes fp32 logits, one block of rows after the other, and selects candidates from them. From
// the number of candidates of all rows the device decides whether the chunk is filtered, or computed again as
// StoredPath computes it. The lists of a filtered chunk lie in the memory of its logits, which are no longer
// read then.
class FilteredStoredPath final : public ChunkPath {
 public:
  explicit FilteredStoredPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.filtered(); }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  // Loss has computed dx.
  absl::Status HiddenGradient(const ChunkJob& job) override { return absl::OkStatus(); }
  absl::Status WeightGradient(const ChunkJob& job) override;
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override {
    return exact_.Describe(plan);
  }
  std::vector<Choice> DescribeMemory(const ChunkPlan& plan) const override;

 private:
  absl::Status Select(const ChunkJob& job) const;

  const PathContext& context_;
  StoredPath exact_;
  const StagedLogits staged_;
  FilterBuffers buffers_;
  const CandidateFilter filter_;
  const TopSelector top_;
};

// The path recomputes logits, one block of rows after the other. If the plan is fused, the logit pass lists
// the candidates; otherwise they are selected from the logits of a block of few rows. From the number of
// candidates of all rows the device then decides whether the chunk is filtered, or computed as RecomputedPath
// computes it. docs/kernels/recomputed.md describes the whole path.
class FilteredRecomputedPath final : public ChunkPath {
 public:
  explicit FilteredRecomputedPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.filtered(); }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  // Computes both gradients if the decision is "exact". Otherwise Loss has already computed dx, and
  // HiddenGradient adds only dW.
  absl::Status HiddenGradient(const ChunkJob& job) override;
  absl::Status WeightGradient(const ChunkJob& job) override;
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override {
    return exact_.Describe(plan);
  }
  std::vector<Choice> DescribeMemory(const ChunkPlan& plan) const override;

 private:
  FilterBlock ChooseBlock(const ChunkPlan& plan, int64_t padded_rows) const;
  // Selects the candidates of a block of rows.
  absl::Status SelectInPass(const ChunkJob& job, const RowBlock& rows, const FilterArena& arena) const;
  absl::Status SelectFromLogits(const ChunkJob& job, const RowBlock& rows, const FilterArena& arena) const;
  absl::Status Gradients(const ChunkJob& job) const;

  const PathContext& context_;
  RecomputedPath exact_;
  FilterBuffers buffers_;
  const CandidateFilter filter_;
  const TopSelector top_;
  FilterBlock block_;  // of the chunk that Prepare has begun
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_FILTERED_PATH_H_
