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

}  // namespace
}  // namespace lossd::access::audit_log_test
