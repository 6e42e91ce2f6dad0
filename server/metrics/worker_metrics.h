// SPDX-License-Identifier: Apache-2.0
// What a worker, a rank that serves no clients, says of itself as metrics, in a form that can be sent.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_METRICS_WORKER_METRICS_H_
#define LOSSD_SERVER_METRICS_WORKER_METRICS_H_

#include <prometheus/metric_family.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/metrics/gpu_monitor.h"

namespace lossd::metrics {

// Counters or gauges of one name.
struct PlainFamily {
  struct Sample {
    std::vector<std::pair<std::string, std::string>> labels;
    double value = 0.0;
  };
  std::string name;
  std::string help;
  bool counter = false;  // else a gauge
  std::vector<Sample> samples;
};

// `busy`: the time in which the worker had chunks or requests to do; `collectives`: of that, in sums of
// gradients and the spreading of values. Both since its start. And the metrics of its GPUs.
std::vector<PlainFamily> WorkerFamilies(absl::Duration busy, absl::Duration collectives,
                                        absl::Span<const std::unique_ptr<GpuMonitor>> gpus);

std::vector<PlainFamily> ToPlain(const std::vector<prometheus::MetricFamily>& families);
std::vector<prometheus::MetricFamily> FromPlain(const std::vector<PlainFamily>& families);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_WORKER_METRICS_H_
