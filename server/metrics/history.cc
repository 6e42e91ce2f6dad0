// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/history.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/clocks/clock.h"
#include "server/metrics/families.h"

namespace lossd::metrics {
namespace {

HeadValues NoValues() {
  HeadValues values;
  values.fill(std::numeric_limits<float>::quiet_NaN());
  return values;
}

// "name":[1,null,2.5], of the samples `first` to `last`.
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

// Keeps the last reading that is as old as the window, and the readings after it.
template <typename Readings>
void Shorten(Readings* readings, absl::Time now, absl::Duration window) {
  while (readings->size() > 2 && now - (*readings)[1].time >= window) readings->pop_front();
}

// What was observed between two readings of a histogram.
ClientMetric::Histogram Difference(ClientMetric::Histogram later, const ClientMetric::Histogram& earlier) {
  later.sample_count -= earlier.sample_count;
  for (size_t i = 0; i < later.bucket.size() && i < earlier.bucket.size(); ++i) {
    later.bucket[i].cumulative_count -= earlier.bucket[i].cumulative_count;
  }
  return later;
}

HeadValues ValuesOf(const HeadMetrics::Step* last, double rows_per_second) {
  HeadValues values;
  values.fill(kNothing);
  const auto set = [&](HeadSeries series, double value) {
    values[static_cast<size_t>(series)] = static_cast<float>(value);
  };
  set(HeadSeries::kRows, rows_per_second);
  if (last == nullptr) return values;
  if (last->loss.has_value()) set(HeadSeries::kLoss, *last->loss);
  set(HeadSeries::kGradientNorm, last->grad_norm);
  set(HeadSeries::kLearningRate, last->learning_rate);
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
    next = std::max(next + History::kInterval, now);  // no crowd of samples after a pause
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
      // A head that was deleted and created anew begins at zero.
      rate = static_cast<double>(std::max<int64_t>(grown, 0)) /
             std::max(absl::ToDoubleSeconds(now - begin.time), 1e-3);
    }
    heads[head.name] =
        ValuesOf(of_head != nullptr && of_head->last.has_value() ? &*of_head->last : nullptr, rate);
  }
  metrics_->trace().Expire();
  latencies_.push_back({now, metrics_->latencies()});
  Shorten(&latencies_, now, kQuantileWindow);
  history_->Add(clocks::OnTheWall(now), ServerValues(reading, stats), heads);
  readings_.push_back(std::move(reading));
  Shorten(&readings_, now + History::kInterval, kRateWindow);
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

}  // namespace lossd::metrics
