// SPDX-License-Identifier: Apache-2.0
// The ranks of this process that compute for the leader: one for each device, each with threads of its own
// and with what watches its GPU.
//
// Thread-safe.
#ifndef LOSSD_SERVER_APP_LOCAL_RANKS_H_
#define LOSSD_SERVER_APP_LOCAL_RANKS_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/create_backend.h"
#include "server/app/device_watch.h"
#include "server/app/server.h"
#include "server/metrics/worker_metrics.h"
#include "server/ranks/worker.h"

namespace lossd::app {

// How ranks have ended: as ranks::Worker::Run says.
struct RanksEnd {
  absl::Status status;
  bool joined = false;  // before; then an error means that rank 0 or the device is lost
};

struct LocalRanksOptions {
  int first_rank = 1;         // of the first backend; the others follow
  int devices = 1;            // of each process
  std::string local_address;  // Leader::local_address, in the leader's process
  // Called once, when all are joined; and when the first has ended with an error, or else all have ended. On
  // threads of the ranks; must not call in here.
  std::function<void()> on_joined = [] {};
  std::function<void(const RanksEnd&)> on_end = [](const RanksEnd&) {};
};

// "rank 1", "ranks 2, 3".
std::string RankNames(int first, int count);

class LocalRanks {
 public:
  // Has the ranks join the leader.
  static absl::StatusOr<std::unique_ptr<LocalRanks>> Start(const ServerOptions& options,
                                                           std::vector<kernels::CreatedBackend> backends,
                                                           LocalRanksOptions local);
  // After the leader, if that is in this process. Waits for the ranks, which leave if they wait for the
  // leader. What belongs to a rank that does not end within 20 seconds stays for ever: its device hangs.
  ~LocalRanks();
  LocalRanks(const LocalRanks&) = delete;
  LocalRanks& operator=(const LocalRanks&) = delete;

  // Has the leader hear that the ranks are asked to stop. Does not wait.
  void Leave(const std::string& reason);
  // All are.
  bool joined() const;
  // A device is.
  bool device_lost() const;
  // The longest: Worker::Silence.
  absl::Duration Silence() const;

 private:
  struct Rank;

  LocalRanks(const ServerOptions& options, LocalRanksOptions local);
  absl::Status Add(kernels::CreatedBackend own);
  void Run(Rank* rank);
  void OnJoined();
  void OnEnd(const RanksEnd& end);

  const ServerOptions& options_;
  const LocalRanksOptions local_;
  std::vector<std::unique_ptr<Rank>> ranks_;  // const once the first thread runs
  absl::Mutex mutex_;
  size_t joined_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
  bool end_told_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_LOCAL_RANKS_H_
