// SPDX-License-Identifier: Apache-2.0
// Tests of what the server remembers: the history of samples and the sampler that fills it (history.h),
// events (event_log.h) and recordings (trace_recorder.h), by clocks of the tests' own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/metrics/events.h"
#include "server/metrics/status_page.h"

namespace lossd::metrics::history_test {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

// ---- History ----

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

// ---- Sampler ----
// Samples of a server without calls, by times of the test's own.

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
  metrics_.OnChunk({.head = "lm", .rows = 4, .accumulating = {.loss = 10.0, .valid_rows = 4}});
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

TEST_F(SamplerTest, ASampleWithoutAStepSaysNothingOfSteps) {
  const auto step = [this](uint64_t number, double norm) {
    metrics_.OnStep({.head = "lm", .step = number, .rows = 4, .grad_norm = norm, .learning_rate = 0.5});
  };
  step(0, 0.25);
  SampleAfter(0);
  SampleAfter(2);
  step(1, 0.5);
  step(2, 0.75);
  SampleAfter(2);
  SampleAfter(2);
  metrics_.ForgetHead("lm");  // another head of the same name follows
  step(2, 1.0);
  SampleAfter(2);
  EXPECT_EQ(Head()["gradient_norm"], nlohmann::json({0.25, nullptr, 0.75, nullptr, 1.0}));
  EXPECT_EQ(Head()["learning_rate"], nlohmann::json({0.5, nullptr, 0.5, nullptr, 0.5}));
  EXPECT_EQ(Head()["rows_per_second"], nlohmann::json({0, 0, 0, 0, 0}));
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

// ---- Events ----
// Events by a clock of the test's own.

class EventLogTest : public testing::Test {
 protected:
  std::vector<std::string> TextsAfter(uint64_t id) const {
    std::vector<std::string> texts;
    for (const Event& event : events_.After(id).events) texts.push_back(event.text);
    return texts;
  }

  absl::Time now_ = absl::UnixEpoch();
  EventLog events_{[this] { return now_; }};
};

TEST_F(EventLogTest, AReaderGoesOnFromTheLastIdItSaw) {
  EXPECT_EQ(events_.After(0).last_id, 0);
  events_.Add(EventLevel::kInfo, "head_created", "a", "one");
  events_.Add(EventLevel::kInfo, "head_created", "b", "two");
  const EventLog::Reading first = events_.After(0);
  EXPECT_THAT(TextsAfter(0), ElementsAre("one", "two"));
  EXPECT_THAT(TextsAfter(first.last_id), SizeIs(0));
  events_.Add(EventLevel::kError, "device_error", "", "three");
  EXPECT_THAT(TextsAfter(first.last_id), ElementsAre("three"));
  EXPECT_FALSE(events_.After(first.last_id).missed);
}

TEST_F(EventLogTest, RepeatsAreOneEventThatBecomesTheNewest) {
  events_.Count(EventLevel::kWarning, "call_failed", "", "refused");
  events_.Add(EventLevel::kInfo, "head_created", "a", "created");
  const uint64_t seen = events_.After(0).last_id;
  now_ += absl::Minutes(1);
  events_.Count(EventLevel::kWarning, "call_failed", "", "refused");
  EXPECT_THAT(TextsAfter(0), ElementsAre("created", "refused"));
  const EventLog::Reading later = events_.After(seen);
  ASSERT_THAT(later.events, SizeIs(1));
  EXPECT_EQ(later.events[0].count, 2);
  EXPECT_EQ(later.events[0].first, absl::UnixEpoch());
  EXPECT_EQ(later.events[0].last, now_);
  events_.Count(EventLevel::kWarning, "call_failed", "", "refused otherwise");
  EXPECT_THAT(TextsAfter(0), ElementsAre("created", "refused", "refused otherwise"));
}

TEST_F(EventLogTest, ARunOfRepeatsEnds) {
  events_.Count(EventLevel::kWarning, "call_failed", "", "refused");
  now_ += EventLog::kRun + absl::Seconds(1);
  events_.Count(EventLevel::kWarning, "call_failed", "", "refused");
  EXPECT_THAT(events_.After(0).events, SizeIs(2));
}

TEST_F(EventLogTest, TheOldestMakeRoomAndReadersAreTold) {
  for (size_t i = 0; i < EventLog::kMost + 10; ++i) events_.Add(EventLevel::kInfo, "k", "", absl::StrCat(i));
  EXPECT_THAT(events_.After(0).events, SizeIs(EventLog::kMost));
  EXPECT_TRUE(events_.After(9).missed);
  EXPECT_FALSE(events_.After(10).missed);
  const EventLog::Reading newest = events_.After(0, 2);
  EXPECT_TRUE(newest.missed);
  ASSERT_THAT(newest.events, SizeIs(2));
  EXPECT_EQ(newest.events[1].text, absl::StrCat(EventLog::kMost + 9));
}

TEST_F(EventLogTest, AnyBytesAreShortTextInTheJson) {
  now_ = absl::FromUnixMillis(1'700'000'000'123);
  events_.Add(EventLevel::kError, "device_error", "lm",
              absl::StrCat("\xff\"<b>\n", std::string(10'000, 'x')));
  const std::string text = ToJson(events_.After(0), 0xabc);
  EXPECT_LT(text.size(), 1000);
  const nlohmann::json json = nlohmann::json::parse(text);
  EXPECT_EQ(json["incarnation"], "0000000000000abc");
  EXPECT_EQ(json["last_id"], 1);
  EXPECT_EQ(json["missed"], false);
  const nlohmann::json& event = json["events"][0];
  EXPECT_EQ(event["time"], "2023-11-14T22:13:20.123Z");
  EXPECT_EQ(event["level"], "error");
  EXPECT_EQ(event["kind"], "device_error");
  EXPECT_EQ(event["head"], "lm");
  EXPECT_EQ(event["count"], 1);
  EXPECT_TRUE(event["text"].get<std::string>().starts_with("\xef\xbf\xbd\"<b>\n"));
}

// ---- Recordings ----
// Recordings by a clock of the test's own.

class TraceRecorderTest : public testing::Test {
 protected:
  // A span that ends now.
  void Add(SpanKind kind, uint64_t id, absl::Duration took = absl::Milliseconds(1),
           absl::string_view head = "lm") {
    trace_.Add(head, {.kind = kind, .id = id, .first_row = 8, .rows = 4, .begin = now_ - took, .end = now_});
  }
  nlohmann::json Take(uint64_t number) {
    const absl::StatusOr<std::string> json = trace_.Take(number);
    EXPECT_TRUE(json.ok()) << json.status();
    return json.ok() ? nlohmann::json::parse(*json) : nlohmann::json();
  }

  absl::Time now_ = absl::UnixEpoch();
  TraceRecorder trace_{[this] { return now_; }};
};

TEST_F(TraceRecorderTest, RecordsForATimeAndForgetsWhatIsTaken) {
  Add(SpanKind::kQueue, 1);  // before
  EXPECT_FALSE(trace_.recording());
  const uint64_t number = *trace_.Start(absl::Seconds(2));
  EXPECT_TRUE(trace_.recording());
  now_ += absl::Seconds(1);
  Add(SpanKind::kQueue, 2, absl::Seconds(1.5));  // since before the beginning
  Add(SpanKind::kResults, 77);
  Add(SpanKind::kStep, 3);
  EXPECT_TRUE(absl::IsUnavailable(trace_.Take(number).status()));
  now_ += absl::Seconds(1);
  Add(SpanKind::kQueue, 4);
  now_ += absl::Seconds(1);
  Add(SpanKind::kQueue, 5);  // too late
  EXPECT_FALSE(trace_.recording());
  const nlohmann::json json = Take(number);
  EXPECT_EQ(json["otherData"]["seconds"], 2);
  EXPECT_EQ(json["otherData"]["ended_early"], false);
  std::string events;
  for (const auto& event : json["traceEvents"]) {
    events += event["ph"].get<std::string>() + " " + event["name"].get<std::string>();
    if (event.contains("id")) events += " " + event["id"].get<std::string>();
    if (event.contains("ts")) events += " " + std::to_string(event["ts"].get<int64_t>());
    events += "\n";
  }
  EXPECT_EQ(events,
            "M process_name\nM process_name\n"
            "b queue microbatch 2 row 8 0\ne queue microbatch 2 row 8 1000000\n"
            "b results chunk 77 999000\ne results chunk 77 1000000\n"
            "i step 3 1000000\n"
            "b queue microbatch 4 row 8 1999000\ne queue microbatch 4 row 8 2000000\n");
  EXPECT_TRUE(absl::IsNotFound(trace_.Take(number).status()));
}

TEST_F(TraceRecorderTest, OneAtATime) {
  const uint64_t first = *trace_.Start(absl::Seconds(1));
  EXPECT_TRUE(absl::IsFailedPrecondition(trace_.Start(absl::Seconds(1)).status()));
  now_ += absl::Seconds(1);
  EXPECT_TRUE(absl::IsFailedPrecondition(trace_.Start(absl::Seconds(1)).status())) << "it waits to be taken";
  EXPECT_TRUE(absl::IsNotFound(trace_.Take(first + 1).status()));
  EXPECT_TRUE(absl::IsNotFound(trace_.Take(0).status()));
  now_ += TraceRecorder::kKept;
  EXPECT_NE(*trace_.Start(absl::Seconds(1)), first);
  EXPECT_TRUE(absl::IsNotFound(trace_.Take(first).status()));
}

TEST_F(TraceRecorderTest, WhatNobodyTakesIsDropped) {
  const uint64_t number = *trace_.Start(absl::Seconds(1));
  now_ += absl::Seconds(1);
  trace_.Expire();
  EXPECT_FALSE(trace_.recording());
  now_ += TraceRecorder::kKept;
  trace_.Expire();
  EXPECT_TRUE(absl::IsNotFound(trace_.Take(number).status()));
}

TEST_F(TraceRecorderTest, EndsWhenItIsFull) {
  const uint64_t number = *trace_.Start(TraceRecorder::kMostTime);
  for (size_t i = 0; i <= TraceRecorder::kMostSpans; ++i) {
    Add(SpanKind::kSend, i, absl::ZeroDuration(), std::to_string(i % 1000));
  }
  EXPECT_FALSE(trace_.recording());
  const nlohmann::json json = Take(number);
  EXPECT_EQ(json["otherData"]["ended_early"], true);
  // Of each head a name, of each span its begin and its end.
  EXPECT_EQ(json["traceEvents"].size(), 1 + TraceRecorder::kMostHeads + 1 + 2 * TraceRecorder::kMostSpans);
}

TEST_F(TraceRecorderTest, TimesAreBounded) {
  for (const absl::Duration time :
       {absl::ZeroDuration(), -absl::Seconds(1), absl::Seconds(30.5), absl::InfiniteDuration()}) {
    EXPECT_TRUE(absl::IsInvalidArgument(trace_.Start(time).status())) << time;
  }
}

}  // namespace
}  // namespace lossd::metrics::history_test
