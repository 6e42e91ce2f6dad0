// SPDX-License-Identifier: Apache-2.0
// Sampled gradients of a chunk whose logits are recomputed, a block of rows after the other
// (docs/kernels/sampled.md). The logits of a block, of all classes, become ds in place, and from it the list
// of the block's rows is taken. dx and dW come from the lists of all blocks. With `auto` the device decides
// after the last block, by the predicted error, whether the gradients are computed as RecomputedPath would.
//
// Each block has its share of the room for entries, and takes a larger threshold if that is not enough.
#ifndef LOSSD_KERNELS_CUDA_PATHS_SAMPLED_RECOMPUTED_PATH_H_
#define LOSSD_KERNELS_CUDA_PATHS_SAMPLED_RECOMPUTED_PATH_H_

#include <vector>

#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/filter_plan.h"
#include "kernels/cuda/paths/recomputed_path.h"
#include "kernels/cuda/paths/sample_plan.h"
#include "kernels/cuda/paths/split_gradients.h"

namespace lossd::kernels::cuda {

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
  RecomputedSampleBuffers buffers_;
  int64_t block_rows_ = 0;  // of the chunk that Prepare has begun
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_SAMPLED_RECOMPUTED_PATH_H_
