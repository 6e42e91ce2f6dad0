#include "kernels/sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace lossd::kernels {
namespace {

// Everything here is a function of these seeds, so no bound fails by chance.
constexpr uint64_t kSeeds[] = {0, 1, 2, 0x1234567890abcdefu, ~uint64_t{0}};
constexpr uint32_t kCount = 1 << 16;

// They are part of what the gradient of a microbatch is, so they may not change.
TEST(Sampling, GoldenValues) {
  EXPECT_EQ(MixBits(0), 0u);
  EXPECT_EQ(MixBits(1), 0x5692161d100b05e5u);
  EXPECT_EQ(SampleOf(0, 0), 0x1.c4415p-1f);
  EXPECT_EQ(SampleOf(0, 1), 0x1.b9e278p-2f);
  EXPECT_EQ(SampleOf(1, 0), 0x1.7fdfp-1f);
  EXPECT_EQ(SampleOf(0x1234567890abcdefu, 77), 0x1.58be6ap-1f);
  EXPECT_EQ(SampleOf(~uint64_t{0}, 0x7fffffffu), 0x1.da70cp-2f);
}

// Chi-square over equal bins: of uniform numbers it is the number of bins, give or take a few roots of twice
// it.
void ExpectUniform(const std::vector<uint32_t>& counts) {
  double total = 0.0;
  for (const uint32_t count : counts) total += count;
  const auto bins = static_cast<double>(counts.size());
  double sum = 0.0;
  for (const uint32_t count : counts) sum += std::pow(count - total / bins, 2) / (total / bins);
  EXPECT_NEAR(sum, bins, 5.0 * std::sqrt(2.0 * bins));
}

size_t Bin(float sample, size_t bins) { return static_cast<size_t>(sample * static_cast<float>(bins)); }

TEST(Sampling, NumbersAreUniformOverRowsAndSeeds) {
  for (const uint64_t seed : kSeeds) {
    std::vector<uint32_t> rows(256), seeds(256);
    for (uint32_t i = 0; i < kCount; ++i) {
      for (const float sample : {SampleOf(seed, i), SampleOf(seed + i, 5)}) {
        ASSERT_GE(sample, 0.0f);
        ASSERT_LT(sample, 1.0f);
      }
      ++rows[Bin(SampleOf(seed, i), 256)];
      ++seeds[Bin(SampleOf(seed + i, 5), 256)];
    }
    ExpectUniform(rows);
    ExpectUniform(seeds);
  }
}

// Numbers that must have nothing to do with each other: of neighbouring rows, seeds, and both.
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
        return std::pair{SampleOf(s + i, 9), SampleOf(s + i + 1, 9)};
      },
      [](uint64_t s, uint32_t i) {
        return std::pair{SampleOf(s + i, 9), SampleOf(s + i, 10)};
      },
      [](uint64_t s, uint32_t i) {
        return std::pair{SampleOf(s + i, i), SampleOf(s + i + 1, i + 1)};
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

// Which classes are taken; sizes as multiples of 1/64, so that every sum is exact in float too.
template <typename T>
std::vector<bool> Taken(const std::vector<int>& sizes, float omega) {
  SystematicSampler<T> sampler(static_cast<T>(omega));
  std::vector<bool> taken;
  for (const int size : sizes) taken.push_back(sampler.Take(static_cast<T>(size) / 64));
  return taken;
}

TEST(Sampling, TakesEachClassAsOftenAsItIsWide) {
  const std::vector<int> sizes = {3, 0, 64, 17, 1, 63, 200, 5, 5, 5, 64, 32, 0, 31, 1};
  std::vector<int> taken(sizes.size());
  for (int i = 0; i < 64; ++i) {  // points between multiples of 1/64
    const float omega = (static_cast<float>(i) + 0.5f) / 64;
    const std::vector<bool> now = Taken<double>(sizes, omega);
    EXPECT_EQ(Taken<float>(sizes, omega), now);
    for (size_t v = 0; v < sizes.size(); ++v) taken[v] += now[v] ? 1 : 0;
  }
  for (size_t v = 0; v < sizes.size(); ++v) EXPECT_EQ(taken[v], std::min(sizes[v], 64)) << v;
}

// A block of classes in the middle of a row is sampled as in the whole row.
TEST(Sampling, BlocksContinueOneAnother) {
  const std::vector<int> sizes = {3, 0, 64, 17, 1, 63, 200, 5, 5, 5, 64, 32, 0, 31, 1};
  for (int i = 0; i < 64; ++i) {
    const float omega = (static_cast<float>(i) + 0.5f) / 64;
    const std::vector<bool> whole = Taken<double>(sizes, omega);
    double begin = 0.0;
    for (size_t cut = 0; cut < sizes.size(); ++cut) {
      SystematicSampler<double> block(double{omega}, begin);
      for (size_t v = cut; v < sizes.size(); ++v)
        EXPECT_EQ(block.Take(sizes[v] / 64.0), whole[v]) << cut << " " << v;
      begin += std::min(sizes[cut] / 64.0, 1.0);
    }
  }
}

}  // namespace
}  // namespace lossd::kernels
