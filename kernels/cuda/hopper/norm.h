// The norms of long rows on Hopper: rows come through shared memory by bulk copies. See ../norm.h for what is
// computed; enqueue on `stream`; device memory; thread-safe.
#ifndef LOSSD_KERNELS_CUDA_HOPPER_NORM_H_
#define LOSSD_KERNELS_CUDA_HOPPER_NORM_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/device_limits.h"
#include "kernels/cuda/norm.h"

namespace lossd::kernels::cuda::hopper {

// False: these kernels are not for this device or rows of this kind; otherwise *error is the launch's.
bool LaunchNormForwardIfFits(const NormParams& params, const DeviceLimits& limits, cudaStream_t stream,
                             cudaError_t* error);

// The same for dx and, if backward.partials is not null, the partial sums of min(rows, multiprocessors)
// blocks.
bool LaunchNormBackwardIfFits(const NormParams& params, const NormBackwardParams& backward,
                              const DeviceLimits& limits, cudaStream_t stream, cudaError_t* error);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_HOPPER_NORM_H_
