// SPDX-License-Identifier: Apache-2.0
// Some rows of a chunk that are computed together. Plain data.
#ifndef LOSSD_KERNELS_CUDA_PATHS_ROW_BLOCK_H_
#define LOSSD_KERNELS_CUDA_PATHS_ROW_BLOCK_H_

#include <cstdint>

#include "kernels/cuda/kernels/loss_rows.h"

namespace lossd::kernels::cuda {

// From compact row `begin` on.
struct RowBlock {
  int64_t begin = 0;
  RowInputs in;
  RowResults out;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_ROW_BLOCK_H_
