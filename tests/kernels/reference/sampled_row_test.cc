// SPDX-License-Identifier: Apache-2.0
#include "kernels/reference/sampled_row.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/sampling.h"

namespace lossd::kernels::reference::sampled_row_test {
namespace {

using Values = std::vector<double>;

std::vector<uint8_t> Bits(std::initializer_list<int> bits) { return {bits.begin(), bits.end()}; }

TEST(SampledRow, TakesTheClassesThatAPointFallsOn) {
  const Values sizes = {0.25, 0.25, 0.0, 7.0, 0.5, 0.75};  // borders at 0.25, 0.5, 1.5, 2, 2.75
  EXPECT_EQ(TakenClasses(sizes, 0.125), Bits({1, 0, 0, 1, 0, 1}));
  EXPECT_EQ(TakenClasses(sizes, 0.375), Bits({0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(TakenClasses(sizes, 0.625), Bits({0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(TakenClasses(sizes, 0.875), Bits({0, 0, 0, 1, 1, 0}));
}

TEST(SampledRow, WithoutErrorsNothingIsUndecided) {
  const Values sizes = {0.25, 0.25, 0.0, 7.0, 0.5, 0.75};
  for (const double omega : {0.0, 0.25, 0.375, 0.75}) {
    EXPECT_EQ(UndecidedClasses(sizes, Values(6), omega), Values(6)) << omega;
  }
}

// 5 classes on 2 devices are 3 and 2. Each part begins anew, with a number of its own.
TEST(SampledRow, PartsAreSampledByThemselves) {
  const Values sizes = {0.5, 0.4, 0.3, 0.5, 0.6}, errors = {0.01, 0.01, 0.01, 0.02, 0.0};
  const std::vector<SampledPart> parts = SampledPartsOf(5, 2, /*shares=*/{}, /*seed=*/7, /*row=*/3);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].begin, 0u);
  EXPECT_EQ(parts[0].end, 3u);
  EXPECT_EQ(parts[1].begin, 3u);
  EXPECT_EQ(parts[1].end, 5u);
  EXPECT_EQ(parts[0].omega, double{SampleOf(7, 3)});
  EXPECT_EQ(parts[1].omega, double{SampleOf(7, 3, 3)});
  const std::vector<SampledPart> known = {{0, 3, 0.45}, {3, 5, 0.505}};
  EXPECT_EQ(TakenClasses(sizes, known), Bits({1, 0, 0, 0, 1}));
  EXPECT_EQ(UndecidedClasses(sizes, errors, known), Values({0, 0, 0, 1, 1}));
}

// The points 0.249 and 1.249 are closer to borders than the errors: to that of the first two classes, and to
// none.
TEST(SampledRow, ClassesAtABorderThatIsTooCloseAreUndecided) {
  const Values sizes = {0.25, 0.25, 0.0, 7.0, 0.5, 0.6};
  EXPECT_EQ(UndecidedClasses(sizes, Values(6, 0.01), 0.249), Values({1, 1, 0, 0, 0, 0}));
  EXPECT_EQ(UndecidedClasses(sizes, Values(6, 0.01), 0.251), Values({1, 1, 0, 0, 0, 0}));
  EXPECT_EQ(UndecidedClasses(sizes, Values(6, 0.01), 0.375), Values(6));
  // Errors add up: the point 1.97 is farther from the border at 2 than any class is off.
  const Values late = UndecidedClasses(sizes, Values(6, 0.01), 0.97);
  EXPECT_EQ(late[4], 1.0);
  EXPECT_EQ(late[5], 1.0);
}

// Classes of size 1 and more are always taken, the target and classes that are 0 never.
TEST(SampledRow, CertainClassesAreNotUndecided) {
  const Values sizes = {1.5, 0.0, 1.5, 0.0, 1.5};
  for (const double omega : {0.0, 0.001, 0.5, 0.999}) {
    EXPECT_EQ(UndecidedClasses(sizes, Values({0.4, 0.0, 0.4, 0.0, 0.4}), omega), Values(5));
  }
}

TEST(SampledRow, WhereErrorsAreLargeOnlyProbabilitiesAreKnown) {
  const Values sizes = {0.5, 0.01, 0.99, 2.0};
  const Values undecided = UndecidedClasses(sizes, Values({0.6, 0.01, 0.01, 0.01}), 0.1);
  EXPECT_EQ(undecided[0], 0.5);
  EXPECT_EQ(undecided[1], 0.25);
  EXPECT_EQ(undecided[2], 0.25);
  EXPECT_EQ(undecided[3], 0.0);
}

// Sizes that are off by no more than the errors change no decision that is certain, and the squares of all
// differences add up to no more than what is undecided.
TEST(SampledRow, AllowsForWhateverTheErrorsChange) {
  std::mt19937 rng(5);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  int changed = 0, certain = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    Values sizes(60), errors(60), off(60);
    const double error = trial % 3 == 0 ? 1e-2 : 1e-4;
    for (size_t v = 0; v < sizes.size(); ++v) {
      sizes[v] = v % 9 == 0 ? 0.0 : std::exp(-6.0 * uniform(rng)) * 1.2;
      errors[v] = error * sizes[v];
      off[v] = sizes[v] + errors[v] * (trial % 2 == 0 ? 1.0 : 2.0 * uniform(rng) - 1.0);
    }
    const double omega = uniform(rng);
    const auto taken = TakenClasses(sizes, omega), other = TakenClasses(off, omega);
    const Values undecided = UndecidedClasses(sizes, errors, omega);
    double allowed = 0.0, difference = 0.0;
    for (size_t v = 0; v < sizes.size(); ++v) {
      if (taken[v] != other[v]) {
        ASSERT_GT(undecided[v], 0.0) << "trial " << trial << " class " << v;
        ++changed;
      }
      allowed += undecided[v];
      difference += taken[v] != other[v] ? 1.0 : 0.0;
    }
    // A point at the end of the row has no second class.
    EXPECT_LE(difference, 9.0 * allowed) << "trial " << trial;
    certain += allowed == 0.0 ? 1 : 0;
  }
  EXPECT_GT(changed, 200);
  EXPECT_GT(certain, 500);
}

}  // namespace
}  // namespace lossd::kernels::reference::sampled_row_test
