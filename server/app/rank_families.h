// SPDX-License-Identifier: Apache-2.0
// Metrics of a worker as what the ranks send each other. Pure functions; thread-safe.
#ifndef LOSSD_SERVER_APP_RANK_FAMILIES_H_
#define LOSSD_SERVER_APP_RANK_FAMILIES_H_

#include <vector>

#include "lossd/ranks/v1/ranks.pb.h"
#include "server/metrics/worker_metrics.h"

namespace lossd::app {

ranks::v1::Metrics ToProto(const std::vector<metrics::PlainFamily>& families);
std::vector<metrics::PlainFamily> FromProto(const ranks::v1::Metrics& message);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_RANK_FAMILIES_H_
