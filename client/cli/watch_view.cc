#include "client/cli/watch_view.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/describe.h"
#include "client/cli/format.h"

namespace lossd::cli {
namespace {

constexpr char kMicrobatchSeconds[] = "lossd_microbatch_seconds";
constexpr char kPayloadBytes[] = "lossd_payload_bytes_total";
constexpr char kChunks[] = "lossd_chunks_total";
constexpr char kGradientErrorSum[] = "lossd_gradient_error_ratio_sum";
constexpr char kGradientErrorCount[] = "lossd_gradient_error_ratio_count";

std::map<std::string, uint64_t> RowsByHead(const WatchSample& sample) {
  std::map<std::string, uint64_t> rows;
  for (const v1::HeadDescription& head : sample.heads) rows[head.spec().name()] = head.total_rows();
  return rows;
}

// The sum of the samples of this name with this label.
double SumOf(const std::vector<MetricSample>& metrics, absl::string_view name, const std::string& label,
             absl::string_view value) {
  double sum = 0;
  for (const MetricSample& sample : metrics) {
    const auto found = sample.labels.find(label);
    if (sample.name == name && found != sample.labels.end() && found->second == value) sum += sample.value;
  }
  return sum;
}

// The value of the sample of this name, 0 if there is none.
double ValueOf(const std::vector<MetricSample>& metrics, absl::string_view name) {
  for (const MetricSample& sample : metrics) {
    if (sample.name == name) return sample.value;
  }
  return 0;
}

uint64_t QueuedSlices(const WatchSample& sample) {
  uint64_t slices = 0;
  for (const v1::HeadDescription& head : sample.heads) slices += head.queued_slices();
  return slices;
}

std::string MemoryOf(const v1::ServerDescription& server) {
  const std::string used = HumanBytes(static_cast<double>(TotalBytes(server.memory())));
  if (server.memory_limit() == 0) return used;
  return absl::StrCat(used, " of ", HumanBytes(static_cast<double>(server.memory_limit())));
}

}  // namespace

void WatchHistory::Add(WatchSample sample) {
  last_ = sample;
  if (!sample.status.ok()) {
    rows_per_second_.push_back(0);
  } else {
    previous_ = std::nullopt;
    if (good_.has_value() && good_->server.incarnation() == sample.server.incarnation())
      previous_ = std::move(good_);
    good_ = std::move(sample);
    head_rows_per_second_.clear();
    if (previous_.has_value()) {
      const double seconds = absl::ToDoubleSeconds(good_->time - previous_->time);
      const std::map<std::string, uint64_t> before = RowsByHead(*previous_);
      double total = 0;
      for (const auto& [head, rows] : RowsByHead(*good_)) {
        const auto it = before.find(head);
        if (it == before.end() || it->second > rows || seconds <= 0) continue;
        head_rows_per_second_[head] = static_cast<double>(rows - it->second) / seconds;
        total += head_rows_per_second_[head];
      }
      rows_per_second_.push_back(total);
    }
  }
  while (rows_per_second_.size() > length_) rows_per_second_.pop_front();
}

double WatchHistory::RowsPerSecond(const std::string& head) const {
  const auto it = head_rows_per_second_.find(head);
  return it == head_rows_per_second_.end() ? 0 : it->second;
}

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
  if (!good_->metrics.has_value() || !previous_.has_value() || !previous_->metrics.has_value()) return "";
  const double seconds = absl::ToDoubleSeconds(good_->time - previous_->time);
  const auto rate = [&](absl::string_view direction) {
    const double bytes = SumOf(*good_->metrics, kPayloadBytes, "direction", direction) -
                         SumOf(*previous_->metrics, kPayloadBytes, "direction", direction);
    return absl::StrCat(HumanBytes(std::max(0.0, bytes / seconds)), "/s");
  };
  return absl::StrCat(rate("in"), " in, ", rate("out"), " out");
}

