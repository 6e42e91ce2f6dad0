#include "kernels/sampling.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace lossd::kernels {
namespace {

// Everything here is a function of these seeds, so no bound fails by chance.
constexpr uint64_t kSeeds[] = {0, 1, 2, 0x1234567890abcdefu, ~uint64_t{0}};
constexpr uint32_t kCount = 1 << 16;

// The values of kernels/sampling.h are part of what a microbatch's gradient is: they may not change.
TEST(Sampling, GoldenValues) {
  EXPECT_EQ(MixBits(0), 0u);
  EXPECT_EQ(MixBits(1), 0x5692161d100b05e5u);
  const SampleKey zero = SampleKeyOf(0, 0);
  EXPECT_EQ(zero.low, 0x7b1dcdafu);
  EXPECT_EQ(zero.high, 0xe220a839u);
  const SampleKey key = SampleKeyOf(0x1234567890abcdefu, 77);
  EXPECT_EQ(key.low, 0xc9ab1b50u);
  EXPECT_EQ(key.high, 0xac5f354bu);
  EXPECT_EQ(SampleBits(key, 0), 0x889db9a5u);
  EXPECT_EQ(SampleBits(key, 1), 0x70e44d01u);
  EXPECT_EQ(SampleBits(key, 0xffffffffu), 0xea2106a8u);
  EXPECT_EQ(SampleOf(key, 0), 0x1.734bd4p-1f);
  EXPECT_EQ(SampleOf(key, 1), 0x1.113a5ep-1f);
  EXPECT_EQ(SampleOf(key, 262143), 0x1.9d48dcp-3f);
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

size_t Bin(float sample, size_t bins) {
  return std::min(bins - 1, static_cast<size_t>(sample * static_cast<float>(bins)));
}

TEST(Sampling, NumbersOfARowAreUniform) {
  for (const uint64_t seed : kSeeds) {
    const SampleKey key = SampleKeyOf(seed, 5);
    std::vector<uint32_t> counts(256);
    for (uint32_t v = 0; v < kCount; ++v) {
      const float sample = SampleOf(key, v);
      ASSERT_GE(sample, 0.0f);
      ASSERT_LE(sample, 1.0f);
      ++counts[Bin(sample, counts.size())];
    }
    ExpectUniform(counts);
  }
}

TEST(Sampling, NumbersOfAClassAreUniformOverRows) {
  for (const uint64_t seed : kSeeds) {
    std::vector<uint32_t> counts(256);
    for (uint32_t row = 0; row < kCount; ++row) ++counts[Bin(SampleOf(SampleKeyOf(seed, row), 1001), 256)];
    ExpectUniform(counts);
  }
}

// What decides about a class of probability p is whether its number is below p / tau, so small numbers have
// to be as frequent as they should be.
TEST(Sampling, SmallNumbersAreAsFrequentAsTheyShouldBe) {
  for (const double bound : {0.1, 0.01, 0.001, 1e-4}) {
    uint32_t below = 0;
    constexpr uint32_t kRows = 512, kClasses = 1 << 13;
    for (uint32_t row = 0; row < kRows; ++row) {
      const SampleKey key = SampleKeyOf(42, row);
      for (uint32_t v = 0; v < kClasses; ++v) below += SampleOf(key, v) < bound ? 1 : 0;
    }
    const double expected = bound * kRows * kClasses;
    EXPECT_NEAR(below, expected, 5.0 * std::sqrt(expected)) << bound;
  }
}

// Numbers that must have nothing to do with each other: of what is next to a class, a row, a seed.
TEST(Sampling, NeighboursAreIndependent) {
  using Pair = std::function<std::pair<float, float>(uint64_t seed, uint32_t i)>;
  const auto number = [](uint64_t seed, uint64_t row, uint32_t v) {
    return SampleOf(SampleKeyOf(seed, row), v);
  };
  const Pair pairs[] = {
      [&](uint64_t s, uint32_t i) {
        return std::pair{number(s, 3, i), number(s, 3, i + 1)};
      },
      [&](uint64_t s, uint32_t i) {
        return std::pair{number(s, 3, i), number(s, 3, i + 2)};
      },
      [&](uint64_t s, uint32_t i) {
        return std::pair{number(s, 3, i), number(s, 3, i + 256)};
      },
      [&](uint64_t s, uint32_t i) {
        return std::pair{number(s, 3, i), number(s, 4, i)};
      },
      [&](uint64_t s, uint32_t i) {
        return std::pair{number(s, i, 9), number(s, i + 1, 9)};
      },
      [&](uint64_t s, uint32_t i) {
        return std::pair{number(s, i, 9), number(s, i + 1, 10)};
      },
      [&](uint64_t s, uint32_t i) {
        return std::pair{number(s, 3, i), number(s + 1, 3, i)};
      },
      [&](uint64_t s, uint32_t i) {
        return std::pair{number(s + i, 3, 9), number(s + i + 1, 3, 9)};
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

// Each bit is set in half of the words, and agrees with each other bit in half of them.
TEST(Sampling, BitsAreIndependent) {
  const SampleKey key = SampleKeyOf(7, 11);
  std::array<std::array<uint32_t, 32>, 32> agree{};
  std::array<uint32_t, 32> set{};
  for (uint32_t i = 0; i < kCount; ++i) {
    const uint32_t word = SampleBits(key, i);
    for (uint32_t a = 0; a < 32; ++a) {
      set[a] += word >> a & 1;
      for (uint32_t b = 0; b < a; ++b) agree[a][b] += (word >> a ^ ~(word >> b)) & 1;
    }
  }
  const double bound = 5.0 * 0.5 * std::sqrt(kCount);
  for (size_t a = 0; a < 32; ++a) {
    EXPECT_NEAR(set[a], kCount / 2, bound) << a;
    for (size_t b = 0; b < a; ++b) EXPECT_NEAR(agree[a][b], kCount / 2, bound) << a << " " << b;
  }
}

TEST(Sampling, CoarseNumbersAreTheUpperBitsOfTheFineOnes) {
  const SampleKey key = SampleKeyOf(3, 1);
  for (uint32_t v = 0; v < kCount; ++v) {
    const uint32_t pair = CoarseSamplePair(key, v / 2);
    const uint32_t coarse = v % 2 == 0 ? pair & 0xffffu : pair >> 16;
    const float fine = SampleOf(key, v);
    ASSERT_GE(fine, static_cast<float>(coarse) * 0x1p-16f);
    ASSERT_LE(fine, static_cast<float>(coarse + 1) * 0x1p-16f);
    ASSERT_EQ(fine, FineSample(key, v, coarse));
  }
}

TEST(Sampling, WhatIsTakenAtAThresholdIsTakenAtEveryLowerOne) {
  const SampleKey key = SampleKeyOf(8, 0);
  for (uint32_t v = 0; v < kCount; ++v) {
    const float size = std::exp2(-8.0f - 0.0001f * static_cast<float>(v));
    const float sample = SampleOf(key, v);
    bool taken = true;
    for (float threshold = 0x1p-20f; threshold <= 1.0f; threshold *= 2.0f) {
      const bool here = SampledSize(size, threshold, sample) > 0.0f;
      ASSERT_TRUE(taken || !here) << v << " " << threshold;
      taken = here;
    }
  }
}

TEST(Sampling, CountsTheSizeOnAverage) {
  for (const float size : {0.9f, 0.5f, 0.03f, 0.001f}) {
    constexpr float kThreshold = 0.75f;
    double sum = 0.0;
    for (uint32_t row = 0; row < 64; ++row) {
      const SampleKey key = SampleKeyOf(99, row);
      for (uint32_t v = 0; v < 4096; ++v) {
        sum += double{SampledSize(size, kThreshold, SampleOf(key, v))} / (64 * 4096);
      }
    }
    const double deviation = std::sqrt(std::max(0.0, double{size} * (double{kThreshold} - double{size})));
    EXPECT_NEAR(sum, size, 5.0 * deviation / 512 + 1e-6) << size;
  }
  EXPECT_EQ(SampledSize(0.75f, 0.75f, 1.0f), 0.75f);
  EXPECT_EQ(SampledSize(0.0f, 0.75f, 0.0f), 0.0f);
  EXPECT_EQ(SampledSize(0.2f, 0.75f, 0.0f), 0.75f);
  EXPECT_EQ(SampledSize(0.2f, 0.75f, 1.0f), 0.0f);
}

}  // namespace
}  // namespace lossd::kernels
