// SPDX-License-Identifier: Apache-2.0
// The samples for charts, the pieces of pages, and the status pages (status_page.h).
#include "server/metrics/status_page.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "kernels/clocks/clock.h"

namespace lossd::metrics {
namespace {

HeadValues NoValues() {
  HeadValues values;
  values.fill(std::numeric_limits<float>::quiet_NaN());
  return values;
}

// Appends a series of the samples `first` to `last` as JSON: "name":[1,null,2.5].
void AppendArray(absl::string_view name, uint64_t first, uint64_t last,
                 absl::FunctionRef<double(uint64_t)> value, std::string* json) {
  absl::StrAppend(json, "\"", name, "\":[");
  for (uint64_t number = first; number <= last; ++number) {
    if (number > first) json->push_back(',');
    const double each = value(number);
    if (!std::isfinite(each)) {
      json->append("null");
    } else if (std::abs(each) >= 1e8) {
      absl::StrAppendFormat(json, "%.2f", each);  // times and bytes
    } else {
      absl::StrAppendFormat(json, "%.6g", each);
    }
  }
  json->push_back(']');
}

}  // namespace

absl::string_view SeriesName(size_t series) {
  constexpr absl::string_view kNames[kSeries] = {
      "rows_per_second",        "bytes_in_per_second",    "bytes_out_per_second", "errors_per_second",
      "device_busy_ratio",      "queued_slices",          "queued_rows",          "open_streams",
      "staging_used_bytes",     "planned_bytes",          "resident_bytes",       "microbatch_seconds_p50",
      "microbatch_seconds_p95", "microbatch_seconds_p99", "receive_seconds_p50",  "receive_seconds_p95",
      "receive_seconds_p99",    "queue_seconds_p50",      "queue_seconds_p95",    "queue_seconds_p99",
      "compute_seconds_p50",    "compute_seconds_p95",    "compute_seconds_p99",  "send_seconds_p50",
      "send_seconds_p95",       "send_seconds_p99"};
  return kNames[series];
}

absl::string_view HeadSeriesName(size_t series) {
  constexpr absl::string_view kNames[kHeadSeries] = {"rows_per_second", "loss", "gradient_norm",
                                                     "learning_rate"};
  return kNames[series];
}

void History::Add(absl::Time time, const Values& values, const std::map<std::string, HeadValues>& heads) {
  absl::MutexLock lock(&mutex_);
  if (samples_.empty()) samples_.resize(kSamples);
  const size_t slot = SlotOf(++last_);
  samples_[slot] = {time, values};
  for (auto track = heads_.begin(); track != heads_.end();) {
    track = heads.contains(track->first) ? std::next(track) : heads_.erase(track);
  }
  for (const auto& [name, of_head] : heads) {
    auto track = heads_.find(name);
    if (track == heads_.end()) {
      if (heads_.size() == kMostHeads) continue;
      track = heads_.emplace(name, Track(kSamples, NoValues())).first;
    }
    track->second[slot] = of_head;
  }
}

std::optional<Values> History::Last() const {
  absl::ReaderMutexLock lock(&mutex_);
  if (last_ == 0) return std::nullopt;
  return samples_[SlotOf(last_)].values;
}

std::string History::Json(uint64_t incarnation, uint64_t after, absl::string_view head) const {
  absl::ReaderMutexLock lock(&mutex_);
  const uint64_t oldest = last_ > kSamples ? last_ - kSamples + 1 : 1;
  const uint64_t first = std::max(oldest, std::min(after, last_) + 1);
  std::string json = absl::StrFormat("{\"incarnation\":\"%016x\",\"interval_seconds\":%g,\"last\":%d,",
                                     incarnation, absl::ToDoubleSeconds(kInterval), last_);
  const auto append = [&](absl::string_view name, absl::FunctionRef<double(uint64_t)> value) {
    mutex_.AssertReaderHeld();
    AppendArray(name, first, last_, value, &json);
  };
  const auto sample = [&](uint64_t number) -> const Sample& {
    mutex_.AssertReaderHeld();
    return samples_[SlotOf(number)];
  };
  append("times",
         [&](uint64_t number) { return absl::ToDoubleSeconds(sample(number).time - absl::UnixEpoch()); });
  json.append(",\"server\":{");
  for (size_t series = 0; series < kSeries; ++series) {
    if (series > 0) json.push_back(',');
    append(SeriesName(series), [&](uint64_t number) { return sample(number).values[series]; });
  }
  json.append("},\"heads\":{");
  bool another = false;
  for (const auto& [name, track] : heads_) {
    if (!head.empty() && name != head) continue;
    absl::StrAppend(&json, another ? "," : "", nlohmann::json(name).dump(), ":{");
    const Track& values = track;  // clang 14 captures no structured binding
    for (size_t series = 0; series < kHeadSeries; ++series) {
      if (series > 0) json.push_back(',');
      append(HeadSeriesName(series), [&](uint64_t number) { return values[SlotOf(number)][series]; });
    }
    json.push_back('}');
    another = true;
  }
  json.append("}}\n");
  return json;
}

// ---- The sampler ----

namespace {

using prometheus::ClientMetric;

constexpr float kNothing = std::numeric_limits<float>::quiet_NaN();
constexpr double kQuantiles[] = {0.5, 0.95, 0.99};

// Drops readings from before the window, but keeps the last reading that is not inside the window, because
// the window begins there.
template <typename Readings>
void Shorten(Readings* readings, absl::Time now, absl::Duration window) {
  while (readings->size() > 2 && now - (*readings)[1].time >= window) readings->pop_front();
}

// The histogram of the observations between two readings.
ClientMetric::Histogram Difference(ClientMetric::Histogram later, const ClientMetric::Histogram& earlier) {
  later.sample_count -= earlier.sample_count;
  for (size_t i = 0; i < later.bucket.size() && i < earlier.bucket.size(); ++i) {
    later.bucket[i].cumulative_count -= earlier.bucket[i].cumulative_count;
  }
  return later;
}

// The values of a head. `step`: the last step closed since the previous sample; null: no step was closed.
HeadValues ValuesOf(const HeadMetrics::Step* step, double rows_per_second) {
  HeadValues values;
  values.fill(kNothing);
  const auto set = [&](HeadSeries series, double value) {
    values[static_cast<size_t>(series)] = static_cast<float>(value);
  };
  set(HeadSeries::kRows, rows_per_second);
  if (step == nullptr) return values;
  if (step->loss.has_value()) set(HeadSeries::kLoss, *step->loss);
  set(HeadSeries::kGradientNorm, step->grad_norm);
  set(HeadSeries::kLearningRate, step->learning_rate);
  return values;
}

}  // namespace

Sampler::Sampler(const engine::Engine* engine, const kernels::Backend* backend, Metrics* metrics,
                 History* history)
    : engine_(engine), backend_(backend), metrics_(metrics), history_(history) {}

Sampler::~Sampler() {
  {
    absl::MutexLock lock(&stop_mutex_);
    stop_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void Sampler::Start() {
  Sample(clocks::SteadyNow());
  thread_ = std::thread([this] { Run(); });
}

void Sampler::Run() {
  absl::Time next = clocks::SteadyNow() + History::kInterval;
  while (true) {
    {
      absl::MutexLock lock(&stop_mutex_);
      if (clocks::AwaitUntil(stop_mutex_, absl::Condition(&stop_), next)) return;
    }
    const absl::Time now = clocks::SteadyNow();
    Sample(now);
    next = std::max(next + History::kInterval, now);  // after a pause, does not make up for missed samples
  }
}

void Sampler::Sample(absl::Time now) {
  absl::MutexLock lock(&mutex_);
  const engine::EngineStats stats = engine_->stats();
  Reading reading{.time = now, .totals = metrics_->totals(), .device_busy = stats.device_busy};
  std::map<std::string, HeadMetrics::Summary> known = metrics_->heads().Summaries();
  std::map<std::string, HeadValues> heads;
  for (const engine::HeadSnapshot& head : engine_->List()) {
    const auto summary = known.find(head.name);
    const HeadMetrics::Summary* of_head = summary == known.end() ? nullptr : &summary->second;
    const int64_t rows = of_head == nullptr ? 0 : of_head->rows;
    reading.rows[head.name] = rows;
    double rate = 0.0;
    if (!readings_.empty()) {
      const Reading& begin = readings_.front();
      const auto before = begin.rows.find(head.name);
      const int64_t grown = rows - (before == begin.rows.end() ? 0 : before->second);
      // The counter of a head that was deleted and created again restarts at zero.
      rate = static_cast<double>(std::max<int64_t>(grown, 0)) /
             std::max(absl::ToDoubleSeconds(now - begin.time), 1e-3);
    }
    const HeadMetrics::Step* last =
        of_head != nullptr && of_head->last.has_value() ? &*of_head->last : nullptr;
    if (last != nullptr) reading.last_closed[head.name] = last->closed;
    heads[head.name] = ValuesOf(IsNews(head.name, last) ? last : nullptr, rate);
  }
  metrics_->trace().Expire();
  latencies_.push_back({now, metrics_->latencies()});
  Shorten(&latencies_, now, kQuantileWindow);
  history_->Add(clocks::OnTheWall(now), ServerValues(reading, stats), heads);
  readings_.push_back(std::move(reading));
  Shorten(&readings_, now + History::kInterval, kRateWindow);
}

bool Sampler::IsNews(const std::string& head, const HeadMetrics::Step* last) const {
  if (last == nullptr) return false;
  if (readings_.empty()) return true;
  const auto before = readings_.back().last_closed.find(head);
  return before == readings_.back().last_closed.end() || before->second != last->closed;
}

Values Sampler::ServerValues(const Reading& now, const engine::EngineStats& stats) const {
  Values values;
  values.fill(kNothing);
  const auto set = [&](Series series, double value) {
    values[static_cast<size_t>(series)] = static_cast<float>(value);
  };
  const Reading& begin = readings_.empty() ? now : readings_.front();
  const double seconds = std::max(absl::ToDoubleSeconds(now.time - begin.time), 1e-3);
  const auto rate = [&](double Totals::*counter) {
    return (now.totals.*counter - begin.totals.*counter) / seconds;
  };
  set(Series::kRows, rate(&Totals::rows));
  set(Series::kBytesIn, rate(&Totals::payload_bytes_in));
  set(Series::kBytesOut, rate(&Totals::payload_bytes_out));
  set(Series::kErrors, rate(&Totals::errors));
  const double busy = absl::ToDoubleSeconds(now.device_busy - begin.device_busy) / seconds;
  set(Series::kDeviceBusy, std::clamp(busy, 0.0, 1.0));
  set(Series::kQueuedSlices, static_cast<double>(stats.queued_slices));
  set(Series::kQueuedRows, static_cast<double>(stats.queued_rows));
  set(Series::kOpenStreams, static_cast<double>(stats.open_streams));
  set(Series::kStagingBytes, static_cast<double>(stats.staging_used_bytes));
  set(Series::kPlannedBytes, static_cast<double>(backend_->memory().current.Total()));
  if (const auto process = ReadProcessStats(); process.has_value()) {
    set(Series::kResidentBytes, static_cast<double>(process->resident_bytes));
  }
  const auto first = static_cast<size_t>(Series::kMicrobatch);
  for (size_t kind = 0; kind < kLatencies; ++kind) {
    const ClientMetric::Histogram in_window =
        Difference(latencies_.back().latencies[kind], latencies_.front().latencies[kind]);
    if (in_window.sample_count == 0) continue;
    for (size_t i = 0; i < std::size(kQuantiles); ++i) {
      values[first + kind * std::size(kQuantiles) + i] =
          static_cast<float>(EstimateQuantile(in_window, kQuantiles[i]));
    }
  }
  return values;
}

// ---- Pieces of pages ----

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

// ---- Lists of checkpoints ----

CheckpointLists::CheckpointLists(std::string directory)
    : directory_(std::move(directory)), thread_([this] { Run(); }) {}

CheckpointLists::~CheckpointLists() {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }
  thread_.join();
}

std::optional<absl::StatusOr<head::NewestCheckpoints>> CheckpointLists::Of(absl::string_view head) {
  if (directory_.empty()) return head::NewestCheckpoints();
  const std::string name(head);
  absl::MutexLock lock(&mutex_);
  Entry& entry = by_head_[name];
  entry.asked_at = clocks::SteadyNow();
  if (!entry.waits && entry.asked_at - entry.read_at > kFresh) {
    entry.waits = true;
    queue_.push_back(name);
  }
  if (entry.asked_at - entry.read_at <= kOld) return entry.list;
  const auto was_read = [this, &name]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto found = by_head_.find(name);
    return stopped_ || found == by_head_.end() || !found->second.waits;
  };
  clocks::AwaitFor(mutex_, absl::Condition(&was_read), kPatience);
  const auto found = by_head_.find(name);
  return found == by_head_.end() ? std::nullopt : found->second.list;
}

void CheckpointLists::Run() {
  while (true) {
    std::string head;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &CheckpointLists::HasWork));
      if (stopped_) return;
      head = std::move(queue_.front());
      queue_.pop_front();
    }
    absl::StatusOr<head::NewestCheckpoints> list = head::ListNewest(directory_, head, kShown, kMostFolders);
    absl::MutexLock lock(&mutex_);
    Entry& entry = by_head_[head];
    entry.list = std::move(list);
    entry.read_at = clocks::SteadyNow();
    entry.waits = false;
    if (by_head_.size() > kMostHeads) ForgetOldest();
  }
}

