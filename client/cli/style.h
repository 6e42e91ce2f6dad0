// SPDX-License-Identifier: Apache-2.0
// How text for people looks: how much of it there is, and in which colours.
//
// Thread-compatible.
#ifndef LOSSD_CLIENT_CLI_STYLE_H_
#define LOSSD_CLIENT_CLI_STYLE_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace lossd::cli {

enum class Tone : uint8_t { kPlain, kTitle, kGood, kWarning, kBad, kFaint };

struct Style {
  bool wide = false;   // columns and fields that not everyone needs, too
  bool color = false;  // escape sequences for tones

  std::string Paint(Tone tone, absl::string_view text) const;
};

enum class ColorMode : uint8_t { kAuto, kAlways, kNever };

// Whether what is written to the descriptor has colours. kAuto: if it is a terminal, TERM is neither empty
// nor "dumb", and NO_COLOR (no-color.org) is not set or empty.
bool HasColor(ColorMode mode, int descriptor);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_STYLE_H_
