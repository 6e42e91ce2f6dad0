#include "client/cli/format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lossd::cli {
namespace {

// Three significant digits below 1000.
std::string ThreeDigits(double value) {
  const double size = std::fabs(value);
  return absl::StrFormat("%.*f", size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2, value);
}

std::string Pad(absl::string_view text, size_t width, Align align) {
  const std::string space(width - std::min(width, DisplayWidth(text)), ' ');
  return align == Align::kLeft ? absl::StrCat(text, space) : absl::StrCat(space, text);
}

}  // namespace

std::string HumanBytes(double bytes) {
  constexpr std::array<const char*, 7> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  if (unit == 0) return absl::StrFormat("%.0f B", bytes);
  return absl::StrCat(ThreeDigits(bytes), " ", kUnits[unit]);
}

std::string HumanCount(uint64_t count) {
  const std::string digits = absl::StrCat(count);
  std::string result;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) result += ',';
    result += digits[i];
  }
  return result;
}

std::string HumanRate(double per_second) {
  constexpr std::array<const char*, 5> kUnits = {"", " k", " M", " G", " T"};
  size_t unit = 0;
  while (per_second >= 1000 && unit + 1 < kUnits.size()) {
    per_second /= 1000;
    ++unit;
  }
  return absl::StrCat(ThreeDigits(per_second), kUnits[unit]);
}

std::string HumanSeconds(double seconds) {
  if (seconds == 0) return "0 s";
  if (seconds < 1e-3) return absl::StrCat(ThreeDigits(seconds * 1e6), " us");
  if (seconds < 1) return absl::StrCat(ThreeDigits(seconds * 1e3), " ms");
  if (seconds < 60) return absl::StrCat(ThreeDigits(seconds), " s");
  const auto whole = static_cast<int64_t>(seconds);
  const int64_t days = whole / 86400, hours = whole / 3600 % 24, minutes = whole / 60 % 60;
  if (days > 0) return absl::StrFormat("%dd %02dh %02dm", days, hours, minutes);
  if (hours > 0) return absl::StrFormat("%dh %02dm %02ds", hours, minutes, whole % 60);
  return absl::StrFormat("%dm %02ds", minutes, whole % 60);
}

std::string HumanIncarnation(uint64_t incarnation) { return absl::StrFormat("%016x", incarnation); }

std::string Sparkline(absl::Span<const double> values) {
  constexpr std::array<const char*, 8> kBlocks = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const double largest = values.empty() ? 0 : *std::max_element(values.begin(), values.end());
  std::string line;
  for (double value : values) {
    const double level = largest > 0 ? value / largest * (kBlocks.size() - 1) : 0;
    line += kBlocks[static_cast<size_t>(std::clamp(std::lround(level), 0L, 7L))];
  }
  return line;
}

size_t DisplayWidth(absl::string_view text) {
  size_t width = 0;
  bool escape = false;
  for (char c : text) {
    if (escape) {
      escape = !((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'));
    } else if (c == '\033') {
      escape = true;
    } else if ((c & 0xc0) != 0x80) {  // not a UTF-8 continuation byte
      ++width;
    }
  }
  return width;
}

std::string Table::ToString() const {
  std::vector<size_t> widths;
  for (const Column& column : columns_) widths.push_back(DisplayWidth(column.title));
  for (const auto& row : rows_) {
    for (size_t i = 0; i < widths.size(); ++i) widths[i] = std::max(widths[i], DisplayWidth(row[i]));
  }
  std::string text;
  const auto add_line = [&](auto cell) {
    std::string line;
    for (size_t i = 0; i < columns_.size(); ++i) {
      absl::StrAppend(&line, i > 0 ? "  " : "", Pad(cell(i), widths[i], columns_[i].align));
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  };
  add_line([this](size_t i) { return columns_[i].title; });
  for (const auto& row : rows_) add_line([&row](size_t i) { return row[i]; });
  return text;
}

std::string FieldList::ToString() const {
  size_t width = 0;
  for (const auto& [name, value] : fields_) width = std::max(width, DisplayWidth(name));
  std::string text;
  for (const auto& [name, value] : fields_) {
    absl::StrAppend(&text, Pad(name, width, Align::kLeft), "  ", value, "\n");
  }
  return text;
}

}  // namespace lossd::cli
