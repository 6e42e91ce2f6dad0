// SPDX-License-Identifier: Apache-2.0
// The paths of sampled gradients (docs/kernels/sampled.md): SampledStoredPath for heads that store logits,
// SampledRecomputedPath for heads that recompute them. Both also compute the filtered gradients of a head
// that is split by vocabulary (docs/kernels/filtered.md).
//
// Driven by the backend's thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_SAMPLED_PATH_H_
#define LOSSD_KERNELS_CUDA_PATHS_SAMPLED_PATH_H_

#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/path_memory.h"
#include "kernels/cuda/paths/path_steps.h"
#include "kernels/cuda/paths/recomputed_path.h"
#include "kernels/cuda/paths/stored_path.h"

namespace lossd::kernels::cuda {

// The chunk begins as an exact one, FusedStoredPath's or StoredPath's, which leaves a matrix of ds. From it a
// list of few classes a row is taken; with `auto` the device decides by the predicted error whether the list
// or the matrix becomes dx and dW. What follows the decision works in the memory of the matrix.
class SampledStoredPath final : public ChunkPath {
 public:
  explicit SampledStoredPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.sampled() || plan.filters_elements; }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  absl::Status HiddenGradient(const ChunkJob& job) override;
  absl::Status WeightGradient(const ChunkJob& job) override;
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override;
  std::vector<Choice> DescribeMemory(const ChunkPlan& plan) const override;

 private:
  int64_t CapacityOf(const ChunkJob& job) const;
  SampleList ListOf(const ChunkJob& job) const;
  // The list and the decision.
  absl::Status Sample(const ChunkJob& job);
  SampleRowsParams SampleOf(const ChunkJob& job) const;
  // The list of all that is left in a matrix of filtered ds. If it does not fit, the matrix is used.
  absl::Status ListFiltered(const ChunkJob& job) const;
  // What `listed` enqueues if the list becomes the gradient, else what `dense` does.
  absl::Status Branch(const ChunkJob& job, DeviceBranch& branch, absl::FunctionRef<absl::Status()> dense,
                      absl::FunctionRef<absl::Status()> listed) const;
  // dx, if it is wanted, and the entries of dW.
  absl::Status GatherRows(const ChunkJob& job) const;
  absl::Status CopyLists(const ChunkJob& job) const;
  absl::Status AddKept(const ChunkJob& job) const;

  // Hot classes.
  bool UsesHot(const ChunkJob& job) const;
  GemmShape HotHiddenShape(const ChunkJob& job) const;
  GemmShape HotWeightShape(const ChunkJob& job) const;
  HotPart HotPartOf(const ChunkJob& job) const;
  const float* Factors(const ChunkJob& job) const;  // of the rows of the matrix, or null
  absl::Status BeginHot(const ChunkJob& job);
  absl::Status MultiplyHotHidden(const ChunkJob& job) const;
  absl::Status AddHot(const ChunkJob& job) const;
  absl::Status ChooseHot(const ChunkJob& job) const;

  const PathContext& context_;
  const GemmShapes shapes_;
  FusedStoredPath fused_;
  StoredPath stored_;
  const GradientMerger merger_;
  SampleBuffers buffers_;
  HotClasses hot_;
  int64_t hot_bytes_ = 0;
  bool knows_hot_ = false;
};

// Logits are recomputed, a block of rows after the other. The logits of a block, of all classes, become ds in
// place, and from it the list of the block's rows is taken. dx and dW come from the lists of all blocks. With
// `auto` the device decides after the last block, by the predicted error, whether the gradients are computed
// as RecomputedPath would.
//
// Each block has its share of the room for entries, and takes a larger threshold if that is not enough.
class SampledRecomputedPath final : public ChunkPath {
 public:
  explicit SampledRecomputedPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.sampled() || plan.filters_elements; }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  // Both gradients.
  absl::Status HiddenGradient(const ChunkJob& job) override { return Gradients(job); }
  absl::Status WeightGradient(const ChunkJob& job) override;
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override {
    return exact_.Describe(plan);
  }
  std::vector<Choice> DescribeMemory(const ChunkPlan& plan) const override;

 private:
  FilterShape ShapeOfHead() const;
  FilterShape ShapeOf(const ChunkJob& job) const;
  // Whether ds of a block comes from the logit pass, as exponentials and factors of rows.
  bool LeavesExponentials(const ChunkPlan& plan) const;
  DType ElementsOf(const ChunkPlan& plan) const;
  int64_t BlockRows(const ChunkPlan& plan, int64_t rows) const;
  // The first entry of the rows from `row` on.
  int64_t FirstEntry(const ChunkJob& job, int64_t row) const;
  SampleList ListOf(const ChunkJob& job, const RowBlock& rows) const;
  // Row results of a block and its ds, in the arena.
  absl::StatusOr<LogitMatrix> BlockElements(const ChunkJob& job, const RowBlock& rows) const;
  // Those, and its entries.
  absl::Status SampleBlock(const ChunkJob& job, const RowBlock& rows) const;
  absl::Status Gradients(const ChunkJob& job) const;
  absl::Status SampledGradients(const ChunkJob& job) const;
  // dx, if it is wanted, and the entries of dW, in the arena.
  absl::Status GatherRows(const ChunkJob& job) const;

  const PathContext& context_;
  RecomputedPath exact_;
  const GradientMerger merger_;
  const TopSelector top_;
  RecomputedSampleBuffers buffers_;
  int64_t block_rows_ = 0;  // of the chunk that Prepare has begun
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_SAMPLED_PATH_H_
