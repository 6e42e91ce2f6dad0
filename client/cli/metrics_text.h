// SPDX-License-Identifier: Apache-2.0
// Reads Prometheus' text format, as far as servers print it, and estimates quantiles from histograms.
//
// Pure functions, thread-safe.
#ifndef LOSSD_CLIENT_CLI_METRICS_TEXT_H_
#define LOSSD_CLIENT_CLI_METRICS_TEXT_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace lossd::cli {

struct MetricSample {
  std::string name;
  std::map<std::string, std::string> labels;
  double value = 0;
};

// Comments and lines that are no samples are left out.
std::vector<MetricSample> ParseMetrics(absl::string_view text);

// Cumulative counts by upper bound, as in `<name>_bucket` samples; those of several label sets are summed.
using Buckets = std::map<double, double>;
Buckets BucketsOf(const std::vector<MetricSample>& samples, absl::string_view name);

// What was counted between two scrapes.
Buckets Difference(const Buckets& later, const Buckets& earlier);

// Linear within a bucket, as Prometheus' histogram_quantile; in the last bucket its lower bound. nullopt if
// nothing was counted.
std::optional<double> Quantile(const Buckets& buckets, double q);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_METRICS_TEXT_H_
