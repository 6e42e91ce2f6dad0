// SPDX-License-Identifier: Apache-2.0
// The norm before the classifier, one row at a time; fp32 values, double sums. Stateless and thread-safe.
//
// unit = (x - mean) / sqrt(variance + eps) (LayerNorm, biased variance) or x / sqrt(mean square + eps)
// (RMSNorm); y = unit * gain + shift.
#ifndef LOSSD_KERNELS_CPU_NORM_H_
#define LOSSD_KERNELS_CPU_NORM_H_

#include <cstdint>

#include "kernels/head_config.h"

namespace lossd::kernels {

struct NormParams {
  Norm norm = Norm::kNone;  // kLayerNorm or kRmsNorm here
  float epsilon = 0.0f;
  int64_t size = 0;              // D
  const float* gain = nullptr;   // [D]
  const float* shift = nullptr;  // [D], LayerNorm only
};

// unit [D] holds x on entry; writes unit and y [D]. Returns 1 / sqrt(... + eps).
float NormForward(const NormParams& params, float* unit, float* y);

// grad [D] holds dL/dy on entry and dL/dx on return.
void NormBackward(const NormParams& params, const float* unit, float inverse_deviation, float* grad);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_NORM_H_
