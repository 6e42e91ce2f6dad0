// SPDX-License-Identifier: Apache-2.0
// Recordings by a clock of the test's own.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "server/metrics/events.h"

namespace lossd::metrics::trace_recorder_test {
namespace {

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
}  // namespace lossd::metrics::trace_recorder_test
