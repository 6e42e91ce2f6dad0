// SPDX-License-Identifier: Apache-2.0
// Filtered gradients of a chunk whose head stores logits (docs/kernels/filtered.md): candidates are selected
// from the fp32 logits of a block of rows after the other, and the device decides by them whether the chunk
// is filtered or computed anew as StoredPath would. The lists of a filtered chunk lie in the memory of its
// logits, which are not read any more.
#ifndef LOSSD_KERNELS_CUDA_PATHS_FILTERED_STORED_PATH_H_
#define LOSSD_KERNELS_CUDA_PATHS_FILTERED_STORED_PATH_H_

#include "kernels/cuda/paths/candidate_filter.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/staged_logits.h"
#include "kernels/cuda/paths/stored_path.h"

namespace lossd::kernels::cuda {

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
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_FILTERED_STORED_PATH_H_
