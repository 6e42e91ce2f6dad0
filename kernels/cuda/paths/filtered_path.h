// SPDX-License-Identifier: Apache-2.0
// The paths of filtered gradients (docs/kernels/filtered.md): FilteredStoredPath for heads that store logits,
// FilteredRecomputedPath for heads that recompute them.
//
// Driven by the backend's thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_FILTERED_PATH_H_
#define LOSSD_KERNELS_CUDA_PATHS_FILTERED_PATH_H_

#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/path_steps.h"
#include "kernels/cuda/paths/recomputed_path.h"
#include "kernels/cuda/paths/stored_path.h"

namespace lossd::kernels::cuda {

// Candidates are selected from the fp32 logits of a block of rows after the other, and the device decides by
// them whether the chunk is filtered or computed anew as StoredPath would. The lists of a filtered chunk lie
// in the memory of its logits, which are not read any more.
class FilteredStoredPath final : public ChunkPath {
 public:
  explicit FilteredStoredPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.filtered(); }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  absl::Status HiddenGradient(const ChunkJob& job) override { return absl::OkStatus(); }  // Loss has done it
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

// Logits are recomputed, a block of rows after the other: candidates are listed by the logit pass where the
// plan is fused, else selected from the logits of a block of few rows. The device then decides by the
// candidates of all rows whether the chunk is filtered or computed as RecomputedPath would.
// docs/kernels/recomputed.md has the whole picture.
class FilteredRecomputedPath final : public ChunkPath {
 public:
  explicit FilteredRecomputedPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.filtered(); }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  // Both gradients, if the decision is to be exact; else Loss has computed dx, and dW is added.
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
