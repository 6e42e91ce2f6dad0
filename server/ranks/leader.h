// SPDX-License-Identifier: Apache-2.0
// The leader of several ranks. It waits until all workers are there and agree (start.h), and makes their
// backends and its own into one backend (remote_backend.h). Afterwards it tells when a rank is lost or wants
// to leave.
//
// Thread-safe, but for Form.
#ifndef LOSSD_SERVER_RANKS_LEADER_H_
#define LOSSD_SERVER_RANKS_LEADER_H_

#include <grpcpp/security/server_credentials.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/create_backend.h"
#include "kernels/group/group_backend.h"
#include "server/head/file_sites.h"
#include "server/ranks/channel.h"
#include "server/ranks/start.h"
#include "server/ranks/worker_stream.h"

namespace lossd::ranks {

struct LeaderOptions {
  int ranks = 2;     // of all processes
  int devices = 1;   // of each process, and so many of the ranks. Also a setting (kDevices)
  std::string host;  // of the workers' service
  int port = 0;      // 0: any free one
  std::shared_ptr<grpc::ServerCredentials> credentials;  // outlive the leader
  // Empty: whoever reaches the address may be a rank; on the loopback only programs of this process's user
  // and of root, where the kernel says whose they are.
  std::string secret;
  ChannelLimits limits;
  Settings settings;  // but those of the backend
  kernels::GroupOptions group;
  bool share_rows = true;  // with workers of this host; else, and with the others, rows travel in messages
  absl::Duration timeout = absl::Minutes(5);             // for all ranks to come
  absl::Duration collective_timeout = absl::Minutes(1);  // for a rank to do its part of a sum
  // Whether to give up waiting; asked every now and then.
  std::function<bool()> stop = [] { return false; };
};

// A worker that was asked to stop.
struct Leaving {
  int rank = 1;
  std::string reason;
};

class Leader {
 public:
  // Listens. UNAVAILABLE if it cannot.
  static absl::StatusOr<std::unique_ptr<Leader>> Start(const LeaderOptions& options);
  // Has the workers end. After the backend that Form has made.
  virtual ~Leader() = default;

  // The port that was chosen.
  virtual int port() const = 0;

  // Where workers of this process reach it (WorkerOptions::leader), without TLS; empty if a process has one
  // device.
  virtual const std::string& local_address() const = 0;

  // The backend of all ranks, of which `own` is the leader's. The leader outlives it. A rank that does not
  // agree is refused, hears which of its values is wrong, and costs the others nothing; the log has the right
  // value, too. DEADLINE_EXCEEDED naming those that have not come, and why the last one was refused;
  // CANCELLED; UNAVAILABLE if they cannot be connected. The workers are told, and end. Nobody can connect any
  // more once all have come.
  virtual absl::StatusOr<std::unique_ptr<kernels::Backend>> Form(kernels::CreatedBackend own) = 0;

  // What carries the sums and exchanges of the ranks (kernels/rank_link.h), after Form.
  virtual const std::string& collectives() const = 0;

  // How its workers save and load their parts of heads, after Form. Lives as long as the leader.
  virtual head::FileSites* file_sites() = 0;

  // `on_lost` is called once, when the first rank is lost, on a thread of the leader's, or here if one is.
  virtual void WatchLoss(std::function<void(const absl::Status&)> on_lost) = 0;
  // `on_leaving` is called once, when the first worker has been asked to stop; on a thread as for WatchLoss.
  virtual void WatchLeaving(std::function<void(const Leaving&)> on_leaving) = 0;

  // What is known of each rank, by rank.
  virtual std::vector<RankReport> Reports() const = 0;
  // How long ago the threads that serve ranks' sockets last looked for something to do: the longest.
  virtual absl::Duration Silence() const = 0;
  // The times of rank 0; workers report theirs in their metrics. After Form, while its backend is there.
  virtual kernels::RankTimes times() const = 0;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_LEADER_H_
