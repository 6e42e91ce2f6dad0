// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/row_sampling.h"

#include <cmath>

namespace lossd::kernels {

void RowSampler::Sample(float* gradient, int64_t n) {
  const double threshold = double{threshold_};
  for (int64_t v = 0; v < n; ++v) {
    const double size = std::fabs(double{gradient[v]});
    square_ += size * size;
    if (size >= threshold) continue;  // as wide as two points are apart: one falls on it, the next is as far
    variance_ += size * (threshold - size);
    gradient[v] = sampler_.Take(size / threshold) ? std::copysign(threshold_, gradient[v]) : 0.0f;
  }
}

}  // namespace lossd::kernels
