// SPDX-License-Identifier: Apache-2.0
// Tests of events.h: the last events, and recordings, by clocks of the tests' own.
#include "server/metrics/events.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace lossd::metrics::events_test {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

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
}  // namespace lossd::metrics::events_test
