// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/shared_memory_metrics.h"

#include <utility>

#include "server/metrics/families.h"

namespace lossd::metrics {

void AddSharedMemoryFamilies(const std::vector<SharedMemoryUse>& uses,
                             std::vector<prometheus::MetricFamily>* families) {
  const auto add = [&](const char* name, const char* help, int64_t SharedMemoryUse::*value) {
    prometheus::MetricFamily family = MakeFamily(name, help, prometheus::MetricType::Gauge);
    for (const SharedMemoryUse& use : uses)
      AddSample(&family, {{"device", use.device}}, static_cast<double>(use.*value));
    families->push_back(std::move(family));
  };
  add("lossd_region_bytes", "Memory that clients of the host share with the server, by device.",
      &SharedMemoryUse::used_bytes);
  add("lossd_region_limit_bytes", "What that may be, by device.", &SharedMemoryUse::limit_bytes);
}

}  // namespace lossd::metrics
