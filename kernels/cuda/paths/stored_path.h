// Exact gradients of a chunk whose logits are stored: the library's GEMM leaves all logits in memory, the row
// loss kernel turns them into row results and, in place, into their gradient, and two GEMMs take it from
// there.
#ifndef LOSSD_KERNELS_CUDA_PATHS_STORED_PATH_H_
#define LOSSD_KERNELS_CUDA_PATHS_STORED_PATH_H_

#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/gemm_shapes.h"
#include "kernels/cuda/paths/stored_gradients.h"

namespace lossd::kernels::cuda {

class StoredPath final : public ChunkPath {
 public:
  explicit StoredPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.exact() && !plan.fused(); }
  static void Claim(const HeadConfig& config, const HeadSizes& sizes, PathClaims& claims);

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  absl::Status HiddenGradient(const ChunkJob& job) override;
  absl::Status WeightGradient(const ChunkJob& job) override;
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override;
  absl::Status Tune(const void* hidden) override;

  // The steps of these phases, for paths that put others between them. The logits of the chunk:
  absl::Status ComputeLogits(const ChunkJob& job) const;
  LogitMatrix logits() const;
  // Row results, and the gradient in place of the logits if one is wanted.
  absl::Status RowLoss(const ChunkJob& job) const;
  // dx and dW from that gradient; the rows of job.hidden that may not be added are 0.
  absl::Status HiddenGemm(const ChunkJob& job) const { return gradients_.HiddenGradient(job, Gradient()); }
  absl::Status WeightGemm(const ChunkJob& job) const { return gradients_.WeightGradient(job, Gradient()); }

 private:
  StoredGradient Gradient() const { return {context_.memory[Region::kLogits], nullptr}; }

  const PathContext& context_;
  const GemmShapes shapes_;
  const StoredGradients gradients_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_STORED_PATH_H_
