// SPDX-License-Identifier: Apache-2.0
// The replicas of one head on all ranks, as the leader drives them: every rank is told to do its part, and
// the leader does its own beside them. And the parts of a head that is split by vocabulary.
#ifndef LOSSD_SERVER_RANKS_RANK_REPLICAS_H_
#define LOSSD_SERVER_RANKS_RANK_REPLICAS_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/rank_link.h"

namespace lossd::ranks {

// `heads`: the leader's own, of the backend of `link`, then those of the workers in the order of their ranks
// (RemoteHead). An error of one rank is that of all: whatever a rank could not do may be done at others. A
// worker that does not answer within `timeout`, and a little more for it to notice that itself, is given up.
absl::StatusOr<std::unique_ptr<kernels::Replicas>> MakeRankReplicas(
    kernels::RankLink* link, absl::Duration timeout, absl::Span<kernels::HeadKernels* const> heads);

// Joins the leader's part of a head that is split by vocabulary to those of the workers, who have joined
// theirs. `heads` as above. INVALID_ARGUMENT naming rank and values if chunks have to be of the same size on
// all ranks, and would not be.
absl::Status JoinRankClasses(kernels::RankLink* link, bool same_chunks,
                             absl::Span<kernels::HeadKernels* const> heads);

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_RANK_REPLICAS_H_
