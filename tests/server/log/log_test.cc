// SPDX-License-Identifier: Apache-2.0
#include "server/log/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace lossd::log::log_test {
namespace {

using ::testing::HasSubstr;

TEST(LogTest, TextHasKeysAndValues) {
  EXPECT_EQ(FormatText("head created", {{"head", "main"}, {"rows", 12}, {"ratio", 0.5}, {"frozen", false}}),
            "head created head=main rows=12 ratio=0.5 frozen=false");
}

TEST(LogTest, TextQuotesWhatWouldBeAmbiguous) {
  EXPECT_EQ(FormatText("x", {{"a", "two words"}, {"b", ""}, {"c", "k=v"}, {"d", "say \"hi\""}}),
            "x a=\"two words\" b=\"\" c=\"k=v\" d=\"say \\\"hi\\\"\"");
}

TEST(LogTest, TextStaysOnOneLine) {
  EXPECT_EQ(FormatText("a\nb", {{"peer", "x\r\ny"}}), "a\\nb peer=\"x\\r\\ny\"");
}

TEST(LogTest, JsonIsOneObjectWithTypes) {
  const std::string line =
      FormatJson("T", "INFO", "said \"hi\"\n", {{"n", uint64_t{1} << 63}, {"ok", true}, {"s", "v"}});
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const nlohmann::json object = nlohmann::json::parse(line);
  EXPECT_EQ(object["time"], "T");
  EXPECT_EQ(object["level"], "INFO");
  EXPECT_EQ(object["message"], "said \"hi\"\n");
  EXPECT_EQ(object["n"], uint64_t{1} << 63);
  EXPECT_EQ(object["ok"], true);
  EXPECT_EQ(object["s"], "v");
}

TEST(LogTest, JsonSurvivesInvalidUtf8) {
  EXPECT_TRUE(nlohmann::json::accept(FormatJson("T", "INFO", "m", {{"bytes", "\xff\xfe"}})));
}

TEST(LogTest, WritesToStandardErrorFromTheLeastLevelOn) {
  Configure(LogLevel::kWarning, LogFormat::kText);
  ::testing::internal::CaptureStderr();
  Log(LogLevel::kInfo, "quiet");
  Log(LogLevel::kError, "loud", {{"n", 1}});
  const std::string output = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(output, HasSubstr(" ERROR loud n=1\n"));
  EXPECT_THAT(output, ::testing::Not(HasSubstr("quiet")));
}

TEST(LogTest, FlagValues) {
  LogLevel level = LogLevel::kInfo;
  LogFormat format = LogFormat::kText;
  std::string error;
  for (const char* name : {"debug", "info", "warning", "error", "off"}) {
    ASSERT_TRUE(AbslParseFlag(name, &level, &error));
    EXPECT_EQ(AbslUnparseFlag(level), name);
  }
  EXPECT_TRUE(AbslParseFlag("json", &format, &error));
  EXPECT_EQ(format, LogFormat::kJson);
  EXPECT_FALSE(AbslParseFlag("loud", &level, &error));
  EXPECT_THAT(error, HasSubstr("warning"));
}

}  // namespace
}  // namespace lossd::log::log_test
