// SPDX-License-Identifier: Apache-2.0
#include "server/admin/choice_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/log/log.h"

namespace lossd::admin::choice_log_test {
namespace {

using ::testing::HasSubstr;

std::string Logged(log::LogLevel least) {
  log::Configure(least, log::LogFormat::kText);
  const kernels::Choice choices[] = {
      {.what = "loss", .choice = "after the logits product", .reason = "few rows"},
      {.what = "chunk", .choice = "up to 8 rows", .workspace_bytes = 4096}};
  ::testing::internal::CaptureStderr();
  LogChoices("head computes", "main", choices);
  return ::testing::internal::GetCapturedStderr();
}

TEST(ChoiceLogTest, HasAnEventForEachChoice) {
  const std::string text = Logged(log::LogLevel::kDebug);
  EXPECT_THAT(text, HasSubstr("DEBUG head computes head=main what=loss choice=\"after the logits product\" "
                              "reason=\"few rows\" workspace_bytes=0\n"));
  EXPECT_THAT(text, HasSubstr("what=chunk choice=\"up to 8 rows\" reason=\"\" workspace_bytes=4096\n"));
}

TEST(ChoiceLogTest, IsForDebuggingOnly) { EXPECT_EQ(Logged(log::LogLevel::kInfo), ""); }

}  // namespace
}  // namespace lossd::admin::choice_log_test
