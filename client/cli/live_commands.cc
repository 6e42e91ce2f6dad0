// SPDX-License-Identifier: Apache-2.0
// The commands events, top, trace and watch.
#include "client/cli/live_commands.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/describe.h"
#include "client/cli/options.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"

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

// One line of the picture above the list of heads.
struct WatchHistory::Field {
  std::string name;
  std::string value;
  int rank = 0;  // if the picture is too high, the lines with the highest rank are dropped first; 0: never
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
  // Restores the order of good_->heads, in which the pointers are ascending.
  std::sort(heads.begin(), heads.end(), std::less<>());
  return heads;
}

// `trend`: the width, in columns, of the chart of each head's losses.
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
  // The least width is 6, so that the charts of all heads begin in one column that seldom moves.
  size_t loss_width = 6;
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
    shown = lines > 2 ? lines - 2 : 1;  // one line for the titles, one for the number of heads left out
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

namespace {

constexpr double kIdleSeconds = 60;     // a client that was idle for longer is left out
constexpr double kLongWaitSeconds = 5;  // a client that should send or take something is late after this time

std::string ByteRate(double per_second) { return absl::StrCat(HumanBytes(per_second), "/s"); }

// The growth of a counter. A counter that has begun again is less than before; then 0.
double Growth(uint64_t now, uint64_t before) { return now < before ? 0 : static_cast<double>(now - before); }

std::string NameOfWait(v1::StreamWait wait) {
  if (wait == v1::STREAM_WAIT_OPEN) return "opening";
  if (wait == v1::STREAM_WAIT_SEND) return "sending";
  return v1::StreamWait_IsValid(wait) && wait != v1::STREAM_WAIT_UNSPECIFIED ? NameOf(wait) : "unknown";
}

std::string Line(absl::string_view text, const Frame& frame) {
  return absl::StrCat(Truncated(text, frame.columns), "\n");
}

// Empty below a second: a client that works is never idle for long, and short times would only flicker.
std::string IdleText(double seconds) {
  if (seconds < 1) return "";
  return seconds < 60 ? absl::StrFormat("%.0f s", std::floor(seconds)) : HumanSeconds(seconds);
}

std::string Counted(uint64_t count, absl::string_view what) {
  return absl::StrCat(HumanCount(count), " ", what, count == 1 ? "" : "s");
}

std::string NameOfPeer(const std::string& peer, const Frame& frame) {
  return TruncatedName(peer.empty() ? "(this process)" : Printable(peer), frame.columns < 60 ? 16 : 40);
}

}  // namespace

const std::map<std::string, TopOrder>& TopOrders() {
  static const auto* const orders = new std::map<std::string, TopOrder>{{"bytes", TopOrder::kBytes},
                                                                        {"rows", TopOrder::kRows},
                                                                        {"staging", TopOrder::kStaging},
                                                                        {"wait", TopOrder::kWait}};
  return *orders;
}

void TopHistory::Add(absl::StatusOr<v1::ListStreamsResponse> answer) {
  status_ = answer.status();
  if (!answer.ok()) return;
  previous_ = std::nullopt;
  if (now_.has_value() && now_->incarnation() == answer->incarnation()) previous_ = std::move(now_);
  now_ = *std::move(answer);
}

double TopHistory::Seconds() const {
  return previous_.has_value() ? now_->time_seconds() - previous_->time_seconds() : 0;
}

TopHistory::PeerRates TopHistory::RatesOf(const v1::PeerDescription& peer) const {
  if (Seconds() <= 0) return {};
  // For a client that has come since the previous answer, `before` stays empty, because its counters began at
  // 0.
  v1::PeerDescription before;
  for (const v1::PeerDescription& each : previous_->peers()) {
    if (each.peer() == peer.peer()) before = each;
  }
  return {
      .rows_per_second = Growth(peer.rows(), before.rows()) / Seconds(),
      .received_per_second = Growth(peer.received_bytes(), before.received_bytes()) / Seconds(),
      .sent_per_second = Growth(peer.sent_bytes(), before.sent_bytes()) / Seconds(),
      .waiting_slices = std::max(0.0, peer.device_wait_seconds() - before.device_wait_seconds()) / Seconds()};
}

