#include "kernels/cpu/row_sampling.h"

#include <cmath>
#include <vector>

#include "gtest/gtest.h"

namespace lossd::kernels {
namespace {

TEST(RowSampling, TakesWhatTheRuleTakesToTheBit) {
  constexpr int64_t kClasses = 100'003;
  for (const float threshold : {0.0f, 1e-30f, 0x1p-10f, 1.0f, 1e30f}) {
    for (const int64_t begin : {0, 1, 17}) {
      const SampleKey key = SampleKeyOf(123, static_cast<uint64_t>(begin));
      std::vector<float> gradient(kClasses);
      for (int64_t v = 0; v < kClasses; ++v) {
        // Sizes around the threshold, many of them close to omega * threshold.
        const float omega = SampleOf(key, static_cast<uint32_t>(v));
        float size = threshold * std::exp2(3.0f - 0.0002f * static_cast<float>(v));
        if (v % 3 == 0) size = std::nextafter(omega * threshold, v % 2 == 0 ? 2.0f * threshold : 0.0f);
        if (v % 7 == 0) size = 0.0f;
        gradient[static_cast<size_t>(v)] = v % 5 == 0 ? -size : size;
      }
      std::vector<float> got = gradient;
      const SamplingSums sums = SampleClasses(key, threshold, begin, kClasses - 1, got.data());
      double variance = 0.0, square = 0.0;
      for (int64_t v = 0; v < kClasses; ++v) {
        const float before = gradient[static_cast<size_t>(v)];
        if (v < begin || v == kClasses - 1) {
          ASSERT_EQ(got[static_cast<size_t>(v)], before) << v;
          continue;
        }
        const double size = std::fabs(double{before});
        square += size * size;
        if (size < double{threshold}) variance += size * (double{threshold} - size);
        const float want = SampledSize(std::fabs(before), threshold, SampleOf(key, static_cast<uint32_t>(v)));
        ASSERT_EQ(got[static_cast<size_t>(v)], std::copysign(want, before)) << v;
      }
      EXPECT_NEAR(sums.variance, variance, 1e-9 * variance);
      EXPECT_NEAR(sums.square, square, 1e-9 * square);
    }
  }
}

}  // namespace
}  // namespace lossd::kernels
