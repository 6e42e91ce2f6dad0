// SPDX-License-Identifier: Apache-2.0
#include "kernels/errors/field_error.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/errors/status_macros.h"

namespace lossd::errors {
namespace {

constexpr absl::string_view kPayloadType = "lossd/field-violation";

// The value of a field in the form of the message. Large numbers of bytes are also shown in a larger unit.
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

absl::Status CheckFinite(absl::string_view field, absl::Span<const float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      return FieldError(absl::StrCat(field, "[", i, "]"), "be finite", values[i]);
    }
  }
  return absl::OkStatus();
}

absl::Status ClassError(absl::string_view field, size_t index, int64_t value, int64_t count,
                        absl::string_view also) {
  return FieldError(absl::StrCat(field, "[", index, "]"), absl::StrCat("be in [0, ", count, ")", also),
                    value);
}

namespace {

// `first`: the index of the row's first weight.
absl::Status CheckSum(absl::string_view prefix, WeightSum rule, size_t first, double sum) {
  const auto refuse = [&](absl::string_view must) {
    return FieldProblem(absl::StrCat(prefix, "target_weights[", first, "]"),
                        absl::StrCat("begins a row whose weights must add up to ", must), sum);
  };
  if (sum > double{std::numeric_limits<float>::max()}) return refuse("a finite fp32 number");
  if (rule == WeightSum::kAtMostOne && sum > 1.0 + kMostOverOne)
    return refuse("at most 1.001 with rest one_class");
  if (rule == WeightSum::kAboveZero && !(sum > 0.0)) return refuse("more than 0 with rest renormalized");
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckSoftTargets(absl::string_view prefix, WeightSum rule, int64_t vocab_size, size_t each,
                              absl::Span<const int32_t> classes, absl::Span<const float> weights,
                              absl::Span<const int32_t> targets, int32_t ignored) {
  if (each == 0 && rule == WeightSum::kAny) return absl::OkStatus();  // most calls have no soft targets
  for (size_t row = 0; row < targets.size(); ++row) {
    double sum = 0.0;
    for (size_t i = row * each; i < (row + 1) * each; ++i) {
      const auto refuse = [&](absl::string_view must) {
        return FieldError(absl::StrCat(prefix, "target_weights[", i, "]"), must, weights[i]);
      };
      if (classes[i] != kNoClass && (classes[i] < 0 || classes[i] >= vocab_size)) {
        return ClassError(absl::StrCat(prefix, "target_classes"), i, classes[i], vocab_size,
                          absl::StrCat(" or ", kNoClass));
      }
      if (!(std::isfinite(weights[i]) && weights[i] >= 0.0f)) return refuse("be finite and >= 0");
      if (classes[i] == kNoClass && weights[i] != 0.0f) {
        return refuse(absl::StrCat("be 0 where target_classes is ", kNoClass));
      }
      sum += double{weights[i]};
    }
    if (targets[row] == ignored) continue;
    LOSSD_RETURN_IF_ERROR(CheckSum(prefix, rule, row * each, sum));
  }
  return absl::OkStatus();
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

namespace {

constexpr absl::string_view kCut = "...";
constexpr absl::string_view kReplacement = "\xef\xbf\xbd";
constexpr size_t kMaxContinuations = 3;  // most continuation bytes of a UTF-8 character

uint8_t Byte(absl::string_view text, size_t at) { return static_cast<uint8_t>(text[at]); }

bool IsContinuation(uint8_t byte) { return (byte & 0xc0) == 0x80; }

// The length of the character that starts with the byte `first`; 0 if no character does. 0xc0 and 0xc1 would
// start overlong forms, and 0xf5 and above code points beyond U+10FFFF.
size_t LengthOf(uint8_t first) {
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return 2;
  if (first >= 0xe0 && first <= 0xef) return 3;
  return first >= 0xf0 && first <= 0xf4 ? 4 : 0;
}

// Whether the second byte makes no overlong form, surrogate or code point above U+10FFFF.
bool SecondFits(uint8_t first, uint8_t second) {
  switch (first) {
    case 0xe0:
      return second >= 0xa0;
    case 0xed:
      return second < 0xa0;
    case 0xf0:
      return second >= 0x90;
    case 0xf4:
      return second < 0x90;
    default:
      return true;
  }
}

// The length of the valid character at the beginning of `text`; 0 if there is none. `text` is not empty.
size_t ValidLength(absl::string_view text) {
  const size_t length = LengthOf(Byte(text, 0));
  if (length == 0 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (!IsContinuation(Byte(text, i))) return 0;
  }
  return length == 1 || SecondFits(Byte(text, 0), Byte(text, 1)) ? length : 0;
}

}  // namespace

std::string Shortened(absl::string_view text, size_t limit) {
  if (text.size() <= limit) return std::string(text);
  const size_t longest = limit - kCut.size();
  size_t length = longest;
  while (length > 0 && longest - length < kMaxContinuations && IsContinuation(Byte(text, length))) --length;
  return absl::StrCat(text.substr(0, length), kCut);
}

std::string ValidUtf8(absl::string_view text) {
  std::string valid;
  valid.reserve(text.size());
  while (!text.empty()) {
    const size_t length = ValidLength(text);
    absl::StrAppend(&valid, length == 0 ? kReplacement : text.substr(0, length));
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return valid;
}

namespace {

template <typename Count>
std::string Exact(Count bytes) {
  std::string text = absl::StrCat(bytes, " bytes");
  const auto value = static_cast<double>(bytes);
  if (std::fabs(value) >= kManyBytes) absl::StrAppend(&text, " (", HumanBytes(value), ")");
  return text;
}

}  // namespace

std::string HumanBytes(double bytes) {
  constexpr std::array<const char*, 7> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  size_t unit = 0;
  while (std::fabs(bytes) >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  if (unit == 0) return absl::StrFormat("%.0f B", bytes);
  const double size = std::fabs(bytes);
  return absl::StrFormat("%.*f %s", size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2, bytes, kUnits[unit]);
}

std::string ExactBytes(int64_t bytes) { return Exact(bytes); }

std::string ExactBytes(uint64_t bytes) { return Exact(bytes); }

std::optional<int64_t> ParseBytes(absl::string_view text) {
  constexpr double kKib = 1024.0;
  constexpr std::pair<absl::string_view, double> kUnits[] = {{"", 1.0},
                                                             {"B", 1.0},
                                                             {"KiB", kKib},
                                                             {"KB", 1e3},
                                                             {"MiB", kKib * kKib},
                                                             {"MB", 1e6},
                                                             {"GB", 1e9},
                                                             {"GiB", kKib * kKib * kKib},
                                                             {"TB", 1e12},
                                                             {"TiB", kKib * kKib * kKib * kKib}};
  const size_t digits = text.find_last_of("0123456789.") + 1;  // 0 if there are no digits
  const absl::string_view name = absl::StripAsciiWhitespace(text.substr(digits));
  double number = 0.0;
  // SimpleAtod would also accept "1e3", "0x10" and "+1".
  if (!absl::SimpleAtod(text.substr(0, digits), &number) ||
      text.substr(0, digits).find_first_of("eExX+-") != text.npos)
    return std::nullopt;
  for (const auto& [unit, size] : kUnits) {
    if (!absl::EqualsIgnoreCase(name, unit)) continue;
    const double bytes = std::round(number * size);
    if (bytes >= 0.0 && bytes < 0x1p62) return static_cast<int64_t>(bytes);
  }
  return std::nullopt;
}

namespace {

// Removes a text with its length from the front of `bytes`, and returns the text.
std::optional<std::string> TakeText(absl::string_view* bytes) {
  uint64_t size = 0;
  if (bytes->size() < sizeof(size)) return std::nullopt;
  std::memcpy(&size, bytes->data(), sizeof(size));
  bytes->remove_prefix(sizeof(size));
  if (size > bytes->size()) return std::nullopt;
  std::string text(bytes->substr(0, size));
  bytes->remove_prefix(size);
  return text;
}

}  // namespace

void SetTexts(absl::string_view type, absl::Span<const std::string> texts, absl::Status* status) {
  std::string bytes;
  for (const std::string& text : texts) {
    const uint64_t size = text.size();
    bytes.append(reinterpret_cast<const char*>(&size), sizeof(size));
    bytes.append(text);
  }
  status->SetPayload(type, absl::Cord(std::move(bytes)));
}

std::optional<std::vector<std::string>> GetTexts(absl::string_view type, const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(type);
  if (!payload.has_value()) return std::nullopt;
  const std::string bytes(*payload);
  absl::string_view left = bytes;
  std::vector<std::string> texts;
  while (!left.empty()) {
    std::optional<std::string> text = TakeText(&left);
    if (!text.has_value()) return std::nullopt;
    texts.push_back(*std::move(text));
  }
  return texts;
}

absl::Status WithMessage(const absl::Status& status, absl::string_view message) {
  absl::Status result(status.code(), message);
  status.ForEachPayload(
      [&result](absl::string_view type, const absl::Cord& payload) { result.SetPayload(type, payload); });
  return result;
}

}  // namespace lossd::errors
