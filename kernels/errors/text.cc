// SPDX-License-Identifier: Apache-2.0
#include "kernels/errors/text.h"

#include <cstdint>

#include "absl/strings/str_cat.h"

namespace lossd::errors {
namespace {

constexpr absl::string_view kCut = "...";
constexpr absl::string_view kReplacement = "\xef\xbf\xbd";
constexpr size_t kMaxContinuations = 3;  // of a UTF-8 character

uint8_t Byte(absl::string_view text, size_t at) { return static_cast<uint8_t>(text[at]); }

bool IsContinuation(uint8_t byte) { return (byte & 0xc0) == 0x80; }

// The bytes of the character that starts with `first`; 0 if none does. 0xc0 and 0xc1 would be overlong, 0xf5
// and above are beyond U+10FFFF.
size_t LengthOf(uint8_t first) {
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return 2;
  if (first >= 0xe0 && first <= 0xef) return 3;
  return first >= 0xf0 && first <= 0xf4 ? 4 : 0;
}

// Whether the second byte rules out overlong forms, surrogates and code points above U+10FFFF.
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

// The bytes of the valid character that `text`, which is not empty, begins with; 0 if there is none.
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

}  // namespace lossd::errors
