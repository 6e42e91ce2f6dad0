// SPDX-License-Identifier: Apache-2.0
// The fp32 logits of a chunk whose head stores logits, a block of rows at a time (staging_plan.h): no number
// of 16 bits decides about a result of a row.
//
// Driven by the backend's thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_STAGED_LOGITS_H_
#define LOSSD_KERNELS_CUDA_PATHS_STAGED_LOGITS_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/gemm_shapes.h"
#include "kernels/cuda/paths/row_block.h"
#include "kernels/cuda/paths/staging_plan.h"

namespace lossd::kernels::cuda {

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

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_STAGED_LOGITS_H_
