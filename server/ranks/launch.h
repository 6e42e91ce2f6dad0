// SPDX-License-Identifier: Apache-2.0
// Which of how many processes this one is, and where the first of them is reached: from flags, and from the
// environment that launchers set. A pure function; thread-safe.
#ifndef LOSSD_SERVER_RANKS_LAUNCH_H_
#define LOSSD_SERVER_RANKS_LAUNCH_H_

#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace lossd::ranks {

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

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_LAUNCH_H_