std::vector<v1::PeerDescription> TopHistory::Peers(bool all) const {
  std::vector<v1::PeerDescription> peers;
  for (const v1::PeerDescription& peer : now_->peers()) {
    if (all || peer.open_streams() > 0 || peer.idle_seconds() < kIdleSeconds) peers.push_back(peer);
  }
  const auto key = [this](const v1::PeerDescription& peer) {
    const PeerRates rates = RatesOf(peer);
    switch (order_) {
      case TopOrder::kRows:
        return rates.rows_per_second;
      case TopOrder::kBytes:
        return rates.received_per_second + rates.sent_per_second;
      case TopOrder::kStaging:
        return static_cast<double>(peer.staging_bytes());
      case TopOrder::kWait:
        return rates.waiting_slices;
    }
    return 0.0;
  };
  std::stable_sort(peers.begin(), peers.end(), [&](const auto& a, const auto& b) { return key(a) > key(b); });
  return peers;
}

std::vector<v1::StreamDescription> TopHistory::Streams() const {
  std::vector<v1::StreamDescription> streams(now_->streams().begin(), now_->streams().end());
  const auto key = [this](const v1::StreamDescription& stream) {
    switch (order_) {
      case TopOrder::kRows:
        return static_cast<double>(stream.queued_rows());
      case TopOrder::kBytes:
        return static_cast<double>(stream.received_bytes() + stream.sent_bytes());
      case TopOrder::kStaging:
        return static_cast<double>(stream.staging_bytes());
      case TopOrder::kWait:
        return stream.wait_seconds();
    }
    return 0.0;
  };
  std::stable_sort(streams.begin(), streams.end(),
                   [&](const auto& a, const auto& b) { return key(a) > key(b); });
  return streams;
}

std::string TopHistory::Summary() const {
  double rows = 0;
  for (const v1::PeerDescription& peer : now_->peers()) rows += RatesOf(peer).rows_per_second;
  const uint64_t streams = static_cast<uint64_t>(now_->streams_size()) + now_->streams_left_out();
  std::string order;
  for (const auto& [name, each] : TopOrders()) {
    if (each == order_) order = name;
  }
  return absl::StrCat("  ", HumanRate(rows), " rows/s  ", Counted(streams, "open stream"), "  by ", order);
}

std::string TopHistory::PeersPicture(const Frame& frame, size_t lines) const {
  const std::vector<v1::PeerDescription> peers = Peers(all_);
  Table table({{"CLIENT"},
               {"ROWS/S", Align::kRight},
               {"IN", Align::kRight, 3},
               {"OUT", Align::kRight, 4},
               {"STAGING", Align::kRight, 2},
               {"WAITING", Align::kRight, 5},
               {"STREAMS", Align::kRight, 1},
               {"IDLE", Align::kRight, 6},
               {"ALL ROWS", Align::kRight, 7}});
  const size_t shown = std::min(peers.size(), lines);
  for (size_t i = 0; i < shown; ++i) {
    const v1::PeerDescription& peer = peers[i];
    const PeerRates rates = RatesOf(peer);
    table.AddRow({NameOfPeer(peer.peer(), frame), HumanRate(rates.rows_per_second),
                  ByteRate(rates.received_per_second), ByteRate(rates.sent_per_second),
                  HumanBytes(peer.staging_bytes()), absl::StrFormat("%.1f", rates.waiting_slices),
                  HumanCount(peer.open_streams()), IdleText(peer.idle_seconds()), HumanCount(peer.rows())});
  }
  std::string text = peers.empty() ? "" : table.ToString(frame.style, frame.columns);
  if (shown < peers.size()) {
    absl::StrAppend(&text, Line(absl::StrCat("and ", Counted(peers.size() - shown, "more client")), frame));
  }
  if (const size_t idle = static_cast<size_t>(now_->peers_size()) - peers.size(); idle > 0) {
    const std::string line = absl::StrCat(Counted(idle, "client"), " idle for over a minute");
    absl::StrAppend(&text, frame.style.Paint(Tone::kFaint, Truncated(line, frame.columns)), "\n");
  }
  return text;
}

