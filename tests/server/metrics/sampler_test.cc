// SPDX-License-Identifier: Apache-2.0
// Samples of a server without calls, by times of the test's own.
#include "server/metrics/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/time/clock.h"
#include "kernels/cpu/cpu_backend.h"

namespace lossd::metrics::sampler_test {
namespace {

class SamplerTest : public testing::Test {
 protected:
  SamplerTest() {
    EXPECT_TRUE(engine_->CreateHead("lm", {.hidden_size = 8, .vocab_size = 16}).ok());
    EXPECT_TRUE(engine_->PublishHead("lm").ok());
  }
  void SampleAfter(int seconds) { sampler_.Sample(now_ += absl::Seconds(seconds)); }
  float Last(Series series, size_t offset = 0) const {
    return (*history_.Last())[static_cast<size_t>(series) + offset];
  }
  nlohmann::json Head() const { return nlohmann::json::parse(history_.Json(1, 0, ""))["heads"]["lm"]; }

  Metrics metrics_{{.version = "1"}};
  std::unique_ptr<kernels::Backend> backend_ = *kernels::CreateCpuBackend({.threads = 1});
  std::unique_ptr<engine::Engine> engine_ =
      *engine::Engine::Create({.slice_bytes = 1024, .staging_bytes = 8192}, backend_.get(), 42, {&metrics_});
  History history_;
  Sampler sampler_{engine_.get(), backend_.get(), &metrics_, &history_};
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(SamplerTest, RatesAreMeansOfTheWindow) {
  SampleAfter(0);
  EXPECT_EQ(Last(Series::kRows), 0);
  metrics_.OnChunk({.head = "lm", .rows = 1000});
  metrics_.AddPayloadIn(4096);
  SampleAfter(2);
  EXPECT_EQ(Last(Series::kRows), 500);
  EXPECT_EQ(Last(Series::kBytesIn), 2048);
  for (int i = 0; i < 4; ++i) SampleAfter(2);
  EXPECT_EQ(Last(Series::kRows), 100) << "ten seconds after the first sample";
  EXPECT_EQ(Head()["rows_per_second"].back(), 100);
  SampleAfter(2);
  EXPECT_EQ(Last(Series::kRows), 0) << "the rows are older than the window";
}

TEST_F(SamplerTest, QuantilesAreOfTheWindow) {
  SampleAfter(0);
  EXPECT_TRUE(std::isnan(Last(Series::kMicrobatch)));
  for (int i = 0; i < 99; ++i) metrics_.ObserveMicrobatch(0.002);
  metrics_.ObserveMicrobatch(4.0);
  SampleAfter(2);
  EXPECT_GT(Last(Series::kMicrobatch), 0.001);
  EXPECT_LE(Last(Series::kMicrobatch), 0.0025);
  EXPECT_LE(Last(Series::kMicrobatch, 2), 0.0025);
  EXPECT_TRUE(std::isnan(Last(Series::kReceive)));
  metrics_.ObserveMicrobatch(4.0);
  SampleAfter(2);
  EXPECT_GT(Last(Series::kMicrobatch, 2), 2.5);
  for (int i = 0; i < 16; ++i) SampleAfter(2);
  EXPECT_TRUE(std::isnan(Last(Series::kMicrobatch)));
}

TEST_F(SamplerTest, TheDeviceIsBusyWhileItWorks) {
  SampleAfter(0);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(engine_->ZeroGradients("lm", 0).ok());
  EXPECT_GT(engine_->stats().device_busy, absl::ZeroDuration());
  SampleAfter(2);
  EXPECT_GT(Last(Series::kDeviceBusy), 0);
  EXPECT_LE(Last(Series::kDeviceBusy), 1);
  // The thread may still be ending the last piece of its work.
  for (int i = 0; i < 1000 && Last(Series::kDeviceBusy) > 0; ++i) {
    absl::SleepFor(absl::Milliseconds(5));
    SampleAfter(2);
  }
  EXPECT_EQ(Last(Series::kDeviceBusy), 0) << "nothing was done in the window";
}

TEST_F(SamplerTest, HeadsSayWhatTheirLastStepSaid) {
  SampleAfter(0);
  EXPECT_TRUE(Head()["loss"].back().is_null());
  metrics_.OnChunk({.head = "lm", .rows = 4, .loss_rows = 4, .loss_sum = 10.0});
  metrics_.OnStep({.head = "lm", .step = 1, .rows = 4, .grad_norm = 0.25, .learning_rate = 0.5});
  SampleAfter(2);
  EXPECT_EQ(Head()["loss"].back(), 2.5);
  EXPECT_EQ(Head()["gradient_norm"].back(), 0.25);
  EXPECT_EQ(Head()["learning_rate"].back(), 0.5);
  ASSERT_TRUE(engine_->DeleteHead("lm").ok());
  metrics_.ForgetHead("lm");
  SampleAfter(2);
  EXPECT_TRUE(Head().is_null());
  EXPECT_GT(Last(Series::kResidentBytes), 0);
  EXPECT_GT(Last(Series::kPlannedBytes), 0);
}

TEST_F(SamplerTest, AHeadThatWasMadeAnewBeginsAtZero) {
  metrics_.OnChunk({.head = "lm", .rows = 1000});
  SampleAfter(0);
  metrics_.ForgetHead("lm");
  metrics_.OnChunk({.head = "lm", .rows = 10});
  SampleAfter(2);
  EXPECT_EQ(Head()["rows_per_second"].back(), 0);
}

TEST_F(SamplerTest, SamplesByItself) {
  sampler_.Start();
  EXPECT_TRUE(history_.Last().has_value());
}

}  // namespace
}  // namespace lossd::metrics::sampler_test
