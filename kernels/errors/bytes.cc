// SPDX-License-Identifier: Apache-2.0
#include "kernels/errors/bytes.h"

#include <array>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lossd::errors {
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

}  // namespace lossd::errors
