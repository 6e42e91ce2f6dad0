// SPDX-License-Identifier: Apache-2.0
// Tests of field_error.h: errors of fields, payloads of errors, and texts of numbers.
#include "kernels/errors/field_error.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

// ---- Numbers of bytes ----

namespace lossd::errors::bytes_test {
namespace {

TEST(BytesTest, HumanBytesHaveThreeDigits) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1024), "1.00 KiB");
  EXPECT_EQ(HumanBytes(9.994 * 1024), "9.99 KiB");
  EXPECT_EQ(HumanBytes(9.996 * 1024), "10.0 KiB");
  EXPECT_EQ(HumanBytes(99.96 * 1024), "100 KiB");
  EXPECT_EQ(HumanBytes(1.5 * 1024 * 1024 * 1024), "1.50 GiB");
  EXPECT_EQ(HumanBytes(-2048), "-2.00 KiB");
  EXPECT_EQ(HumanBytes(18446744073709551616.0), "16.0 EiB");
}

TEST(BytesTest, ExactBytesHaveAUnitWhereTheNumberIsLong) {
  EXPECT_EQ(ExactBytes(int64_t{0}), "0 bytes");
  EXPECT_EQ(ExactBytes(kManyBytes - 1), "9999 bytes");
  EXPECT_EQ(ExactBytes(kManyBytes), "10000 bytes (9.77 KiB)");
  EXPECT_EQ(ExactBytes(int64_t{1610612736}), "1610612736 bytes (1.50 GiB)");
  EXPECT_EQ(ExactBytes(int64_t{-1610612736}), "-1610612736 bytes (-1.50 GiB)");
  EXPECT_EQ(ExactBytes(std::numeric_limits<uint64_t>::max()), "18446744073709551615 bytes (16.0 EiB)");
}

}  // namespace
}  // namespace lossd::errors::bytes_test

// ---- Field error ----

namespace lossd::errors::field_error_test {
namespace {

constexpr char kOtherPayload[] = "lossd/test";

TEST(FieldErrorTest, SaysTheSameInMessageAndPayload) {
  const absl::Status status = FieldError("open.x", "be small", 12);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "open.x must be small, got 12");
  EXPECT_EQ(GetFieldViolation(status), (FieldViolation{"open.x", "must be small", "12"}));
}

TEST(FieldErrorTest, AnEmptyValueIsSeen) {
  const absl::Status status = FieldError("head", "name a head", "");
  EXPECT_EQ(status.message(), "head must name a head, got \"\"");
  EXPECT_EQ(GetFieldViolation(status)->value, "");
}

TEST(FieldErrorTest, OtherCodesAndWordings) {
  const absl::Status status = FieldProblem("rows", "repeats row 3", "[3, 6)", absl::StatusCode::kNotFound);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "rows repeats row 3, got [3, 6)");
  EXPECT_EQ(GetFieldViolation(status), (FieldViolation{"rows", "repeats row 3", "[3, 6)"}));
  EXPECT_EQ(FieldError("a", "b", 1, absl::StatusCode::kNotFound).code(), absl::StatusCode::kNotFound);
}

TEST(FieldErrorTest, WordsOfTheMessageMayStandInFieldAndValue) {
  const FieldViolation tricky{"a must b, got c", "must be d, got e", ", got f must g"};
  const absl::Status status = FieldError(tricky.field, "be d, got e", tricky.value);
  EXPECT_EQ(GetFieldViolation(status), tricky);
  EXPECT_EQ(GetFieldViolation(Within("p.", status))->field, "p.a must b, got c");
}

TEST(FieldErrorTest, AnyBytesComeBack) {
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes.push_back(static_cast<char>(byte));
  const absl::Status status = FieldError(bytes, "be \xff", bytes);
  EXPECT_EQ(GetFieldViolation(status), (FieldViolation{bytes, "must be \xff", bytes}));
}

