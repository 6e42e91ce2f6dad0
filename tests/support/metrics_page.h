// SPDX-License-Identifier: Apache-2.0
// What tests read on a page of metrics in Prometheus' text format. Pure functions; thread-safe.
#ifndef LOSSD_TESTS_SUPPORT_METRICS_PAGE_H_
#define LOSSD_TESTS_SUPPORT_METRICS_PAGE_H_

#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"

namespace lossd::test {

// Of a series of the page, "name{label=\"value\"}"; -1 if it is not there.
inline double ValueOf(const std::string& metrics, const std::string& series) {
  const size_t found = metrics.find(absl::StrCat("\n", series, " "));
  return found == std::string::npos ? -1 : std::atof(metrics.c_str() + found + series.size() + 2);
}

// The series of a rank's exchanges.
inline std::string CollectiveSeconds(int rank, const char* operation) {
  return absl::StrCat("lossd_rank_collective_seconds_total{rank=\"", rank, "\",operation=\"", operation,
                      "\"}");
}

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_METRICS_PAGE_H_
