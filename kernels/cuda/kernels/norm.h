// SPDX-License-Identifier: Apache-2.0
// Launchers of LayerNorm and RMSNorm over the rows of a chunk, forward and backward.
//
//   LayerNorm: y = (x - mean) r gain + shift,  r = 1 / sqrt(var + eps)
//   RMSNorm:   y = x r gain,                   r = 1 / sqrt(mean x^2 + eps)
//
// Everything is computed in fp32. Launchers enqueue on `stream`; pointers are device memory. Thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_NORM_H_
#define LOSSD_KERNELS_CUDA_KERNELS_NORM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/strings/string_view.h"
#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/kernels/launch_plan.h"
#include "kernels/cuda/kernels/rows.h"

namespace lossd::kernels::cuda {

// The operands of the forward pass; the backward pass uses them too.
struct NormParams {
  bool centred = true;  // LayerNorm; false: RMSNorm
  float epsilon = 1e-5f;
  const float* gain = nullptr;         // [D]
  const float* shift = nullptr;        // [D], LayerNorm only
  int64_t rows = 0;                    // compact rows
  const int32_t* source = nullptr;     // [rows]: the raw row of each compact row; null: the same row
  DeviceMatrix x;                      // raw rows, D columns
  DeviceMatrix y;                      // compact rows; forward: out (zero from D to ld); backward: dL/dy
  float* mean = nullptr;               // [rows]: forward: out; backward: in
  float* inverse_deviation = nullptr;  // [rows]: r; forward: out; backward: in
};

NormPlan PlanNormForward(const NormParams& params);
cudaError_t LaunchNormForward(const NormParams& params, const DeviceLimits& limits, cudaStream_t stream);

// The operands of the backward pass in addition to NormParams.
struct NormBackwardParams {
  float scale = 1.0f;  // dL/dy is scale * y
  // [rows]: 0: the row does not count in the parameter gradients; null: all rows count
  const int32_t* keep = nullptr;
  DeviceMatrix dx;  // raw rows; may be x itself; data null: not wanted
  // The accumulators to which the parameter gradients are added; null: not wanted. partials: scratch of
  // NormPartialFloats() floats.
  float* gain_gradient = nullptr;   // [D]
  float* shift_gradient = nullptr;  // [D], LayerNorm only
  float* partials = nullptr;
};

NormPlan PlanNormBackward(const NormParams& params, const NormBackwardParams& backward,
                          const DeviceLimits& limits);
cudaError_t LaunchNormBackward(const NormParams& params, const NormBackwardParams& backward,
                               const DeviceLimits& limits, cudaStream_t stream);

namespace hopper {

// ---- the first stage of the backward pass on Hopper: bulk copies bring rows to shared memory ----

// "" if this kernel can be used for the device and for such rows, else the reason why not. Launches nothing.
absl::string_view WhyNoNormBackward(const NormParams& params, const NormBackwardParams& backward,
                                    const DeviceLimits& limits);
// Computes dx and, if backward.partials is not null, partial sums of the parameter gradients: *partial_rows
// rows for the gain, and then as many rows for the shift. Returns false if WhyNoNormBackward gives a reason.
// Otherwise returns true, and *error is the error of the launch.
bool LaunchNormBackwardIfFits(const NormParams& params, const NormBackwardParams& backward,
                              const DeviceLimits& limits, cudaStream_t stream, int64_t* partial_rows,
                              cudaError_t* error);

}  // namespace hopper

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_NORM_H_
