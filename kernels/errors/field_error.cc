// SPDX-License-Identifier: Apache-2.0
#include "kernels/errors/field_error.h"

#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "kernels/errors/bytes.h"
#include "kernels/errors/payload.h"
#include "kernels/errors/text.h"

namespace lossd::errors {
namespace {

constexpr absl::string_view kPayloadType = "lossd/field-violation";

// The value of a field as the message shows it: many bytes in a larger unit, too.
std::string Shown(const FieldViolation& violation) {
  if (violation.value.empty()) return "\"\"";
  int64_t bytes = 0;
  const bool many = absl::EndsWith(violation.field, "_bytes") && absl::SimpleAtoi(violation.value, &bytes) &&
                    bytes >= kManyBytes;
  return many ? ExactBytes(bytes) : violation.value;
}

}  // namespace

absl::Status FieldError(absl::string_view field, absl::string_view rule, const absl::AlphaNum& value,
                        absl::StatusCode code) {
  return FieldProblem(field, absl::StrCat("must ", rule), value, code);
}

absl::Status FieldProblem(absl::string_view field, absl::string_view problem, const absl::AlphaNum& value,
                          absl::StatusCode code) {
  const FieldViolation violation{.field = Shortened(field, kMaxFieldBytes),
                                 .rule = std::string(problem),
                                 .value = Shortened(value.Piece(), kMaxValueBytes)};
  return WithViolation(
      absl::Status(code, absl::StrCat(violation.field, " ", violation.rule, ", got ", Shown(violation))),
      violation);
}

absl::Status WithViolation(absl::Status status, const FieldViolation& violation) {
  const std::string texts[] = {Shortened(violation.field, kMaxFieldBytes), violation.rule,
                               Shortened(violation.value, kMaxValueBytes)};
  SetTexts(kPayloadType, texts, &status);
  return status;
}

std::optional<FieldViolation> GetFieldViolation(const absl::Status& status) {
  std::optional<std::vector<std::string>> texts = GetTexts(kPayloadType, status);
  if (!texts.has_value() || texts->size() != 3) return std::nullopt;
  return FieldViolation{std::move((*texts)[0]), std::move((*texts)[1]), std::move((*texts)[2])};
}

absl::Status Within(absl::string_view prefix, absl::Status status) {
  std::optional<FieldViolation> violation = GetFieldViolation(status);
  if (!violation.has_value()) return status;
  if (absl::StartsWith(status.message(), violation->field)) {
    status = WithMessage(status, absl::StrCat(prefix, status.message()));
  }
  violation->field = absl::StrCat(prefix, violation->field);
  return WithViolation(std::move(status), *violation);
}

}  // namespace lossd::errors
