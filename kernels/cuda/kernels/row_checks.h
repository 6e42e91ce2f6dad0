// SPDX-License-Identifier: Apache-2.0
// What the guard looks at. Also of programs without CUDA.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_ROW_CHECKS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_ROW_CHECKS_H_

#include <cstdint>

namespace lossd::kernels::cuda {

// What has to be finite of a row, or its slice fails.
enum class RowCheck : int32_t {
  kNothing,         // the row is absent (kernels/backend.h)
  kLoss,            // its results
  kHiddenGradient,  // and dx, because it is wanted or goes through a norm into the norm's gradients
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_ROW_CHECKS_H_
