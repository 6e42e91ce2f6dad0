// SPDX-License-Identifier: Apache-2.0
// Events by a clock of the test's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/metrics/events.h"

namespace lossd::metrics::event_log_test {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

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

}  // namespace
}  // namespace lossd::metrics::event_log_test
