// SPDX-License-Identifier: Apache-2.0
// Formats numbers, charts, tables and lists of fields (format.h).
#include "client/cli/format.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/client_options.h"
#include "kernels/errors/field_error.h"

namespace lossd::cli {

// ---- Style ----

namespace {

// The codes select among the sixteen colors that every terminal has, so that the terminal's own settings for
// these colors apply.
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
  const std::string terminal = client::EnvironmentVariable("TERM");
  return isatty(descriptor) != 0 && !terminal.empty() && terminal != "dumb" &&
         client::EnvironmentVariable("NO_COLOR").empty();
}

// ---- Numbers and bars ----

namespace {

// Three significant digits for values below 1000.
std::string ThreeDigits(double value) {
  const double size = std::fabs(value);
  return absl::StrFormat("%.*f", size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2, value);
}

// The block character for a value in [0, 1].
const char* Block(double value) {
  constexpr std::array<const char*, 8> kBlocks = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  return kBlocks[static_cast<size_t>(std::clamp(std::lround(value * 7), 0L, 7L))];
}

std::string Pad(absl::string_view text, size_t width, Align align) {
  const std::string space(width - std::min(width, DisplayWidth(text)), ' ');
  return align == Align::kLeft ? absl::StrCat(text, space) : absl::StrCat(space, text);
}

}  // namespace

std::string HumanBytes(double bytes) { return errors::HumanBytes(bytes); }

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
  const double largest = values.empty() ? 0 : *std::max_element(values.begin(), values.end());
  std::string line;
  for (double value : values) line += Block(largest > 0 ? value / largest : 0);
  return line;
}

std::string Trendline(absl::Span<const double> values) {
  double least = std::numeric_limits<double>::infinity(), largest = -least;
  for (double value : values) {
    if (!std::isfinite(value)) continue;
    least = std::min(least, value);
    largest = std::max(largest, value);
  }
  std::string line;
  for (double value : values) {
    line += std::isfinite(value) ? Block(largest > least ? (value - least) / (largest - least) : 0) : "x";
  }
  return line;
}

absl::Span<const double> Last(absl::Span<const double> values, size_t count) {
  return values.subspan(values.size() - std::min(count, values.size()));
}

// ---- Text on a terminal ----

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

std::string TruncatedName(absl::string_view name, size_t width) {
  if (DisplayWidth(name) <= width || width < 3) return Truncated(name, width);
  const size_t behind = (width - 1) / 2;
  size_t at = name.size();
  for (size_t shown = 0; shown < behind;) {
    --at;
    if ((name[at] & 0xc0) != 0x80) ++shown;
  }
  return absl::StrCat(Truncated(name, width - behind), name.substr(at));
}

std::string Truncated(absl::string_view line, size_t width) {
  if (DisplayWidth(line) <= width) return std::string(line);
  if (width == 0) return "";
  std::string text;
  size_t shown = 0;
  bool painted = false;
  for (size_t i = 0; i < line.size();) {
    if (line[i] == '\033') {
      const size_t end = std::min(line.find('m', i), line.size() - 1);
      absl::StrAppend(&text, line.substr(i, end - i + 1));
      painted = true;
      i = end + 1;
      continue;
    }
    if (shown == width - 1) break;
    size_t end = i + 1;
    while (end < line.size() && (line[end] & 0xc0) == 0x80) ++end;
    absl::StrAppend(&text, line.substr(i, end - i));
    ++shown;
    i = end;
  }
  return absl::StrCat(text, "…", painted ? "\033[0m" : "");
}

namespace {

std::string WithoutControls(absl::string_view text, bool lines) {
  std::string printable;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool c1 =
        byte == 0xc2 && i + 1 < text.size() && (static_cast<unsigned char>(text[i + 1]) & 0xe0) == 0x80;
    if (c1) ++i;
    const bool control = byte < 0x20 || byte == 0x7f || c1;
    printable += control && !(lines && byte == '\n') ? '?' : text[i];
  }
  return printable;
}

}  // namespace

std::string Printable(absl::string_view text) { return WithoutControls(text, /*lines=*/false); }
std::string PrintableLines(absl::string_view text) { return WithoutControls(text, /*lines=*/true); }

// ---- Tables and fields ----

std::vector<size_t> Table::Widths(size_t width) const {
  std::vector<size_t> widths;
  size_t all = 0;
  for (size_t i = 0; i < columns_.size(); ++i) {
    size_t widest = DisplayWidth(columns_[i].title);
    for (const auto& row : rows_) widest = std::max(widest, DisplayWidth(row[i]));
    widths.push_back(widest);
    all += widest + (i > 0 ? 2 : 0);
  }
  while (all > width) {
    size_t least = 0;  // the column that is needed least
    for (size_t i = 1; i < columns_.size(); ++i) {
      if (widths[i] > 0 && columns_[i].rank > (widths[least] > 0 ? columns_[least].rank : 0)) least = i;
    }
    if (columns_[least].rank == 0 || widths[least] == 0) break;
    all -= widths[least] + 2;
    widths[least] = 0;
  }
  return widths;
}

size_t Table::Width(size_t width) const {
  size_t all = 0;
  for (size_t column : Widths(width)) all += column > 0 ? column + (all > 0 ? 2 : 0) : 0;
  return std::min(all, width);
}

std::string Table::ToString(const Style& style, size_t width) const {
  const std::vector<size_t> widths = Widths(width);
  std::string text;
  const auto line_of = [&](auto cell) {
    std::string line;
    for (size_t i = 0; i < columns_.size(); ++i) {
      if (widths[i] == 0) continue;
      absl::StrAppend(&line, line.empty() ? "" : "  ", Pad(cell(i), widths[i], columns_[i].align));
    }
    line.erase(line.find_last_not_of(' ') + 1);
    return Truncated(line, width);
  };
  absl::StrAppend(&text, style.Paint(Tone::kTitle, line_of([this](size_t i) { return columns_[i].title; })),
                  "\n");
  for (const auto& row : rows_) absl::StrAppend(&text, line_of([&row](size_t i) { return row[i]; }), "\n");
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
