// SPDX-License-Identifier: Apache-2.0
#include "client/cli/watch_view.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/describe.h"
#include "kernels/clocks/clock.h"

namespace lossd::cli {

// ---- The picture ----

namespace {

std::string MemoryOf(const v1::ServerDescription& server, const Frame& frame) {
  const auto used = static_cast<double>(TotalBytes(server.memory()));
  if (server.memory_limit() == 0) return HumanBytes(used);
  const auto limit = static_cast<double>(server.memory_limit());
  const std::string text = absl::StrCat(HumanBytes(used), " of ", HumanBytes(limit));
  return used > 0.95 * limit ? frame.style.Paint(Tone::kWarning, text) : text;
}

std::string Percent(double share) { return absl::StrFormat("%.0f %%", 100 * std::clamp(share, 0.0, 1.0)); }

std::string PadTo(std::string text, size_t width) {
  const size_t shown = DisplayWidth(text);
  return shown < width ? absl::StrCat(text, std::string(width - shown, ' ')) : text;
}

std::vector<double> Copy(const std::deque<double>& values) { return {values.begin(), values.end()}; }

}  // namespace

// A line above the heads.
struct WatchHistory::Field {
  std::string name;
  std::string value;
  int rank = 0;  // where there is no room for all lines, those of the highest ranks go
  std::vector<double> series;
};

std::string WatchHistory::LatencyText() const {
  if (!good_->metrics.has_value()) return "";
  Buckets buckets = BucketsOf(*good_->metrics, kMicrobatchSeconds);
  if (previous_.has_value() && previous_->metrics.has_value()) {
    buckets = Difference(buckets, BucketsOf(*previous_->metrics, kMicrobatchSeconds));
  }
  const std::optional<double> p50 = Quantile(buckets, 0.5), p99 = Quantile(buckets, 0.99);
  if (!p50.has_value() || !p99.has_value()) return "idle";
  return absl::StrCat("p50 ", HumanSeconds(*p50), ", p99 ", HumanSeconds(*p99));
}

std::string WatchHistory::TransferText() const {
  const std::optional<double> in = Growth(kPayloadBytes, "direction", "in");
  const std::optional<double> out = Growth(kPayloadBytes, "direction", "out");
  if (!in.has_value() || !out.has_value()) return "";
  const auto rate = [&](double bytes) {
    return absl::StrCat(HumanBytes(std::max(0.0, bytes / Seconds())), "/s");
  };
  return absl::StrCat(rate(*in), " in, ", rate(*out), " out");
}

std::string WatchHistory::ChunksText() const {
  const auto count = [&](const char* gradients) {
    return Growth(kChunks, "gradients", gradients).value_or(0);
  };
  const auto percent = [](double part, double whole) {
    return absl::StrFormat("%.0f %%", 100 * part / whole);
  };
  const double exact = count("exact"), filtered = count("filtered"), sampled = count("sampled");
  const double all = exact + filtered + sampled;
  if (all <= 0) return "";
  std::string text = absl::StrCat(percent(exact, all), " exact, ", percent(filtered, all), " filtered, ",
                                  percent(sampled, all), " sampled");
  const double errors = Growth(kGradientErrorCount).value_or(0);
  if (errors <= 0) return text;
  absl::StrAppendFormat(&text, " (predicted error %.2g)", Growth(kGradientErrorSum).value_or(0) / errors);
  return text;
}

std::vector<WatchHistory::Field> WatchHistory::Fields(const Frame& frame) const {
  const v1::ServerDescription& now = good_->server;
  std::vector<Field> fields;
  const auto add = [&fields](const char* name, std::string value, int rank, std::vector<double> series = {}) {
    if (!value.empty()) fields.push_back({name, std::move(value), rank, std::move(series)});
  };
  add("rows/s", HumanRate(RowsPerSecond()), 0, Copy(rows_per_second_));
  if (const auto share = DeviceShare(); share.has_value()) {
    add("device", absl::StrCat(Percent(*share), " busy"), 1, Copy(device_share_));
  }
  add("queue",
      absl::StrCat(HumanCount(QueuedSlices(*good_)), QueuedSlices(*good_) == 1 ? " slice" : " slices",
                   " queued, ", HumanCount(now.open_streams()), " of ", HumanCount(now.max_streams()),
                   " streams"),
      2);
  add("memory", MemoryOf(now, frame), 3);
  if (good_->metrics.has_value()) {
    const double used = ValueOf(*good_->metrics, kStagingUsedBytes).value_or(0);
    const double all = ValueOf(*good_->metrics, kStagingBytes).value_or(0);
    if (all > 0) {
      const std::string text = absl::StrCat(HumanBytes(used), " of ", HumanBytes(all));
      add("staging", used > 0.95 * all ? frame.style.Paint(Tone::kWarning, text) : text, 5);
    }
  }
  add("microbatch", LatencyText(), 4);
  add("payload", TransferText(), 6);
  add("chunks", ChunksText(), 8);
  add("round trip", HumanSeconds(good_->round_trip_seconds), 9);
  if (!good_->metrics.has_value() && !good_->why_no_metrics.empty()) {
    add("no metrics", frame.style.Paint(Tone::kFaint, Printable(good_->why_no_metrics)), 7);
  }
  return fields;
}

std::vector<const v1::HeadDescription*> WatchHistory::Busiest(size_t count) const {
  std::vector<const v1::HeadDescription*> heads;
  heads.reserve(good_->heads.size());
  for (const v1::HeadDescription& head : good_->heads) heads.push_back(&head);
  if (heads.size() <= count) return heads;
  const auto key = [this](const v1::HeadDescription* head) {
    const auto found = heads_.find(head->spec().name());
    return std::make_pair(found == heads_.end() ? absl::InfinitePast() : found->second.active,
                          head->total_rows());
  };
  std::stable_sort(heads.begin(), heads.end(), [&](const auto* a, const auto* b) { return key(a) > key(b); });
  heads.resize(count);
  // As they stand in good_->heads.
  std::sort(heads.begin(), heads.end(), std::less<>());
  return heads;
}

// With a line of `trend` columns for the losses of each head.
Table WatchHistory::HeadsTable(const Frame& frame, const std::vector<const v1::HeadDescription*>& heads,
                               size_t trend) const {
  const bool has_losses =
      std::any_of(heads_.begin(), heads_.end(), [](const auto& each) { return !each.second.losses.empty(); });
  std::vector<Column> columns = {{"HEAD"}};
  if (has_losses) columns.push_back({"LOSS"});
  columns.insert(columns.end(), {{"ROWS/S", Align::kRight},
                                 {"DEVICE", Align::kRight, 3},
                                 {"QUEUE", Align::kRight, 2},
                                 {"STEP", Align::kRight, 1},
                                 {"STEP ROWS", Align::kRight, 6},
                                 {"STREAMS", Align::kRight, 5},
                                 {"MEMORY", Align::kRight, 4},
                                 {"HIDDEN x VOCAB", Align::kLeft, 7}});
  Table table(std::move(columns));
  const size_t name_width = frame.columns < 60 ? 12 : frame.columns < 120 ? 32 : 64;
  const auto history_of = [this](const v1::HeadDescription& head) {
    const auto found = heads_.find(head.spec().name());
    return found == heads_.end() ? HeadHistory() : found->second;
  };
  const auto loss_of = [](const HeadHistory& history) {
    return history.losses.empty() ? "" : absl::StrFormat("%.4g", history.losses.back());
  };
  size_t loss_width = 6;  // the lines of all heads begin in one column, and seldom move
  for (const v1::HeadDescription* head : heads) {
    loss_width = std::max(loss_width, loss_of(history_of(*head)).size());
  }
  for (const v1::HeadDescription* each : heads) {
    const v1::HeadDescription& head = *each;
    const HeadHistory history = history_of(head);
    std::vector<std::string> cells = {TruncatedName(Printable(head.spec().name()), name_width)};
    if (has_losses) {
      std::string loss;
      if (!history.losses.empty()) {
        loss = PadTo(loss_of(history), loss_width);
        if (!std::isfinite(history.losses.back())) loss = frame.style.Paint(Tone::kBad, loss);
        absl::StrAppend(&loss, " ", Trendline(Last(Copy(history.losses), trend)));
      }
      cells.push_back(PadTo(loss, loss_width + 1 + trend));
    }
    std::string queue = HumanCount(head.queued_slices() + head.waiting_slices());
    if (!head.waits_for().empty()) queue = frame.style.Paint(Tone::kWarning, queue);
    cells.insert(
        cells.end(),
        {HumanRate(RowsPerSecond(head.spec().name())),
         history.device_share.has_value() ? Percent(*history.device_share) : "", queue,
         HumanCount(head.state().step()), HumanCount(head.step_rows()), HumanCount(head.open_streams()),
         HumanBytes(static_cast<double>(TotalBytes(head.memory()))), Shape(head.spec())});
    table.AddRow(std::move(cells));
  }
  return table;
}

std::string WatchHistory::HeadsPicture(const Frame& frame, size_t lines) const {
  constexpr size_t kLeastTrend = 8, kMostTrend = 60;
  if (good_->heads.empty()) return absl::StrCat(Truncated("no heads", frame.columns), "\n");
  size_t shown = good_->heads.size();
  if (shown + 1 > lines)
    shown = lines > 2 ? lines - 2 : 1;  // one line for the titles, one for what is left out
  const std::vector<const v1::HeadDescription*> heads = Busiest(shown);
  const size_t used = HeadsTable(frame, heads, kLeastTrend).Width(frame.columns);
  const size_t trend = std::min(kMostTrend, kLeastTrend + frame.columns - std::min(frame.columns, used));
  std::string text = HeadsTable(frame, heads, trend).ToString(frame.style, frame.columns);
  if (shown < good_->heads.size())
    absl::StrAppend(&text,
                    Truncated(absl::StrCat("and ", HumanCount(good_->heads.size() - shown), " more heads"),
                              frame.columns),
                    "\n");
  return text;
}

std::string WatchHistory::Render(const std::string& server, const Frame& frame) const {
  std::vector<std::string> lines;
  const auto add = [&](absl::string_view line, Tone tone = Tone::kPlain) {
    lines.push_back(frame.style.Paint(tone, Truncated(line, frame.columns)));
  };
  const std::string title = absl::StrCat("lossd at ", server);
  if (!good_.has_value()) {
    add(title, Tone::kTitle);
    add("");
    add(last_.has_value() ? Printable(last_->status.message()) : "waiting", Tone::kBad);
    return absl::StrCat(absl::StrJoin(lines, "\n"), "\n");
  }
  const v1::ServerDescription& now = good_->server;
  add(absl::StrCat(title, "  up ", HumanSeconds(now.uptime_seconds()), "  ", Printable(now.backend()), "  ",
                   Printable(now.device())),
      Tone::kTitle);
  if (good_->metrics.has_value() && ValueOf(*good_->metrics, kDeviceLost).value_or(0) > 0)
    add("the device is lost: the server has to be started again", Tone::kBad);
  if (now.draining()) add("draining: it ends what is under way and takes nothing new", Tone::kWarning);
  if (!last_->status.ok()) add(absl::StrCat("no answer: ", Printable(last_->status.message())), Tone::kBad);
  add("");
  std::vector<Field> fields = Fields(frame);
  const size_t least_heads = std::min<size_t>(good_->heads.size(), 3) + 2;
  while (fields.size() > 2 && lines.size() + fields.size() + least_heads > frame.lines) {
    fields.erase(std::max_element(fields.begin(), fields.end(),
                                  [](const Field& a, const Field& b) { return a.rank < b.rank; }));
  }
  constexpr size_t kNames = 12, kValues = 10;
  for (const Field& field : fields) {
    std::string line = absl::StrCat(PadTo(field.name, kNames), field.value);
    if (!field.series.empty() && frame.columns > kNames + kValues) {
      line = PadTo(line, kNames + kValues + 1);
      absl::StrAppend(&line, Sparkline(Last(field.series, frame.columns - DisplayWidth(line))));
    }
    add(line);
  }
  add("");
  const size_t left = frame.lines > lines.size() ? frame.lines - lines.size() : 0;
  return absl::StrCat(absl::StrJoin(lines, "\n"), "\n", HeadsPicture(frame, left));
}

std::string WatchHistory::Line() const {
  const std::string time =
      absl::FormatTime("%H:%M:%S", clocks::OnTheWall(last_->time), absl::LocalTimeZone());
  if (!last_->status.ok()) return absl::StrCat(time, "  no answer: ", last_->status.message(), "\n");
  const std::string latency = LatencyText();
  const std::optional<double> share = DeviceShare();
  return absl::StrCat(time, "  ", HumanRate(RowsPerSecond()), " rows/s  ", good_->heads.size(),
                      good_->heads.size() == 1 ? " head  " : " heads  ", good_->server.open_streams(),
                      good_->server.open_streams() == 1 ? " stream  " : " streams  ", QueuedSlices(*good_),
                      " queued  ", HumanBytes(static_cast<double>(TotalBytes(good_->server.memory()))),
                      share.has_value() ? absl::StrCat("  device ", Percent(*share)) : "",
                      latency.empty() ? "" : "  microbatch " + latency, "\n");
}

// ---- WatchHistory: samples and what has changed between them ----

namespace {

std::map<std::string, uint64_t> RowsByHead(const WatchSample& sample) {
  std::map<std::string, uint64_t> rows;
  for (const v1::HeadDescription& head : sample.heads) rows[head.spec().name()] = head.total_rows();
  return rows;
}

void Push(double value, size_t length, std::deque<double>* values) {
  values->push_back(value);
  while (values->size() > length) values->pop_front();
}

}  // namespace

std::optional<double> ValueOf(const std::vector<MetricSample>& metrics, const std::string& name,
                              const std::string& label, const std::string& value) {
  std::optional<double> sum;
  for (const MetricSample& sample : metrics) {
    if (sample.name != name) continue;
    if (!label.empty()) {
      const auto found = sample.labels.find(label);
      if (found == sample.labels.end() || found->second != value) continue;
    }
    sum = sum.value_or(0) + sample.value;
  }
  return sum;
}

uint64_t QueuedSlices(const WatchSample& sample) {
  uint64_t slices = 0;
  for (const v1::HeadDescription& head : sample.heads) slices += head.queued_slices();
  return slices;
}

void WatchHistory::Add(WatchSample sample) {
  last_ = sample;
  if (!sample.status.ok()) return Push(0, length_, &rows_per_second_);
  previous_ = std::nullopt;
  if (good_.has_value() && good_->server.incarnation() == sample.server.incarnation())
    previous_ = std::move(good_);
  good_ = std::move(sample);
  const std::map<std::string, uint64_t> present = RowsByHead(*good_);
  for (auto it = heads_.begin(); it != heads_.end();)
    it = present.count(it->first) > 0 ? ++it : heads_.erase(it);
  AddRates();
  AddLosses();
}

void WatchHistory::AddRates() {
  for (auto& [name, head] : heads_) {
    head.rows_per_second = 0;
    head.device_share = std::nullopt;
  }
  if (!previous_.has_value()) return;
  const std::map<std::string, uint64_t> before = RowsByHead(*previous_);
  double total = 0;
  for (const auto& [name, rows] : RowsByHead(*good_)) {
    HeadHistory& head = heads_[name];
    if (const auto busy = Growth(kHeadDeviceSeconds, "head", name); busy.has_value() && Seconds() > 0) {
      head.device_share = std::max(0.0, *busy / Seconds());
    }
    const auto it = before.find(name);
    if (it == before.end() || it->second > rows || Seconds() <= 0) continue;
    head.rows_per_second = static_cast<double>(rows - it->second) / Seconds();
    total += head.rows_per_second;
    if (rows > it->second) head.active = good_->time;
  }
  Push(total, length_, &rows_per_second_);
  if (const auto share = DeviceShare(); share.has_value()) Push(*share, length_, &device_share_);
}

void WatchHistory::AddLosses() {
  if (!good_->metrics.has_value()) return;
  for (const v1::HeadDescription& each : good_->heads) {
    const std::string& name = each.spec().name();
    const std::optional<double> step = ValueOf(*good_->metrics, kHeadStep, "head", name);
    const std::optional<double> loss = ValueOf(*good_->metrics, kHeadLoss, "head", name);
    HeadHistory& head = heads_[name];
    if (!step.has_value() || !loss.has_value() || head.step == step) continue;
    head.step = step;
    Push(*loss, length_, &head.losses);
  }
}

double WatchHistory::Seconds() const {
  return previous_.has_value() ? absl::ToDoubleSeconds(good_->time - previous_->time) : 0;
}

std::optional<double> WatchHistory::Growth(const std::string& metric, const std::string& label,
                                           const std::string& value) const {
  if (!previous_.has_value() || !previous_->metrics.has_value() || !good_->metrics.has_value())
    return std::nullopt;
  const std::optional<double> now = ValueOf(*good_->metrics, metric, label, value);
  if (!now.has_value()) return std::nullopt;
  return *now - ValueOf(*previous_->metrics, metric, label, value).value_or(0);
}

double WatchHistory::RowsPerSecond(const std::string& head) const {
  const auto it = heads_.find(head);
  return it == heads_.end() ? 0 : it->second.rows_per_second;
}

std::optional<double> WatchHistory::DeviceShare() const {
  const std::optional<double> busy = good_.has_value() ? Growth(kBusySeconds) : std::nullopt;
  if (!busy.has_value() || Seconds() <= 0) return std::nullopt;
  return std::clamp(*busy / Seconds(), 0.0, 1.0);
}

nlohmann::ordered_json WatchHistory::Json() const {
  nlohmann::ordered_json json;
  json["time"] =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", clocks::OnTheWall(last_->time), absl::UTCTimeZone());
  if (!last_->status.ok()) {
    json["error"] = last_->status.message();
    return json;
  }
  json["server"] = ToJson(good_->server);
  json["rows_per_second"] = RowsPerSecond();
  if (const auto share = DeviceShare(); share.has_value()) json["device_share"] = *share;
  json["round_trip_seconds"] = good_->round_trip_seconds;
  json["heads"] = nlohmann::ordered_json::array();
  for (const v1::HeadDescription& head : good_->heads) {
    nlohmann::ordered_json& entry = json["heads"].emplace_back(ToJson(head));
    entry["rows_per_second"] = RowsPerSecond(head.spec().name());
    const auto found = heads_.find(head.spec().name());
    if (found == heads_.end()) continue;
    if (!found->second.losses.empty()) entry["loss"] = found->second.losses.back();
    if (found->second.device_share.has_value()) entry["device_share"] = *found->second.device_share;
  }
  return json;
}

}  // namespace lossd::cli
