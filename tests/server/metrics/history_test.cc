// SPDX-License-Identifier: Apache-2.0
// Tests of history.h: the history of samples, and the sampler that fills it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/time/clock.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/metrics/status_page.h"

// ---- History ----

namespace lossd::metrics::history_test {
namespace {

using ::testing::SizeIs;

Values ValuesWith(float rows) {
  Values values;
  values.fill(std::numeric_limits<float>::quiet_NaN());
  values[0] = rows;
  return values;
}

HeadValues HeadWith(float loss) { return {1.0f, loss, 0.5f, 1e-4f}; }

class HistoryTest : public testing::Test {
 protected:
  void Add(float rows, const std::map<std::string, HeadValues>& heads = {}) {
    history_.Add(absl::FromUnixSeconds(1'000'000'000 + 2 * added_++), ValuesWith(rows), heads);
  }
  nlohmann::json Json(uint64_t after = 0, absl::string_view head = "") const {
    return nlohmann::json::parse(history_.Json(42, after, head));
  }

  History history_;
  int64_t added_ = 0;
};

TEST_F(HistoryTest, BeginsEmpty) {
  EXPECT_FALSE(history_.Last().has_value());
  const nlohmann::json json = Json();
  EXPECT_EQ(json["incarnation"], "000000000000002a");
  EXPECT_EQ(json["interval_seconds"], 2);
  EXPECT_EQ(json["last"], 0);
  EXPECT_THAT(json["times"], SizeIs(0));
  EXPECT_THAT(json["server"], SizeIs(kSeries));
  EXPECT_THAT(json["heads"], SizeIs(0));
}

TEST_F(HistoryTest, AReaderGoesOnFromTheLastSampleItHas) {
  for (int i = 0; i < 5; ++i) Add(static_cast<float>(i));
  EXPECT_EQ(Json()["server"]["rows_per_second"], nlohmann::json({0, 1, 2, 3, 4}));
  EXPECT_EQ(Json()["server"]["queued_rows"], nlohmann::json({nullptr, nullptr, nullptr, nullptr, nullptr}));
  const nlohmann::json later = Json(3);
  EXPECT_EQ(later["last"], 5);
  EXPECT_EQ(later["times"], nlohmann::json({1'000'000'006.0, 1'000'000'008.0}));
  EXPECT_EQ(later["server"]["rows_per_second"], nlohmann::json({3, 4}));
  EXPECT_THAT(Json(5)["times"], SizeIs(0));
  EXPECT_THAT(Json(std::numeric_limits<uint64_t>::max())["times"], SizeIs(0));
  EXPECT_EQ((*history_.Last())[0], 4.0f);
}

TEST_F(HistoryTest, KeepsSoManySamples) {
  const auto samples = static_cast<int>(History::kSamples);
  for (int i = 0; i < samples + 7; ++i) Add(static_cast<float>(i), {{"lm", HeadWith(static_cast<float>(i))}});
  const nlohmann::json json = Json();
  EXPECT_THAT(json["times"], SizeIs(samples));
  EXPECT_EQ(json["server"]["rows_per_second"].front(), 7);
  EXPECT_EQ(json["server"]["rows_per_second"].back(), samples + 6);
  EXPECT_EQ(json["heads"]["lm"]["loss"].front(), 7);
  EXPECT_EQ(json["heads"]["lm"]["loss"].back(), samples + 6);
  EXPECT_LT(history_.Json(42, 0, "").size(), 100'000);
}

TEST_F(HistoryTest, HeadsComeAndGo) {
  Add(0);
  Add(0, {{"a", HeadWith(3)}, {"b", HeadWith(std::numeric_limits<float>::quiet_NaN())}});
  nlohmann::json heads = Json()["heads"];
  EXPECT_EQ(heads["a"]["loss"], nlohmann::json({nullptr, 3}));
  EXPECT_EQ(heads["b"]["loss"], nlohmann::json({nullptr, nullptr}));
  EXPECT_EQ(heads["b"]["gradient_norm"], nlohmann::json({nullptr, 0.5}));
  EXPECT_THAT(Json(0, "a")["heads"], SizeIs(1));
  EXPECT_THAT(Json(0, "c")["heads"], SizeIs(0));
  Add(0, {{"b", HeadWith(1)}});
  EXPECT_FALSE(Json()["heads"].contains("a"));
  Add(0, {{"a", HeadWith(9)}});  // another one of this name
  EXPECT_EQ(Json()["heads"]["a"]["loss"], nlohmann::json({nullptr, nullptr, nullptr, 9}));
}

TEST_F(HistoryTest, SoManyHeadsHaveSeries) {
  std::map<std::string, HeadValues> heads;
  for (size_t i = 0; i < History::kMostHeads + 5; ++i)
    heads["head-" + std::to_string(1000 + i)] = HeadWith(1);
  Add(0, heads);
  EXPECT_THAT(Json()["heads"], SizeIs(History::kMostHeads));
  heads.erase("head-1000");
  Add(0, heads);
  EXPECT_THAT(Json()["heads"], SizeIs(History::kMostHeads));
}

}  // namespace
}  // namespace lossd::metrics::history_test

// ---- Sampler ----
// Samples of a server without calls, by times of the test's own.

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
