// SPDX-License-Identifier: Apache-2.0
#include "kernels/errors/field_error.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

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