// Removes the entry whose last request is the oldest. Entries that wait to be read are not removed, because
// they are in queue_.
void CheckpointLists::ForgetOldest() {
  auto oldest = by_head_.end();
  for (auto it = by_head_.begin(); it != by_head_.end(); ++it) {
    if (it->second.waits) continue;
    if (oldest == by_head_.end() || it->second.asked_at < oldest->second.asked_at) oldest = it;
  }
  if (oldest != by_head_.end()) by_head_.erase(oldest);
}

// ---- The page of the server ----

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
    rows += TableRow({absl::StrCat(LinkTo(head.name), state), Grouped(static_cast<int64_t>(head.state.step)),
                      loss, Grouped(head.step_rows), Grouped(head.total_rows), Grouped(head.open_streams),
                      Grouped(head.config.vocab_size), Grouped(head.config.hidden_size),
                      EscapeHtml(kernels::Name(head.compute_dtype)), head.config.trainable ? "yes" : "frozen",
                      FormatBytes(static_cast<double>(head.memory.Total()))});
  }
  std::string html = Table({"Head", "Step", "Loss", "Rows in step", "Rows", "Streams", "Vocabulary",
                            "Hidden size", "Compute", "Trained", "Memory"},
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

// ---- The page of one head ----

namespace {

std::string LossText(const HeadMetrics::Step& step) {
  return step.loss.has_value() ? FormatNumber(*step.loss) : "-";
}

// The error of a step's gradients: the predicted relative error of sampled gradients, or the probability that
// filtered gradients left out.
std::string ErrorText(const HeadMetrics::Step& step) {
  const auto percent = [](double share) { return absl::StrCat(FormatNumber(share * 100), " %"); };
  if (step.gradient_error.has_value()) return percent(*step.gradient_error);
  return step.dropped_probability.has_value() ? absl::StrCat(percent(*step.dropped_probability), " dropped")
                                              : std::string("-");
}

// How the head's last gradients were computed: exact, filtered or sampled. If no gradients have been computed
// yet, the head's own setting.
kernels::Gradients LastGradients(const engine::HeadSnapshot& head, const HeadMetrics::Summary& summary) {
  return summary.gradients.value_or(head.config.gradients);
}

std::string GradientsText(const engine::HeadSnapshot& head, const HeadMetrics::Summary& summary) {
  const kernels::Gradients last = LastGradients(head, summary);
  const absl::string_view by_default = kernels::Name(head.config.gradients);
  if (last == head.config.gradients) return absl::StrCat("gradients ", by_default);
  return absl::StrCat("gradients of the last chunk ", kernels::Name(last), ", by default ", by_default);
}

// The error of the head's last gradients: the predicted error if they were sampled, or the probability that
// was left out if they were filtered.
std::string GradientError(const engine::HeadSnapshot& head, const HeadMetrics::Summary& summary) {
  const kernels::Gradients last = LastGradients(head, summary);
  if (last == kernels::Gradients::kExact) return "exact";
  if (last == kernels::Gradients::kSampled && head.gradient_error > 0) {
    return absl::StrCat(FormatNumber(head.gradient_error * 100), " %");
  }
  return summary.last.has_value() ? ErrorText(*summary.last) : std::string("-");
}

std::string StepsTable(const std::vector<HeadMetrics::Step>& steps) {
  if (steps.empty()) return "<p>None since the server started.</p>\n";
  const absl::Time now = clocks::WallNow();
  std::string rows;
  for (const HeadMetrics::Step& step : steps) {
    rows += TableRow(
        {Grouped(static_cast<int64_t>(step.number)), FormatTime(clocks::OnTheWall(step.closed), now),
         LossText(step), FormatNumber(step.grad_norm), ErrorText(step), FormatNumber(step.learning_rate),
         Grouped(step.rows), step.seconds.has_value() ? FormatSeconds(*step.seconds) : std::string("-"),
         step.skipped ? "<span class=\"state warning\">skipped</span>" : "applied"});
  }
  return Table({"Step", "Time (UTC)", "Loss", "Gradient norm", "Error", "Learning rate", "Rows",
                "Since the last", "Result"},
               rows);
}

// `saves`: the saves that this server has made, the newest first.
std::string CheckpointRow(const head::CheckpointInfo& info, const std::vector<SaveMetrics::Save>& saves,
                          absl::Time now) {
  if (!info.status.ok()) {
    return TableRow({EscapeHtml(info.name), "-", "-", "-", "-", "-", "-",
                     absl::StrCat("<span class=\"state error\">damaged</span> <span class=\"text\">",
                                  EscapeHtml(info.status.message()), "</span>")});
  }
  const bool is_dated = info.saved_at > absl::UnixEpoch();
  const auto save = std::find_if(saves.begin(), saves.end(), [&info](const SaveMetrics::Save& each) {
    return each.checkpoint == info.name && each.step == info.subject.step;
  });
  return TableRow(
      {EscapeHtml(info.name), Grouped(static_cast<int64_t>(info.subject.step)),
       FormatBytes(static_cast<double>(info.bytes)),
       is_dated ? FormatTime(info.saved_at, now) : std::string("-"),
       is_dated ? FormatUptime(std::max(now - info.saved_at, absl::ZeroDuration())) : std::string("-"),
       save == saves.end() ? std::string("-") : FormatSeconds(save->seconds),
       info.subject.run.empty() ? std::string("-") : EscapeHtml(info.subject.run),
       info.automatic ? "the server" : "a client"});
}

std::string CheckpointsTable(const std::optional<absl::StatusOr<head::NewestCheckpoints>>& newest,
                             const std::vector<SaveMetrics::Save>& saves) {
  if (!newest.has_value()) return "<p>The directory is being read.</p>\n";
  if (!newest->ok()) {
    return absl::StrCat("<p>The directory cannot be read: ", EscapeHtml(newest->status().message()),
                        "</p>\n");
  }
  const head::NewestCheckpoints& list = **newest;
  if (list.checkpoints.empty()) return "<p>There are none.</p>\n";
  const absl::Time now = clocks::WallNow();
  std::string rows;
  for (const head::CheckpointInfo& info : list.checkpoints) rows += CheckpointRow(info, saves, now);
  std::string more;
  if (list.left_out > 0 || list.and_more) {
    more = absl::StrCat("<p>And ", list.and_more ? "more than " : "",
                        Grouped(static_cast<int64_t>(list.left_out)), " older.</p>\n");
  }
  return absl::StrCat(
      Table({"Checkpoint", "Step", "Size", "Saved (UTC)", "Age", "Took", "Run", "Named by"}, rows), more);
}

std::string ChoicesTable(const engine::HeadSnapshot& head) {
  std::string rows;
  const auto add = [&](absl::string_view of, const std::vector<kernels::Choice>& choices) {
    for (const kernels::Choice& choice : choices) {
      rows += TableRow(
          {EscapeHtml(choice.what), std::string(of),
           absl::StrCat("<span class=\"text\">", EscapeHtml(choice.choice), "</span>"),
           absl::StrCat("<span class=\"text\">", EscapeHtml(choice.reason), "</span>"),
           choice.workspace_bytes > 0 ? FormatBytes(static_cast<double>(choice.workspace_bytes)) : ""});
    }
  };
  add("head", head.choices);
  add("last chunk", head.last_chunk_choices);
  if (rows.empty()) return "<p>None: the backend has one way to compute this head.</p>\n";
  return Table({"What", "Of", "Choice", "Because", "Workspace"}, rows);
}

std::string PlannedTable(const kernels::MemoryBytes& memory) {
  const auto total = static_cast<double>(memory.Total());
  std::string rows;
  for (size_t i = 0; i < kernels::kMemoryKinds; ++i) {
    const auto held = static_cast<double>(memory.by_kind[i]);
    if (held == 0) continue;
    rows += TableRow({std::string(kernels::Name(static_cast<kernels::MemoryKind>(i))), Bar(held, total),
                      FormatBytes(held)});
  }
  rows += TableRow({"total", Bar(total, total), FormatBytes(total)});
  return Table({"Purpose", "", "Planned"}, rows);
}

}  // namespace

std::optional<std::string> StatusPage::RenderHead(absl::string_view name) const {
  const absl::StatusOr<engine::HeadSnapshot> head = engine_->Describe(name);
  if (!head.ok()) return std::nullopt;
  const std::vector<HeadMetrics::Step> steps = metrics_->heads().Steps(name);
  const HeadMetrics::Summary summary = metrics_->heads().SummaryOf(name);
  const std::string loss = steps.empty() ? "-" : LossText(steps.front());
  const std::string events = EventRows(metrics_->events(), name, kEventsShown);
  const auto fact = [](absl::string_view what, int64_t value) { return Fact(what, Grouped(value)); };
  return Document(
      absl::StrCat("lossd: ", name), name,
      absl::StrCat(
          "<header id=\"summary\"><p><a href=\"/\">lossd</a></p><h1>", EscapeHtml(name),
          head->tensors_status.ok() ? "" : " <span class=\"state error\">not usable</span>", "</h1>\n<p>",
          Grouped(head->config.vocab_size), " classes of ", Grouped(head->config.hidden_size),
          " values &middot; ", EscapeHtml(kernels::Name(head->compute_dtype)), " &middot; ",
          head->config.trainable ? "trained" : "frozen", " &middot; optimizer state ",
          EscapeHtml(kernels::Name(head->config.optimizer_state)), " &middot; ",
          EscapeHtml(GradientsText(*head, summary)), " &middot; logits ",
          EscapeHtml(kernels::Name(head->config.logits)), "</p>\n<div class=\"facts\">\n",
          fact("step", static_cast<int64_t>(head->state.step)), Fact("loss", loss),
          fact("rows in step", head->step_rows), fact("rows", head->total_rows),
          fact("open streams", head->open_streams), fact("queued slices", head->queued_slices),
          fact("rows a chunk", head->chunk_rows),
          Fact("gradient norm", steps.empty() ? "-" : FormatNumber(steps.front().grad_norm)),
          Fact("gradient error", GradientError(*head, summary)),
          Fact("memory", FormatBytes(static_cast<double>(head->memory.Total()))), "</div>\n",
          head->waits_for.empty() ? ""
                                  : absl::StrCat("<p>Waits for ", EscapeHtml(head->waits_for), ".</p>\n"),
          head->tensors_status.ok()
              ? ""
              : absl::StrCat("<p>", EscapeHtml(head->tensors_status.message()), "</p>\n"),
          "</header>\n<section id=\"charts\">\n", Chart("head-rows", "Rows per second"),
          Chart("head-loss", "Loss of the last step"), Chart("head-norm", "Gradient norm"),
          Chart("head-rate", "Learning rate"), "</section>\n<section id=\"steps\"><h2>Last steps</h2>\n",
          StepsTable(steps), "</section>\n<section id=\"checkpoints\"><h2>Checkpoints</h2>\n",
          options_.checkpoints == nullptr
              ? std::string()
              : CheckpointsTable(options_.checkpoints->Of(name), metrics_->saves().Saves(name)),
          "</section>\n<section id=\"choices\"><h2>Choices</h2>\n", ChoicesTable(*head),
          "</section>\n<section id=\"memory\"><h2>Memory</h2>\n", PlannedTable(head->memory),
          "</section>\n<section id=\"events\"><h2>Events</h2>\n",
          events.empty() ? "<p>None since the server started.</p>\n"
                         : Table({"Time (UTC)", "Level", "What", "Head", "Count"}, events),
          "</section>\n"));
}

std::string StatusPage::RenderNoHead(absl::string_view name) const {
  return Document(
      "lossd: no such head", "",
      absl::StrCat(
          "<header id=\"summary\"><p><a href=\"/\">lossd</a></p><h1>No head ", EscapeHtml(name),
          "</h1>\n<p>There is no head of this name: it was not created yet, or it was deleted. In a browser "
          "this page "
          "appears when the head does, and looks for it less and less often, once a minute in the end.</p>\n"
          "<p><a href=\"/\">All heads</a></p></header>\n"));
}

}  // namespace lossd::metrics
