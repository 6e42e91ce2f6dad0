// SPDX-License-Identifier: Apache-2.0
// Functions with which several processes start as one server. ReadLaunch reads from flags and environment
// variables which of the processes this process is, and where the leader is. CheckAgreement checks that a
// worker has the same settings as the leader. FirstEvent reports the first event of a kind to a watcher; the
// leader uses it for the first lost rank and the first rank that wants to leave.
//
// The functions are pure and thread-safe.
#ifndef LOSSD_SERVER_RANKS_START_H_
#define LOSSD_SERVER_RANKS_START_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/rank_link.h"
#include "lossd/ranks/v1/ranks.pb.h"

namespace lossd::ranks {

// ---- What the ranks have in common ----

// Names and values of the settings that must be the same on every rank: flags, version and so on.
using Settings = std::vector<std::pair<std::string, std::string>>;

// `flags` with two settings of the backend added: its name, and the kind of its device.
Settings SettingsOf(Settings flags, const kernels::BackendInfo& backend);

// The name of the setting that says how many devices each process has. Each device is a rank of its own.
inline constexpr char kDevices[] = "number of devices";

// INVALID_ARGUMENT unless a worker's rank is in [1, ranks).
absl::Status CheckRank(const v1::Hello& worker, int ranks);

// A hash of the definitions of the messages between ranks, as 16 hexadecimal digits. Two processes with the
// same value have the same definitions.
std::string ProtocolHash();

// Checks that a worker's settings equal the leader's settings, and that its GPU has as much memory as the
// leader's GPU. (A GPU product may be sold with several sizes, and a plan for one GPU must fit the others.)
// The memory sizes may differ by a hundredth, because drivers reserve different amounts. INVALID_ARGUMENT
// names rank (or process, if processes have several devices), setting and both values. `listener`: the reader
// of the message. A message for the worker has only the worker's value, because any program may claim to be a
// worker.
enum class Listener : uint8_t { kLog, kWorker };
absl::Status CheckAgreement(const Settings& leader, const kernels::RankTraits& traits,
                            const v1::Hello& worker, Listener listener = Listener::kLog);

// Makes the error DEADLINE_EXCEEDED. It names the `missing` ranks out of `ranks` ranks, the `timeout`, and
// `refusal`, the last refusal, unless that is OK.
absl::Status NotCome(absl::Span<const int> missing, int ranks, absl::Duration timeout,
                     const absl::Status& refusal = absl::OkStatus());

// ---- The number of this process, the number of processes, and the address of the leader ----
// They come from flags, or from the environment variables that launchers set.

// The most processes of a server, and the most ranks.
inline constexpr int kMostRanks = 1024;

// The place of this process in its server. The processes of a server are its ranks, as in MPI. If each
// process has several devices, the devices are the ranks; but the numbers in Launch, in flags and in
// launchers still count processes.
struct Launch {
  int rank = 0;                   // rank 0 is the leader, which serves clients
  int ranks = 1;                  // the number of ranks; > 1: there are workers
  std::optional<int> local_rank;  // the rank within this host, if the launcher reports it
  std::string leader;             // "host:port" where workers reach the leader; empty with one rank
};

struct LaunchFlags {
  // The launcher whose variables are read: "none", "torchrun", "slurm", "lws" (LeaderWorkerSet), "jobset"
  // (JobSet or an indexed Job), or "auto". "auto" finds the launcher that has set its variables, and prefers
  // torchrun to the launcher around it.
  std::string launcher = "none";
  // Values of flags. They must not contradict the variables.
  std::optional<int> rank;
  std::optional<int> ranks;
  std::string leader;  // "host:port" or "host"
  int port = 7072;     // the leader's port if neither `leader` nor a launcher gives one
};

using Environment = std::map<std::string, std::string>;

// INVALID_ARGUMENT, which names the flag or the variable and its value, if a value is missing, is not a
// number, is out of range or contradicts another value.
absl::StatusOr<Launch> ReadLaunch(const LaunchFlags& flags, const Environment& environment);

// The first host of a Slurm node list, "gpu[03-05,9],login" -> "gpu03"; empty if the text is not a node list.
std::string FirstHost(const std::string& node_list);

// Passes the first event of a kind to one watcher. If the watcher is set after the event, it is called
// at once. Thread-safe; the watcher is called without a lock.
template <typename T>
class FirstEvent {
 public:
  using Watcher = std::function<void(const T&)>;

  // Calls the watcher if this is the first event. Later events are dropped.
  void Report(const T& event) ABSL_LOCKS_EXCLUDED(mutex_) {
    Watcher watcher;
    {
      absl::MutexLock lock(&mutex_);
      if (event_.has_value()) return;
      event_ = event;
      watcher = std::exchange(watcher_, nullptr);
    }
    if (watcher) watcher(event);
  }

  void Watch(Watcher watcher) ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      if (!event_.has_value()) {
        watcher_ = std::move(watcher);
        return;
      }
    }
    watcher(*event_);  // needs no lock: event_ does not change after this
  }

  // Removes the watcher.
  void Unwatch() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    watcher_ = nullptr;
  }

 private:
  absl::Mutex mutex_;
  std::optional<T> event_;
  Watcher watcher_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_START_H_
