// SPDX-License-Identifier: Apache-2.0
// Metrics of this process under the names that Prometheus client libraries share, read from /proc/self.
//
// Thread-safe.
#ifndef LOSSD_SERVER_METRICS_PROCESS_H_
#define LOSSD_SERVER_METRICS_PROCESS_H_

#include <prometheus/metric_family.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace lossd::metrics {

struct ProcessStats {
  double cpu_seconds = 0.0;         // user and system
  double start_time_seconds = 0.0;  // since the Unix epoch
  int64_t virtual_bytes = 0;
  int64_t resident_bytes = 0;
  int64_t open_fds = 0;
};

// Nullopt if /proc cannot be read.
std::optional<ProcessStats> ReadProcessStats();

// Empty if /proc cannot be read.
std::vector<prometheus::MetricFamily> CollectProcess();

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_PROCESS_H_
