// SPDX-License-Identifier: Apache-2.0
// The path of exact gradients of a chunk with a teacher whose head recomputes its logits. The head keeps no
// room for the logits of whole rows, so the teacher's memory has those of a block of rows: of the teacher, of
// the head behind them, and their gradient behind these. The path computes the row results of all blocks
// first. Then the guard has passed, and the path computes each block's logits once more, their gradient, and
// from it dx and dW of the block: six products in the place of the four of StoredPath.
#ifndef LOSSD_KERNELS_CUDA_PATHS_DISTILLED_RECOMPUTED_PATH_H_
#define LOSSD_KERNELS_CUDA_PATHS_DISTILLED_RECOMPUTED_PATH_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/path_memory.h"
#include "kernels/cuda/paths/path_steps.h"
#include "kernels/cuda/paths/stored_path.h"

namespace lossd::kernels::cuda {

class DistilledRecomputedPath final : public ChunkPath {
 public:
  explicit DistilledRecomputedPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.distilled; }
  // Rows of a block, a multiple of 8, if the teacher's memory has room for the fp32 logits of `teacher_rows`
  // rows (TeacherRows::block_rows). The same on all parts of a head.
  static int64_t BlockRows(const HeadSizes& sizes, int64_t teacher_rows);

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  // Both gradients, block by block; a chunk that accumulates has dx, too (CudaHead::Prepare).
  absl::Status HiddenGradient(const ChunkJob& job) override;
  absl::Status WeightGradient(const ChunkJob& job) override { return absl::OkStatus(); }
  // Of chunks that nobody asks about in advance: a head is described without a teacher.
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override {
    return cuda::Describe(plan);
  }

 private:
  // The teacher's memory behind the logits of a block of its rows.
  struct Room {
    int64_t rows = 0;    // of a block
    RowResults results;  // what the second pass says once more
    float* divergence = nullptr;
    void* logits = nullptr;  // [rows, padded_vocab] fp32
    LogitMatrix gradient;    // [rows, padded_vocab] compute dtype
    static Room Carve(const PathContext& context, const TeacherRows& teacher);
  };
  absl::Status ForEachBlock(const ChunkJob& job, const Room& room, StagedLogits::BlockStep step) const;
  absl::Status Gradients(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& gradient) const;
  absl::Status AddBias(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& gradient) const;

  const PathContext& context_;
  const GemmShapes shapes_;
  const StagedLogits staged_;
  const StoredPath stored_;
  const TopSelector top_;
  const RecomputedShape shape_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_DISTILLED_RECOMPUTED_PATH_H_
