// SPDX-License-Identifier: Apache-2.0
#include "server/app/byte_size.h"

#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace lossd::app {
namespace {

struct Unit {
  absl::string_view name;
  double bytes;
};

constexpr Unit kUnits[] = {{"TiB", 1024.0 * 1024 * 1024 * 1024},
                           {"GiB", 1024.0 * 1024 * 1024},
                           {"MiB", 1024.0 * 1024},
                           {"KiB", 1024.0},
                           {"TB", 1e12},
                           {"GB", 1e9},
                           {"MB", 1e6},
                           {"KB", 1e3},
                           {"B", 1.0},
                           {"", 1.0}};

}  // namespace

bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error) {
  const size_t digits = text.find_last_of("0123456789.") + 1;
  const absl::string_view name = absl::StripAsciiWhitespace(text.substr(digits));
  double number = 0.0;
  const bool is_number =
      absl::SimpleAtod(text.substr(0, digits), &number) && text.find_first_of("eExX+-") > digits;
  for (const Unit& unit : kUnits) {
    if (!is_number || !absl::EqualsIgnoreCase(name, unit.name)) continue;
    const double bytes = std::round(number * unit.bytes);
    if (!(bytes >= 0.0 && bytes < 4.6e18)) break;
    size->bytes = static_cast<int64_t>(bytes);
    return true;
  }
  *error = "must be a number of bytes such as 4096, 64KiB or 2GiB";
  return false;
}

std::string AbslUnparseFlag(const ByteSize& size) {
  for (const Unit& unit : kUnits) {
    const auto bytes = static_cast<int64_t>(unit.bytes);
    const bool binary = absl::EndsWith(unit.name, "iB");
    if (binary && size.bytes != 0 && size.bytes % bytes == 0)
      return absl::StrCat(size.bytes / bytes, unit.name);
  }
  return absl::StrCat(size.bytes);
}

}  // namespace lossd::app
