// SPDX-License-Identifier: Apache-2.0
// Pieces of HTML pages, and numbers as people read them.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_METRICS_HTML_H_
#define LOSSD_SERVER_METRICS_HTML_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace lossd::metrics {

// Text safe between tags and inside quoted attributes.
std::string EscapeHtml(absl::string_view text);

// "0 B", "512 B", "1.5 KiB", "3.2 GiB".
std::string FormatBytes(double bytes);
// "0", "35 us", "1.2 ms", "3.4 s"; "-" for NaN.
// "3 d 4 h", "4 h 12 min", "12 min 5 s": of a time since a start, the two largest units.
std::string FormatUptime(absl::Duration uptime);
std::string FormatSeconds(double seconds);
// 1234567 as "1,234,567".
std::string Grouped(int64_t number);
// Three or four digits: "0.0123", "12.3", "1.23e-05".
std::string FormatNumber(double number);
// The time of day in UTC, with the date if it is not that of `now`.
std::string FormatTime(absl::Time time, absl::Time now);

// A row of a table out of HTML, and a table with a head that can be scrolled sideways.
std::string TableRow(const std::vector<std::string>& cells, absl::string_view tag = "td");
std::string Table(const std::vector<std::string>& header, absl::string_view rows);
// A figure with its name, both text.
std::string Fact(absl::string_view name, absl::string_view value);
// A bar from 0 to `most`.
std::string Bar(double value, double most);
// A place for a chart that the script of the page draws: `kind` is a name in page.js.
std::string Chart(absl::string_view kind, absl::string_view title);

// A whole document: `body` is HTML that the script renews every two seconds. `title` and `head` are text;
// `head` is the head that the page is about, empty for none.
std::string Document(absl::string_view title, absl::string_view head, absl::string_view body);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_HTML_H_
