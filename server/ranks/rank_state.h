// SPDX-License-Identifier: Apache-2.0
// What the leader knows of a rank. Values; thread-compatible.
#ifndef LOSSD_SERVER_RANKS_RANK_STATE_H_
#define LOSSD_SERVER_RANKS_RANK_STATE_H_

#include <cstdint>
#include <string>

#include "kernels/memory.h"
#include "lossd/ranks/v1/ranks.pb.h"

namespace lossd::ranks {

// What has gone to a worker and come from it, since the ranks came together.
struct RankTraffic {
  int64_t chunks = 0;  // computed without an error
  int64_t rows = 0;    // of these, those without a target included
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
};

struct RankState {
  int rank = 0;
  std::string host;
  std::string device;
  bool lost = false;
  kernels::MemoryStats memory;  // as the rank last said
  RankTraffic traffic;          // of a worker
  v1::Metrics metrics;          // of a worker, as it last said
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_RANK_STATE_H_
