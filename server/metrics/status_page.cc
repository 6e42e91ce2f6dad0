// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/status_page.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/clocks/clock.h"
#include "server/metrics/html.h"

namespace lossd::metrics {
namespace {

std::string LinkTo(absl::string_view head) {
  const std::string name = EscapeHtml(head);
  return absl::StrCat("<a href=\"/heads/", name, "\">", name, "</a>");
}

std::string Rate(double per_second) { return Grouped(static_cast<int64_t>(std::llround(per_second))); }

}  // namespace

StatusPage::StatusPage(const StatusPageOptions& options, const engine::Engine* engine,
                       const kernels::Backend* backend, Metrics* metrics, const History* history)
    : options_(options), engine_(engine), backend_(backend), metrics_(metrics), history_(history) {}

std::string StatusPage::Render(absl::string_view trouble) const {
  return Document(
      "lossd", "",
      absl::StrCat(Summary(trouble), "<section id=\"charts\">\n", Chart("rows", "Rows per second"),
                   Chart("loss", "Loss of the last step, by head"), Chart("latency", "Time of a microbatch"),
                   Chart("phases", "Time of a slice in each phase, median"),
                   Chart("busy", "Time in which the device is busy"),
                   Chart("bytes", "Tensor bytes per second"), Chart("queue", "Queue"),
                   Chart("memory", "Memory"), Chart("norm", "Gradient norm, by head"),
                   "</section>\n<section id=\"heads\"><h2>Heads</h2>\n", HeadsTable(),
                   "</section>\n<section id=\"events\"><h2>Events and errors</h2>\n", EventsTable(),
                   "</section>\n<section id=\"memory\"><h2>Memory</h2>\n", MemoryTable(),
                   "</section>\n<section id=\"latency\"><h2>Latency</h2>\n", LatencyTable(),
                   "<p>Of the last 30 seconds, estimated from histograms.</p></section>\n"
                   "<footer><a href=\"/metrics\">All metrics</a> <a href=\"/history.json\">Samples</a> "
                   "<a href=\"/events.json\">Events</a></footer>\n"));
}

std::string StatusPage::Summary(absl::string_view trouble) const {
  const engine::EngineStats stats = engine_->stats();
  const kernels::BackendInfo info = backend_->info();
  const Totals totals = metrics_->totals();
  const std::optional<Values> last = history_->Last();
  const auto rate = [&](Series series) {
    return last.has_value() ? (*last)[static_cast<size_t>(series)] : 0.0f;
  };
  const absl::string_view level = trouble.empty() ? "good" : trouble == "draining" ? "warning" : "error";
  return absl::StrCat(
      "<header id=\"summary\"><h1>lossd <span class=\"state ", level, "\">",
      EscapeHtml(trouble.empty() ? "serving" : trouble), "</span></h1>\n<p>", EscapeHtml(options_.version),
      " &middot; ", EscapeHtml(info.name), " backend, ", EscapeHtml(info.device),
      options_.collectives.empty() ? "" : " &middot; collectives " + EscapeHtml(options_.collectives),
      " &middot; gRPC on ", EscapeHtml(options_.grpc_address), " &middot; up ",
      FormatUptime(clocks::SteadyNow() - options_.started), " &middot; incarnation ",
      absl::Hex(engine_->incarnation(), absl::kZeroPad16), "</p>\n<div class=\"facts\">\n",
      Fact("rows/s", Rate(rate(Series::kRows))),
      Fact("device busy", absl::StrFormat("%.0f %%", 100 * rate(Series::kDeviceBusy))),
      Fact("received", FormatBytes(rate(Series::kBytesIn)) + "/s"),
      Fact("sent", FormatBytes(rate(Series::kBytesOut)) + "/s"),
      Fact("open streams", Grouped(stats.open_streams)), Fact("queued slices", Grouped(stats.queued_slices)),
      Fact(absl::StrCat("staging, of ", FormatBytes(static_cast<double>(stats.staging_bytes))),
           FormatBytes(static_cast<double>(stats.staging_used_bytes))),
      Fact("rows computed", Grouped(static_cast<int64_t>(totals.rows))),
      Fact("steps", Grouped(static_cast<int64_t>(totals.steps))),
      Fact("errors", Grouped(static_cast<int64_t>(totals.errors))),
      "</div>\n<p>Rates are of the last 10 seconds.</p></header>\n");
}

std::string StatusPage::HeadsTable() const {
  const std::vector<engine::HeadSnapshot> heads = engine_->List();
  if (heads.empty()) return "<p>None yet. A client or <code>lossctl create</code> makes one.</p>\n";
  const std::map<std::string, HeadMetrics::Summary> summaries = metrics_->heads().Summaries();
  std::string rows;
  for (size_t i = 0; i < std::min(heads.size(), kMostRows); ++i) {
    const engine::HeadSnapshot& head = heads[i];
    const auto summary = summaries.find(head.name);
    std::string loss = "-";
    if (summary != summaries.end() && summary->second.last.has_value() &&
        summary->second.last->loss.has_value()) {
      loss = FormatNumber(*summary->second.last->loss);
    }
    const absl::string_view state =
        head.tensors_status.ok() ? "" : " <span class=\"state error\">not usable</span>";
    rows +=
        TableRow({absl::StrCat(LinkTo(head.name), state), Grouped(head.config.vocab_size),
                  Grouped(head.config.hidden_size), EscapeHtml(kernels::Name(head.compute_dtype)),
                  head.config.trainable ? "yes" : "frozen", Grouped(static_cast<int64_t>(head.state.step)),
                  loss, Grouped(head.step_rows), Grouped(head.total_rows), Grouped(head.open_streams),
                  FormatBytes(static_cast<double>(head.memory.Total()))});
  }
  std::string html = Table({"Head", "Vocabulary", "Hidden size", "Compute", "Trained", "Step", "Loss",
                            "Rows in step", "Rows", "Streams", "Memory"},
                           rows);
  if (heads.size() > kMostRows) absl::StrAppend(&html, "<p>and ", heads.size() - kMostRows, " more</p>\n");
  return html;
}

std::string StatusPage::MemoryTable() const {
  const kernels::MemoryStats memory = backend_->memory();
  const double most = static_cast<double>(memory.limit > 0 ? memory.limit : memory.peak_total);
  std::string rows;
  for (size_t i = 0; i < kernels::kMemoryKinds; ++i) {
    const auto held = static_cast<double>(memory.current.by_kind[i]);
    rows += TableRow({std::string(kernels::Name(static_cast<kernels::MemoryKind>(i))), Bar(held, most),
                      FormatBytes(held), FormatBytes(static_cast<double>(memory.peak.by_kind[i]))});
  }
  const auto total = static_cast<double>(memory.current.Total());
  rows += TableRow(
      {"total", Bar(total, most), FormatBytes(total), FormatBytes(static_cast<double>(memory.peak_total))});
  const std::string limit =
      memory.limit > 0 ? FormatBytes(static_cast<double>(memory.limit)) : std::string("none");
  return absl::StrCat(Table({"Purpose", "", "Now", "Peak"}, rows), "<p>Limit: ", limit, "</p>\n");
}

std::string StatusPage::LatencyTable() const {
  const std::optional<Values> last = history_->Last();
  std::string rows;
  const auto add = [&](absl::string_view name, Series series) {
    std::vector<std::string> cells = {std::string(name)};
    for (size_t i = 0; i < 3; ++i) {
      cells.push_back(FormatSeconds(last.has_value() ? (*last)[static_cast<size_t>(series) + i]
                                                     : std::numeric_limits<double>::quiet_NaN()));
    }
    rows += TableRow(cells);
  };
  add("receive", Series::kReceive);
  add("queue", Series::kQueue);
  add("compute", Series::kCompute);
  add("send", Series::kSend);
  add("microbatch", Series::kMicrobatch);
  return Table({"Phase", "median", "95 %", "99 %"}, rows);
}

std::string StatusPage::EventsTable() const {
  const std::string rows = EventRows(metrics_->events(), "", kEventsShown);
  if (rows.empty()) return "<p>None since the start.</p>\n";
  return Table({"Time (UTC)", "Level", "What", "Head", "Count"}, rows);
}

std::string EventRows(const EventLog& events, absl::string_view head, size_t most) {
  const absl::Time now = clocks::WallNow();
  EventLog::Reading reading = events.After(0);
  std::reverse(reading.events.begin(), reading.events.end());
  std::string rows;
  for (const Event& event : reading.events) {
    if (!head.empty() && event.head != head) continue;
    if (most-- == 0) break;
    rows += TableRow(
        {FormatTime(event.last, now),
         absl::StrCat("<span class=\"state ", Name(event.level), "\">", Name(event.level), "</span>"),
         absl::StrCat("<span class=\"text\">", EscapeHtml(event.text), "</span>"), EscapeHtml(event.head),
         Grouped(event.count)});
  }
  return rows;
}

}  // namespace lossd::metrics