std::string TopHistory::StreamsPicture(const Frame& frame, size_t lines) const {
  const std::vector<v1::StreamDescription> streams = Streams();
  Table table({{"STREAM", Align::kRight, 4},
               {"CLIENT"},
               {"HEAD", Align::kLeft, 2},
               {"MICROBATCH", Align::kRight, 6},
               {"ROWS QUEUED", Align::kRight, 1},
               {"STAGING", Align::kRight, 3},
               {"WAITS FOR"},
               {"AGE", Align::kRight, 5},
               {"KIND", Align::kLeft, 7}});
  const size_t shown = std::min(streams.size(), lines);
  for (size_t i = 0; i < shown; ++i) {
    const v1::StreamDescription& stream = streams[i];
    std::string wait = NameOfWait(stream.waits_for());
    if (stream.wait_seconds() >= 0.1) absl::StrAppend(&wait, " ", HumanSeconds(stream.wait_seconds()));
    const bool late =
        stream.waits_for() != v1::STREAM_WAIT_SERVER && stream.wait_seconds() > kLongWaitSeconds;
    table.AddRow({absl::StrCat(stream.number()), NameOfPeer(stream.peer(), frame), Printable(stream.head()),
                  absl::StrCat(stream.microbatch_id()),
                  absl::StrCat(HumanCount(stream.queued_rows()), "/", HumanCount(stream.rows())),
                  HumanBytes(stream.staging_bytes()), late ? frame.style.Paint(Tone::kWarning, wait) : wait,
                  HumanSeconds(stream.age_seconds()),
                  absl::StrCat(stream.backward() ? "backward" : "forward",
                               stream.shared_memory() ? ", shared memory" : "")});
  }
  std::string text = table.ToString(frame.style, frame.columns);
  const uint64_t left_out = streams.size() - shown + now_->streams_left_out();
  if (left_out > 0) {
    absl::StrAppend(&text, Line(absl::StrCat("and ", Counted(left_out, "more stream")), frame));
  }
  return text;
}

std::string TopHistory::Render(const std::string& server, const Frame& frame) const {
  std::string title = absl::StrCat("lossd at ", server);
  if (now_.has_value()) absl::StrAppend(&title, Summary());
  std::string text = absl::StrCat(frame.style.Paint(Tone::kTitle, Truncated(title, frame.columns)), "\n");
  size_t used = 2;
  if (!status_.ok()) {
    const std::string line = absl::StrCat("no answer: ", Printable(status_.message()));
    absl::StrAppend(&text, frame.style.Paint(Tone::kBad, Truncated(line, frame.columns)), "\n");
    ++used;
  }
  if (!now_.has_value()) return text;
  absl::StrAppend(&text, "\n");
  if (now_->peers().empty()) return absl::StrCat(text, Line("no client has sent rows", frame));
  // Each table needs a line for its titles, and may need one for what is left out. The table of clients may
  // need one more for idle clients.
  const size_t room = frame.lines > used + 6 ? frame.lines - used - 6 : 2;
  const size_t peers = Peers(all_).size();
  const auto streams = static_cast<size_t>(now_->streams_size());
  const size_t for_peers = std::min(peers, std::max(room - std::min(streams, room / 2), room / 2));
  absl::StrAppend(&text, PeersPicture(frame, std::max<size_t>(1, for_peers)));
  if (streams == 0) return absl::StrCat(text, "\n", Line("no stream is open", frame));
  return absl::StrCat(text, "\n",
                      StreamsPicture(frame, std::max<size_t>(1, room - std::min(room, for_peers))));
}

