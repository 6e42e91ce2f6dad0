// SPDX-License-Identifier: Apache-2.0
#include "server/messages/texts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/errors/field_error.h"

namespace lossd::messages {
namespace {

using ::testing::HasSubstr;

TEST(TextsTest, CharactersAreCountedNotBytes) {
  std::string umlauts, faces;
  for (int i = 0; i < 128; ++i) {
    umlauts += "\u00e4";
    faces += "\U0001f600";
  }
  for (const std::string& run :
       {std::string(), std::string("host:17-0123abcd"), std::string(128, 'x'), umlauts, faces}) {
    EXPECT_TRUE(CheckRun("run", run).ok()) << run;
  }
  for (const std::string& run : {std::string(129, 'x'), umlauts + "x", faces + "x"}) {
    const absl::Status status = CheckRun("open.run", run);
    EXPECT_EQ(std::string(status.message()),
              "open.run must be at most 128 printable characters, got 129 characters");
    EXPECT_EQ(errors::GetFieldViolation(status)->field, "open.run");
  }
}

TEST(TextsTest, WhatIsNotPrintableIsRefused) {
  for (const std::string& run :
       {std::string("a\nb"), std::string("a\0b", 3), std::string("\x1b[31m"), std::string("\x7f"),
        std::string("\u0085"), std::string("\u202e"), std::string("\u2028"), std::string("\ufeff"),
        std::string("\xff"), std::string("\xc3")}) {
    EXPECT_THAT(std::string(CheckRun("run", run).message()), HasSubstr("not printable")) << run;
  }
}

TEST(TextsTest, AnIdIsNotEmpty) {
  EXPECT_TRUE(CheckCallId("reset_id", "a").ok());
  EXPECT_TRUE(CheckCallId("reset_id", std::string(64, 'a')).ok());
  EXPECT_EQ(std::string(CheckCallId("reset_id", "").message()),
            "reset_id must be 1 to 64 printable characters, got nothing");
  EXPECT_FALSE(CheckCallId("reset_id", std::string(65, 'a')).ok());
}

}  // namespace
}  // namespace lossd::messages
