// SPDX-License-Identifier: Apache-2.0
#include "client/cli/value_checks.h"

#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lossd::cli {
namespace {

struct Unit {
  absl::string_view name;
  double bytes;
};

constexpr double kKib = 1024.0;
constexpr Unit kByteUnits[] = {{"TiB", kKib* kKib* kKib* kKib},
                               {"GiB", kKib* kKib* kKib},
                               {"MiB", kKib* kKib},
                               {"KiB", kKib},
                               {"T", kKib* kKib* kKib* kKib},
                               {"G", kKib* kKib* kKib},
                               {"M", kKib* kKib},
                               {"K", kKib},
                               {"TB", 1e12},
                               {"GB", 1e9},
                               {"MB", 1e6},
                               {"KB", 1e3},
                               {"B", 1.0},
                               {"", 1.0}};

// SimpleAtoi passes over spaces around a number, which a shell has kept on purpose or by accident.
template <typename T>
bool IsWhole(const std::string& text, T* number) {
  return !text.empty() && !absl::ascii_isspace(static_cast<unsigned char>(text.front())) &&
         absl::SimpleAtoi(text, number);
}

}  // namespace

ValueCheck Rule(std::string rule, std::function<bool(const std::string&)> fits) {
  return [rule = std::move(rule), fits = std::move(fits)](const std::string& text) {
    return fits(text) ? std::string() : absl::StrCat("must ", rule, ", got \"", text, "\"");
  };
}

ValueCheck WholeNumberOfAnySign() {
  return Rule("be a whole number", [](const std::string& text) {
    int64_t number = 0;
    return IsWhole(text, &number);
  });
}

ValueCheck WholeNumber(uint64_t least, uint64_t most) {
  const bool bounded = most != std::numeric_limits<uint64_t>::max();
  const std::string rule = bounded ? absl::StrCat("be a whole number from ", least, " to ", most)
                                   : absl::StrCat("be a whole number from ", least, " to 2^64 - 1");
  return Rule(rule, [least, most](const std::string& text) {
    uint64_t number = 0;
    return IsWhole(text, &number) && number >= least && number <= most;
  });
}

ValueCheck AnyNumber() {
  return Rule("be a number", [](const std::string& text) {
    double number = 0;
    return absl::SimpleAtod(text, &number);
  });
}

ValueCheck NumberFromTo(double least, double most) {
  return Rule(absl::StrFormat("be a number from %g to %g", least, most), [least, most](const auto& text) {
    double number = 0;
    return absl::SimpleAtod(text, &number) && number >= least && number <= most;
  });
}

ValueCheck NumberAboveZero() {
  return Rule("be a number above 0", [](const std::string& text) {
    double number = 0;
    return absl::SimpleAtod(text, &number) && number > 0 && std::isfinite(number);
  });
}

ValueCheck NumberOfBytes() {
  return Rule("be a number of bytes such as 4096, 64KiB or 2GiB",
              [](const std::string& text) { return ParseBytes(text).has_value(); });
}

ValueCheck NotEmpty() {
  return [](const std::string& text) { return text.empty() ? "must not be empty" : std::string(); };
}

std::optional<uint64_t> ParseBytes(absl::string_view text) {
  const size_t digits = text.find_last_of("0123456789.") + 1;  // 0 if there are none
  const absl::string_view name = absl::StripAsciiWhitespace(text.substr(digits));
  double number = 0.0;
  const bool is_number = absl::SimpleAtod(text.substr(0, digits), &number) &&
                         text.find_first_of("xX+-") == text.npos &&
                         text.substr(0, digits).find_first_of("eE") == text.npos;
  for (const Unit& unit : kByteUnits) {
    if (!is_number || !absl::EqualsIgnoreCase(name, unit.name)) continue;
    const double bytes = std::round(number * unit.bytes);
    if (!(bytes >= 0.0 && bytes < 0x1p62)) return std::nullopt;
    return static_cast<uint64_t>(bytes);
  }
  return std::nullopt;
}

}  // namespace lossd::cli
