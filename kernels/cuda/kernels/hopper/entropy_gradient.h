// SPDX-License-Identifier: Apache-2.0
// Launcher of the kernel that turns stored exponentials into gradients in rows that have an upstream gradient
// of their entropy. Such a gradient is no multiple of the exponentials, and needs the row's complete sums.
//
// Enqueues on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_ENTROPY_GRADIENT_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_ENTROPY_GRADIENT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels/hopper/fused_rows.h"
#include "kernels/cuda/kernels/loss_rows.h"

namespace lossd::kernels::cuda::hopper {

// Changes, in place, the rows among in.rows whose coef_entropy is not 0: recoverable exponentials [rows, ld]
// bf16 become what rows.entropy says. The elements of the targets stay as they are.
cudaError_t LaunchEntropyGradient(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                                  void* exponentials, int64_t ld, cudaStream_t stream);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_ENTROPY_GRADIENT_H_
