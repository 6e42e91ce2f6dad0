// SPDX-License-Identifier: Apache-2.0
// The metrics of the ranks of one server: AddRankFamilies says which ranks (processes or devices) there are
// and what each holds, and PlainFamily is the form in which a worker, a rank that serves no clients, sends
// its own metrics to rank 0.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_METRICS_RANK_METRICS_H_
#define LOSSD_SERVER_METRICS_RANK_METRICS_H_

#include <prometheus/metric_family.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "kernels/rank_link.h"
#include "server/metrics/gpu_monitor.h"

namespace lossd::metrics {

// What is known of one rank.
struct RankReading {
  kernels::RankState state;
  std::vector<prometheus::MetricFamily> metrics;  // of the rank's own, without the label rank
};

// Of all ranks, by rank; thread-safe.
using ReadRanks = std::function<std::vector<RankReading>()>;

// Adds the families of all ranks. Families of one name from several ranks become one family, with the label
// rank.
void AddRankFamilies(std::vector<RankReading> ranks, std::vector<prometheus::MetricFamily>* families);

// What a rank's time went into, without the label rank.
std::vector<prometheus::MetricFamily> RankTimeFamilies(const kernels::RankTimes& times);

// Adds the label to every sample, before its others.
void AddRankLabel(int rank, std::vector<prometheus::MetricFamily>* families);

// Counters or gauges of one name, in a form that can be sent.
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

// What a worker's time went into, and the metrics of its GPUs. A null monitor: a GPU without metrics.
std::vector<PlainFamily> WorkerFamilies(const kernels::RankTimes& times,
                                        absl::Span<const std::unique_ptr<GpuMonitor>> gpus);

std::vector<PlainFamily> ToPlain(const std::vector<prometheus::MetricFamily>& families);
std::vector<prometheus::MetricFamily> FromPlain(const std::vector<PlainFamily>& families);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_RANK_METRICS_H_
