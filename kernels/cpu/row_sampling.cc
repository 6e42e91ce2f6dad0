#include "kernels/cpu/row_sampling.h"

#include <cmath>

namespace lossd::kernels {
namespace {

constexpr float kCoarse = 0x1p-16f;

// IsSampled with the number of the class, whose lower bits are only computed where the upper ones leave it
// open.
bool IsTaken(SampleKey key, uint32_t column, uint32_t coarse, float size, float threshold) {
  const auto low = static_cast<float>(coarse);
  if (IsSampled(size, threshold, (low + 1.0f) * kCoarse)) return true;
  if (!IsSampled(size, threshold, low * kCoarse)) return false;
  return IsSampled(size, threshold, FineSample(key, column, coarse));
}

}  // namespace

SamplingSums SampleClasses(SampleKey key, float threshold, int64_t begin, int64_t end, float* gradient) {
  SamplingSums sums;
  uint32_t pair = 0;
  for (int64_t v = begin; v < end; ++v) {
    const auto column = static_cast<uint32_t>(v);
    if (v == begin || (column & 1) == 0) pair = CoarseSamplePair(key, column >> 1);
    const float size = std::fabs(gradient[v]);
    sums.square += double{size} * double{size};
    if (size >= threshold) continue;
    sums.variance += double{size} * (double{threshold} - double{size});
    const uint32_t coarse = (column & 1) != 0 ? pair >> 16 : pair & 0xffffu;
    gradient[v] =
        IsTaken(key, column, coarse, size, threshold) ? std::copysign(threshold, gradient[v]) : 0.0f;
  }
  return sums;
}

}  // namespace lossd::kernels
