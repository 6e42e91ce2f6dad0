// SPDX-License-Identifier: Apache-2.0
#include "server/messages/texts.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "lossd/v1/types.pb.h"
#include "proto/wire/status_details.h"
#include "server/engine/errors.h"

namespace lossd::messages {
namespace {

struct CodePoints {
  uint32_t first;
  uint32_t last;
};
// Controls, line and paragraph separators, marks without a width, and those that change the direction.
constexpr CodePoints kNotPrintable[] = {
    {0x00, 0x1f},     {0x7f, 0x9f},     {0xad, 0xad},     {0x61c, 0x61c},   {0x200b, 0x200f},
    {0x2028, 0x202e}, {0x2060, 0x206f}, {0xfeff, 0xfeff}, {0xfff9, 0xfffb}, {0xe0000, 0xe0fff}};

bool IsPrintable(uint32_t code) {
  return std::none_of(std::begin(kNotPrintable), std::end(kNotPrintable),
                      [&](const CodePoints& points) { return points.first <= code && code <= points.last; });
}

// The characters of a valid text; -1 if one of them is not printable.
int CountPrintable(absl::string_view text) {
  int count = 0;
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<uint8_t>(text[i]);
    const size_t bytes = byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
    uint32_t code = bytes == 1 ? byte : byte & (0x7fu >> bytes);
    for (size_t k = 1; k < bytes; ++k) code = code << 6 | (static_cast<uint8_t>(text[i + k]) & 0x3fu);
    if (!IsPrintable(code)) return -1;
    i += bytes;
    ++count;
  }
  return count;
}

}  // namespace

absl::Status CheckText(absl::string_view field, absl::string_view text, int least, int most) {
  const int count = errors::ValidUtf8(text) == text ? CountPrintable(text) : -1;
  if (least <= count && count <= most) return absl::OkStatus();
  const std::string range = least == 0 ? absl::StrCat("at most ", most) : absl::StrCat(least, " to ", most);
  const std::string got = count < 0    ? "a character that is not printable"
                          : count == 0 ? "nothing"
                                       : absl::StrCat(count, " characters");
  return errors::FieldError(field, absl::StrCat("be ", range, " printable characters"), got);
}

absl::Status CheckRun(absl::string_view field, absl::string_view run) {
  return CheckText(field, run, 0, 128);
}

absl::Status CheckCallId(absl::string_view field, absl::string_view id) {
  return CheckText(field, id, 1, 64);
}

absl::Status CheckIncarnation(absl::string_view field, uint64_t meant, uint64_t own) {
  if (meant == own) return absl::OkStatus();
  return errors::FieldError(
      field, absl::StrCat("be that of this server process, ", absl::Hex(own, absl::kZeroPad16)),
      absl::Hex(meant, absl::kZeroPad16), absl::StatusCode::kFailedPrecondition);
}

absl::Status WithDetail(absl::Status status, uint64_t incarnation) {
  v1::ErrorDetail detail;
  detail.set_incarnation(incarnation);
  if (std::optional<errors::FieldViolation> violation = errors::GetFieldViolation(status)) {
    detail.set_field(std::move(violation->field));
    detail.set_value(std::move(violation->value));
  }
  if (const std::optional<uint64_t> step = engine::GetCurrentStep(status)) detail.set_current_step(*step);
  for (std::string& line : engine::GetMissing(status)) detail.add_missing(std::move(line));
  wire::SetErrorDetail(detail, &status);
  return status;
}

}  // namespace lossd::messages
