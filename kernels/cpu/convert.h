// SPDX-License-Identifier: Apache-2.0
// Conversion between fp32 and the dtypes of hidden states and tensors.
//
// To 16 bits: round to nearest even; what is too large becomes infinite, NaN stays NaN. Stateless and
// thread-safe. The loops have no branches and vectorise.
#ifndef LOSSD_KERNELS_CPU_CONVERT_H_
#define LOSSD_KERNELS_CPU_CONVERT_H_

#include <cstdint>

#include "kernels/dtype.h"

namespace lossd::kernels {

// `from` [n] in `dtype`, of any alignment, to fp32.
void ToFloat(DType dtype, const void* from, int64_t n, float* to);
// fp32 to `to` [n] in `dtype`, of any alignment.
void FromFloat(DType dtype, const float* from, int64_t n, void* to);

// to[i] += scale * from[i], the product and the sum each rounded to fp32; `from` [n] as in ToFloat.
void AddScaled(DType dtype, const void* from, int64_t n, float scale, float* to);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CONVERT_H_
