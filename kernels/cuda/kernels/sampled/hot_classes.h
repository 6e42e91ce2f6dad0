// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels around hot classes: those that sampled gradients take most often. Their part of ds
// is multiplied as a dense matrix of few columns, and only the others are sampled (docs/kernels/sampled.md).
//
// All enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_HOT_CLASSES_H_
#define LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_HOT_CLASSES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/kernels/sampled/sampled_memory.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// The most popular classes become hot, of those that are taken at least `least` times between two choices.
cudaError_t LaunchChooseHot(const HotClasses& hot, float least, cudaStream_t stream);

// Adds to hot.taken how often the rows would have taken each hot class: the sum over rows of min(width *
// |element|, 1).
struct CountHotParams {
  HotClasses hot;
  const void* elements = nullptr;  // [rows, kHotClasses]
  DType dtype = DType::kBFloat16;
  const float* widths = nullptr;  // [rows]
  int64_t rows = 0;
};
cudaError_t LaunchCountHot(const CountHotParams& params, cudaStream_t stream);

// to[i] = weight[ids[i]], [kHotClasses, ld]; rows of `to` that are no class are 0.
cudaError_t LaunchGatherHot(const HotClasses& hot, const void* weight, DType dtype, int64_t ld, void* to,
                            cudaStream_t stream);
// weight_gradient[ids[i]] += scale * from[i], [kHotClasses, ld], and likewise the bias's unless it is null.
struct ScatterHotParams {
  HotClasses hot;
  const float* from = nullptr;
  const float* bias_from = nullptr;  // [kHotClasses]; already scaled
  int64_t ld = 0;
  float scale = 1.0f;
  float* weight_gradient = nullptr;  // [vocab, ld]
  float* bias_gradient = nullptr;    // [vocab] or null
};
cudaError_t LaunchScatterHot(const ScatterHotParams& params, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_HOT_CLASSES_H_
