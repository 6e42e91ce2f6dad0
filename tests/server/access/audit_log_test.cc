// SPDX-License-Identifier: Apache-2.0
#include "server/access/audit_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "server/log/log.h"

namespace lossd::access::audit_log_test {
namespace {

using testing::HasSubstr;
using testing::Not;

class AuditLogTest : public testing::Test {
 protected:
  AuditLogTest() { log::Configure(log::LogLevel::kInfo, log::LogFormat::kText); }

  std::string Refuse(int times) {
    testing::internal::CaptureStderr();
    for (int i = 0; i < times; ++i) {
      audit_.Refused({.identity = "", .address = "10.0.0.5:1", .method = "ListHeads", .head = ""},
                     absl::UnauthenticatedError("who"));
    }
    return testing::internal::GetCapturedStderr();
  }
  static int64_t Lines(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  AuditLog audit_{[this] { return now_; }};
};

TEST_F(AuditLogTest, ALineHasWhoWhenceWhatAndOutcome) {
  testing::internal::CaptureStderr();
  audit_.Ended({.identity = "dns:ops", .address = "10.0.0.5:1", .method = "DeleteHead", .head = "lm"}, "OK");
  EXPECT_THAT(
      testing::internal::GetCapturedStderr(),
      HasSubstr("INFO audit identity=dns:ops address=10.0.0.5:1 method=DeleteHead head=lm outcome=OK\n"));
}

TEST_F(AuditLogTest, ALineIsBoundedAndCannotForgeAnother) {
  const std::string evil =
      "a\nINFO audit identity=dns:ops outcome=OK\r\033[2J\xc2\x9b\xff \"" + std::string(1'000'000, 'x');
  testing::internal::CaptureStderr();
  audit_.Ended({.identity = evil, .address = evil, .method = "DeleteHead", .head = evil}, "OK");
  const std::string line = testing::internal::GetCapturedStderr();
  EXPECT_EQ(Lines(line), 1);
  EXPECT_LT(line.size(), 1000);
  EXPECT_TRUE(std::all_of(line.begin(), line.end() - 1, [](char c) { return c >= ' ' && c <= '~'; })) << line;
}

TEST_F(AuditLogTest, RefusedCallsCannotFillADisk) {
  EXPECT_EQ(Lines(Refuse(100'000)), AuditLog::kRefusedLines);
  now_ += absl::Seconds(3);
  const std::string later = Refuse(100'000);
  EXPECT_EQ(Lines(later), 3);
  EXPECT_THAT(later, HasSubstr("refusals_left_out=99980"));
  now_ += absl::Hours(1000);
  EXPECT_EQ(Lines(Refuse(100'000)), AuditLog::kRefusedLines);
}

TEST_F(AuditLogTest, AClockThatIsSetBackDoesNotStopTheLines) {
  Refuse(1000);
  now_ -= absl::Hours(1);
  Refuse(1);
  now_ += absl::Seconds(2);
  EXPECT_EQ(Lines(Refuse(10)), 2);
}

TEST_F(AuditLogTest, ASaveSaysWhatItRemoved) {
  testing::internal::CaptureStderr();
  audit_.Ended({.identity = "token:pipeline",
                .address = "10.0.0.5:1",
                .method = "SaveCheckpoint",
                .head = "lm",
                .removed = {"lm/step-0000000001", "lm/step-0000000002"}},
               "OK");
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("outcome=OK removed=2 removed_names=\"lm/step-0000000001 lm/step-0000000002\"\n"));
  std::vector<std::string> many(1000, "lm/step-0000000001");
  testing::internal::CaptureStderr();
  audit_.Ended({.identity = "x", .address = "y", .method = "SaveCheckpoint", .head = "lm", .removed = many},
               "OK");
  const std::string line = testing::internal::GetCapturedStderr();
  EXPECT_THAT(line, HasSubstr("removed=1000"));
  EXPECT_LT(line.size(), 600u);
}

// Calls of one peer that fail over and over; another one's failures are told all the same.
TEST_F(AuditLogTest, FailedCallsHaveABudgetForEachPeer) {
  const auto fail = [&](const std::string& peer, int times) {
    testing::internal::CaptureStderr();
    for (int i = 0; i < times; ++i) audit_.Failed(peer, "DescribeHead", "NOT_FOUND", "no head");
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(Lines(fail("a", 100'000)), AuditLog::kFailedLines);
  EXPECT_EQ(Lines(fail("b", 1)), 1);
  now_ += absl::Seconds(1);
  EXPECT_THAT(fail("a", 1), HasSubstr("failures_left_out=99980"));
  int64_t lines = 0;
  for (int i = 0; i < 5'000; ++i) lines += Lines(fail("peer" + std::to_string(i), 1));
  EXPECT_LE(lines, AuditLog::kFailedLinesOfAll) << "of peers that come and go";
}

// A trainer may delete checkpoints, and so may ask for ones that are not there.
TEST_F(AuditLogTest, AuditedCallsThatFailHaveABudgetForEachIdentity) {
  const auto end = [&](const std::string& identity, const char* outcome, int times) {
    testing::internal::CaptureStderr();
    for (int i = 0; i < times; ++i) {
      audit_.Ended({.identity = identity, .address = "x", .method = "DeleteCheckpoint", .head = "lm"},
                   outcome);
    }
    return Lines(testing::internal::GetCapturedStderr());
  };
  EXPECT_EQ(end("a", "NOT_FOUND", 100'000), AuditLog::kFailedLines);
  EXPECT_EQ(end("b", "NOT_FOUND", 1), 1);
  EXPECT_EQ(end("a", "OK", 500), 500) << "what was done is always told";
}

}  // namespace
}  // namespace lossd::access::audit_log_test
