#include "kernels/cpu/row_sampling.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace lossd::kernels {
namespace {

constexpr int64_t kClasses = 100'003;
constexpr float kThresholds[] = {0.0f, 1e-30f, 0x1p-10f, 1.0f, 1e30f};

// From far below the threshold to above it, with both signs, some 0 and some at the threshold itself.
std::vector<float> Gradient(float threshold, uint32_t seed) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> exponent(-30.0f, 2.0f);
  std::vector<float> gradient(kClasses);
  for (size_t v = 0; v < gradient.size(); ++v) {
    gradient[v] = threshold * std::exp2(exponent(rng));
    if (v % 7 == 0) gradient[v] = 0.0f;
    if (v % 11 == 0) gradient[v] = threshold;
    if (v % 13 == 0) gradient[v] = std::nextafter(threshold, 0.0f);
    if (v % 3 == 0) gradient[v] = -gradient[v];
  }
  return gradient;
}

// The rule in other words, class by class.
TEST(RowSampling, TakesTheClassesThatAPointFallsOn) {
  for (const float threshold : kThresholds) {
    for (const float omega : {0.0f, 0.3f, 1.0f - 0x1p-24f}) {
      const std::vector<float> gradient = Gradient(threshold, 1);
      std::vector<float> got = gradient;
      SystematicSampler<double> sampler(double{omega});
      SampleClasses(sampler, threshold, 0, kClasses, got.data());
      double end = 0.0;
      int undecided = 0;
      for (size_t v = 0; v < gradient.size(); ++v) {
        const double size = std::fabs(double{gradient[v]});
        if (size >= double{threshold}) {
          ASSERT_EQ(got[v], gradient[v]) << v;
          end += 1.0;
          continue;
        }
        const double begin = end - double{omega};
        end += size / double{threshold};
        const double behind = end - double{omega};
        const double nearest =
            std::min(std::fabs(begin - std::round(begin)), std::fabs(behind - std::round(behind)));
        if (nearest < 1e-9) {
          ++undecided;
          ASSERT_TRUE(got[v] == 0.0f || std::fabs(got[v]) == threshold) << v;
          continue;
        }
        const bool taken = std::floor(behind) > std::floor(begin);
        ASSERT_EQ(got[v], taken ? std::copysign(threshold, gradient[v]) : 0.0f) << v << " at " << omega;
      }
      EXPECT_LT(undecided, 20);
    }
  }
}

TEST(RowSampling, GoesOnBehindTheTarget) {
  const std::vector<float> gradient = Gradient(0.5f, 2);
  for (const int64_t target : {int64_t{0}, int64_t{17}, kClasses - 1}) {
    std::vector<float> got = gradient;
    SystematicSampler<double> sampler(0.7);
    SampleClasses(sampler, 0.5f, 0, target, got.data());
    EXPECT_EQ(got[static_cast<size_t>(target)], gradient[static_cast<size_t>(target)]);
    SampleClasses(sampler, 0.5f, target + 1, kClasses, got.data());
    got.erase(got.begin() + target);
    std::vector<float> without = gradient;
    without.erase(without.begin() + target);
    SystematicSampler<double> whole(0.7);
    SampleClasses(whole, 0.5f, 0, kClasses - 1, without.data());
    EXPECT_EQ(got, without) << target;
  }
}

TEST(RowSampling, SumsUpWhatWasThereBefore) {
  for (const float threshold : kThresholds) {
    const std::vector<float> gradient = Gradient(threshold, 3);
    double variance = 0.0, square = 0.0;
    for (int64_t v = 100; v < kClasses - 1; ++v) {
      const double size = std::fabs(double{gradient[static_cast<size_t>(v)]});
      square += size * size;
      if (size < double{threshold}) variance += size * (double{threshold} - size);
    }
    std::vector<float> got = gradient;
    SystematicSampler<double> sampler(0.1);
    const SamplingSums sums = SampleClasses(sampler, threshold, 100, kClasses - 1, got.data());
    EXPECT_NEAR(sums.variance, variance, 1e-9 * variance);
    EXPECT_NEAR(sums.square, square, 1e-9 * square);
    EXPECT_TRUE(std::equal(got.begin(), got.begin() + 100, gradient.begin()));
    EXPECT_EQ(got.back(), gradient.back());
  }
}

// Classes so narrow that they hardly move a float, together half as wide as the distance of the points: half
// of all rows take one.
TEST(RowSampling, CountsTheNarrowestClasses) {
  constexpr size_t kNarrow = size_t{1} << 18;
  int count = 0;
  for (int i = 0; i < 4; ++i) {
    SystematicSampler<double> sampler(0.125 + i / 4.0);
    for (int part = 0; part < 64; ++part) {
      std::vector<float> narrow(kNarrow, 0x1p-25f);
      SampleClasses(sampler, 1.0f, 0, kNarrow, narrow.data());
      count +=
          static_cast<int>(kNarrow - static_cast<size_t>(std::count(narrow.begin(), narrow.end(), 0.0f)));
    }
  }
  EXPECT_EQ(count, 2);
}

}  // namespace
}  // namespace lossd::kernels
