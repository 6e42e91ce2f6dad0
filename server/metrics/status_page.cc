#include "server/metrics/status_page.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"

namespace lossd::metrics {
namespace {

constexpr absl::string_view kStyle = R"(
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #667080; --line: #d8dee6; --bar: #3b76c4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dde3ea; --paper: #14181d; --soft: #8b97a6; --line: #2c343e; --bar: #5b93dd; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; }
h2 { font-size: 1rem; margin: 2rem 0 .4rem; }
p { margin: .2rem 0; color: var(--soft); }
a { color: var(--bar); }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; }
meter { width: 10rem; }
.facts { display: flex; flex-wrap: wrap; gap: .4rem 2.2rem; margin-top: 1rem; }
.facts div { min-width: 6rem; }
.facts b { display: block; font-size: 1.25rem; font-weight: 600; }
.facts span { color: var(--soft); }
)";

std::string Row(const std::vector<std::string>& cells, absl::string_view tag = "td") {
  std::string row = "<tr>";
  for (const std::string& cell : cells) absl::StrAppend(&row, "<", tag, ">", cell, "</", tag, ">");
  return absl::StrCat(row, "</tr>\n");
}

std::string Table(const std::vector<std::string>& header, const std::string& rows) {
  return absl::StrCat("<div class=\"wide\"><table>\n<thead>", Row(header, "th"), "</thead>\n<tbody>\n", rows,
                      "</tbody></table></div>\n");
}

std::string Fact(absl::string_view name, absl::string_view value) {
  return absl::StrCat("<div><b>", EscapeHtml(value), "</b><span>", EscapeHtml(name), "</span></div>\n");
}

std::string Bar(double value, double most) {
  return absl::StrFormat("<meter min=\"0\" max=\"%.0f\" value=\"%.0f\"></meter>", std::max(most, 1.0), value);
}

// 1234567 as "1,234,567".
std::string Grouped(int64_t number) {
  const std::string digits = absl::StrCat(number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0 && digits[i - 1] != '-') text.push_back(',');
    text.push_back(digits[i]);
  }
  return text;
}

}  // namespace

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
  if (seconds <= 0.0) return "0";
  if (seconds < 1e-3) return absl::StrFormat("%.0f us", seconds * 1e6);
  if (seconds < 1.0) return absl::StrFormat("%.1f ms", seconds * 1e3);
  return absl::StrFormat("%.1f s", seconds);
}

StatusPage::StatusPage(const StatusPageOptions& options, const engine::Engine* engine,
                       const kernels::Backend* backend, const Metrics* metrics)
    : options_(options), engine_(engine), backend_(backend), metrics_(metrics) {}

std::string StatusPage::Render(bool draining) {
  const engine::EngineStats stats = engine_->stats();
  return absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
      "<meta http-equiv=\"refresh\" content=\"5\"><title>lossd</title><style>",
      kStyle, "</style></head>\n<body>\n", Summary(draining, stats), "<h2>Heads</h2>\n", HeadsTable(),
      "<h2>Memory</h2>\n", MemoryTable(), "<h2>Latency</h2>\n", LatencyTable(),
      "<p>Estimated from histograms over the life of the process. <a href=\"/metrics\">All metrics</a></p>\n",
      "</body></html>\n");
}

StatusPage::Rates StatusPage::UpdateRates() {
  const Totals totals = metrics_->totals();
  const absl::Time now = absl::Now();
  absl::MutexLock lock(&mutex_);
  Rates rates;
  if (last_view_.has_value()) {
    rates.seconds = std::max(absl::ToDoubleSeconds(now - *last_view_), 1e-3);
    rates.rows = (totals.rows - last_totals_.rows) / rates.seconds;
    rates.bytes_in = (totals.payload_bytes_in - last_totals_.payload_bytes_in) / rates.seconds;
    rates.bytes_out = (totals.payload_bytes_out - last_totals_.payload_bytes_out) / rates.seconds;
  }
  last_view_ = now;
  last_totals_ = totals;
  return rates;
}

