// SPDX-License-Identifier: Apache-2.0
// The processes of one server, as metrics: who is there, and what each holds. Stateless; thread-safe.
#ifndef LOSSD_SERVER_METRICS_RANK_METRICS_H_
#define LOSSD_SERVER_METRICS_RANK_METRICS_H_

#include <prometheus/metric_family.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/memory.h"

namespace lossd::metrics {

// What has gone to a worker and come from it, since the ranks came together.
struct RankTraffic {
  int64_t chunks = 0;
  int64_t rows = 0;
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
};

struct RankReading {
  int rank = 0;
  std::string host;
  std::string device;
  bool lost = false;
  kernels::MemoryStats memory;                    // as the rank last said
  std::optional<RankTraffic> traffic;             // of a worker
  std::vector<prometheus::MetricFamily> metrics;  // of a worker, without the label rank, as it last said
};

// Of all ranks, by rank; thread-safe.
using ReadRanks = std::function<std::vector<RankReading>()>;

// Adds the families of all ranks; those that several ranks have of their own become one, with the label rank.
void AddRankFamilies(std::vector<RankReading> ranks, std::vector<prometheus::MetricFamily>* families);

// Adds the label to every sample, before its others.
void AddRankLabel(int rank, std::vector<prometheus::MetricFamily>* families);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_RANK_METRICS_H_
