// SPDX-License-Identifier: Apache-2.0
// Tests of head_metrics.h and of the registry of metrics.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/engine/engine.h"
#include "server/metrics/metrics.h"
#include "tests/support/temp_folder.h"

// ---- Head metrics ----
// The series of each head, by a clock of the test's own.

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

TEST(CollectPagingTest, HeadsInHostMemoryAlone) {
  engine::HeadSnapshot device, host;
  device.name = "device";
  host.name = "host";
  host.paging = {.on_device = true,
                 .value_bytes = 10,
                 .hits = 5,
                 .copies = 3,
                 .evictions = 2,
                 .copied_bytes = 30,
                 .copying = absl::Milliseconds(1500)};
  std::vector<prometheus::MetricFamily> families;
  CollectPaging({{device, host}}, &families);
  std::map<std::string, double> values;
  for (const prometheus::MetricFamily& family : families) {
    ASSERT_EQ(family.metric.size(), 1u) << family.name;
    ASSERT_EQ(family.metric[0].label.size(), 1u);
    EXPECT_EQ(family.metric[0].label[0].value, "host");
    const bool counts = family.type == prometheus::MetricType::Counter;
    values[family.name] = counts ? family.metric[0].counter.value : family.metric[0].gauge.value;
  }
  EXPECT_THAT(values, testing::ElementsAre(testing::Pair("lossd_head_on_device", 1.0),
                                           testing::Pair("lossd_head_pool_copied_bytes_total", 30.0),
                                           testing::Pair("lossd_head_pool_copies_total", 3.0),
                                           testing::Pair("lossd_head_pool_copy_seconds_total", 1.5),
                                           testing::Pair("lossd_head_pool_evictions_total", 2.0),
                                           testing::Pair("lossd_head_pool_hits_total", 5.0)));
}

TEST_F(HeadMetricsTest, AStepHasTheMeanLossOfItsRows) {
  metrics_.OnChunk({.head = "a", .rows = 10, .accumulating = {.loss = 20.0, .valid_rows = 8}});
  metrics_.OnChunk({.head = "b", .rows = 5, .accumulating = {.loss = 1.0, .valid_rows = 5}});
  metrics_.OnChunk({.head = "a", .rows = 4, .accumulating = {.loss = 10.0, .valid_rows = 2}});
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
  metrics_.OnChunk({.head = "a", .rows = 10, .sums = {.valid_rows = 8}, .accumulating = {.valid_rows = 8}});
  metrics_.OnChunk({.head = "a", .rows = 3, .sums = {.valid_rows = 2}});  // loss only
  EXPECT_EQ(Value("lossd_valid_rows_total", "a"), 10);
}

