// SPDX-License-Identifier: Apache-2.0
// Short functions that build metric families: in a registry, or by hand for values that are pulled when
// metrics are collected. The file also has two small groups of such families: of the process
// (CollectProcess), and of the memory that clients share with the server (AddSharedMemoryFamilies).
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_METRICS_FAMILIES_H_
#define LOSSD_SERVER_METRICS_FAMILIES_H_

#include <prometheus/client_metric.h>
#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lossd::metrics {

using Labels = std::vector<std::pair<std::string, std::string>>;

inline prometheus::MetricFamily MakeFamily(std::string name, std::string help, prometheus::MetricType type) {
  prometheus::MetricFamily family;
  family.name = std::move(name);
  family.help = std::move(help);
  family.type = type;
  return family;
}

// Adds one sample; the family's type says whether it is a counter or a gauge.
inline void AddSample(prometheus::MetricFamily* family, const Labels& labels, double value) {
  prometheus::ClientMetric metric;
  for (const auto& [name, text] : labels) metric.label.push_back({name, text});
  if (family->type == prometheus::MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  family->metric.push_back(std::move(metric));
}

inline prometheus::MetricFamily Single(std::string name, std::string help, prometheus::MetricType type,
                                       double value) {
  prometheus::MetricFamily family = MakeFamily(std::move(name), std::move(help), type);
  AddSample(&family, {}, value);
  return family;
}

// Adds families of which some may be there already, from families[begin] on; those get the samples.
inline void AddFamilies(std::vector<prometheus::MetricFamily> more, size_t begin,
                        std::vector<prometheus::MetricFamily>* families) {
  for (prometheus::MetricFamily& each : more) {
    const auto same = std::find_if(families->begin() + static_cast<std::ptrdiff_t>(begin), families->end(),
                                   [&](const auto& family) { return family.name == each.name; });
    if (same == families->end()) {
      families->push_back(std::move(each));
    } else {
      std::move(each.metric.begin(), each.metric.end(), std::back_inserter(same->metric));
    }
  }
}

inline prometheus::MetricFamily Gauge(std::string name, std::string help, double value) {
  return Single(std::move(name), std::move(help), prometheus::MetricType::Gauge, value);
}

inline prometheus::Family<prometheus::Counter>& CounterFamily(prometheus::Registry& registry,
                                                              const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}

inline prometheus::Family<prometheus::Histogram>& HistogramFamily(prometheus::Registry& registry,
                                                                  const char* name, const char* help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
}

// What /proc/self says of this process.
struct ProcessStats {
  double cpu_seconds = 0.0;         // user and system
  double start_time_seconds = 0.0;  // since the Unix epoch
  int64_t virtual_bytes = 0;
  int64_t resident_bytes = 0;
  int64_t open_fds = 0;
};

// Nullopt if /proc cannot be read.
std::optional<ProcessStats> ReadProcessStats();

// Metrics of this process under the names that Prometheus client libraries share. Empty if /proc cannot be
// read.
std::vector<prometheus::MetricFamily> CollectProcess();

// The memory of one kind that clients of the host share with the server.
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

#endif  // LOSSD_SERVER_METRICS_FAMILIES_H_
