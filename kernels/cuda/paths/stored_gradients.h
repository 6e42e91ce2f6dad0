// SPDX-License-Identifier: Apache-2.0
// The gradients of a chunk from a matrix of ds in device memory: what the paths of stored logits have in
// common.
//
// Each function enqueues on the device's compute stream. Driven by the backend's thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_STORED_GRADIENTS_H_
#define LOSSD_KERNELS_CUDA_PATHS_STORED_GRADIENTS_H_

#include "absl/status/status.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/gradient_gemms.h"

namespace lossd::kernels::cuda {

class StoredGradients {
 public:
  explicit StoredGradients(const PathContext& context)
      : context_(context), library_(context), own_(context) {}

  // The GEMMs that the plan says.
  const GradientGemms& GemmsOf(const ChunkPlan& plan) const;
  // dx into Region::kHiddenGradient.
  absl::Status HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const;
  // db and dW; the factors of the rows are in job.hidden already.
  absl::Status WeightGradient(const ChunkJob& job, const StoredGradient& gradient) const;

 private:
  const PathContext& context_;
  const LibraryGemms library_;
  const OwnGemms own_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_STORED_GRADIENTS_H_
