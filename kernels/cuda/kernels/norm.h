// SPDX-License-Identifier: Apache-2.0
// Launchers of LayerNorm and RMSNorm over the rows of a chunk, forward and backward.
//
//   LayerNorm: y = (x - mean) r gain + shift, r = 1 / sqrt(var + eps);  RMSNorm: y = x r gain, r = 1 /
//   sqrt(mean x^2 + eps)
// Everything is computed in fp32. Launchers enqueue on `stream`; device memory; thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_NORM_H_
#define LOSSD_KERNELS_CUDA_KERNELS_NORM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/strings/string_view.h"
#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/kernels/launch_plan.h"
#include "kernels/cuda/kernels/rows.h"

namespace lossd::kernels::cuda {

struct NormParams {
  bool centred = true;  // LayerNorm; false: RMSNorm
  float epsilon = 1e-5f;
  const float* gain = nullptr;         // [D]
  const float* shift = nullptr;        // [D], LayerNorm only
  int64_t rows = 0;                    // compact rows
  const int32_t* source = nullptr;     // [rows]: the raw row of a compact row; null: the same
  DeviceMatrix x;                      // raw rows, D columns
  DeviceMatrix y;                      // compact rows; forward: out (zero from D to ld); backward: dL/dy in
  float* mean = nullptr;               // [rows]: out in forward, in in backward
  float* inverse_deviation = nullptr;  // [rows]: r; out in forward, in in backward
};

NormPlan PlanNormForward(const NormParams& params);
cudaError_t LaunchNormForward(const NormParams& params, const DeviceLimits& limits, cudaStream_t stream);

struct NormBackwardParams {
  float scale = 1.0f;             // dL/dy is scale * y
  const int32_t* keep = nullptr;  // [rows]: 0 keeps a row out of the parameter gradients; null: all in
  DeviceMatrix dx;                // raw rows; may be x itself; data null: not wanted
  // Parameter gradients, added to; null: not wanted. partials: NormPartialFloats() floats.
  float* gain_gradient = nullptr;   // [D]
  float* shift_gradient = nullptr;  // [D], LayerNorm only
  float* partials = nullptr;
};

NormPlan PlanNormBackward(const NormParams& params, const NormBackwardParams& backward,
                          const DeviceLimits& limits);
cudaError_t LaunchNormBackward(const NormParams& params, const NormBackwardParams& backward,
                               const DeviceLimits& limits, cudaStream_t stream);

namespace hopper {

// ---- the first stage of the backward pass on Hopper: rows come through shared memory by bulk copies ----

// Why this kernel is not for the device or for rows of this kind, or "". Launches nothing.
absl::string_view WhyNoNormBackward(const NormParams& params, const NormBackwardParams& backward,
                                    const DeviceLimits& limits);
// dx and, if backward.partials is not null, partial sums: *partial_rows rows of them for the gain, then as
// many for the shift. False if WhyNoNormBackward gives a reason; otherwise *error is the launch's.
bool LaunchNormBackwardIfFits(const NormParams& params, const NormBackwardParams& backward,
                              const DeviceLimits& limits, cudaStream_t stream, int64_t* partial_rows,
                              cudaError_t* error);

}  // namespace hopper

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_NORM_H_
