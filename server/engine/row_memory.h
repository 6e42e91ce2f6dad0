// SPDX-License-Identifier: Apache-2.0
// Host memory for what the server remembers of rows: the targets and weights of open streams, and the ledgers
// of open steps. A budget that is counted, not an allocation: its users allocate row by row.
//
// Streams are paid for by their peer, ledgers by their head, and each has its share (fair_share.h). A user of
// the memory has an Account with it.
//
// Thread-compatible: guarded by the engine's lock.
#ifndef LOSSD_SERVER_ENGINE_ROW_MEMORY_H_
#define LOSSD_SERVER_ENGINE_ROW_MEMORY_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "server/engine/fair_share.h"

namespace lossd::engine {

class RowMemory {
 public:
  // As FairShare.
  RowMemory(int64_t bytes, double share) : shares_(bytes, share) {}

  class Account {
   public:
    // One that has no limit and counts nothing.
    Account() = default;
    // `holder` is who pays, e.g. "head lm_head"; "" has no share. `memory` outlives the account.
    Account(RowMemory* memory, std::string holder) : memory_(memory), holder_(std::move(holder)) {}

    // RESOURCE_EXHAUSTED naming the limit and its flag; then nothing is taken.
    absl::Status Take(int64_t bytes);
    void Give(int64_t bytes);

   private:
    RowMemory* memory_ = nullptr;
    std::string holder_;
  };

  int64_t used() const { return shares_.used(); }
  int64_t capacity() const { return shares_.capacity(); }

 private:
  FairShare shares_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ROW_MEMORY_H_