// As a trainer that adds up the summaries of its microbatches.
TEST_F(HeadMetricsTest, AStepHasTheErrorOfItsSampledAndFilteredGradients) {
  using kernels::Gradients;
  const auto chunk = [this](int64_t rows, Gradients gradients, double dropped, double variance,
                            double square) {
    metrics_.OnChunk({.head = "a",
                      .rows = rows,
                      .gradients = gradients,
                      .sums = {.dropped_mass = dropped,
                               .sampling_variance = variance,
                               .squared_gradient = square,
                               .valid_rows = rows},
                      .accumulating = {.valid_rows = rows}});
  };
  chunk(10, Gradients::kSampled, 0.0, 1e-4, 1.0);
  chunk(10, Gradients::kSampled, 0.0, 8e-4, 8.0);
  chunk(6, Gradients::kFiltered, 0.5, 0.0, 0.0);
  chunk(2, Gradients::kFiltered, 0.1, 0.0, 0.0);
  chunk(50, Gradients::kExact, 0.0, 0.0, 0.0);
  // Gradients of hidden states alone take no part in the step.
  metrics_.OnChunk({.head = "a",
                    .rows = 4,
                    .gradients = Gradients::kSampled,
                    .sums = {.sampling_variance = 1.0, .squared_gradient = 1.0, .valid_rows = 4}});
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
  metrics_.OnChunk({.head = "a", .rows = 1, .accumulating = {.loss = 9.0, .valid_rows = 1}});
  metrics_.OnStep({.head = "a", .step = 1});
  EXPECT_TRUE(std::isnan(Value("lossd_head_step_seconds", "a")));
  now_ += absl::Seconds(3);
  metrics_.OnChunk({.head = "a", .rows = 2, .accumulating = {.loss = 4.0, .valid_rows = 2}});
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
  metrics_.OnChunk({.head = "a", .rows = 10, .accumulating = {.loss = 20.0, .valid_rows = 8}});
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

// ---- The registry of metrics ----

namespace lossd::metrics::metrics_test {
namespace {

using kernels::Gradients;
using ::testing::HasSubstr;
using ::testing::Not;

// The value of the sample "name{labels}" in the text; NaN if there is none.
double Sample(const std::string& text, absl::string_view sample) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    double value = 0;
    if (absl::StartsWith(line, absl::StrCat(sample, " ")) &&
        absl::SimpleAtod(line.substr(sample.size() + 1), &value)) {
      return value;
    }
  }
  return std::numeric_limits<double>::quiet_NaN();
}

class MetricsTest : public ::testing::Test {
 protected:
  MetricsTest() {
    backend_ = *kernels::CreateCpuBackend({.threads = 1});
    engine::EngineOptions options;
    options.slice_bytes = 1024;
    options.staging_bytes = 8192;
    engine_ = *engine::Engine::Create(options, backend_.get(), 42, {&metrics_});
    metrics_.Attach(engine_.get(), backend_.get());
  }
  ~MetricsTest() override { metrics_.Detach(); }

  Metrics metrics_{
      {.version = "1.2.3", .backend = "cpu", .device = "a \"quoted\" device", .compiler = "c++"}};
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<engine::Engine> engine_;
};

TEST_F(MetricsTest, CountsSaves) {
  metrics_.saves().OnSaved("main", {.checkpoint = "main/a", .step = 7, .bytes = 1000, .seconds = 0.2});
  metrics_.saves().OnSaved("main", {.checkpoint = "main/b", .step = 9, .bytes = 500, .seconds = 2.0});
  metrics_.saves().OnSaved("other", {.checkpoint = "other/a", .step = 1, .bytes = 1, .seconds = 0.1});
  metrics_.saves().OnFailed(absl::InternalError("disk"));
  metrics_.saves().OnFailed(absl::AlreadyExistsError("the name"));
  metrics_.saves().OnFailed(absl::CancelledError("by the client"));
  metrics_.saves().SetBuffered(77);
  std::string text = metrics_.RenderText();
  EXPECT_EQ(Sample(text, "lossd_checkpoint_saves_total{result=\"ok\"}"), 3);
  EXPECT_EQ(Sample(text, "lossd_checkpoint_saves_total{result=\"failed\"}"), 1);
  EXPECT_EQ(Sample(text, "lossd_checkpoint_saves_total{result=\"cancelled\"}"), 1);
  EXPECT_EQ(Sample(text, "lossd_checkpoint_saved_bytes_total"), 1501);
  EXPECT_EQ(Sample(text, "lossd_checkpoint_save_seconds_count"), 3);
  EXPECT_EQ(Sample(text, "lossd_checkpoint_buffered_bytes"), 77);
  EXPECT_EQ(Sample(text, "lossd_checkpoint_last_step{head=\"main\"}"), 9);
  const double now = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  EXPECT_NEAR(Sample(text, "lossd_checkpoint_last_success_timestamp_seconds{head=\"main\"}"), now, 60);
  metrics_.ForgetHead("main");
  text = metrics_.RenderText();
  EXPECT_TRUE(std::isnan(Sample(text, "lossd_checkpoint_last_step{head=\"main\"}")));
  EXPECT_EQ(Sample(text, "lossd_checkpoint_last_step{head=\"other\"}"), 1);
}

TEST_F(MetricsTest, CountsEvents) {
  metrics_.OnChunk({.head = "main",
                    .rows = 100,
                    .sums = {.valid_rows = 90},
                    .compute_seconds = 0.02,
                    .queue_seconds = {0.001, 0.002}});
  for (const auto& [rows, valid_rows, mass] : {std::tuple{10, 10, 1.25}, {7, 6, 0.5}}) {
    metrics_.OnChunk({.head = "main",
                      .rows = rows,
                      .gradients = Gradients::kFiltered,
                      .sums = {.dropped_mass = mass, .valid_rows = valid_rows},
                      .compute_seconds = 0.3,
                      .queue_seconds = {0.003}});
  }
  metrics_.OnChunk({.head = "main",
                    .rows = 3,
                    .gradients = Gradients::kSampled,
                    .sums = {.sampling_variance = 4e-4, .squared_gradient = 16.0, .valid_rows = 2}});
  metrics_.OnStep({.head = "main", .skipped = false});
  metrics_.OnStep({.head = "main", .skipped = true});
  metrics_.OnContribution({.head = "main", .added_rows = 7});
  metrics_.OnStep({.head = "main", .made_not_finite = 2});
  metrics_.OnDeviceError(absl::InternalError("x"));
  metrics_.ObservePhase(Phase::kReceive, 0.0002);
  metrics_.ObserveMicrobatch(0.4);
  metrics_.AddPayloadIn(1000);
  metrics_.AddPayloadOut(300);
  metrics_.CountRequest("ComputeLoss");
  metrics_.CountRequest("ComputeLoss");
  metrics_.CountError("ComputeLoss", "INVALID_ARGUMENT");
  metrics_.SetDraining(true);
  const std::string text = metrics_.RenderText();
  EXPECT_EQ(Sample(text, "lossd_rows_total{head=\"main\"}"), 120);
  EXPECT_EQ(Sample(text, "lossd_valid_rows_total{head=\"main\"}"), 108);
  EXPECT_EQ(Sample(text, "lossd_chunks_total{gradients=\"exact\"}"), 1);
  EXPECT_EQ(Sample(text, "lossd_chunks_total{gradients=\"filtered\"}"), 2);
  EXPECT_EQ(Sample(text, "lossd_chunk_rows_sum{gradients=\"exact\"}"), 90);
  EXPECT_EQ(Sample(text, "lossd_chunk_rows_sum{gradients=\"filtered\"}"), 16);
  EXPECT_EQ(Sample(text, "lossd_chunks_total{gradients=\"sampled\"}"), 1);
  EXPECT_EQ(Sample(text, "lossd_chunk_rows_sum{gradients=\"sampled\"}"), 2);
  EXPECT_EQ(Sample(text, "lossd_gradient_error_ratio_count"), 1);
  EXPECT_NEAR(Sample(text, "lossd_gradient_error_ratio_sum"), 5e-3, 1e-9);
  EXPECT_EQ(Sample(text, "lossd_dropped_probability_total"), 1.75);
  EXPECT_EQ(Sample(text, "lossd_steps_total"), 2);
  EXPECT_EQ(Sample(text, "lossd_skipped_steps_total"), 1);
  EXPECT_EQ(Sample(text, "lossd_diverged_steps_total"), 1);
  EXPECT_EQ(Sample(text, "lossd_contribution_rows_total"), 7);
  EXPECT_EQ(Sample(text, "lossd_device_errors_total"), 1);
  EXPECT_EQ(Sample(text, "lossd_payload_bytes_total{direction=\"in\"}"), 1000);
  EXPECT_EQ(Sample(text, "lossd_payload_bytes_total{direction=\"out\"}"), 300);
  EXPECT_EQ(Sample(text, "lossd_requests_total{method=\"ComputeLoss\"}"), 2);
  EXPECT_EQ(Sample(text, "lossd_errors_total{code=\"INVALID_ARGUMENT\",method=\"ComputeLoss\"}"), 1);
  EXPECT_EQ(Sample(text, "lossd_phase_seconds_count{phase=\"compute\"}"), 4);
  EXPECT_EQ(Sample(text, "lossd_phase_seconds_count{phase=\"queue\"}"), 4);
  EXPECT_EQ(Sample(text, "lossd_phase_seconds_bucket{phase=\"receive\",le=\"0.00025\"}"), 1);
  EXPECT_EQ(Sample(text, "lossd_phase_seconds_bucket{phase=\"receive\",le=\"0.0001\"}"), 0);
  EXPECT_EQ(Sample(text, "lossd_microbatch_seconds_count"), 1);
  EXPECT_EQ(Sample(text, "lossd_draining"), 1);
}

TEST_F(MetricsTest, PullsFromEngineBackendAndProcess) {
  const std::string text = metrics_.RenderText();
  EXPECT_EQ(Sample(text, "lossd_memory_bytes{kind=\"staging\"}"), 8192);
  EXPECT_EQ(Sample(text, "lossd_memory_peak_bytes{kind=\"staging\"}"), 8192);
  EXPECT_EQ(Sample(text, "lossd_memory_limit_bytes"), 0);
  EXPECT_GE(Sample(text, "lossd_device_busy_seconds_total"), 0);
  EXPECT_EQ(Sample(text, "lossd_staging_bytes"), 8192);
  EXPECT_EQ(Sample(text, "lossd_staging_used_bytes"), 0);
  EXPECT_EQ(Sample(text, "lossd_staging_peak_bytes"), 0);
  for (const char* name : {"lossd_open_streams", "lossd_queued_slices", "lossd_waiting_slices",
                           "lossd_queued_rows", "lossd_heads", "lossd_ledger_rows", "lossd_ledger_bytes"}) {
    EXPECT_EQ(Sample(text, name), 0) << name;
  }
  EXPECT_GT(Sample(text, "process_resident_memory_bytes"), 1e6);
  EXPECT_GT(Sample(text, "process_virtual_memory_bytes"), Sample(text, "process_resident_memory_bytes"));
  EXPECT_GE(Sample(text, "process_cpu_seconds_total"), 0);
  EXPECT_GT(Sample(text, "process_start_time_seconds"), 1.6e9);
  EXPECT_GE(Sample(text, "process_open_fds"), 3);
}

TEST_F(MetricsTest, WithoutSourcesTheRestRemains) {
  metrics_.Detach();
  const std::string text = metrics_.RenderText();
  EXPECT_THAT(text, Not(HasSubstr("lossd_memory_bytes")));
  EXPECT_THAT(text, HasSubstr("lossd_chunks_total{gradients=\"exact\"} 0"));
}

TEST_F(MetricsTest, ForgottenHeadsLeaveNoSeriesButStayInTheTotal) {
  metrics_.OnChunk({.head = "gone", .rows = 5});
  metrics_.OnChunk({.head = "here", .rows = 7});
  metrics_.ForgetHead("gone");
  const std::string text = metrics_.RenderText();
  EXPECT_THAT(text, Not(HasSubstr("\"gone\"")));
  EXPECT_THAT(text, HasSubstr("\"here\""));
  EXPECT_EQ(metrics_.totals().rows, 12);
}

TEST_F(MetricsTest, SurvivesConcurrentUse) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 200; ++i) {
        metrics_.OnChunk({.head = t % 2 == 0 ? "head0" : "head1", .rows = 1});
        if (i % 20 == 0) metrics_.RenderText();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(metrics_.totals().rows, 800);
}

