// SPDX-License-Identifier: Apache-2.0
// The paths (chunk_path.h) of sampled gradients (docs/kernels/sampled.md): SampledStoredPath for heads that
// store logits, SampledRecomputedPath for heads that recompute them. Both also compute filtered gradients if
// the head is split by vocabulary or rows have soft targets (ChunkPlan::filters_elements,
// docs/kernels/filtered.md).
//
// ds is the matrix dL/ds of a chunk. From each row of ds a path takes a few elements, the entries of the
// list, and computes dx and dW from the list. The predicted error is the relative error of these gradients,
// known from sums over the list. sampled_path.cc says in which memory the list lies, and when.
//
// Called by the backend's driving thread.
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

// The path begins a chunk as FusedStoredPath or StoredPath does, which results in a matrix of ds (dL/ds).
// From each row of the matrix it takes a few classes into a list. With kAuto the device decides by the
// predicted error whether dx and dW are computed from the list or from the matrix. If they are computed from
// the list, that work may overwrite the matrix.
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
  // Selects the list from the matrix, and makes the decision: job.decision on the device.
  absl::Status Sample(const ChunkJob& job);
  SampleRowsParams SampleOf(const ChunkJob& job) const;  // what the selection kernels need
  // For a matrix of filtered ds: lists all elements that are not 0. If they do not fit into the list, the
  // gradients are computed from the matrix.
  absl::Status ListFiltered(const ChunkJob& job) const;
  // Enqueues a branch: the work of `listed` if gradients come from the list, else the work of `dense`.
  absl::Status Branch(const ChunkJob& job, DeviceBranch& branch, absl::FunctionRef<absl::Status()> dense,
                      absl::FunctionRef<absl::Status()> listed) const;
  // Computes dx from the list, if dx is wanted, and the entries from which dW is computed.
  absl::Status GatherRows(const ChunkJob& job) const;
  absl::Status CopyLists(const ChunkJob& job) const;
  // Adds dW of the list, of the uniform part of label smoothing, and of the hot classes.
  absl::Status AddKept(const ChunkJob& job) const;

  // The next functions are for hot classes. These are the most frequent classes, which get dense products of
  // their own.
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
  int64_t hot_bytes_ = 0;   // of hot_
  bool knows_hot_ = false;  // hot_ has been zeroed, before the first chunk that uses it
};

// The path recomputes logits, one block of rows after the other. In the memory of a block's logits, of all
// classes, it computes ds, and from ds it takes the list of the block's rows. dx and dW are computed from the
// lists of all blocks. With kAuto the device decides after the last block, by the predicted error, whether
// the gradients are instead computed as RecomputedPath computes them.
//
// Each block has a share of the room for entries. If the share is too small, the block gets a larger
// threshold.
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
  // Whether the logit pass computes ds of a block, in the form of exponentials and a factor for each row.
  bool LeavesExponentials(const ChunkPlan& plan) const;
  DType ElementsOf(const ChunkPlan& plan) const;
  int64_t BlockRows(const ChunkPlan& plan, int64_t rows) const;
  // The index of the first entry of the rows from `row` on.
  int64_t FirstEntry(const ChunkJob& job, int64_t row) const;
  SampleList ListOf(const ChunkJob& job, const RowBlock& rows) const;
  // Computes the row results of a block, and the block's ds, which lies in the arena.
  absl::StatusOr<LogitMatrix> BlockElements(const ChunkJob& job, const RowBlock& rows) const;
  // Does the work of BlockElements, and takes the block's entries.
  absl::Status SampleBlock(const ChunkJob& job, const RowBlock& rows) const;
  absl::Status Gradients(const ChunkJob& job) const;
  absl::Status SampledGradients(const ChunkJob& job) const;
  // Computes dx from the list, if dx is wanted, and in the arena the entries from which dW is computed.
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
