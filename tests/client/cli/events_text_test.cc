// SPDX-License-Identifier: Apache-2.0
#include "client/cli/events_text.h"

#include <gtest/gtest.h>

#include <string>

namespace lossd::cli::events_text_test {
namespace {

constexpr char kAnswer[] = R"({"incarnation":"00ab","last_id":9,"missed":true,"events":[
  {"id":8,"time":"2026-01-02T03:04:05.678Z","first_time":"2026-01-02T03:00:00.000Z","count":12,"level":"warning",
   "kind":"call_failed","head":"","text":"ApplyStep ended with NOT_FOUND"},
  {"id":9,"time":"2026-01-02T03:04:06.000Z","first_time":"2026-01-02T03:04:06.000Z","count":1,"level":"info",
   "kind":"head_created","head":"lm","text":"head\u001b[2J created"}]})";

TEST(EventsTextTest, ReadsWhatTheServerAnswers) {
  const absl::StatusOr<Events> events = ParseEvents(kAnswer);
  ASSERT_TRUE(events.ok()) << events.status();
  EXPECT_EQ(events->incarnation, "00ab");
  EXPECT_EQ(events->last_id, 9);
  EXPECT_TRUE(events->missed);
  ASSERT_EQ(events->events.size(), 2);
  EXPECT_EQ(EventLine(events->events[0]),
            "2026-01-02T03:04:05.678Z warning ApplyStep ended with NOT_FOUND (12 times)");
  EXPECT_EQ(EventLine(events->events[1]), "2026-01-02T03:04:06.000Z info    lm: head?[2J created");
}

TEST(EventsTextTest, OtherAnswersAreErrors) {
  EXPECT_FALSE(ParseEvents("").ok());
  EXPECT_FALSE(ParseEvents("<html>").ok());
  EXPECT_FALSE(ParseEvents("[]").ok());
  const std::string answer = kAnswer;
  for (const char* part :
       {"incarnation", "last_id", "missed", "events", "\"id", "time", "count", "level", "kind", "text"}) {
    std::string other = answer;
    other.replace(other.find(part), 1, part[0] == '"' ? "\"x" : "x");
    EXPECT_FALSE(ParseEvents(other).ok()) << part;
  }
}

}  // namespace
}  // namespace lossd::cli::events_text_test
