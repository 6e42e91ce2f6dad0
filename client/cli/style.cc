// SPDX-License-Identifier: Apache-2.0
#include "client/cli/style.h"

#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "client/cli/environment.h"

namespace lossd::cli {
namespace {

// Of the sixteen colours that every terminal has, and that its owner may have chosen.
absl::string_view EscapeCodeOf(Tone tone) {
  switch (tone) {
    case Tone::kPlain:
      return "";
    case Tone::kTitle:
      return "1";
    case Tone::kGood:
      return "32";
    case Tone::kWarning:
      return "33";
    case Tone::kBad:
      return "1;31";
    case Tone::kFaint:
      return "2";
  }
  return "";
}

}  // namespace

std::string Style::Paint(Tone tone, absl::string_view text) const {
  const absl::string_view code = EscapeCodeOf(tone);
  if (!color || code.empty() || text.empty()) return std::string(text);
  return absl::StrCat("\033[", code, "m", text, "\033[0m");
}

bool HasColor(ColorMode mode, int descriptor) {
  if (mode != ColorMode::kAuto) return mode == ColorMode::kAlways;
  const std::string terminal = EnvironmentVariable("TERM");
  return isatty(descriptor) != 0 && !terminal.empty() && terminal != "dumb" &&
         EnvironmentVariable("NO_COLOR").empty();
}

}  // namespace lossd::cli
