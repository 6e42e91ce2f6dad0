// SPDX-License-Identifier: Apache-2.0
#include "server/access/tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace lossd::access::tokens_test {
namespace {

using testing::HasSubstr;
using testing::Not;

const AccessFile kFile = {"token_file", "/etc/lossd/tokens"};
// Of "abcdefghijklmnopqrstuvwxyz".
constexpr char kHash[] = "71c480df93d6ae2f1efad1447c66c9525e316218cf51fc8d9ed832f2daf18b73";

TEST(TokensTest, FindsWhoseATokenIs) {
  const auto tokens = Tokens::Parse(
      kFile, absl::StrCat("# people\n\nadmin:ops:0123456789abcdef\r\n", "  trainer:p1:with:colons:in:it \n",
                          "reader:scrape:sha256:", kHash, "\ntrainer:p1:a-second-token-of-p1"));
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ((*tokens)->size(), 4);
  ASSERT_NE((*tokens)->Find("0123456789abcdef"), nullptr);
  EXPECT_EQ((*tokens)->Find("0123456789abcdef")->name, "ops");
  EXPECT_EQ((*tokens)->Find("0123456789abcdef")->role, Role::kAdmin);
  EXPECT_EQ((*tokens)->Find("with:colons:in:it")->role, Role::kTrainer);
  EXPECT_EQ((*tokens)->Find("abcdefghijklmnopqrstuvwxyz")->name, "scrape");
  EXPECT_EQ((*tokens)->Find("a-second-token-of-p1")->name, "p1");
}

TEST(TokensTest, KnowsNoOther) {
  const auto tokens =
      Tokens::Parse(kFile, absl::StrCat("admin:ops:0123456789abcdef\nreader:s:sha256:", kHash));
  ASSERT_TRUE(tokens.ok());
  for (const std::string& token :
       {std::string(), std::string("0123456789abcde"), std::string("0123456789abcdef0"),
        std::string("0123456789abcdeF"), absl::StrCat("sha256:", kHash), std::string(kHash),
        std::string(100'000, 'x')}) {
    EXPECT_EQ((*tokens)->Find(token), nullptr) << token.substr(0, 80);
  }
}

TEST(TokensTest, RefusesLinesByNumberAndTellsNoToken) {
  for (const char* line : {"admin:ops", "boss:ops:secret-secret-secret", ":ops:secret-secret-secret",
                           "admin::secret-secret-secret", "admin:a name:secret-secret-secret",
                           "admin:ops:secret", "admin:ops:secret secret secret secret",
                           "admin:ops:sha256:secret", "secret-secret-secret", "reader:a:0123456789abcdef"}) {
    const auto tokens = Tokens::Parse(kFile, absl::StrCat("reader:first:0123456789abcdef\n", line));
    const std::string message(tokens.status().message());
    EXPECT_EQ(tokens.status().code(), absl::StatusCode::kInvalidArgument) << line;
    EXPECT_THAT(message, HasSubstr("/etc/lossd/tokens line 2"));
    EXPECT_THAT(message, HasSubstr("token_file"));
    EXPECT_THAT(message, Not(HasSubstr("secret")));
    EXPECT_THAT(message, Not(HasSubstr("0123")));
  }
  EXPECT_THAT(std::string(Tokens::Parse(kFile, "# none\n").status().message()), HasSubstr("at least one"));
}

TEST(TokensTest, TheirNumberIsBounded) {
  std::string text;
  for (size_t i = 0; i <= Tokens::kMaxTokens; ++i)
    absl::StrAppend(&text, "reader:n:0123456789abcdef", i, "\n");
  EXPECT_THAT(std::string(Tokens::Parse(kFile, text).status().message()), HasSubstr("line 1025"));
}

}  // namespace
}  // namespace lossd::access::tokens_test
