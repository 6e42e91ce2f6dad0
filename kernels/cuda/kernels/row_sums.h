// SPDX-License-Identifier: Apache-2.0
// Statistics of a row over some of its classes, until the other classes have been added. Plain data; also of
// programs without CUDA.
//
// The file is shorter than 60 lines because plans without CUDA (paths/path_claims.h) include it, and kernels
// of two folders do.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_ROW_SUMS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_ROW_SUMS_H_

#include <cstdint>

namespace lossd::kernels::cuda {

// What the blocks of classes so far say of a row, the target left out; as Stats of row_loss_math.cuh.
struct RunningRow {
  float max;
  float sum;
  float spread;
  float weighted;
  int32_t arg;
  float stored_target;  // the target's logit as it comes with the others
};

// What the classes of one device say of a row, the target left out; as Stats of row_loss_math.cuh, but for
// what exponents are relative to and where classes are counted from.
struct RowRecord {
  float reference;  // in units of log 2
  float max;
  float sum;
  float spread;
  float weighted;
  int32_t arg;         // in the vocabulary; INT32_MAX: not known
  float target;        // the target's logit as it comes with the others
  int32_t has_target;  // 0: it is elsewhere, and `target` says nothing
};
static_assert(sizeof(RowRecord) == 32);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_ROW_SUMS_H_