TEST_F(MetricsTest, PromtoolAgrees) {
  if (std::system("command -v promtool > /dev/null 2>&1") != 0) {
    GTEST_SKIP() << "promtool is missing (Debian package prometheus)";
  }
  metrics_.OnChunk(
      {.head = "main", .rows = 5, .sums = {.valid_rows = 5}, .compute_seconds = 0.1, .queue_seconds = {0.1}});
  metrics_.CountRequest("ComputeLoss");
  metrics_.CountError("ComputeLoss", "NOT_FOUND");
  test::TempFolder folder;
  test::WriteWholeFile(folder.File("metrics.txt"), metrics_.RenderText());
  const int result = std::system(absl::StrCat("promtool check metrics < ", folder.File("metrics.txt"), " > ",
                                              folder.File("out.txt"), " 2>&1")
                                     .c_str());
  EXPECT_EQ(result, 0) << test::ReadWholeFile(folder.File("out.txt"));
  EXPECT_EQ(test::ReadWholeFile(folder.File("out.txt")), "");
}

TEST(EstimateQuantileTest, InterpolatesInsideTheBucket) {
  prometheus::ClientMetric::Histogram histogram;
  EXPECT_EQ(EstimateQuantile(histogram, 0.5), 0.0);
  const double infinity = std::numeric_limits<double>::infinity();
  histogram.bucket = {{0, 1.0}, {10, 2.0}, {20, 4.0}, {20, infinity}};
  histogram.sample_count = 20;
  EXPECT_DOUBLE_EQ(EstimateQuantile(histogram, 0.25), 1.5);
  EXPECT_DOUBLE_EQ(EstimateQuantile(histogram, 0.5), 2.0);
  EXPECT_DOUBLE_EQ(EstimateQuantile(histogram, 0.75), 3.0);
  histogram.bucket.back().cumulative_count = histogram.sample_count = 40;
  EXPECT_DOUBLE_EQ(EstimateQuantile(histogram, 0.99), 4.0);
}

}  // namespace
}  // namespace lossd::metrics::metrics_test
