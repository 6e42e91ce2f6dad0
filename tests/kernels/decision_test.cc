// SPDX-License-Identifier: Apache-2.0
// Tests of decision.h: the decision for or against sampling, and the samplers.
#include "kernels/decision.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

// ---- Decision ----

namespace lossd::kernels::decision_test {
namespace {

TEST(Decision, IsAsPlannedOrExactWithAReason) {
  for (const Gradients asked : {Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    const Gradients planned = asked == Gradients::kAuto ? Gradients::kSampled : asked;
    for (const Decision decision :
         {Decision::kAsPlanned, Decision::kTooManyCandidates, Decision::kTooMuchError}) {
      const Gradients gradients = GradientsOf(asked, decision);
      EXPECT_EQ(gradients, decision == Decision::kAsPlanned ? planned : Gradients::kExact);
      const Choice choice = GradientsChoice(asked, decision);
      EXPECT_EQ(choice.what, "gradients");
      EXPECT_EQ(choice.choice, Name(gradients));
      EXPECT_NE(choice.reason, "");
    }
  }
  EXPECT_NE(GradientsChoice(Gradients::kAuto, Decision::kAsPlanned).reason,
            GradientsChoice(Gradients::kSampled, Decision::kAsPlanned).reason);
}

TEST(Decision, APartIsComputedAsTheWholeWas) {
  for (const Gradients asked : {Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    const LossOptions options = {.gradients = asked, .sample_threshold = 0x1p-9f};
    LossOptions exact = options;
    exact.gradients = Gradients::kExact;
    EXPECT_EQ(AsDecided(options, Gradients::kExact, 0.0f), exact);
  }
  const LossOptions filtered = {.gradients = Gradients::kFiltered};
  EXPECT_EQ(AsDecided(filtered, Gradients::kFiltered, 0.0f), filtered);
  LossOptions sampled = {.gradients = Gradients::kSampled, .sample_threshold = 0x1p-9f};
  EXPECT_EQ(AsDecided(sampled, Gradients::kSampled, 0x1p-9f), sampled);
  sampled.sample_threshold = 0x1p-7f;
  EXPECT_EQ(AsDecided({.gradients = Gradients::kSampled}, Gradients::kSampled, 0x1p-7f), sampled);
  sampled.sample_threshold = 1.0f;
  EXPECT_EQ(AsDecided({.gradients = Gradients::kSampled}, Gradients::kSampled, 8.0f), sampled)
      << "options know no more";
  const LossOptions both = AsDecided({.gradients = Gradients::kAuto}, Gradients::kSampled, 0x1p-7f);
  EXPECT_EQ(both.gradients, Gradients::kAuto);
  EXPECT_EQ(both.sample_threshold, 0x1p-7f);
  EXPECT_GE(both.max_gradient_error, 1e30f);
  EXPECT_TRUE(Validate(both).ok());
}

TEST(Decision, SaysWhichThresholdWasTaken) {
  const Choice asked = ThresholdChoice(0x1p-10f, 0x1p-10f);
  EXPECT_EQ(asked.what, "sample threshold");
  EXPECT_EQ(asked.choice, "0.000976562");
  EXPECT_EQ(asked.reason, "it was asked for");
  EXPECT_EQ(ThresholdChoice(0x1p-10f, 0x1p-8f).choice, "0.00390625");
  EXPECT_EQ(ThresholdChoice(0x1p-10f, 0x1p-8f).reason, "no room for what 0.000976562 takes");
}

}  // namespace
}  // namespace lossd::kernels::decision_test

// ---- Sampling ----

namespace lossd::kernels::sampling_test {
namespace {

// Everything here is a function of these seeds, so no bound fails by chance.
constexpr uint64_t kSeeds[] = {0, 1, 2, 0x1234567890abcdefu, ~uint64_t{0}};
constexpr uint32_t kCount = 1 << 16;

// The values of kernels/decision.h are part of what a microbatch's gradient is: they may not change.
TEST(Sampling, GoldenValues) {
  EXPECT_EQ(MixBits(0), 0u);
  EXPECT_EQ(MixBits(1), 0x5692161d100b05e5u);
  EXPECT_EQ(SampleOf(0, 0), 0x1.c44150p-1f);
  EXPECT_EQ(SampleOf(0, 1), 0x1.b9e278p-2f);
  EXPECT_EQ(SampleOf(1, 0), 0x1.7fdf00p-1f);
  EXPECT_EQ(SampleOf(0x1234567890abcdefu, 77), 0x1.58be6ap-1f);
  EXPECT_EQ(SampleOf(~uint64_t{0}, ~uint64_t{0}), 0x1.2fff60p-2f);
  EXPECT_EQ(SampleOf(0x1234567890abcdefu, 77, 0), SampleOf(0x1234567890abcdefu, 77));
  EXPECT_EQ(SampleOf(0x1234567890abcdefu, 77, 1), 0x1.36adc8p-1f);
  EXPECT_EQ(SampleOf(0x1234567890abcdefu, 77, 64128), 0x1.e698ecp-2f);
}

// Chi-square over equal bins; of uniform numbers it is bins +- a few sqrt(2 bins).
double ChiSquare(const std::vector<uint32_t>& counts) {
  double total = 0.0;
  for (const uint32_t count : counts) total += count;
  const double expected = total / static_cast<double>(counts.size());
  double sum = 0.0;
  for (const uint32_t count : counts) sum += (count - expected) * (count - expected) / expected;
  return sum;
}

void ExpectUniform(const std::vector<uint32_t>& counts) {
  const auto bins = static_cast<double>(counts.size());
  EXPECT_NEAR(ChiSquare(counts), bins, 5.0 * std::sqrt(2.0 * bins));
}

size_t Bin(float sample, size_t bins) { return static_cast<size_t>(sample * static_cast<float>(bins)); }

TEST(Sampling, NumbersAreUniformOverRows) {
  for (const uint64_t seed : kSeeds) {
    std::vector<uint32_t> counts(256);
    for (uint32_t row = 0; row < kCount; ++row) {
      const float omega = SampleOf(seed, row);
      ASSERT_GE(omega, 0.0f);
      ASSERT_LT(omega, 1.0f);
      ++counts[Bin(omega, counts.size())];
    }
    ExpectUniform(counts);
  }
}

TEST(Sampling, NumbersOfARowAreUniformOverSeeds) {
  for (const uint64_t row : {uint64_t{0}, uint64_t{1}, uint64_t{77}, uint64_t{1} << 40}) {
    std::vector<uint32_t> counts(256);
    for (uint32_t seed = 0; seed < kCount; ++seed) ++counts[Bin(SampleOf(seed, row), counts.size())];
    ExpectUniform(counts);
  }
}

// What decides about a class of probability p is whether a point falls on p / tau, so small numbers have to
// be as frequent as they should be.
TEST(Sampling, SmallNumbersAreAsFrequentAsTheyShouldBe) {
  for (const double bound : {0.1, 0.01, 0.001, 1e-4}) {
    uint32_t below = 0;
    constexpr uint32_t kSeedCount = 64, kRows = 1 << 16;
    for (uint32_t seed = 0; seed < kSeedCount; ++seed) {
      for (uint32_t row = 0; row < kRows; ++row) below += SampleOf(seed, row) < bound ? 1 : 0;
    }
    const double expected = bound * kSeedCount * kRows;
    EXPECT_NEAR(below, expected, 5.0 * std::sqrt(expected)) << bound;
  }
}

// Numbers that must have nothing to do with each other: of rows and seeds that are next to each other.
TEST(Sampling, NeighboursAreIndependent) {
  using Pair = std::function<std::pair<float, float>(uint64_t seed, uint32_t i)>;
  const Pair pairs[] = {
      [](uint64_t s, uint32_t i) {
        return std::pair{SampleOf(s, i), SampleOf(s, i + 1)};
      },
      [](uint64_t s, uint32_t i) {
        return std::pair{SampleOf(s, i), SampleOf(s, i + 2)};
      },
      [](uint64_t s, uint32_t i) {
        return std::pair{SampleOf(s, i), SampleOf(s, i + 1024)};
      },
      [](uint64_t s, uint32_t i) {
        return std::pair{SampleOf(s, i), SampleOf(s + 1, i)};
      },
      [](uint64_t s, uint32_t i) {
        return std::pair{SampleOf(s, i + 1), SampleOf(s + 1, i)};
      },
      [](uint64_t s, uint32_t i) {
        return std::pair{SampleOf(s + i, 3), SampleOf(s + i + 1, 3)};
      },
      [](uint64_t s, uint32_t i) {
        return std::pair{SampleOf(s + i, 3), SampleOf(s + i + 1, 4)};
      },
      [](uint64_t s, uint32_t i) {
        return std::pair{SampleOf(s, i), SampleOf(i, s)};
      },
      // And of parts of a row.
      [](uint64_t s, uint32_t i) {
        return std::pair{SampleOf(s, i), SampleOf(s, i, 64128)};
      },
      [](uint64_t s, uint32_t i) {
        return std::pair{SampleOf(s, i, 64128), SampleOf(s, i, 2 * 64128)};
      },
      [](uint64_t s, uint32_t i) {
        return std::pair{SampleOf(s, 3, i), SampleOf(s, 3, i + 1)};
      },
  };
  constexpr size_t kBins = 16;
  for (size_t which = 0; which < std::size(pairs); ++which) {
    for (const uint64_t seed : kSeeds) {
      SCOPED_TRACE(which);
      std::vector<uint32_t> counts(kBins * kBins);
      double covariance = 0.0;
      for (uint32_t i = 0; i < kCount; ++i) {
        const auto [a, b] = pairs[which](seed, i);
        ++counts[Bin(a, kBins) * kBins + Bin(b, kBins)];
        covariance += (double{a} - 0.5) * (double{b} - 0.5);
      }
      ExpectUniform(counts);
      EXPECT_NEAR(covariance * 12.0 / kCount, 0.0, 5.0 / std::sqrt(kCount));
    }
  }
}

// Each of the 24 bits is set in half of the numbers, and agrees with each other bit in half of them.
TEST(Sampling, BitsAreIndependent) {
  std::vector<uint32_t> set(24), agree(24 * 24);
  for (uint32_t i = 0; i < kCount; ++i) {
    const auto word = static_cast<uint32_t>(SampleOf(7, i) * 0x1p24f);
    for (uint32_t a = 0; a < 24; ++a) {
      set[a] += word >> a & 1;
      for (uint32_t b = 0; b < a; ++b) agree[a * 24 + b] += (word >> a ^ ~(word >> b)) & 1;
    }
  }
  const double bound = 5.0 * 0.5 * std::sqrt(kCount);
  for (size_t a = 0; a < 24; ++a) {
    EXPECT_NEAR(set[a], kCount / 2, bound) << a;
    for (size_t b = 0; b < a; ++b) EXPECT_NEAR(agree[a * 24 + b], kCount / 2, bound) << a << " " << b;
  }
}

// ---- SystematicSampler ----

constexpr int kGrid = 4096;  // points of omega, at the middles between multiples of 1 / kGrid

double GridOmega(int i) { return (i + 0.5) / kGrid; }

// Sizes of a row, multiples of 1 / kGrid, so that all sums are exact and a class of width w is taken at w
// kGrid points of the grid. Many are 0, some 1 or more, some close to 1.
std::vector<double> Sizes(uint32_t seed, size_t classes) {
  std::mt19937 rng(seed);
  std::vector<double> sizes(classes);
  for (double& size : sizes) {
    const uint32_t kind = rng() % 8;
    const double below_one = static_cast<double>(rng() % kGrid) / kGrid;
    if (kind == 0) size = 0.0;
    if (kind == 1) size = 1.0;
    if (kind == 2) size = 3.0 + below_one;
    if (kind == 3) size = below_one;
    if (kind == 4) size = 1.0 - 1.0 / kGrid;
    if (kind > 4) size = std::floor(below_one * 64.0) / kGrid;
  }
  return sizes;
}

template <typename T>
std::vector<int> Taken(const std::vector<double>& sizes, double omega) {
  SystematicSampler<T> sampler(static_cast<T>(omega));
  std::vector<int> taken;
  for (const double size : sizes) taken.push_back(sampler.Take(static_cast<T>(size)) ? 1 : 0);
  return taken;
}

double WidthOf(const std::vector<double>& sizes, size_t classes) {
  double width = 0.0;
  for (size_t v = 0; v < classes; ++v) width += std::min(sizes[v], 1.0);
  return width;
}

template <typename T>
class SystematicSamplerTest : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(SystematicSamplerTest, Types);

TYPED_TEST(SystematicSamplerTest, TakesEachClassWithItsProbability) {
  for (const uint32_t seed : {1u, 2u, 3u}) {
    const std::vector<double> sizes = Sizes(seed, 300);
    std::vector<int> count(sizes.size());
    for (int i = 0; i < kGrid; ++i) {
      const std::vector<int> taken = Taken<TypeParam>(sizes, GridOmega(i));
      for (size_t v = 0; v < sizes.size(); ++v) count[v] += taken[v];
    }
    for (size_t v = 0; v < sizes.size(); ++v) {
      EXPECT_EQ(count[v], std::min(sizes[v], 1.0) * kGrid) << v << " of size " << sizes[v];
    }
  }
}

TYPED_TEST(SystematicSamplerTest, TakesThoseThatAPointFallsOn) {
  const std::vector<double> sizes = Sizes(4, 300);
  for (int i = 0; i < kGrid; i += 7) {
    const double omega = GridOmega(i);
    const std::vector<int> taken = Taken<TypeParam>(sizes, omega);
    for (size_t v = 0; v < sizes.size(); ++v) {
      const double begin = WidthOf(sizes, v), end = WidthOf(sizes, v + 1);
      ASSERT_EQ(taken[v], std::floor(end - omega) - std::floor(begin - omega)) << v << " at " << omega;
      ASSERT_TRUE(taken[v] == 1 || sizes[v] < 1.0) << v << " at " << omega;
    }
  }
}

// Whatever omega and the sizes are: the number that is taken hardly depends on chance.
TYPED_TEST(SystematicSamplerTest, TakesAsManyAsTheRowIsWide) {
  for (uint32_t seed = 10; seed < 40; ++seed) {
    const std::vector<double> sizes = Sizes(seed, 1 + seed * 17 % 400);
    const double width = WidthOf(sizes, sizes.size());
    for (int i = 0; i < kGrid; i += 31) {
      const std::vector<int> taken = Taken<TypeParam>(sizes, GridOmega(i));
      const auto count = static_cast<double>(std::count(taken.begin(), taken.end(), 1));
      ASSERT_TRUE(count == std::floor(width) || count == std::ceil(width)) << count << " of " << width;
    }
  }
}

TYPED_TEST(SystematicSamplerTest, GoesOnFromTheMiddleOfARow) {
  const std::vector<double> sizes = Sizes(5, 200);
  for (int i = 0; i < kGrid; i += 61) {
    const double omega = GridOmega(i);
    const std::vector<int> whole = Taken<TypeParam>(sizes, omega);
    for (size_t first = 0; first <= sizes.size(); first += 25) {
      SystematicSampler<TypeParam> sampler(static_cast<TypeParam>(omega),
                                           static_cast<TypeParam>(WidthOf(sizes, first)));
      for (size_t v = first; v < sizes.size(); ++v) {
        ASSERT_EQ(sampler.Take(static_cast<TypeParam>(sizes[v])) ? 1 : 0, whole[v]) << v << " at " << omega;
      }
    }
  }
}

// However close omega is to 0 or 1, and whatever comes before.
TYPED_TEST(SystematicSamplerTest, TakesNothingOfSizeZeroAndEverythingFromOneOn) {
  for (const float omega : {0.0f, 0x1p-24f, 0.5f, 1.0f - 0x1p-24f}) {
    for (const double before : {0.0, 1e-12, 0x1p-25, 0x1p-24, 1.0 - 0x1p-24, 1.0, 1e30}) {
      SystematicSampler<TypeParam> sampler(static_cast<TypeParam>(omega));
      sampler.Take(static_cast<TypeParam>(before));
      for (int i = 0; i < 100; ++i) {
        ASSERT_TRUE(sampler.Take(TypeParam{1})) << omega << " after " << before;
        ASSERT_FALSE(sampler.Take(TypeParam{0})) << omega << " after " << before;
      }
    }
  }
}

// As many classes as a large vocabulary has, each far narrower than the distance of the points.
TEST(SystematicSampler, RoundingDoesNotAddUp) {
  constexpr int kClasses = 1 << 18;
  for (const double size : {1.0 / 300.0, 1.0 / 7.0, 0.99}) {
    SystematicSampler<double> sampler(0.25);
    SystematicSampler<float> in_float(0.25f);
    int count = 0, count_in_float = 0;
    for (int v = 0; v < kClasses; ++v) {
      count += sampler.Take(size) ? 1 : 0;
      count_in_float += in_float.Take(static_cast<float>(size)) ? 1 : 0;
    }
    EXPECT_NEAR(count, size * kClasses, 1.0) << size;
    EXPECT_NEAR(count_in_float, size * kClasses, 1.0 + 1e-4 * size * kClasses) << size;
  }
}

}  // namespace
}  // namespace lossd::kernels::sampling_test
