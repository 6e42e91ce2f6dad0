// SPDX-License-Identifier: Apache-2.0
// Formats text for people and JSON for scripts: numbers, small charts, tables and lists of fields, their
// colors, and the environment variables that say how text looks. The functions are thread-safe as long as
// nothing changes the environment; the classes are thread-compatible.
#ifndef LOSSD_CLIENT_CLI_FORMAT_H_
#define LOSSD_CLIENT_CLI_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::cli {

enum class Tone : uint8_t { kPlain, kTitle, kGood, kWarning, kBad, kFaint };

// How text for people looks: how much it contains, and whether it is colored.
struct Style {
  bool wide = false;   // also print columns and fields that not everyone needs
  bool color = false;  // print escape sequences for tones

  std::string Paint(Tone tone, absl::string_view text) const;
};

enum class ColorMode : uint8_t { kAuto, kAlways, kNever };

// Whether text that is written to the file descriptor is colored. With kAuto it is if the descriptor is a
// terminal, TERM is neither empty nor "dumb", and NO_COLOR (no-color.org) is unset or empty.
bool HasColor(ColorMode mode, int descriptor);

std::string HumanBytes(double bytes);                // "17 B", "1.50 GiB"
std::string HumanCount(uint64_t count);              // "1,234,567"
std::string HumanRate(double per_second);            // "12.3", "4.56 k", "7.89 M"
std::string HumanSeconds(double seconds);            // "12.3 us", "4.56 ms", "7.89 s", "2h 03m 04s"
std::string HumanIncarnation(uint64_t incarnation);  // sixteen hexadecimal digits

// A line of block characters, one per value, between 0 and the largest value.
std::string Sparkline(absl::Span<const double> values);
// The same, scaled between the smallest and the largest value, for values that are never near 0. A value that
// is not finite is drawn as "x".
std::string Trendline(absl::Span<const double> values);
// The last `count` values, or all if there are fewer.
absl::Span<const double> Last(absl::Span<const double> values, size_t count);

// The number of terminal columns that the text takes. Each code point counts as one, escape sequences as
// none.
size_t DisplayWidth(absl::string_view text);
// The beginning of a line, at most `width` columns wide. If something was cut off, the last column is "…".
std::string Truncated(absl::string_view line, size_t width);
// A name of at most `width` columns. A longer name keeps its beginning and its end with "…" between them,
// because the names of a series differ at the end.
std::string TruncatedName(absl::string_view name, size_t width);
// Makes text from a server safe for a terminal: without control characters, it cannot move the cursor.
std::string Printable(absl::string_view text);
std::string PrintableLines(absl::string_view text);  // the same, but keeps the ends of lines

enum class Align { kLeft, kRight };

struct Column {
  std::string title;
  Align align = Align::kLeft;
  int rank = 0;  // If the table is too wide, the columns with the highest rank are dropped first; 0: never.
};

// Aligned columns under titles, two spaces apart.
class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // One cell per column.
  void AddRow(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  // `width` is the largest width, in terminal columns. `style` paints the titles.
  std::string ToString(const Style& style = {}, size_t width = std::numeric_limits<size_t>::max()) const;
  // The terminal columns that the table takes if `width` are available.
  size_t Width(size_t width = std::numeric_limits<size_t>::max()) const;

 private:
  // The width of each column; 0 for a column that is dropped.
  std::vector<size_t> Widths(size_t width) const;

  const std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// Names and values, one pair a line, values aligned.
class FieldList {
 public:
  void Add(std::string name, std::string value) { fields_.emplace_back(std::move(name), std::move(value)); }
  std::string ToString() const;

 private:
  std::vector<std::pair<std::string, std::string>> fields_;
};

// The JSON that lossctl reads and prints. Its objects keep the order of their members. A source that uses
// more than the name Json includes <nlohmann/json.hpp>.

using Json = nlohmann::ordered_json;

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_FORMAT_H_