nlohmann::ordered_json TopHistory::Json() const {
  if (!status_.ok()) return {{"error", status_.message()}};
  nlohmann::ordered_json json = {{"incarnation", HumanIncarnation(now_->incarnation())},
                                 {"server_seconds", now_->time_seconds()},
                                 {"interval_seconds", Seconds()},
                                 {"peers", nlohmann::ordered_json::array()},
                                 {"streams", nlohmann::ordered_json::array()},
                                 {"streams_left_out", now_->streams_left_out()}};
  for (const v1::PeerDescription& peer : Peers(/*all=*/true)) {
    const PeerRates rates = RatesOf(peer);
    nlohmann::ordered_json& entry = json["peers"].emplace_back(FieldsJson(peer));
    entry["rows_per_second"] = rates.rows_per_second;
    entry["received_bytes_per_second"] = rates.received_per_second;
    entry["sent_bytes_per_second"] = rates.sent_per_second;
    entry["waiting_slices"] = rates.waiting_slices;
  }
  for (const v1::StreamDescription& stream : Streams()) {
    json["streams"].emplace_back(FieldsJson(stream))["waits_for"] = NameOfWait(stream.waits_for());
  }
  return json;
}

// ---- events ----

namespace {

constexpr absl::Duration kPause = absl::Seconds(1);  // between two requests for events

struct EventsFlags {
  std::string http;
  bool follow = false;
  uint64_t after = 0;
};

absl::StatusOr<Events> Fetch(const Context& context, const std::string& address, uint64_t after) {
  const absl::Duration timeout = context.timeout_seconds > 0 ? context.timeout() : absl::Seconds(5);
  LOSSD_TRY(const std::string text,
            HttpFetch(address, absl::StrCat("/events.json?after=", after), context.credentials, timeout));
  return ParseEvents(text);
}

void Print(const Context& context, const Events& events) {
  if (events.missed) context.Print("earlier events are no longer there\n");
  for (const nlohmann::ordered_json& event : events.events) {
    context.Print(absl::StrCat(EventLine(event), "\n"));
  }
}

// Prints one of several answers. As JSON, an answer without events is not printed.
void PrintLook(const Context& context, const Events& events) {
  if (!context.json) {
    Print(context, events);
  } else if (events.missed || !events.events.empty()) {
    context.PrintJsonOfMany(ToJson(events));
  }
}

// Whether to ask again after this error: a server that restarts is waited for, but a wrong request is not
// repeated.
bool MayComeBack(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

absl::Status RunEvents(Context* context, const EventsFlags& flags) {
  LOSSD_TRY(const std::string address, context->HttpAddress(flags.http));
  absl::StatusOr<Events> events = Fetch(*context, address, flags.after);
  if (!events.ok()) return events.status();
  if (!flags.follow) {
    if (context->json) {
      context->PrintJson(ToJson(*events));
    } else {
      Print(*context, *events);
    }
    return absl::OkStatus();
  }
  PrintLook(*context, *events);
  Interrupt interrupt;
  std::string incarnation = events->incarnation;
  uint64_t seen = events->last_id;
  while (true) {
    interrupt.Sleep(kPause);
    if (interrupt.received() || !context->Printed().ok()) return absl::OkStatus();
    events = Fetch(*context, address, seen);
    // The server was restarted, and a new server process numbers its events from 1.
    if (events.ok() && events->incarnation != incarnation) {
      incarnation = events->incarnation;
      events = Fetch(*context, address, 0);
    }
    if (!events.ok() && MayComeBack(events.status())) continue;
    if (!events.ok()) return events.status();
    PrintLook(*context, *events);
    seen = events->last_id;
  }
}

}  // namespace

void AddEventsCommand(CLI::App* app, Context* context) {
  CLI::App* events = app->add_subcommand("events", "Print what has happened on the server");
  events->footer(
      "With --follow -o json prints a document per look that finds events. --follow waits for a server that "
      "is gone.");
  auto flags = std::make_shared<EventsFlags>();
  events->add_flag("--follow", flags->follow, "Go on with what happens, until Ctrl-C");
  events->add_option("--after", flags->after, "Only events whose id is larger [0]");
  AddHttp(events, &flags->http);
  events->callback([=] { context->action = [=] { return RunEvents(context, *flags); }; });
}

// ---- top ----

namespace {

class Top final : public LiveView {
 public:
  Top(const Context& context, TopOrder order, bool all, client::Client& client)
      : context_(context), client_(client), history_(order) {
    history_.set_all(all);
  }

