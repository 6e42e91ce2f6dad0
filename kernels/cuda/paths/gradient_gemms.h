// SPDX-License-Identifier: Apache-2.0
// The gradients of a chunk from a matrix of ds in device memory, which the paths of stored logits have in
// common (StoredGradients), and their GEMMs: dx = ds W and dW += ds^T x, by cuBLASLt (LibraryGemms) or by
// kernels of our own (OwnGemms, hopper/gradient_gemm.h). The plan of a chunk says which of them computes it.
//
// Each function enqueues on the device's compute stream. Driven by the backend's thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_GRADIENT_GEMMS_H_
#define LOSSD_KERNELS_CUDA_PATHS_GRADIENT_GEMMS_H_

#include <vector>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/cuda/kernels/hopper/gradient_gemm.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/gemm_shapes.h"

namespace lossd::kernels::cuda {

// ds over (logit scale * gradient unit), as the loss of a chunk leaves it: row r of the elements times
// factors[r].
struct StoredGradient {
  void* elements = nullptr;        // [padded_rows, padded_vocab] compute dtype
  const float* factors = nullptr;  // [rows] or null: all 1
};

class GradientGemms {
 public:
  virtual ~GradientGemms() = default;

  // Launches nothing.
  virtual absl::Status Prepare(const ChunkJob& job) const = 0;
  // dx into Region::kHiddenGradient.
  virtual absl::Status HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const = 0;
  // Adds to the accumulated dW. The factors of the rows are in job.hidden already.
  virtual absl::Status WeightGradient(const ChunkJob& job, const void* elements) const = 0;
  // Adds what is to be said of the GEMMs of a full chunk.
  virtual absl::Status Describe(std::vector<Choice>& choices) const = 0;
};

class LibraryGemms final : public GradientGemms {
 public:
  explicit LibraryGemms(const PathContext& context);
  absl::Status Prepare(const ChunkJob& job) const override;
  absl::Status HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const override;
  absl::Status WeightGradient(const ChunkJob& job, const void* elements) const override;
  absl::Status Describe(std::vector<Choice>& choices) const override;

 private:
  const PathContext& context_;
  const GemmShapes shapes_;
};

class OwnGemms final : public GradientGemms {
 public:
  explicit OwnGemms(const PathContext& context) : context_(context) {}
  absl::Status Prepare(const ChunkJob& job) const override { return absl::OkStatus(); }
  absl::Status HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const override;
  absl::Status WeightGradient(const ChunkJob& job, const void* elements) const override;
  absl::Status Describe(std::vector<Choice>& choices) const override { return absl::OkStatus(); }

 private:
  absl::Status Run(hopper::GradientGemmParams product) const;

  const PathContext& context_;
};

// The gradients of a chunk from its matrix of ds.
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

#endif  // LOSSD_KERNELS_CUDA_PATHS_GRADIENT_GEMMS_H_