std::string StatusPage::Summary(bool draining, const engine::EngineStats& stats) {
  const kernels::BackendInfo info = backend_->info();
  const Totals totals = metrics_->totals();
  const Rates rates = UpdateRates();
  const absl::Duration uptime = absl::Trunc(absl::Now() - options_.started, absl::Seconds(1));
  std::string html = absl::StrCat(
      "<h1>lossd", draining ? " (draining)" : "", "</h1>\n<p>", EscapeHtml(options_.version), " &middot; ",
      EscapeHtml(info.name), " backend, ", EscapeHtml(info.device), " &middot; gRPC on ",
      EscapeHtml(options_.grpc_address), " &middot; up ", EscapeHtml(absl::FormatDuration(uptime)),
      " &middot; incarnation ", absl::Hex(engine_->incarnation(), absl::kZeroPad16), "</p>\n");
  absl::StrAppend(
      &html, "<div class=\"facts\">\n", Fact("rows computed", Grouped(static_cast<int64_t>(totals.rows))),
      Fact("steps", Grouped(static_cast<int64_t>(totals.steps))),
      Fact("rows/s", absl::StrFormat("%.0f", rates.rows)),
      Fact("received", FormatBytes(rates.bytes_in) + "/s"), Fact("sent", FormatBytes(rates.bytes_out) + "/s"),
      Fact("open streams", Grouped(stats.open_streams)), Fact("queued slices", Grouped(stats.queued_slices)),
      Fact("staging used",
           absl::StrCat(FormatBytes(stats.staging_used_bytes), " of ", FormatBytes(stats.staging_bytes))),
      Fact("errors", Grouped(static_cast<int64_t>(totals.errors))), "</div>\n");
  const std::string window =
      rates.seconds > 0 ? absl::StrFormat("the last %.1f s", rates.seconds) : std::string("the next view on");
  return absl::StrCat(html, "<p>Rates over ", window, ".</p>\n");
}

std::string StatusPage::HeadsTable() const {
  std::string rows;
  for (const engine::HeadSnapshot& head : engine_->List()) {
    rows += Row({EscapeHtml(head.name), Grouped(head.config.vocab_size), Grouped(head.config.hidden_size),
                 EscapeHtml(kernels::Name(head.compute_dtype)), head.config.trainable ? "yes" : "frozen",
                 Grouped(static_cast<int64_t>(head.state.step)), Grouped(head.step_rows),
                 Grouped(head.total_rows), Grouped(head.open_streams),
                 FormatBytes(static_cast<double>(head.memory.Total()))});
  }
  if (rows.empty()) return "<p>None yet. A client or <code>lossctl create</code> makes one.</p>\n";
  return Table({"Head", "V", "D", "Compute", "Trained", "Step", "Rows in step", "Rows", "Streams", "Memory"},
               rows);
}

std::string StatusPage::MemoryTable() const {
  const kernels::MemoryStats memory = backend_->memory();
  const double most = static_cast<double>(memory.limit > 0 ? memory.limit : memory.peak_total);
  std::string rows;
  for (size_t i = 0; i < kernels::kMemoryKinds; ++i) {
    const auto held = static_cast<double>(memory.current.by_kind[i]);
    rows += Row({std::string(kernels::Name(static_cast<kernels::MemoryKind>(i))), Bar(held, most),
                 FormatBytes(held), FormatBytes(static_cast<double>(memory.peak.by_kind[i]))});
  }
  const auto total = static_cast<double>(memory.current.Total());
  rows += Row(
      {"total", Bar(total, most), FormatBytes(total), FormatBytes(static_cast<double>(memory.peak_total))});
  const std::string limit =
      memory.limit > 0 ? FormatBytes(static_cast<double>(memory.limit)) : std::string("none");
  return absl::StrCat(Table({"Purpose", "", "Now", "Peak"}, rows), "<p>Limit: ", limit, "</p>\n");
}

std::string StatusPage::LatencyTable() const {
  const auto row = [](absl::string_view name, const auto& quantile) {
    return Row({std::string(name), FormatSeconds(quantile(0.5)), FormatSeconds(quantile(0.95)),
                FormatSeconds(quantile(0.99))});
  };
  std::string rows;
  for (size_t i = 0; i < kPhases; ++i) {
    const auto phase = static_cast<Phase>(i);
    rows += row(Name(phase), [&](double q) { return metrics_->PhaseQuantile(phase, q); });
  }
  rows += row("microbatch", [&](double q) { return metrics_->MicrobatchQuantile(q); });
  return Table({"Phase", "median", "95 %", "99 %"}, rows);
}

}  // namespace lossd::metrics
