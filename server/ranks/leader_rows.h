// SPDX-License-Identifier: Apache-2.0
// How the leader's rows reach each worker: in memory that both have mapped (shared_rows.h), or in messages.
// Decided while the ranks come together, and logged once for each worker.
//
// For the thread that forms the group. What it makes of the group's options is thread-safe.
#ifndef LOSSD_SERVER_RANKS_LEADER_ROWS_H_
#define LOSSD_SERVER_RANKS_LEADER_ROWS_H_

#include <map>
#include <memory>
#include <string>

#include "kernels/group/group_backend.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "server/ranks/shared_rows.h"
#include "server/ranks/worker_stream.h"

namespace lossd::ranks {

class LeaderRows {
 public:
  using Workers = std::map<int, std::shared_ptr<WorkerStream>>;  // all, by rank

  // Asks all workers to prepare; with memory to share only if `share`. Once.
  void Prepare(const Workers& workers, const std::string& collectives, bool share);
  // A worker has prepared: its rows travel as it says.
  void OnPrepared(WorkerStream& worker, const v1::Prepared& prepared);
  // The group then has its staging memory from here, which outlives it, and computes nothing once a worker is
  // lost: that one may still write gradients of the chunks that it had to where others would lie by then.
  kernels::GroupOptions Complete(kernels::GroupOptions group, const Workers& workers);
  // SharedRows::Silence, after Prepare.
  absl::Duration Silence() const { return shared_ == nullptr ? absl::ZeroDuration() : shared_->Silence(); }

 private:
  std::unique_ptr<SharedRows> shared_;  // null: nothing is shared
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_LEADER_ROWS_H_
