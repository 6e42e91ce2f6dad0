// SPDX-License-Identifier: Apache-2.0
// The paths (chunk_path.h) of exact gradients for a head that recomputes logits: RecomputedPath, and
// DistilledRecomputedPath for chunks with a teacher.
//
// RecomputedPath keeps the logits of at most one block of rows and classes in memory. It first computes the
// statistics of all rows. When lse is known and the guard has passed, it computes the logits of each block
// once more, and from them their gradient. If the plan says so (ChunkPlan::fused), the statistics, and later
// the gradient, are computed within the logits product.
// docs/kernels/recomputed.md describes the whole path.
#ifndef LOSSD_KERNELS_CUDA_PATHS_RECOMPUTED_PATH_H_
#define LOSSD_KERNELS_CUDA_PATHS_RECOMPUTED_PATH_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/cuda/kernels/hopper/fused_loss.h"
#include "kernels/cuda/kernels/recomputed_rows.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/path_memory.h"
#include "kernels/cuda/paths/path_steps.h"
#include "kernels/cuda/paths/stored_path.h"

namespace lossd::kernels::cuda {

// Exact gradients of a head that recomputes logits. The comment at the top of this file describes the path.
class RecomputedPath final : public ChunkPath {
 public:
  explicit RecomputedPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.exact(); }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  // HiddenGradient computes dx and, if the chunk accumulates, dW, block by block. WeightGradient computes dW
  // only if no dx is wanted.
  absl::Status HiddenGradient(const ChunkJob& job) override;
  absl::Status WeightGradient(const ChunkJob& job) override;
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override;

  // The steps of the phases, for other paths that add steps between them.
  //
  // Statistics computes row results and rules of all rows. A rule (GradientRule, loss_rows.h) has what the
  // gradient of a row needs besides its logits. `selects`: it also selects the most probable classes, and
  // Region::kHiddenGradient must be free for their lists.
  absl::Status Statistics(const ChunkJob& job, bool selects) const;
  // Computes the gradients that `job` wants, from the rules and PathContext::keep (the rows that the guard
  // lets through).
  absl::Status Gradients(const ChunkJob& job) const;
  // Computes the logits of a block of rows, for the classes from first_class on.
  absl::Status ClassBlockLogits(const ChunkJob& job, const RowBlock& rows, int64_t first_class,
                                const LogitMatrix& to) const;
  // The parameters of the fused loss of a block of rows. `tiles`: the memory for its partial sums.
  hopper::FusedLossParams FusedLoss(const ChunkJob& job, const RowBlock& rows,
                                    const hopper::TilePartials& tiles) const;
  // These two functions are for a split head; RowResultsAndLogitGradient is also for rows with soft targets.
  // They compute row results and rules of a block of rows from the sums over all classes, and then:
  // - RowResultsAndLogitGradient takes the logits of all classes here from `block` and overwrites them with
  //   ds. If the plan filters elements, it also filters ds, and writes the dropped mass of the classes here
  //   to dropped_mass [rows].
  // - RowResultsAndExponentials computes the logits itself and writes exponentials.
  absl::Status RowResultsAndLogitGradient(const ChunkJob& job, const RowBlock& rows, const ClassBlock& block,
                                          float* dropped_mass) const;
  absl::Status RowResultsAndExponentials(const ChunkJob& job, const RowBlock& rows,
                                         const hopper::TilePartials& tiles, void* exponentials) const;
  // [rows]: dL/ds divided by (scale * gradient unit) is factors()[r] times row r of the exponentials that
  // RowResultsAndExponentials writes. The gradient unit is a power of two (ChunkLayout::unit).
  const float* factors() const { return fused_rows_.factor; }
  GemmShape LogitsGemm(int64_t rows) const { return shapes_.Logits(rows, context_.sizes.padded_vocab); }
  // A matrix at `data` for the fp32 logits of all classes of some rows.
  LogitMatrix LogitsAt(void* data) const {
    return {data, DType::kFloat32, context_.sizes.padded_vocab, context_.sizes.vocab};
  }

