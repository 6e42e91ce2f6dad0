// SPDX-License-Identifier: Apache-2.0
// The leader of several ranks. It waits until all workers are there and agree (start.h), and makes their
// backends and its own into one backend (remote_backend.h). Afterwards it tells when a rank is lost or wants
// to leave.
//
// Thread-safe, but for Form.
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

class GrpcTransport;
class LeaderRows;

class Leader final : private v1::RankService::Service {
 public:
  // Listens. UNAVAILABLE if it cannot.
  static absl::StatusOr<std::unique_ptr<Leader>> Start(const LeaderOptions& options);
  // Has the workers end. After the backend that Form has made.
  ~Leader() override;

  // The port that was chosen.
  int port() const { return port_; }

  // Where workers of this process reach it (WorkerOptions::leader), without TLS; empty if a process has one
  // device.
  const std::string& local_address() const { return local_address_; }

  // The backend of all ranks, of which `own` is the leader's. The leader outlives it. A rank that does not
  // agree is refused, hears which of its values is wrong, and costs the others nothing; the log has the right
  // value, too. DEADLINE_EXCEEDED naming those that have not come, and why the last one was refused;
  // CANCELLED; UNAVAILABLE if they cannot be connected. The workers are told, and end. Nobody can connect any
  // more once all have come.
  absl::StatusOr<std::unique_ptr<kernels::Backend>> Form(kernels::CreatedBackend own);

  // What carries the sums and exchanges of the ranks (kernels/rank_link.h), after Form.
  const std::string& collectives() const { return collectives_; }

  // How its workers save and load their parts of heads, after Form. Lives as long as the leader.
  head::FileSites* file_sites() { return &files_; }

  // `on_lost` is called once, when the first rank is lost, on a thread of the leader's, or here if one is.
  void WatchLoss(std::function<void(const absl::Status&)> on_lost) { loss_.Watch(std::move(on_lost)); }
  // `on_leaving` is called when a worker has been asked to stop, likewise.
  void WatchLeaving(std::function<void(const Leaving&)> on_leaving) { leaving_.Watch(std::move(on_leaving)); }

  // Of all ranks, by rank.
  std::vector<RankReport> Reports() const;
  // How long ago the threads that serve ranks' sockets last looked for something to do: the longest.
  absl::Duration Silence() const;
  // Of rank 0; workers say theirs in their metrics. After Form, while its backend is there.
  kernels::RankTimes times() const { return {own_work().busy, link_->Times()}; }

 private:
  using RankStream = grpc::ServerReaderWriter<v1::ToWorker, v1::FromWorker>;
  using Workers = std::map<int, std::shared_ptr<WorkerStream>>;

  explicit Leader(const LeaderOptions& options);

  absl::Status Listen();
  kernels::MemberWork own_work() const { return group_->MemberStates().front().work; }

  // ---- On threads of gRPC ----
  grpc::Status Join(grpc::ServerContext* context, RankStream* stream) override;
  absl::StatusOr<v1::Hello> ReadHello(grpc::ServerContext* context, GrpcTransport* transport);
  absl::Status Enter(const std::shared_ptr<WorkerStream>& worker);
  void Leave(const std::shared_ptr<WorkerStream>& worker, const absl::Status& status);
  absl::Status OnChunkFailure(const absl::Status& failure);  // on the driving thread of the leader's backend

  // ---- On the thread that forms ----
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
  Settings settings_;              // written before the service starts to admit; then const
  std::string gpu_, collectives_;  // written by Form
  kernels::RankTraits traits_;
  kernels::BackendInfo own_info_;
  const kernels::Backend* own_ = nullptr;
  const kernels::Backend* group_ = nullptr;  // the backend that Form has made
  std::unique_ptr<kernels::RankLink> link_;
  const std::unique_ptr<LeaderRows> rows_;
  RankFiles files_;
  mutable absl::Mutex mutex_;
  bool forming_ ABSL_GUARDED_BY(mutex_) = false;
  bool formed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);  // the last
  Workers workers_ ABSL_GUARDED_BY(mutex_);
  std::map<grpc::ServerContext*, absl::Time> silent_ ABSL_GUARDED_BY(mutex_);  // have not said Hello
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  FirstNews<absl::Status> loss_;
  FirstNews<Leaving> leaving_;

  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<access::ConnectionAcceptor> acceptor_;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_LEADER_H_
