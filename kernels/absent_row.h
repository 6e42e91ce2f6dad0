// SPDX-License-Identifier: Apache-2.0
// Rows with a target that add nothing to any sum, whatever their hidden state holds (docs/math.md, "Rows of
// weight 0").
#ifndef LOSSD_KERNELS_ABSENT_ROW_H_
#define LOSSD_KERNELS_ABSENT_ROW_H_

#include <cstdint>

#include "kernels/backend.h"

namespace lossd::kernels {

// Whether row `row`, which has a target, is absent: its weight is 0 and nothing else of it has a gradient.
inline bool IsAbsent(const Slice& slice, int64_t row) {
  return slice.row_weights != nullptr && slice.row_weights[row] == 0.0f &&
         (slice.grad_lse == nullptr || slice.grad_lse[row] == 0.0f) &&
         (slice.grad_entropy == nullptr || slice.grad_entropy[row] == 0.0f);
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_ABSENT_ROW_H_
