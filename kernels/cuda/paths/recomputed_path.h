// SPDX-License-Identifier: Apache-2.0
// The path of exact gradients of a chunk whose logits are recomputed, so that memory holds the logits of one
// block of rows and classes at most. The path first computes the statistics of all rows. Then lse is known
// and the guard has passed, and the path computes each block's logits once more, and their gradient. Both are
// fused into the logits product where the plan says so. docs/kernels/recomputed.md has the whole picture.
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

class RecomputedPath final : public ChunkPath {
 public:
  explicit RecomputedPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.exact(); }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  // Both gradients, block by block.
  absl::Status HiddenGradient(const ChunkJob& job) override;
  absl::Status WeightGradient(const ChunkJob& job) override;
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override;

  // The steps of these phases, for paths that put others between them. Row results and rules of all rows:
  // selects: also the most probable classes, for which Region::kHiddenGradient is free.
  absl::Status Statistics(const ChunkJob& job, bool selects) const;
  // The gradients that job wants, from the rules and PathContext::keep.
  absl::Status Gradients(const ChunkJob& job) const;
  // Logits of a block of rows and of the classes from first_class on.
  absl::Status ClassBlockLogits(const ChunkJob& job, const RowBlock& rows, int64_t first_class,
                                const LogitMatrix& to) const;
  // What a fused loss of a block of rows takes, with its partials in `tiles`.
  hopper::FusedLossParams FusedLoss(const ChunkJob& job, const RowBlock& rows,
                                    const hopper::TilePartials& tiles) const;
  // Of a head that is split: row results and rules of a block of rows by the sums over all classes, and its
  // ds in the place of its logits, or as exponentials. If the plan is filtered, so are elements, and the mass
  // that the classes here drop goes to dropped_mass [rows].
  absl::Status SplitElements(const ChunkJob& job, const RowBlock& rows, const ClassBlock& block,
                             float* dropped_mass) const;
  absl::Status SplitExponentials(const ChunkJob& job, const RowBlock& rows, const hopper::TilePartials& tiles,
                                 void* exponentials) const;
  // Of the rows of exponentials that such a loss leaves.
  const float* factors() const { return fused_rows_.factor; }
  GemmShape LogitsGemm(int64_t rows) const { return shapes_.Logits(rows, context_.sizes.padded_vocab); }
  // Room for the fp32 logits of all classes of some rows.
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
  // Calls `step` for the blocks of classes, in order. There is one at least.
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
  hopper::FusedRows fused_rows_;  // without partials
  RecomputedBlocks blocks_;       // of the chunk that Prepare has begun
};

// Calls step(begin, size) for the blocks of [0, end); the last one ends at `limit`.
absl::Status ForEachBlock(int64_t end, int64_t block, int64_t limit,
                          absl::FunctionRef<absl::Status(int64_t, int64_t)> step);

// Calls step(rows) for the compact rows of a chunk, so many padded rows at a time.
absl::Status ForEachRowBlock(const ChunkJob& job, int64_t block_rows,
                             absl::FunctionRef<absl::Status(const RowBlock&)> step);

// ---- with a teacher ----

// The path of exact gradients of a chunk with a teacher whose head recomputes its logits. The head keeps no
// room for the logits of whole rows, so the teacher's memory has those of a block of rows: of the teacher, of
// the head behind them, and their gradient behind these. The path computes the row results of all blocks
// first. Then the guard has passed, and the path computes each block's logits once more, their gradient, and
// from it dx and dW of the block: six products in the place of the four of StoredPath.
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

#endif  // LOSSD_KERNELS_CUDA_PATHS_RECOMPUTED_PATH_H_