std::string WatchHistory::ChunksText() const {
  if (!good_->metrics.has_value() || !previous_.has_value() || !previous_->metrics.has_value()) return "";
  const auto count = [&](absl::string_view gradients) {
    return SumOf(*good_->metrics, kChunks, "gradients", gradients) -
           SumOf(*previous_->metrics, kChunks, "gradients", gradients);
  };
  const auto percent = [](double part, double whole) {
    return absl::StrFormat("%.0f %%", 100 * part / whole);
  };
  const double exact = count("exact"), filtered = count("filtered"), sampled = count("sampled");
  const double all = exact + filtered + sampled;
  if (all <= 0) return "";
  std::string text = absl::StrCat(percent(exact, all), " exact, ", percent(filtered, all), " filtered, ",
                                  percent(sampled, all), " sampled");
  const auto growth = [&](absl::string_view name) {
    return ValueOf(*good_->metrics, name) - ValueOf(*previous_->metrics, name);
  };
  const double errors = growth(kGradientErrorCount);
  if (errors <= 0) return text;
  absl::StrAppendFormat(&text, " (predicted error %.2g)", growth(kGradientErrorSum) / errors);
  return text;
}

std::string WatchHistory::Render(const std::string& server, size_t width) const {
  std::string text = absl::StrCat("lossd at ", server);
  if (!good_.has_value()) {
    return absl::StrCat(text, "\n\n", last_.has_value() ? last_->status.message() : "waiting", "\n");
  }
  const v1::ServerDescription& now = good_->server;
  absl::StrAppend(&text, "  ", now.backend(), "  ", now.device(), "  up ", HumanSeconds(now.uptime_seconds()),
                  now.draining() ? "  draining" : "", "\n");
  if (!last_->status.ok()) absl::StrAppend(&text, "no answer: ", last_->status.message(), "\n");
  FieldList fields;
  fields.Add("rows/s", absl::StrCat(HumanRate(RowsPerSecond()), "  ", [&] {
               const size_t room = std::min<size_t>(width > 30 ? width - 30 : 1, rows_per_second_.size());
               return Sparkline(std::vector<double>(rows_per_second_.end() - static_cast<ptrdiff_t>(room),
                                                    rows_per_second_.end()));
             }()));
  if (const std::string latency = LatencyText(); !latency.empty()) fields.Add("microbatch", latency);
  if (const std::string transfer = TransferText(); !transfer.empty()) fields.Add("payload", transfer);
  if (const std::string chunks = ChunksText(); !chunks.empty()) fields.Add("chunks", chunks);
  fields.Add("streams", absl::StrCat(HumanCount(now.open_streams()), " of ", HumanCount(now.max_streams()),
                                     ", ", HumanCount(QueuedSlices(*good_)), " slices queued"));
  fields.Add("memory", MemoryOf(now));
  fields.Add("round trip", HumanSeconds(good_->round_trip_seconds));
  absl::StrAppend(&text, "\n", fields.ToString(), "\n");
  if (good_->heads.empty()) return absl::StrCat(text, "no heads\n");
  Table table({{"HEAD"},
               {"HIDDEN x VOCAB"},
               {"STEP", Align::kRight},
               {"STEP ROWS", Align::kRight},
               {"ROWS/S", Align::kRight},
               {"STREAMS", Align::kRight},
               {"QUEUE", Align::kRight},
               {"MEMORY", Align::kRight}});
  for (const v1::HeadDescription& head : good_->heads) {
    table.AddRow({head.spec().name(), Shape(head.spec()), HumanCount(head.state().step()),
                  HumanCount(head.step_rows()), HumanRate(RowsPerSecond(head.spec().name())),
                  HumanCount(head.open_streams()), HumanCount(head.queued_slices()),
                  HumanBytes(static_cast<double>(TotalBytes(head.memory())))});
  }
  return absl::StrCat(text, table.ToString());
}

std::string WatchHistory::Line() const {
  const std::string time = absl::FormatTime("%H:%M:%S", last_->time, absl::LocalTimeZone());
  if (!last_->status.ok()) return absl::StrCat(time, "  no answer: ", last_->status.message(), "\n");
  const std::string latency = LatencyText();
  return absl::StrCat(time, "  ", HumanRate(RowsPerSecond()), " rows/s  ", good_->heads.size(), " heads  ",
                      good_->server.open_streams(), " streams  ", QueuedSlices(*good_), " queued  ",
                      HumanBytes(static_cast<double>(TotalBytes(good_->server.memory()))),
                      latency.empty() ? "" : "  microbatch " + latency, "\n");
}

}  // namespace lossd::cli