TEST(FieldErrorTest, LongFieldsAndValuesAreShortenedInWholeCharacters) {
  for (const absl::string_view character : {"x", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"}) {
    for (int offset = 0; offset < 4; ++offset) {
      std::string text(offset, 'a');
      while (text.size() < 100000) absl::StrAppend(&text, character);
      const absl::Status status = FieldError(text, "be short", text);
      EXPECT_LT(status.message().size(), kMaxFieldBytes + kMaxValueBytes + 30);
      const FieldViolation violation = GetFieldViolation(status).value();
      EXPECT_EQ(violation.field, violation.value);
      EXPECT_LE(violation.value.size(), kMaxValueBytes);
      EXPECT_GT(violation.value.size(), kMaxValueBytes - character.size());
      EXPECT_TRUE(absl::EndsWith(violation.value, absl::StrCat(character, "..."))) << violation.value;
      EXPECT_TRUE(absl::EndsWith(status.message(), absl::StrCat(", got ", violation.value)));
    }
  }
}

TEST(FieldErrorTest, OtherStatusesNameNoField) {
  EXPECT_EQ(GetFieldViolation(absl::OkStatus()), std::nullopt);
  EXPECT_EQ(GetFieldViolation(absl::InvalidArgumentError("softcap must be > 0, got -1")), std::nullopt);
}

TEST(FieldErrorTest, AViolationCanBeAddedToAMessage) {
  const FieldViolation violation{"file.weight", "must name a tensor", "w"};
  const absl::Status status = WithViolation(absl::NotFoundError("x.bin: no tensor 'w'"), violation);
  EXPECT_EQ(status.message(), "x.bin: no tensor 'w'");
  EXPECT_EQ(GetFieldViolation(status), violation);
  EXPECT_TRUE(WithViolation(absl::OkStatus(), violation).ok());
}

TEST(FieldErrorTest, WithinAddsThePath) {
  absl::Status status = FieldError("softcap", "be > 0", -1, absl::StatusCode::kOutOfRange);
  status.SetPayload(kOtherPayload, absl::Cord("kept"));
  const absl::Status nested = Within("open.", Within("options.", status));
  EXPECT_EQ(nested.message(), "open.options.softcap must be > 0, got -1");
  EXPECT_EQ(nested.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(GetFieldViolation(nested), (FieldViolation{"open.options.softcap", "must be > 0", "-1"}));
  EXPECT_EQ(nested.GetPayload(kOtherPayload), absl::Cord("kept"));
}

TEST(FieldErrorTest, WithinKeepsMessagesThatBeginOtherwise) {
  const FieldViolation violation{"weight", "must name a tensor", "w"};
  const absl::Status status =
      Within("file.", WithViolation(absl::NotFoundError("x.bin: no tensor 'w'"), violation));
  EXPECT_EQ(status.message(), "x.bin: no tensor 'w'");
  EXPECT_EQ(GetFieldViolation(status)->field, "file.weight");
}

TEST(FieldErrorTest, WithinLeavesOthersAlone) {
  for (const absl::Status& status :
       {absl::OkStatus(), absl::InternalError("disk"), absl::InvalidArgumentError("x must y, got z")}) {
    EXPECT_EQ(Within("p.", status), status);
  }
}

TEST(FieldErrorTest, ManyBytesHaveAUnitInTheMessageAlone) {
  const absl::Status status = FieldError("spec.workspace_bytes", "be at most 4096", int64_t{8388608});
  EXPECT_EQ(status.message(), "spec.workspace_bytes must be at most 4096, got 8388608 bytes (8.00 MiB)");
  EXPECT_EQ(GetFieldViolation(status)->value, "8388608");
  EXPECT_EQ(FieldError("workspace_bytes", "be >= 0", -99999).message(),
            "workspace_bytes must be >= 0, got -99999");
  EXPECT_EQ(FieldError("workspace_bytes", "be even", 4097).message(),
            "workspace_bytes must be even, got 4097");
  EXPECT_EQ(FieldError("rows", "be even", 8388609).message(), "rows must be even, got 8388609");
}

TEST(FieldErrorTest, LongPathsAreShortened) {
  const absl::Status status = Within(std::string(1000, 'p'), FieldError("x", "be y", 1));
  EXPECT_EQ(GetFieldViolation(status)->field.size(), kMaxFieldBytes);
}

}  // namespace
}  // namespace lossd::errors::field_error_test

// ---- Payload ----

namespace lossd::errors::payload_test {
namespace {

using Texts = std::vector<std::string>;

constexpr char kType[] = "lossd/test";

TEST(PayloadTest, TextsOfAnyBytesComeBack) {
  std::string all_bytes;
  for (int byte = 0; byte < 256; ++byte) all_bytes.push_back(static_cast<char>(byte));
  for (const Texts& texts :
       {Texts{}, Texts{""}, Texts{"", "", ""}, Texts{"a", std::string("\0|\n,", 4), all_bytes},
        Texts{std::string(100000, 'x')}}) {
    absl::Status status = absl::InternalError("x");
    SetTexts(kType, texts, &status);
    EXPECT_EQ(GetTexts(kType, status), texts);
    EXPECT_EQ(GetTexts("lossd/other", status), std::nullopt);
  }
}

TEST(PayloadTest, LaterTextsReplaceEarlierOnes) {
  absl::Status status = absl::InternalError("x");
  SetTexts(kType, Texts{"a", "b"}, &status);
  SetTexts(kType, Texts{"c"}, &status);
  EXPECT_EQ(GetTexts(kType, status), Texts{"c"});
}

TEST(PayloadTest, NothingIsAttachedToOk) {
  absl::Status status;
  SetTexts(kType, Texts{"a"}, &status);
  EXPECT_EQ(GetTexts(kType, status), std::nullopt);
  EXPECT_TRUE(status.ok());
}

TEST(PayloadTest, OtherBytesAreNoTexts) {
  absl::Status status = absl::InternalError("x");
  SetTexts(kType, Texts{"abc", "de"}, &status);
  const std::string good(*status.GetPayload(kType));
  for (size_t size = 1; size < good.size(); ++size) {
    status.SetPayload(kType, absl::Cord(good.substr(0, size)));
    const bool first_text_alone = size == sizeof(uint64_t) + 3;
    EXPECT_EQ(GetTexts(kType, status).has_value(), first_text_alone) << size;
  }
  status.SetPayload(kType, absl::Cord(std::string(16, '\xff')));  // a length near 2^64
  EXPECT_EQ(GetTexts(kType, status), std::nullopt);
}

TEST(PayloadTest, AnotherMessageKeepsCodeAndPayloads) {
  absl::Status status = absl::AbortedError("before");
  SetTexts(kType, Texts{"a"}, &status);
  status.SetPayload("lossd/other", absl::Cord("b"));
  absl::Status expected = absl::AbortedError("after");
  SetTexts(kType, Texts{"a"}, &expected);
  expected.SetPayload("lossd/other", absl::Cord("b"));
  EXPECT_EQ(WithMessage(status, "after"), expected);
}

}  // namespace
}  // namespace lossd::errors::payload_test

// ---- Texts ----

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
