// SPDX-License-Identifier: Apache-2.0
#include "client/plan/rates.h"

#include <cmath>
#include <cstdint>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::plan::rates_test {
namespace {

using ::testing::HasSubstr;

Timing Of(int64_t hidden, int64_t vocab, int64_t rows, double ms, size_t source = 0) {
  return {hidden, vocab, rows, ms, source, "real"};
}

TEST(Rates, AShapeThatWasMeasuredTakesItsTimeInProportionToTheRows) {
  const std::vector<Timing> measured = {Of(4096, 100'000, 8192, 40.0, 3)};
  const Estimate same = EstimateTime(measured, 4096, 100'000, 8192);
  EXPECT_EQ(same.basis, Basis::kMeasured);
  EXPECT_DOUBLE_EQ(same.low_seconds, 0.040);
  EXPECT_DOUBLE_EQ(same.high_seconds, 0.040);
  EXPECT_THAT(same.sources, ::testing::ElementsAre(3));
  EXPECT_DOUBLE_EQ(EstimateTime(measured, 4096, 100'000, 16384).low_seconds, 0.080);
}

TEST(Rates, OfSeveralRunsOfAShapeTheOneOfMostSimilarRowsCounts) {
  const std::vector<Timing> measured = {Of(4096, 100'000, 8192, 40.0, 0), Of(4096, 100'000, 4096, 22.0, 1)};
  EXPECT_DOUBLE_EQ(EstimateTime(measured, 4096, 100'000, 4096).low_seconds, 0.022);
  EXPECT_DOUBLE_EQ(EstimateTime(measured, 4096, 100'000, 65536).low_seconds, 0.320);
}

TEST(Rates, ShapesThatPredictEachOtherPredictAThird) {
  // 10, 10.4 and 10.2 ns a row and thousand elements.
  const std::vector<Timing> measured = {Of(2000, 100'000, 8192, 2000.0 * 100 * 8192 * 10.0e-6),
                                        Of(4000, 100'000, 8192, 4000.0 * 100 * 8192 * 10.4e-6),
                                        Of(4000, 200'000, 8192, 4000.0 * 200 * 8192 * 10.2e-6)};
  const Estimate estimate = EstimateTime(measured, 3000, 150'000, 8192);
  EXPECT_EQ(estimate.basis, Basis::kLikeShapes);
  const double units = 3000.0 * 150 * 8192 * 1e-9;
  EXPECT_NEAR(estimate.middle_seconds(), 10.2 * units, 1e-9 * units);
  EXPECT_LT(estimate.low_seconds, 10.0 * units);
  EXPECT_GT(estimate.high_seconds, 10.4 * units);
}

TEST(Rates, ShapesThatDoNotPredictEachOtherGiveBounds) {
  const std::vector<Timing> measured = {Of(2000, 100'000, 8192, 2000.0 * 100 * 8192 * 10.0e-6),
                                        Of(4000, 100'000, 8192, 4000.0 * 100 * 8192 * 20.0e-6),
                                        Of(4000, 200'000, 8192, 4000.0 * 200 * 8192 * 12.0e-6)};
  const Estimate estimate = EstimateTime(measured, 3000, 150'000, 8192);
  EXPECT_EQ(estimate.basis, Basis::kBetween);
  const double units = 3000.0 * 150 * 8192 * 1e-9;
  EXPECT_NEAR(estimate.low_seconds, 10.0 * units, 1e-9 * units);
  EXPECT_NEAR(estimate.high_seconds, 20.0 * units, 1e-9 * units);
}

TEST(Rates, WhatWasNotMeasuredIsNotInvented) {
  const std::vector<Timing> measured = {Of(2000, 100'000, 8192, 16.0), Of(4000, 100'000, 8192, 33.0),
                                        Of(4000, 200'000, 8192, 66.0)};
  EXPECT_THAT(EstimateTime({}, 2000, 100'000, 8192).why_none, HasSubstr("not measured on this card"));
  EXPECT_THAT(EstimateTime(measured, 2000, 100'000, 16).why_none, HasSubstr("2048 rows"));
  EXPECT_THAT(EstimateTime(measured, 999, 100'000, 8192).why_none, HasSubstr("hidden size"));
  EXPECT_THAT(EstimateTime(measured, 8001, 100'000, 8192).why_none, HasSubstr("hidden size"));
  EXPECT_THAT(EstimateTime(measured, 2000, 49'999, 8192).why_none, HasSubstr("vocabulary"));
  EXPECT_THAT(EstimateTime(measured, 2000, 400'001, 8192).why_none, HasSubstr("vocabulary"));
  EXPECT_THAT(EstimateTime({measured[0], measured[1]}, 3000, 100'000, 8192).why_none,
              HasSubstr("too few shapes"));
  for (const Estimate& none : {EstimateTime({}, 2000, 100'000, 8192)}) {
    EXPECT_FALSE(none.known());
    EXPECT_EQ(none.high_seconds, 0.0);
  }
}

}  // namespace
}  // namespace lossd::plan::rates_test
