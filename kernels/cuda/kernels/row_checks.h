// SPDX-License-Identifier: Apache-2.0
// What the guard (guard.h) checks of a row. Also of programs without CUDA.
//
// The file is shorter than 60 lines because plans without CUDA (paths/chunk_layout.h) include it, and guard.h
// does.
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
