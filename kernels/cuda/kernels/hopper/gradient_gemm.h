// SPDX-License-Identifier: Apache-2.0
// Launcher of the two products that follow the loss of a chunk on Hopper: the hidden gradient E W and the
// weight gradient E^T x, where E is the matrix ds (or its exponentials). The epilogue scales and adds
// (docs/kernels/hopper.md).
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
  DType input = DType::kBFloat16;  // of A and B; a 16-bit type
  void* c = nullptr;               // [rows, columns]
  DType output = DType::kBFloat16;
  bool add = false;  // fp32 output only
  int64_t rows = 0;
  int64_t columns = 0;  // a multiple of 8; the length of A's stored rows is also a multiple of 8
  int64_t inner = 0;
  float scale = 1.0f;
  const float* factors = nullptr;  // [rows] or null: all 1
  void* scratch = nullptr;         // [kGradientGemmScratchBytes]
  // The device's order, in host memory; null: clusters take tiles in any order.
  const ClusterOrder* order = nullptr;
};

inline constexpr int64_t kGradientGemmScratchBytes = kMostPartials * kPartialBytes + 4096;

// `plan`: from PlanGradientGemm() for rows, columns, inner, and at most LogitPassClusters() clusters.
// cudaErrorInvalidValue unless the output is fp32, or A is not transposed and the output has the input's
// dtype.
cudaError_t LaunchGradientGemm(const GradientGemmParams& params, const GradientGemmPlan& plan,
                               cudaStream_t stream);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_GRADIENT_GEMM_H_
