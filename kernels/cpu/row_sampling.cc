#include "kernels/cpu/row_sampling.h"

#include <cmath>

namespace lossd::kernels {

SamplingSums SampleClasses(SystematicSampler<double>& sampler, float threshold, int64_t begin, int64_t end,
                           float* gradient) {
  const double inverse = 1.0 / double{threshold};
  SamplingSums sums;
  for (int64_t v = begin; v < end; ++v) {
    const float size = std::fabs(gradient[v]);
    sums.square += double{size} * double{size};
    if (size >= threshold) continue;  // always taken, which leaves the sampler as it is
    sums.variance += double{size} * (double{threshold} - double{size});
    gradient[v] = sampler.Take(double{size} * inverse) ? std::copysign(threshold, gradient[v]) : 0.0f;
  }
  return sums;
}

}  // namespace lossd::kernels
