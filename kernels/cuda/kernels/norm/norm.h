// Launchers of LayerNorm and RMSNorm over the rows of a chunk, forward and backward.
//
//   LayerNorm: y = (x - mean) r gain + shift, r = 1 / sqrt(var + eps);  RMSNorm: y = x r gain, r = 1 /
//   sqrt(mean x^2 + eps)
// Everything is computed in fp32. Launchers enqueue on `stream`; device memory; thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_NORM_NORM_H_
#define LOSSD_KERNELS_CUDA_KERNELS_NORM_NORM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/strings/string_view.h"
#include "kernels/cuda/device/device_limits.h"
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
  float* inverse_deviation = nullptr;  // [rows]: likewise r
};

// Where a kernel has a row between the passes over it.
enum class NormRows : uint8_t {
  kRegisters,   // forward
  kBulkCopies,  // backward on Hopper (hopper/norm_backward.h): in a ring that one thread copies whole rows
                // into
  kWarpCopies,  // backward: in a ring that each warp copies its part into
  kNowhere,     // rows of any kind, which are read again for each pass
};
absl::string_view Name(NormRows rows);

// Which kernel a launch takes; decided by dtypes, sizes, alignment and the device alone.
struct NormPlan {
  NormRows rows = NormRows::kNowhere;
  absl::string_view reason;  // why not the kernel before it in NormRows; "": it is the first
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

// How many floats LaunchNormBackward needs for its first stage.
int64_t NormPartialFloats(int64_t hidden_size, int multiprocessors);
NormPlan PlanNormBackward(const NormParams& params, const NormBackwardParams& backward,
                          const DeviceLimits& limits);
cudaError_t LaunchNormBackward(const NormParams& params, const NormBackwardParams& backward,
                               const DeviceLimits& limits, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_NORM_NORM_H_
