// SPDX-License-Identifier: Apache-2.0
// The ranks of one server, processes or devices, as metrics: who is there, and what each holds. Stateless;
// thread-safe.
#ifndef LOSSD_SERVER_METRICS_RANK_METRICS_H_
#define LOSSD_SERVER_METRICS_RANK_METRICS_H_

#include <prometheus/metric_family.h>

#include <functional>
#include <vector>

#include "kernels/rank_state.h"

namespace lossd::metrics {

struct RankReading {
  kernels::RankState state;
  std::vector<prometheus::MetricFamily> metrics;  // of the rank's own, without the label rank
};

// Of all ranks, by rank; thread-safe.
using ReadRanks = std::function<std::vector<RankReading>()>;

// Adds the families of all ranks; those that several ranks have of their own become one, with the label rank.
void AddRankFamilies(std::vector<RankReading> ranks, std::vector<prometheus::MetricFamily>* families);

// What a rank's time went into, without the label rank.
std::vector<prometheus::MetricFamily> RankTimeFamilies(const kernels::RankTimes& times);

// Adds the label to every sample, before its others.
void AddRankLabel(int rank, std::vector<prometheus::MetricFamily>* families);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_RANK_METRICS_H_
