// Numbers and tables as people read them. Pure functions, thread-safe.
#ifndef LOSSD_CLIENT_CLI_FORMAT_H_
#define LOSSD_CLIENT_CLI_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::cli {

std::string HumanBytes(double bytes);                // "17 B", "1.50 GiB"
std::string HumanCount(uint64_t count);              // "1,234,567"
std::string HumanRate(double per_second);            // "12.3", "4.56 k", "7.89 M"
std::string HumanSeconds(double seconds);            // "12.3 us", "4.56 ms", "7.89 s", "2h 03m 04s"
std::string HumanIncarnation(uint64_t incarnation);  // sixteen hexadecimal digits

// A line of block characters, one per value, between 0 and the largest value.
std::string Sparkline(absl::Span<const double> values);

// Columns on a terminal: code points, counting escape sequences as nothing.
size_t DisplayWidth(absl::string_view text);

enum class Align { kLeft, kRight };

struct Column {
  std::string title;
  Align align = Align::kLeft;
};

// Aligned columns under titles, two spaces apart.
class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // One cell per column.
  void AddRow(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string ToString() const;

 private:
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

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_FORMAT_H_
