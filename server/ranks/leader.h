// SPDX-License-Identifier: Apache-2.0
// Leader is rank 0 of a server of several processes. It waits until all workers have connected and their
// settings agree (start.h). Then it joins their backends and its own backend into one backend
// (remote_backend.h). Afterwards it reports when a rank is lost or wants to leave.
//
// Thread-safe, except for Form.
#ifndef LOSSD_SERVER_RANKS_LEADER_H_
#define LOSSD_SERVER_RANKS_LEADER_H_

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/sync_stream.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/create_backend.h"
#include "kernels/group/group_backend.h"
#include "kernels/rank_link.h"
#include "lossd/ranks/v1/ranks.grpc.pb.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "server/access/connection_acceptor.h"
#include "server/head/file_sites.h"
#include "server/ranks/channel.h"
#include "server/ranks/remote_backend.h"
#include "server/ranks/start.h"
#include "server/ranks/worker_stream.h"

namespace lossd::ranks {

struct LeaderOptions {
  int ranks = 2;  // the number of ranks, of all processes together
  // The devices of each process. Each device is a rank. The number is also in `settings` (kDevices).
  int devices = 1;
  // The host address at which the leader listens for workers.
  std::string host;
  int port = 0;  // 0: any free port
  // The credentials outlive the leader.
  std::shared_ptr<grpc::ServerCredentials> credentials;
  // The secret that a worker must send. Empty: each program that reaches the address may be a rank. If the
  // address is a loopback address and the kernel reports the user of a connection, only programs of this
  // process's user and of root may be ranks.
  std::string secret;
  ChannelLimits limits;
  // The settings of this rank, without the settings of the backend, which Form adds.
  Settings settings;
  kernels::GroupOptions group;
  // Whether workers of this host get rows in shared memory. Other workers get rows in messages.
  bool share_rows = true;
  // How long the leader waits for all ranks to connect.
  absl::Duration timeout = absl::Minutes(5);
  // How long a rank may take for its part of a sum.
  absl::Duration collective_timeout = absl::Minutes(1);
  // Returns whether to give up waiting. Form calls it several times a second.
  std::function<bool()> stop = [] { return false; };
};

// A worker that was asked to stop.
struct Leaving {
  int rank = 1;
  std::string reason;
};

class GrpcTransport;
class LeaderRows;

class Leader final : private v1::RankService::Service {
 public:
  // Creates a leader that listens for workers. UNAVAILABLE if it cannot listen.
  static absl::StatusOr<std::unique_ptr<Leader>> Start(const LeaderOptions& options);
  // Tells the workers to end. Destroy the backend that Form has made before the leader.
  ~Leader() override;

  // The port that was chosen.
  int port() const { return port_; }

  // The address at which workers of this process reach the leader, without TLS (WorkerOptions::leader). Empty
  // if each process has one device.
  const std::string& local_address() const { return local_address_; }

  // Waits for all workers, and returns one backend of all ranks; `own` is the leader's part of it. The leader
  // outlives the result. Once all workers have connected, no other worker can.
  //
  // The leader refuses a worker whose settings do not agree, and continues to wait. It sends the worker the
  // name and the value of the wrong setting; the log also has the right value.
  //
  // Errors: DEADLINE_EXCEEDED, which names the missing ranks and the reason why the last refused worker was
  // refused; CANCELLED if `stop` returns true; UNAVAILABLE if the ranks cannot be connected with each other.
  // After an error the leader tells the workers, which then end.
  absl::StatusOr<std::unique_ptr<kernels::Backend>> Form(kernels::CreatedBackend own);

  // The library that carries the sums and exchanges of the ranks (kernels/rank_link.h). Valid after Form.
  const std::string& collectives() const { return collectives_; }

  // How the workers save and load their parts of heads. Valid after Form; lives as long as the leader.
  head::FileSites* file_sites() { return &files_; }

  // `on_lost` is called once, when the first rank is lost, on a thread of the leader. If a rank is lost
  // already, it is called before this returns.
  void WatchLoss(std::function<void(const absl::Status&)> on_lost) { loss_.Watch(std::move(on_lost)); }
  // `on_leaving` is called once, when the first worker has been asked to stop, on the same threads as
  // `on_lost`.
  void WatchLeaving(std::function<void(const Leaving&)> on_leaving) { leaving_.Watch(std::move(on_leaving)); }

  // The reports of all ranks, in the order of ranks.
  std::vector<RankReport> Reports() const;
  // How long ago the threads that serve the workers' sockets last looked for work: the maximum over these
  // threads.
  absl::Duration Silence() const;
  // The times of rank 0. Workers report their own times in their metrics. Valid after Form, while its backend
  // exists.
  kernels::RankTimes times() const { return {own_work().busy, link_->Times()}; }

 private:
  using RankStream = grpc::ServerReaderWriter<v1::ToWorker, v1::FromWorker>;
  using Workers = std::map<int, std::shared_ptr<WorkerStream>>;

  explicit Leader(const LeaderOptions& options);

  absl::Status Listen();
  kernels::MemberWork own_work() const { return group_->MemberStates().front().work; }

  // ---- Called on threads of gRPC ----
  grpc::Status Join(grpc::ServerContext* context, RankStream* stream) override;
  absl::StatusOr<v1::Hello> ReadHello(grpc::ServerContext* context, GrpcTransport* transport);
  absl::Status Enter(const std::shared_ptr<WorkerStream>& worker);
  void Leave(const std::shared_ptr<WorkerStream>& worker, const absl::Status& status);
  // Runs on the driving thread of the leader's backend.
  absl::Status OnChunkFailure(const absl::Status& failure);

  // ---- Called on the thread that calls Form ----
  absl::Status AwaitAll();
  absl::Status Late() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CancelSilent() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Workers AllWorkers() const;
  absl::Status Connect();
  absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeGroup(std::unique_ptr<kernels::Backend> own);
  void EndForming(const absl::Status& status);

  const LeaderOptions options_;
  int port_ = 0;
  std::string local_address_;
  Settings settings_;              // written before workers are admitted, then const
  std::string gpu_, collectives_;  // written by Form
  kernels::RankTraits traits_;
  kernels::BackendInfo own_info_;
  const kernels::Backend* own_ = nullptr;
  const kernels::Backend* group_ = nullptr;  // the backend that Form has made
  std::unique_ptr<kernels::RankLink> link_;
  const std::unique_ptr<LeaderRows> rows_;
  RankFiles files_;
  mutable absl::Mutex mutex_;
  bool forming_ ABSL_GUARDED_BY(mutex_) = false;  // workers may join
  bool formed_ ABSL_GUARDED_BY(mutex_) = false;   // all have joined: a worker that leaves is lost
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);  // the last refusal
  Workers workers_ ABSL_GUARDED_BY(mutex_);
  // Calls that have not sent a Hello.
  std::map<grpc::ServerContext*, absl::Time> silent_ ABSL_GUARDED_BY(mutex_);
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  FirstEvent<absl::Status> loss_;
  FirstEvent<Leaving> leaving_;

  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<access::ConnectionAcceptor> acceptor_;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_LEADER_H_
