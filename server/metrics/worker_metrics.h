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

#include "absl/types/span.h"
#include "kernels/rank_state.h"
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

// What a worker's time went into, and the metrics of its GPUs. Null: one without metrics.
std::vector<PlainFamily> WorkerFamilies(const kernels::RankTimes& times,
                                        absl::Span<const std::unique_ptr<GpuMonitor>> gpus);

std::vector<PlainFamily> ToPlain(const std::vector<prometheus::MetricFamily>& families);
std::vector<prometheus::MetricFamily> FromPlain(const std::vector<PlainFamily>& families);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_WORKER_METRICS_H_
