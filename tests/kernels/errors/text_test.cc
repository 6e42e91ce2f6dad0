// SPDX-License-Identifier: Apache-2.0
#include "kernels/errors/text.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lossd::errors::text_test {
namespace {

constexpr absl::string_view kReplacement = "\xef\xbf\xbd";

TEST(TextTest, ShortTextsStay) {
  EXPECT_EQ(Shortened("", 3), "");
  EXPECT_EQ(Shortened("abc", 3), "abc");
  EXPECT_EQ(Shortened("\xff\x80", 3), "\xff\x80");
}

TEST(TextTest, LongTextsEndWithDots) {
  EXPECT_EQ(Shortened("abcdef", 5), "ab...");
  EXPECT_EQ(Shortened("abcd", 3), "...");
}

// For characters of one to four bytes and every place of the cut.
TEST(TextTest, NoCutIsWithinACharacter) {
  for (const absl::string_view character : {"a", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"}) {
    std::string text;
    for (int i = 0; i < 20; ++i) absl::StrAppend(&text, character);
    for (size_t limit = 3; limit < text.size(); ++limit) {
      const std::string shown = Shortened(text, limit);
      ASSERT_TRUE(absl::EndsWith(shown, "..."));
      const size_t kept = shown.size() - 3;
      EXPECT_EQ(kept % character.size(), 0u) << limit;
      EXPECT_LE(shown.size(), limit);
      EXPECT_GT(kept + character.size(), limit - 3) << "as much as fits";
      EXPECT_EQ(shown.substr(0, kept), text.substr(0, kept));
    }
  }
}

TEST(TextTest, BytesThatAreNoCharactersAreCutToo) {
  EXPECT_EQ(Shortened(std::string(100, '\x80'), 20).substr(0, 14), std::string(14, '\x80'));
}

TEST(TextTest, ValidTextStays) {
  for (const absl::string_view text :
       {"", "plain", "caf\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "\xed\x9f\xbf", "\xee\x80\x80",
        "\xf4\x8f\xbf\xbf", "\xc2\x80", "\xe0\xa0\x80", "\xf0\x90\x80\x80"}) {
    EXPECT_EQ(ValidUtf8(text), text);
  }
  const std::string zero("a\0b", 3);
  EXPECT_EQ(ValidUtf8(zero), zero);
}

TEST(TextTest, EveryOtherByteIsReplaced) {
  struct Case {
    absl::string_view text;
    int replaced;
  };
  const std::vector<Case> cases = {{"\x80", 1},
                                   {"\xff", 1},
                                   {"\xc3", 1},              // ends too early
                                   {"\xe2\x82", 2},          // likewise
                                   {"\xc0\xaf", 2},          // overlong '/'
                                   {"\xe0\x80\xaf", 3},      // likewise
                                   {"\xf0\x80\x80\xaf", 4},  // likewise
                                   {"\xed\xa0\x80", 3},      // a surrogate
                                   {"\xf4\x90\x80\x80", 4},  // above U+10FFFF
                                   {"\xf5\x80\x80\x80", 4}};
  for (const Case& c : cases) {
    std::string expected = "<";
    for (int i = 0; i < c.replaced; ++i) absl::StrAppend(&expected, kReplacement);
    EXPECT_EQ(ValidUtf8(absl::StrCat("<", c.text, ">")), absl::StrCat(expected, ">"));
  }
  EXPECT_EQ(ValidUtf8("\xc3\xc3\xa9"), absl::StrCat(kReplacement, "\xc3\xa9"));
}

}  // namespace
}  // namespace lossd::errors::text_test
