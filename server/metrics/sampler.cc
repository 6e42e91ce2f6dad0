// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/clocks/clock.h"
#include "kernels/clocks/waits.h"
#include "server/metrics/process.h"

namespace lossd::metrics {
namespace {

using prometheus::ClientMetric;

constexpr float kNothing = std::numeric_limits<float>::quiet_NaN();
constexpr double kQuantiles[] = {0.5, 0.95, 0.99};

// Keeps the last one that is as old as the window, and those after it.
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
