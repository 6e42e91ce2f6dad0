// SPDX-License-Identifier: Apache-2.0
// What the leader knows of a rank. Values; thread-compatible.
#ifndef LOSSD_SERVER_RANKS_RANK_REPORT_H_
#define LOSSD_SERVER_RANKS_RANK_REPORT_H_

#include "kernels/rank_state.h"
#include "lossd/ranks/v1/ranks.pb.h"

namespace lossd::ranks {

struct RankReport {
  kernels::RankState state;
  v1::Metrics metrics;  // of a worker, as it last said
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_RANK_REPORT_H_