 private:
  RecomputedBlocks ChooseBlocks(const ChunkPlan& plan, int64_t padded_rows) const;
  RecomputedArena Arena(const ChunkJob& job) const;
  absl::Status RowBlockStatistics(const ChunkJob& job, const RowBlock& rows, bool selects) const;
  absl::Status RowBlockGradients(const ChunkJob& job, const RowBlock& rows) const;
  absl::Status ClassBlockGradient(const ChunkJob& job, const RowBlock& rows, const ClassBlock& block) const;
  absl::Status AddHiddenGradient(const ChunkJob& job, const RowBlock& rows, const ClassBlock& block,
                                 void* sums) const;
  absl::Status AddWeightGradient(const ChunkJob& job, const RowBlock& rows, const ClassBlock& block) const;
  ClassBlock ClassesOf(const ChunkPlan& plan, int64_t first_class, int64_t padded_classes, void* data) const;
  // Calls `step` for each block of classes, in order. There is at least one.
  absl::Status ForEachClassBlock(
      absl::FunctionRef<absl::Status(int64_t first, int64_t padded_classes)> step) const;
  GemmShape HiddenGemm(const ChunkPlan& plan, int64_t rows, int64_t classes) const;
  GemmShape WeightGemm(const ChunkPlan& plan, int64_t rows, int64_t classes) const;
  GradientRule* Rules(const RowBlock& rows) const {
    return context_.memory.At<GradientRule>(Region::kRules) + rows.begin;
  }
  uint8_t* HiddenRows(const ChunkJob& job, const RowBlock& rows) const;
  const uint8_t* WeightRows(int64_t first_class) const;

  const PathContext& context_;
  const GemmShapes shapes_;
  const RecomputedShape shape_;
  const RowMerger merger_;
  const TopSelector top_;
  const SoftSteps soft_;
  hopper::FusedRows fused_rows_;  // `partials` is not set; FusedLoss sets it for a block of rows
  RecomputedBlocks blocks_;       // the sizes of the blocks of the chunk that Prepare has begun
};

// Calls step(begin, size) for the blocks that cover [0, end), in order. `size` is `block`; the last block is
// cut off at `limit`. `limit` >= end: what lies between `end` and `limit` is padding.
absl::Status ForEachBlock(int64_t end, int64_t block, int64_t limit,
                          absl::FunctionRef<absl::Status(int64_t, int64_t)> step);

// Calls step(rows) for the compact rows of a chunk, `block_rows` padded rows at a time.
absl::Status ForEachRowBlock(const ChunkJob& job, int64_t block_rows,
                             absl::FunctionRef<absl::Status(const RowBlock&)> step);

// ---- with a teacher ----

// The path of exact gradients of a chunk with a teacher, for a head that recomputes its logits. The head has
// no room for the logits of whole rows. So the teacher's memory holds, for one block of rows at a time: the
// teacher's logits, behind them the head's logits, and behind these the gradient of the head's logits. The
// path first computes the row results of all blocks. When the guard has passed, it computes the logits of
// each block once more, their gradient, and from it dx and dW of the block. This takes six products instead
// of the four of StoredPath.
class DistilledRecomputedPath final : public ChunkPath {
 public:
  explicit DistilledRecomputedPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.distilled; }
  // The number of rows of a block, a multiple of 8, if the teacher's memory has room for the fp32 logits of
  // `teacher_rows` rows (TeacherRows::block_rows). All parts of a head get the same number.
  static int64_t BlockRows(const HeadSizes& sizes, int64_t teacher_rows);

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  // Computes both gradients, block by block. A chunk that accumulates always computes dx too
  // (CudaHead::Prepare).
  absl::Status HiddenGradient(const ChunkJob& job) override;
  absl::Status WeightGradient(const ChunkJob& job) override { return absl::OkStatus(); }
  // Used only for the log of a chunk, because the description of a head assumes chunks without a teacher.
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override {
    return cuda::Describe(plan);
  }

 private:
  // The buffers in the teacher's memory, behind the teacher's logits of a block.
  struct Room {
    int64_t rows = 0;    // the rows of a block
    RowResults results;  // memory for the row results that the second pass computes again
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

#endif  // LOSSD_KERNELS_CUDA_PATHS_RECOMPUTED_PATH_H_
