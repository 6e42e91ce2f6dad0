// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/worker_metrics.h"

#include "server/metrics/families.h"
#include "server/metrics/rank_metrics.h"

namespace lossd::metrics {

using prometheus::MetricFamily;
using prometheus::MetricType;

std::vector<PlainFamily> WorkerFamilies(const kernels::RankTimes& times,
                                        absl::Span<const std::unique_ptr<GpuMonitor>> gpus) {
  std::vector<MetricFamily> families = RankTimeFamilies(times);
  const size_t of_gpus = families.size();
  for (const std::unique_ptr<GpuMonitor>& gpu : gpus) {
    if (gpu != nullptr) AddFamilies(gpu->Collect(), of_gpus, &families);
  }
  return ToPlain(families);
}

std::vector<PlainFamily> ToPlain(const std::vector<MetricFamily>& families) {
  std::vector<PlainFamily> out;
  for (const MetricFamily& family : families) {
    out.push_back({.name = family.name, .help = family.help, .counter = family.type == MetricType::Counter});
    for (const prometheus::ClientMetric& metric : family.metric) {
      PlainFamily::Sample sample;
      sample.value = out.back().counter ? metric.counter.value : metric.gauge.value;
      for (const auto& [name, value] : metric.label) sample.labels.emplace_back(name, value);
      out.back().samples.push_back(std::move(sample));
    }
  }
  return out;
}

std::vector<MetricFamily> FromPlain(const std::vector<PlainFamily>& families) {
  std::vector<MetricFamily> out;
  for (const PlainFamily& family : families) {
    out.push_back(
        MakeFamily(family.name, family.help, family.counter ? MetricType::Counter : MetricType::Gauge));
    for (const PlainFamily::Sample& sample : family.samples) {
      AddSample(&out.back(), sample.labels, sample.value);
    }
  }
  return out;
}

}  // namespace lossd::metrics
