// SPDX-License-Identifier: Apache-2.0
// The processes of one server, as metrics: who is there, and what each holds. Stateless; thread-safe.
#ifndef LOSSD_SERVER_METRICS_RANK_METRICS_H_
#define LOSSD_SERVER_METRICS_RANK_METRICS_H_

#include <prometheus/metric_family.h>

#include <functional>
#include <string>
#include <vector>

#include "kernels/memory.h"

namespace lossd::metrics {

struct RankReading {
  int rank = 0;
  std::string host;
  std::string device;
  bool lost = false;
  kernels::MemoryStats memory;  // as the rank last said
};

// Of all ranks, by rank; thread-safe.
using ReadRanks = std::function<std::vector<RankReading>()>;

void AddRankFamilies(const std::vector<RankReading>& ranks, std::vector<prometheus::MetricFamily>* families);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_RANK_METRICS_H_
