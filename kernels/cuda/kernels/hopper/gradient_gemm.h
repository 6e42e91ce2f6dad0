// SPDX-License-Identifier: Apache-2.0
// Launcher of the products that follow the loss of a chunk on Hopper: the hidden gradient E W and the weight
// gradient E^T x. Scaling and adding are done in the epilogue (docs/kernels/hopper.md).
//
// Enqueues on `stream`; all pointers are device memory. Stateless and thread-safe. Compute capability 9.0.
// The same plan and operands give the same bits.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_GRADIENT_GEMM_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_GRADIENT_GEMM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels/hopper/cluster_launch.h"
#include "kernels/cuda/kernels/hopper/plan.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda::hopper {

// C[r, :] = (add ? C[r, :] : 0) + scale * factors[r] * (A B)[r, :], fp32 accumulation. Matrices are row-major
// without gaps and 16-byte aligned.
struct GradientGemmParams {
  bool transpose_a = false;        // A is stored as [inner, rows]
  const void* a = nullptr;         // [rows, inner]
  const void* b = nullptr;         // [inner, columns]
  DType input = DType::kBFloat16;  // of both; a 16-bit type
  void* c = nullptr;               // [rows, columns]
  DType output = DType::kBFloat16;
  bool add = false;  // fp32 output only
  int64_t rows = 0;
  int64_t columns = 0;  // a multiple of 8; so is the length of A's stored rows
  int64_t inner = 0;
  float scale = 1.0f;
  const float* factors = nullptr;       // [rows] or null: all 1
  void* scratch = nullptr;              // [kGradientGemmScratchBytes]
  const ClusterOrder* order = nullptr;  // the device's order; host memory; null: clusters in any order
};

inline constexpr int64_t kGradientGemmScratchBytes = kMostPartials * kPartialBytes + 4096;

// `plan`: from PlanGradientGemm() for rows, columns, inner, and at most LogitPassClusters() clusters.
// cudaErrorInvalidValue unless the output is fp32, or A is not transposed and the output has the input's
// dtype.
cudaError_t LaunchGradientGemm(const GradientGemmParams& params, const GradientGemmPlan& plan,
                               cudaStream_t stream);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_GRADIENT_GEMM_H_
