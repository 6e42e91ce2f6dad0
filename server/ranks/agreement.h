// SPDX-License-Identifier: Apache-2.0
// What the ranks of one server have to have in common. Pure functions; thread-safe.
#ifndef LOSSD_SERVER_RANKS_AGREEMENT_H_
#define LOSSD_SERVER_RANKS_AGREEMENT_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "lossd/ranks/v1/ranks.pb.h"

namespace lossd::ranks {

// Names and values of what every rank has to have the same: flags, version and so on.
using Settings = std::vector<std::pair<std::string, std::string>>;

// What the backend adds to the settings of its rank: which it is, and the kind of its device.
Settings SettingsOf(const kernels::BackendInfo& backend);

// INVALID_ARGUMENT naming rank, setting and both values if a worker's settings are not the leader's.
absl::Status CheckAgreement(const Settings& leader, const v1::Hello& worker);

// DEADLINE_EXCEEDED naming the ranks that are `missing` of `ranks` after `timeout`.
absl::Status NotCome(absl::Span<const int> missing, int ranks, absl::Duration timeout);

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_AGREEMENT_H_
