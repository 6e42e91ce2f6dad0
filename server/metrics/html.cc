// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/html.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace lossd::metrics {

std::string EscapeHtml(absl::string_view text) {
  return absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

std::string FormatBytes(double bytes) {
  constexpr absl::string_view kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024.0 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024.0;
    ++unit;
  }
  return unit == 0 ? absl::StrFormat("%.0f B", bytes) : absl::StrFormat("%.1f %s", bytes, kUnits[unit]);
}

std::string FormatSeconds(double seconds) {
  if (std::isnan(seconds)) return "-";
  if (seconds <= 0.0) return "0";
  if (seconds < 1e-3) return absl::StrFormat("%.0f us", seconds * 1e6);
  if (seconds < 1.0) return absl::StrFormat("%.1f ms", seconds * 1e3);
  return absl::StrFormat("%.1f s", seconds);
}

std::string FormatUptime(absl::Duration uptime) {
  const int64_t seconds = std::max<int64_t>(absl::ToInt64Seconds(uptime), 0);
  const int64_t minutes = seconds / 60, hours = minutes / 60, days = hours / 24;
  if (days > 0) return absl::StrCat(Grouped(days), " d ", hours % 24, " h");
  if (hours > 0) return absl::StrCat(hours, " h ", minutes % 60, " min");
  return minutes > 0 ? absl::StrCat(minutes, " min ", seconds % 60, " s") : absl::StrCat(seconds, " s");
}

std::string Grouped(int64_t number) {
  const std::string digits = absl::StrCat(number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0 && digits[i - 1] != '-') text.push_back(',');
    text.push_back(digits[i]);
  }
  return text;
}

std::string FormatNumber(double number) { return absl::StrFormat("%.4g", number); }

std::string FormatTime(absl::Time time, absl::Time now) {
  const absl::TimeZone utc = absl::UTCTimeZone();
  const bool today = absl::ToCivilDay(time, utc) == absl::ToCivilDay(now, utc);
  return absl::FormatTime(today ? "%H:%M:%S" : "%Y-%m-%d %H:%M:%S", time, utc);
}

std::string TableRow(const std::vector<std::string>& cells, absl::string_view tag) {
  std::string row = "<tr>";
  for (const std::string& cell : cells) absl::StrAppend(&row, "<", tag, ">", cell, "</", tag, ">");
  return absl::StrCat(row, "</tr>\n");
}

std::string Table(const std::vector<std::string>& header, absl::string_view rows) {
  return absl::StrCat("<div class=\"wide\"><table>\n<thead>", TableRow(header, "th"), "</thead>\n<tbody>\n",
                      rows, "</tbody></table></div>\n");
}

std::string Fact(absl::string_view name, absl::string_view value) {
  return absl::StrCat("<div><b>", EscapeHtml(value), "</b><span>", EscapeHtml(name), "</span></div>\n");
}

std::string Bar(double value, double most) {
  return absl::StrFormat("<meter min=\"0\" max=\"%.0f\" value=\"%.0f\"></meter>", std::max(most, 1.0), value);
}

std::string Chart(absl::string_view kind, absl::string_view title) {
  return absl::StrCat("<figure class=\"chart\" data-chart=\"", kind, "\"><figcaption>", EscapeHtml(title),
                      "</figcaption></figure>\n");
}

std::string Document(absl::string_view title, absl::string_view head, absl::string_view body) {
  return absl::StrCat("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<title>",
                      EscapeHtml(title),
                      "</title>\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
                      "<link rel=\"icon\" href=\"/page/icon.svg\" type=\"image/svg+xml\">\n"
                      "<link rel=\"stylesheet\" href=\"/page/page.css\">\n"
                      "<script src=\"/page/page.js\" defer></script></head>\n<body data-head=\"",
                      EscapeHtml(head), "\">\n<p id=\"trouble\" role=\"status\" hidden></p>\n<main>\n", body,
                      "</main>\n</body></html>\n");
}

}  // namespace lossd::metrics
