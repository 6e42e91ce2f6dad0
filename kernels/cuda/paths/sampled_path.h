// SPDX-License-Identifier: Apache-2.0
// The paths of sampled gradients (docs/kernels/sampled.md): SampledStoredPath for heads that store logits,
// SampledRecomputedPath for heads that recompute them. Both also compute filtered gradients where a head is
// split by vocabulary or rows have soft targets (ChunkPlan::filters_elements, docs/kernels/filtered.md).
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

// The chunk begins like an exact one of FusedStoredPath or StoredPath, which leaves a matrix of ds. A list of
// few classes a row is taken from the matrix. With `auto` the device decides by the predicted error whether
// dx and dW are computed from the list or from the matrix. Work after a decision for the list uses the memory
// of the matrix.
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
  // Takes the list, and makes the decision.
  absl::Status Sample(const ChunkJob& job);
  SampleRowsParams SampleOf(const ChunkJob& job) const;
  // Lists all elements that are left in a matrix of filtered ds. If they do not fit, the matrix is used.
  absl::Status ListFiltered(const ChunkJob& job) const;
  // Enqueues a branch: the work of `listed` if gradients come from the list, else the work of `dense`.
  absl::Status Branch(const ChunkJob& job, DeviceBranch& branch, absl::FunctionRef<absl::Status()> dense,
                      absl::FunctionRef<absl::Status()> listed) const;
  // Computes dx, if it is wanted, and the entries of dW.
  absl::Status GatherRows(const ChunkJob& job) const;
  absl::Status CopyLists(const ChunkJob& job) const;
  absl::Status AddKept(const ChunkJob& job) const;

  // Hot classes: the most frequent ones, which get dense products of their own.
  bool UsesHot(const ChunkJob& job) const;
  GemmShape HotHiddenShape(const ChunkJob& job) const;
  GemmShape HotWeightShape(const ChunkJob& job) const;
  HotPart HotPartOf(const ChunkJob& job) const;
  const float* Factors(const ChunkJob& job) const;  // factors of the rows of the matrix, or null
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

// The path recomputes logits one block of rows after the other. The logits of a block, of all classes, become
// ds in place, and the list of the block's rows is taken from ds. dx and dW are computed from the lists of
// all blocks. With `auto` the device decides by the predicted error, after the last block, whether the
// gradients are computed as by RecomputedPath instead.
//
// Each block has its share of the room for entries. If that is too small, the block gets a larger threshold.
class SampledRecomputedPath final : public ChunkPath {
 public:
  explicit SampledRecomputedPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.sampled() || plan.filters_elements; }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  // Computes both gradients.
  absl::Status HiddenGradient(const ChunkJob& job) override { return Gradients(job); }
  absl::Status WeightGradient(const ChunkJob& job) override;
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override {
    return exact_.Describe(plan);
  }
  std::vector<Choice> DescribeMemory(const ChunkPlan& plan) const override;

 private:
  FilterShape ShapeOfHead() const;
  FilterShape ShapeOf(const ChunkJob& job) const;
  // Whether the logit pass leaves ds of a block, as exponentials and factors of rows.
  bool LeavesExponentials(const ChunkPlan& plan) const;
  DType ElementsOf(const ChunkPlan& plan) const;
  int64_t BlockRows(const ChunkPlan& plan, int64_t rows) const;
  // The index of the first entry of the rows from `row` on.
  int64_t FirstEntry(const ChunkJob& job, int64_t row) const;
  SampleList ListOf(const ChunkJob& job, const RowBlock& rows) const;
  // Computes the row results of a block, and its ds in the arena.
  absl::StatusOr<LogitMatrix> BlockElements(const ChunkJob& job, const RowBlock& rows) const;
  // Also takes the block's entries.
  absl::Status SampleBlock(const ChunkJob& job, const RowBlock& rows) const;
  absl::Status Gradients(const ChunkJob& job) const;
  absl::Status SampledGradients(const ChunkJob& job) const;
  // Computes dx, if it is wanted, and the entries of dW, in the arena.
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
