// SPDX-License-Identifier: Apache-2.0
// Metrics of the memory that clients of the host share with the server. Pure functions; thread-safe.
#ifndef LOSSD_SERVER_METRICS_SHARED_MEMORY_METRICS_H_
#define LOSSD_SERVER_METRICS_SHARED_MEMORY_METRICS_H_

#include <prometheus/metric_family.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lossd::metrics {

struct SharedMemoryUse {
  std::string device;  // "GPU-...", or "host"
  int64_t used_bytes = 0;
  int64_t limit_bytes = 0;
};

// Called when metrics are collected.
using ReadSharedMemory = std::function<std::vector<SharedMemoryUse>()>;

void AddSharedMemoryFamilies(const std::vector<SharedMemoryUse>& uses,
                             std::vector<prometheus::MetricFamily>* families);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_SHARED_MEMORY_METRICS_H_
