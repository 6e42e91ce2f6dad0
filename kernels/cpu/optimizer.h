// SPDX-License-Identifier: Apache-2.0
// Optimizer updates in fp32, one pass over a parameter: value, moments and gradient are each read and written
// once, and the gradient is zero afterwards. Stateless and thread-safe on disjoint ranges.
#ifndef LOSSD_KERNELS_CPU_OPTIMIZER_H_
#define LOSSD_KERNELS_CPU_OPTIMIZER_H_

#include <cstdint>

#include "kernels/optimizer_options.h"

namespace lossd::kernels {

// A range of one parameter; [n] each. Moments that the optimizer does not use may be null.
struct ParamRange {
  float* value = nullptr;
  float* gradient = nullptr;
  float* moment1 = nullptr;
  float* moment2 = nullptr;
  int64_t n = 0;
};

// Update number `update` (1-based). `is_vector`: a bias or norm parameter.
void UpdateParams(const OptimizerOptions& options, int64_t update, bool is_vector, const ParamRange& range);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_OPTIMIZER_H_
