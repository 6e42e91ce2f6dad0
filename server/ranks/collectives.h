// SPDX-License-Identifier: Apache-2.0
// What carries the sums and exchanges of all ranks, which the leader chooses when all have come.
//
// Stateless; thread-safe.
#ifndef LOSSD_SERVER_RANKS_COLLECTIVES_H_
#define LOSSD_SERVER_RANKS_COLLECTIVES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/rank_link.h"
#include "lossd/ranks/v1/ranks.pb.h"

namespace lossd::ranks {

// INVALID_ARGUMENT naming rank and GPU if two ranks have the same GPU; `why`: what needs one for each. CPUs
// have no names, and are not compared.
absl::Status CheckGpus(const std::string& why, const std::string& leader_gpu,
                       absl::Span<const v1::Hello> workers);

struct CollectivesChoice {
  std::string collectives;  // kernels/rank_link.h
  std::string reason;       // why not the best that the leader has; empty if it is that
};

// The first of what the leader offers that all workers offer as well and that can be: NCCL connects only
// ranks with a GPU each and the same version of it; `nccl_version` is the leader's. INVALID_ARGUMENT naming
// what is in the way if there is none.
absl::StatusOr<CollectivesChoice> ChooseCollectives(absl::Span<const std::string> offered,
                                                    const std::string& leader_gpu,
                                                    const std::string& nccl_version,
                                                    absl::Span<const v1::Hello> workers);

// The same for the leader's own link, which uses it from then on. Logs the choice. Processes that have
// several `devices` each may have no GPU in common, whatever the collectives.
absl::StatusOr<std::string> UseCollectives(kernels::RankLink* link, const std::string& leader_gpu,
                                           int devices, absl::Span<const v1::Hello> workers);

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_COLLECTIVES_H_
