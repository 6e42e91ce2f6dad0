// SPDX-License-Identifier: Apache-2.0
// How several processes start as one server. ReadLaunch says which of the processes this one is and where the
// leader is; CheckAgreement says whether a worker has what all ranks must have in common. FirstNews passes on
// the first loss, or the first wish to leave, of any rank.
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

// Names and values of what every rank has to have the same: flags, version and so on.
using Settings = std::vector<std::pair<std::string, std::string>>;

// `flags`, and what the backend adds to the settings of its rank: which it is, and the kind of its device.
Settings SettingsOf(Settings flags, const kernels::BackendInfo& backend);

// The name of the setting that says how many devices each process has, which are ranks of their own.
inline constexpr char kDevices[] = "number of devices";

// INVALID_ARGUMENT unless a worker's rank is in [1, ranks).
absl::Status CheckRank(const v1::Hello& worker, int ranks);

// A hash of the messages between ranks: two processes with the same value read each other's messages alike.
// 16 hexadecimal digits.
std::string ProtocolHash();

// INVALID_ARGUMENT naming rank (or process, where processes have several devices), setting and both values if
// a worker's settings are not the leader's, or the memory of its GPU is not that of the leader's: a product
// may be sold with several sizes, and what is planned for one has to fit the other. Memories may differ by a
// hundredth, which drivers keep for themselves. `listener`: whoever says that it is a worker hears its own
// value alone.
enum class Listener : uint8_t { kLog, kWorker };
absl::Status CheckAgreement(const Settings& leader, const kernels::RankTraits& traits,
                            const v1::Hello& worker, Listener listener = Listener::kLog);

// DEADLINE_EXCEEDED naming the ranks that are `missing` of `ranks` after `timeout`, and the last refusal
// unless it is OK.
absl::Status NotCome(absl::Span<const int> missing, int ranks, absl::Duration timeout,
                     const absl::Status& refusal = absl::OkStatus());

// ---- Which of how many processes this one is, and where the leader is reached ----
// Flags say so, or the environment variables that launchers set.

// A server has at most so many processes, and so many ranks.
inline constexpr int kMostRanks = 1024;

// The processes that together are one server are its ranks, as MPI calls them. Where each has several
// devices, those are the ranks, and what launchers and flags number are the processes.
struct Launch {
  int rank = 0;                   // 0 is the leader, which serves clients
  int ranks = 1;                  // > 1: there are workers
  std::optional<int> local_rank;  // among the ranks of this host, if the launcher says so
  std::string leader;             // "host:port" where workers reach the leader; empty with one rank
};

struct LaunchFlags {
  // Whose variables are read: "none", "torchrun", "slurm", "lws" (LeaderWorkerSet), "jobset" (JobSet or an
  // indexed Job), or "auto": of whichever has set them, of torchrun before the others.
  std::string launcher = "none";
  // What they say stands beside the variables, and must not contradict them.
  std::optional<int> rank;
  std::optional<int> ranks;
  std::string leader;  // "host:port" or "host"
  int port = 7072;     // of the leader where neither a flag nor a launcher gives one
};

using Environment = std::map<std::string, std::string>;

// INVALID_ARGUMENT naming the flag or the variable and its value if one is missing, is not a number, is out
// of range or contradicts another.
absl::StatusOr<Launch> ReadLaunch(const LaunchFlags& flags, const Environment& environment);

// The first host of a Slurm node list, "gpu[03-05,9],login" -> "gpu03"; empty if it is not one.
std::string FirstHost(const std::string& node_list);

// The first news of its kind, for one watcher. A watcher that begins to watch after the news hears it at
// once. Thread-safe; the watcher is called without a lock.
template <typename T>
class FirstNews {
 public:
  using Watcher = std::function<void(const T&)>;

  // What comes after the first is left out.
  void Tell(const T& news) ABSL_LOCKS_EXCLUDED(mutex_) {
    Watcher watcher;
    {
      absl::MutexLock lock(&mutex_);
      if (news_.has_value()) return;
      news_ = news;
      watcher = std::exchange(watcher_, nullptr);
    }
    if (watcher) watcher(news);
  }

  void Watch(Watcher watcher) ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      if (!news_.has_value()) {
        watcher_ = std::move(watcher);
        return;
      }
    }
    watcher(*news_);  // which changes no more
  }

  // Nobody watches any more.
  void Unwatch() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    watcher_ = nullptr;
  }

 private:
  absl::Mutex mutex_;
  std::optional<T> news_;
  Watcher watcher_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_START_H_