  void Look() override {
    found_ = client_.monitoring().ListStreams(
        0, context_.timeout_seconds > 0 ? context_.timeout() : absl::Seconds(3));
  }
  absl::Status Take() override {
    if (absl::IsUnimplemented(found_.status())) {
      return absl::UnimplementedError(
          absl::StrCat("the server at ", context_.server, " is too old to say who uses it"));
    }
    // The server would refuse the next requests, too.
    if (absl::IsPermissionDenied(found_.status()) || absl::IsUnauthenticated(found_.status()))
      return found_.status();
    history_.Add(std::move(found_));
    found_ = absl::UnavailableError("no look yet");
    return absl::OkStatus();
  }
  bool ready() const override { return history_.ready(); }
  std::string Picture(const Frame& frame) const override {
    Frame above = frame;
    above.lines -= std::min<size_t>(frame.lines, 1);
    constexpr char kKeys[] = "q: leave  a: idle clients  order by r: rows  b: bytes  s: staging  w: wait";
    constexpr char kShortKeys[] = "q: leave  a: idle  order: r, b, s, w";
    const std::string keys = Truncated(frame.columns < sizeof(kKeys) - 1 ? kShortKeys : kKeys, frame.columns);
    return absl::StrCat(history_.Render(context_.server, above), frame.style.Paint(Tone::kFaint, keys), "\n");
  }
  void Print() const override {
    if (context_.json) return context_.PrintJsonOfMany(history_.Json());
    constexpr size_t kUnlimited = 100'000;
    context_.Print(
        absl::StrCat(history_.Render(context_.server,
                                     {.columns = kUnlimited, .lines = kUnlimited, .style = context_.style()}),
                     "\n"));
  }
  bool OnKey(char key) override {
    if (key == 'a') {
      history_.set_all(!history_.all());
      return true;
    }
    for (const auto& [name, order] : TopOrders()) {
      if (name.front() != key) continue;
      history_.set_order(order);
      return true;
    }
    return false;
  }

 private:
  const Context& context_;
  client::Client& client_;
  absl::StatusOr<v1::ListStreamsResponse> found_ =
      absl::UnavailableError("no look yet");  // set by Look, read by Take
  TopHistory history_;
};

}  // namespace

void AddTopCommand(CLI::App* app, Context* context) {
  CLI::App* top =
      app->add_subcommand("top", "Show which clients and streams take rows, bytes and memory, until q");
  top->footer(
      "Not on a terminal it prints the tables per look; with -o json a document per look. Rates are "
      "those between two looks.");
  auto flags = std::make_shared<LiveFlags>();
  auto order = std::make_shared<TopOrder>(TopOrder::kRows);
  auto all = std::make_shared<bool>(false);
  AddLiveOptions(top, flags.get());
  AddWord(top, "--sort", order.get(), TopOrders(), "What comes first: the most of it [rows]");
  top->add_flag("--all", *all, "Clients without a stream that have done nothing for a minute, too");
  SetClientAction(top, context, [=](client::Client& client) {
    Top view(*context, *order, *all, client);
    return RunLive(*context, *flags, &view);
  });
}

// ---- trace ----

namespace {

struct TraceFlags {
  std::string http;
  double seconds = 2;
};

absl::Status RunTrace(Context* context, const TraceFlags& flags) {
  const absl::Duration timeout = context->timeout_seconds > 0 ? context->timeout() : absl::Seconds(30);
  LOSSD_TRY(const std::string address, context->HttpAddress(flags.http));
  LOSSD_TRY(const std::string started,
            HttpPost(address, absl::StrCat("/trace?seconds=", flags.seconds), context->credentials, timeout));
  const auto answer = nlohmann::json::parse(started, nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object() || !answer.contains("recording") || !answer["recording"].is_number_unsigned()) {
    return absl::InternalError("the server's answer names no recording");
  }
  const Interrupt interrupt;
  interrupt.Sleep(absl::Seconds(flags.seconds) + absl::Milliseconds(50));
  if (interrupt.received()) return absl::CancelledError("interrupted; the server drops the trace by itself");
  LOSSD_TRY(const std::string trace,
            HttpPost(address, absl::StrCat("/trace.json?recording=", answer["recording"].get<uint64_t>()),
                     context->credentials, timeout));
  context->Print(trace);
  return absl::OkStatus();
}

}  // namespace

void AddTraceCommand(CLI::App* app, Context* context) {
  CLI::App* trace = app->add_subcommand("trace", "Record what becomes of slices and chunks, for Perfetto");
  trace->footer(
      "Prints Chrome's Trace Event Format: lossctl trace --seconds 2 > trace.json, then open it in "
      "https://ui.perfetto.dev or chrome://tracing. Needs the role admin on a server that asks.");
  auto flags = std::make_shared<TraceFlags>();
  trace->add_option("--seconds", flags->seconds, "How long to record, 0.01 to 30 [2]")
      ->check(NumberFromTo(0.01, 30));
  AddHttp(trace, &flags->http);
  trace->callback([=] { context->action = [=] { return RunTrace(context, *flags); }; });
}

// ---- watch ----

namespace {

class Watch final : public LiveView {
 public:
  Watch(const Context* context, std::string http, client::Client& client)
      : context_(*context), http_(std::move(http)), client_(client) {}

