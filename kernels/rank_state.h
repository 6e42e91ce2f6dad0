// SPDX-License-Identifier: Apache-2.0
// What is known of one rank, a device of a server that has several, in one process or more. Values;
// thread-compatible.
#ifndef LOSSD_KERNELS_RANK_STATE_H_
#define LOSSD_KERNELS_RANK_STATE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "kernels/exchange_times.h"
#include "kernels/memory.h"

namespace lossd::kernels {

// What has gone from rank 0 to a worker in messages and come back, since the ranks came together.
struct RankTraffic {
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
};

struct RankState {
  int rank = 0;
  std::string host;
  std::string device;
  bool lost = false;
  MemoryStats memory;                  // as the rank last said
  int64_t chunks = 0;                  // or parts of them, computed without an error
  int64_t rows = 0;                    // of these, those without a target included
  std::optional<RankTraffic> traffic;  // of a worker
};

// What a rank's time went into, since it started.
struct RankTimes {
  absl::Duration busy;      // there was a chunk to compute or a request to carry out
  ExchangeTimes exchanges;  // of that, in exchanges with other ranks
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_RANK_STATE_H_
