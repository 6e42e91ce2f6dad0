// SPDX-License-Identifier: Apache-2.0
#include "client/cli/metrics_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace lossd::cli::metrics_text_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(MetricsTextTest, ReadsSamples) {
  const auto samples = ParseMetrics(
      "# HELP rows_total Rows.\n"
      "# TYPE rows_total counter\n"
      "rows_total{head=\"a\",note=\"quote \\\" brace } comma , slash \\\\ line \\n\"} 12.5 1700000000\n"
      "plain 3\n"
      "empty{} 4\n"
      "big +Inf\n"
      "\n"
      "broken{head=\"a\n"
      "nothing\n"
      "word abc\n");
  ASSERT_EQ(samples.size(), 4u);
  EXPECT_EQ(samples[0].name, "rows_total");
  EXPECT_EQ(samples[0].labels.at("head"), "a");
  EXPECT_EQ(samples[0].labels.at("note"), "quote \" brace } comma , slash \\ line \n");
  EXPECT_EQ(samples[0].value, 12.5);
  EXPECT_EQ(samples[1].value, 3);
  EXPECT_EQ(samples[2].labels.size(), 0u);
  EXPECT_EQ(samples[3].value, kInfinity);
}

TEST(MetricsTextTest, NothingCrashesIt) {
  for (const char* text : {"{", "a{", "a{b", "a{b=", "a{b=\"", "a{b=\"c\\", "a{b=\"c\"", "a{b=\"c\",",
                           "a{b=\"c\"}", "\"", " "}) {
    EXPECT_THAT(ParseMetrics(text), ::testing::IsEmpty()) << text;
  }
}

TEST(MetricsTextTest, BucketsOfSeveralLabelSetsAddUp) {
  const auto samples = ParseMetrics(
      "t_bucket{phase=\"a\",le=\"0.1\"} 1\n"
      "t_bucket{phase=\"a\",le=\"+Inf\"} 3\n"
      "t_bucket{phase=\"b\",le=\"0.1\"} 10\n"
      "t_bucket{phase=\"b\",le=\"+Inf\"} 10\n"
      "other_bucket{le=\"0.1\"} 100\n"
      "t_count 13\n");
  EXPECT_THAT(BucketsOf(samples, "t"),
              ::testing::ElementsAre(::testing::Pair(0.1, 11), ::testing::Pair(kInfinity, 13)));
}

TEST(MetricsTextTest, Quantiles) {
  const Buckets buckets = {{1, 0}, {2, 50}, {4, 100}, {kInfinity, 100}};
  EXPECT_DOUBLE_EQ(*Quantile(buckets, 0.5), 2);
  EXPECT_DOUBLE_EQ(*Quantile(buckets, 0.25), 1.5);
  EXPECT_DOUBLE_EQ(*Quantile(buckets, 0.75), 3);
  EXPECT_DOUBLE_EQ(*Quantile(buckets, 1), 4);
  EXPECT_DOUBLE_EQ(*Quantile({{1, 5}, {kInfinity, 10}}, 0.9), 1) << "beyond the last bound";
  EXPECT_FALSE(Quantile({}, 0.5).has_value());
  EXPECT_FALSE(Quantile({{1, 0}, {kInfinity, 0}}, 0.5).has_value());
  const Buckets later = {{1, 0}, {2, 50}, {4, 300}, {kInfinity, 300}};
  EXPECT_DOUBLE_EQ(*Quantile(Difference(later, buckets), 0.5), 3);
}

}  // namespace
}  // namespace lossd::cli::metrics_text_test