  void Look() override {
    const absl::Duration timeout = context_.timeout_seconds > 0 ? context_.timeout() : absl::Seconds(3);
    found_ = WatchSample();
    const absl::StatusOr<v1::ServerDescription> server = client_.GetServer(timeout);
    const absl::Time start = clocks::SteadyNow();
    const absl::StatusOr<std::vector<v1::HeadDescription>> heads = client_.ListHeads(timeout);
    found_.time = clocks::SteadyNow();
    found_.round_trip_seconds = absl::ToDoubleSeconds(found_.time - start);
    found_.status = server.status();
    found_.status.Update(heads.status());
    if (!found_.status.ok()) return;
    found_.server = *server;
    found_.heads = *heads;
    const absl::StatusOr<std::string> address = context_.HttpAddress(http_, *server);
    const absl::StatusOr<std::string> metrics =
        address.ok() ? HttpFetch(*address, "/metrics", context_.credentials, absl::Seconds(1)) : address;
    if (metrics.ok()) {
      found_.metrics = ParseMetrics(*metrics);
    } else {
      found_.why_no_metrics = std::string(metrics.status().message());
    }
  }
  absl::Status Take() override {
    history_.Add(std::move(found_));
    return absl::OkStatus();
  }
  std::string Picture(const Frame& frame) const override {
    Frame above = frame;
    above.lines -= std::min<size_t>(frame.lines, 1);
    return absl::StrCat(history_.Render(context_.server, above), frame.style.Paint(Tone::kFaint, "q: leave"),
                        "\n");
  }
  void Print() const override {
    if (context_.json) return context_.PrintJsonOfMany(history_.Json());
    context_.Print(history_.Line());
  }

 private:
  const Context& context_;
  const std::string http_;  // empty: not given
  client::Client& client_;
  WatchSample found_;  // set by Look, read by Take
  WatchHistory history_;
};

}  // namespace

void AddWatchCommand(CLI::App* app, Context* context) {
  CLI::App* watch = app->add_subcommand("watch", "Show what the server does, until q");
  watch->footer("Not on a terminal it prints a line per look; with -o json a document per look.");
  auto flags = std::make_shared<LiveFlags>();
  auto http = std::make_shared<std::string>();
  AddLiveOptions(watch, flags.get());
  AddHttp(watch, http.get(),
          "The server's HTTP address, for losses, latencies and the device [the context's, else where the "
          "server says]");
  SetClientAction(watch, context, [=](client::Client& client) {
    Watch view(context, *http, client);
    return RunLive(*context, *flags, &view);
  });
}

}  // namespace lossd::cli
