// SPDX-License-Identifier: Apache-2.0
// The series of each head, by a clock of the test's own.
#include "server/metrics/head_metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace lossd::metrics::head_metrics_test {
namespace {

class HeadMetricsTest : public testing::Test {
 protected:
  // The value of a head's series, NaN if there is none.
  double Value(const std::string& family, const std::string& head) const {
    std::vector<prometheus::MetricFamily> families;
    metrics_.Collect(&families);
    for (const auto& each : families) {
      if (each.name != family) continue;
      for (const auto& metric : each.metric) {
        if (metric.label.front().value != head) continue;
        return each.type == prometheus::MetricType::Counter ? metric.counter.value : metric.gauge.value;
      }
    }
    return std::numeric_limits<double>::quiet_NaN();
  }

  absl::Time now_ = absl::UnixEpoch();
  HeadMetrics metrics_{[this] { return now_; }};
};

TEST_F(HeadMetricsTest, AStepHasTheMeanLossOfItsRows) {
  metrics_.OnChunk({.head = "a", .rows = 10, .loss_rows = 8, .loss_sum = 20.0});
  metrics_.OnChunk({.head = "b", .rows = 5, .loss_rows = 5, .loss_sum = 1.0});
  metrics_.OnChunk({.head = "a", .rows = 4, .loss_rows = 2, .loss_sum = 10.0});
  metrics_.OnChunk({.head = "a", .rows = 3});  // loss only
  EXPECT_EQ(Value("lossd_rows_total", "a"), 17);
  EXPECT_TRUE(std::isnan(Value("lossd_head_loss", "a")));
  metrics_.OnStep({.head = "a", .step = 7, .rows = 10, .grad_norm = 0.5, .learning_rate = 1e-3});
  EXPECT_EQ(Value("lossd_head_loss", "a"), 3.0);
  EXPECT_EQ(Value("lossd_head_gradient_norm", "a"), 0.5);
  EXPECT_EQ(Value("lossd_head_learning_rate", "a"), 1e-3);
  EXPECT_EQ(Value("lossd_head_step", "a"), 7);
  EXPECT_EQ(Value("lossd_head_step_rows", "a"), 10);
  EXPECT_TRUE(std::isnan(Value("lossd_head_loss", "b")));
}

TEST_F(HeadMetricsTest, TokensAreTheRowsThatHaveATarget) {
  metrics_.OnChunk({.head = "a", .rows = 10, .valid_rows = 8, .loss_rows = 8});
  metrics_.OnChunk({.head = "a", .rows = 3, .valid_rows = 2});  // loss only
  EXPECT_EQ(Value("lossd_valid_rows_total", "a"), 10);
}

// As a trainer that adds up the summaries of its microbatches.
TEST_F(HeadMetricsTest, AStepHasTheErrorOfItsSampledAndFilteredGradients) {
  using kernels::Gradients;
  const auto chunk = [this](int64_t rows, Gradients gradients, double dropped, double variance,
                            double square) {
    metrics_.OnChunk({.head = "a",
                      .rows = rows,
                      .valid_rows = rows,
                      .gradients = gradients,
                      .loss_rows = rows,
                      .dropped_mass = dropped,
                      .sampling_variance = variance,
                      .squared_gradient = square});
  };
  chunk(10, Gradients::kSampled, 0.0, 1e-4, 1.0);
  chunk(10, Gradients::kSampled, 0.0, 8e-4, 8.0);
  chunk(6, Gradients::kFiltered, 0.5, 0.0, 0.0);
  chunk(2, Gradients::kFiltered, 0.1, 0.0, 0.0);
  chunk(50, Gradients::kExact, 0.0, 0.0, 0.0);
  // Gradients of hidden states alone take no part in the step.
  metrics_.OnChunk({.head = "a",
                    .rows = 4,
                    .valid_rows = 4,
                    .gradients = Gradients::kSampled,
                    .sampling_variance = 1.0,
                    .squared_gradient = 1.0});
  EXPECT_TRUE(std::isnan(Value("lossd_head_gradient_error_ratio", "a")));
  metrics_.OnStep({.head = "a", .step = 1});
  EXPECT_NEAR(Value("lossd_head_gradient_error_ratio", "a"), 0.01, 1e-12);
  EXPECT_NEAR(Value("lossd_head_dropped_probability", "a"), 0.6 / 8, 1e-12);
  chunk(10, Gradients::kExact, 0.0, 0.0, 0.0);
  metrics_.OnStep({.head = "a", .step = 2});
  EXPECT_TRUE(std::isnan(Value("lossd_head_gradient_error_ratio", "a")));
  EXPECT_TRUE(std::isnan(Value("lossd_head_dropped_probability", "a")));
}

TEST_F(HeadMetricsTest, TheNextStepBeginsAgain) {
  metrics_.OnChunk({.head = "a", .rows = 1, .loss_rows = 1, .loss_sum = 9.0});
  metrics_.OnStep({.head = "a", .step = 1});
  EXPECT_TRUE(std::isnan(Value("lossd_head_step_seconds", "a")));
  now_ += absl::Seconds(3);
  metrics_.OnChunk({.head = "a", .rows = 2, .loss_rows = 2, .loss_sum = 4.0});
  metrics_.OnStep({.head = "a", .step = 2});
  EXPECT_EQ(Value("lossd_head_loss", "a"), 2.0);
  EXPECT_EQ(Value("lossd_head_step_seconds", "a"), 3.0);
  metrics_.OnStep({.head = "a", .step = 3});  // of contributions alone
  EXPECT_TRUE(std::isnan(Value("lossd_head_loss", "a")));
  EXPECT_EQ(Value("lossd_head_step_seconds", "a"), 0.0);
}

TEST_F(HeadMetricsTest, NoSecondOfTheDeviceCountsTwice) {
  const auto chunk = [this](const std::string& head, double seconds) {
    metrics_.OnChunkLeft({.head = head, .rows = 1, .device_seconds = seconds});
  };
  const char* const kDevice = "lossd_head_device_seconds_total";
  EXPECT_TRUE(std::isnan(Value(kDevice, "a")));
  now_ += absl::Seconds(10);
  chunk("a", 2.0);  // from 8 to 10
  EXPECT_DOUBLE_EQ(Value(kDevice, "a"), 2.0);
  now_ += absl::Seconds(1);
  chunk("b", 3.0);  // from 8 to 11: it waited behind the other one for two seconds
  EXPECT_DOUBLE_EQ(Value(kDevice, "b"), 1.0);
  chunk("a", 0.5);  // wholly within what is counted
  EXPECT_DOUBLE_EQ(Value(kDevice, "a"), 2.0);
  now_ += absl::Seconds(9);
  chunk("a", 4.0);  // from 16 to 20, after a pause
  EXPECT_DOUBLE_EQ(Value(kDevice, "a"), 6.0);
  now_ -= absl::Seconds(15);  // the clock is set back
  chunk("a", 1.0);
  EXPECT_DOUBLE_EQ(Value(kDevice, "a"), 6.0);
  now_ += absl::Seconds(17);
  chunk("a", 1.0);  // from 21 to 22
  EXPECT_DOUBLE_EQ(Value(kDevice, "a"), 7.0);
  metrics_.Forget("a");
  EXPECT_TRUE(std::isnan(Value(kDevice, "a")));
}

TEST_F(HeadMetricsTest, AHeadsSeriesEndWithIt) {
  metrics_.OnChunk({.head = "a", .rows = 10, .loss_rows = 8, .loss_sum = 20.0});
  metrics_.OnStep({.head = "a", .step = 1});
  metrics_.Forget("a");
  metrics_.Forget("never was");
  EXPECT_TRUE(std::isnan(Value("lossd_head_step", "a")));
  EXPECT_TRUE(std::isnan(Value("lossd_rows_total", "a")));
  EXPECT_EQ(metrics_.total_rows(), 10);
  metrics_.OnChunk({.head = "a", .rows = 1});
  EXPECT_EQ(Value("lossd_rows_total", "a"), 1);
  EXPECT_EQ(metrics_.total_rows(), 11);
}

}  // namespace
}  // namespace lossd::metrics::head_metrics_test
