// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/row_sampling.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "gtest/gtest.h"

namespace lossd::kernels::row_sampling_test {
namespace {

constexpr int64_t kClasses = 10'007;

// Sizes from far above the threshold to far below, zeros among them, of both signs.
std::vector<float> Gradient(float threshold) {
  std::vector<float> gradient(kClasses);
  for (int64_t v = 0; v < kClasses; ++v) {
    float size = threshold * std::exp2(3.0f - 0.002f * static_cast<float>((v * 7919) % kClasses));
    if (v % 7 == 0) size = 0.0f;
    gradient[static_cast<size_t>(v)] = v % 5 == 0 ? -size : size;
  }
  return gradient;
}

TEST(RowSampler, TakesWhatThePointsFallOn) {
  for (const float threshold : {1e-30f, 0x1p-10f, 1.0f, 1e30f}) {
    for (const float omega : {0.0f, 0.3f, 0x1.fffffep-1f}) {
      const std::vector<float> gradient = Gradient(threshold);
      std::vector<float> got = gradient;
      RowSampler sampler(omega, threshold);
      sampler.Sample(got.data(), 4000);  // in two parts, as around a target
      sampler.Sample(got.data() + 4000, kClasses - 4000);
      double end = 0.0, variance = 0.0, square = 0.0;
      for (size_t v = 0; v < gradient.size(); ++v) {
        const double size = std::fabs(double{gradient[v]});
        square += size * size;
        const double begin = end;
        end += std::min(1.0, size / double{threshold});
        if (size >= double{threshold}) {
          ASSERT_EQ(got[v], gradient[v]) << v;
          continue;
        }
        variance += size * (double{threshold} - size);
        ASSERT_TRUE(got[v] == 0.0f || got[v] == std::copysign(threshold, gradient[v])) << v;
        const double point =
            omega + std::max(omega == 0.0f ? 1.0 : 0.0, std::floor(begin - omega + 1e-9) + 1.0);
        const double first = begin < double{omega} ? double{omega} : point;
        if (std::fabs(first - end) < 1e-6) continue;
        ASSERT_EQ(got[v] != 0.0f, size > 0.0 && first < end) << v << " at " << omega;
      }
      EXPECT_NEAR(sampler.variance(), variance, 1e-9 * variance);
      EXPECT_NEAR(sampler.square(), square, 1e-9 * square);
    }
  }
}

// The sum of what is taken is that of the sizes, but for less than one class: the points are evenly spaced.
TEST(RowSampler, KeepsTheSumOfARow) {
  for (const float omega : {0.0f, 0.25f, 0.7f}) {
    std::vector<float> gradient(kClasses, 0.013f);
    RowSampler sampler(omega, 1.0f);
    sampler.Sample(gradient.data(), kClasses);
    double sum = 0.0;
    for (const float g : gradient) sum += double{g};
    EXPECT_NEAR(sum, 0.013 * kClasses, 1.001);
  }
}

TEST(RowSampler, ThresholdZeroLeavesAll) {
  std::vector<float> gradient = Gradient(1.0f);
  const std::vector<float> before = gradient;
  RowSampler sampler(0.5f, 0.0f);
  sampler.Sample(gradient.data(), kClasses);
  EXPECT_EQ(gradient, before);
  EXPECT_EQ(sampler.variance(), 0.0);
}

// Classes so narrow that they hardly move a float, together half as wide as the distance of the points: half
// of all rows take one.
TEST(RowSampler, CountsTheNarrowestClasses) {
  constexpr int64_t kNarrow = int64_t{1} << 18;
  int64_t count = 0;
  for (const float omega : {0.125f, 0.375f, 0.625f, 0.875f}) {
    RowSampler sampler(omega, 1.0f);
    for (int part = 0; part < 64; ++part) {
      std::vector<float> narrow(kNarrow, 0x1p-25f);
      sampler.Sample(narrow.data(), kNarrow);
      count += kNarrow - std::count(narrow.begin(), narrow.end(), 0.0f);
    }
  }
  EXPECT_EQ(count, 2);
}

}  // namespace
}  // namespace lossd::kernels::row_sampling_test
