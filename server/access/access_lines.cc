// SPDX-License-Identifier: Apache-2.0
#include "server/access/access_lines.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"

namespace lossd::access {

std::vector<AccessLine> AccessLines(absl::string_view text) {
  std::vector<AccessLine> lines;
  size_t number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (!line.empty() && line.front() != '#') lines.push_back({number, line});
  }
  return lines;
}

}  // namespace lossd::access
