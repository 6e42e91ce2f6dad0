// SPDX-License-Identifier: Apache-2.0
// The first stage of the norms' backward pass on Hopper: rows come through shared memory by bulk copies.
//
// See ../norm.h for what is computed. Enqueues on `stream`; device memory; thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_NORM_BACKWARD_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_NORM_BACKWARD_H_

#include <cuda_runtime_api.h>

#include "absl/strings/string_view.h"
#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/kernels/norm/norm.h"

namespace lossd::kernels::cuda::hopper {

// Why this kernel is not for the device or for rows of this kind, or "". Launches nothing.
absl::string_view WhyNoNormBackward(const NormParams& params, const NormBackwardParams& backward,
                                    const DeviceLimits& limits);
// dx and, if backward.partials is not null, partial sums: *partial_rows rows of them for the gain, then as
// many for the shift. False if WhyNoNormBackward gives a reason; otherwise *error is the launch's.
bool LaunchNormBackwardIfFits(const NormParams& params, const NormBackwardParams& backward,
                              const DeviceLimits& limits, cudaStream_t stream, int64_t* partial_rows,
                              cudaError_t* error);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_NORM_BACKWARD_H_
