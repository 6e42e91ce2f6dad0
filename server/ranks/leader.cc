// SPDX-License-Identifier: Apache-2.0
// Leader, rank 0 of a server of several processes (leader.h): streams of workers, forming, and losses.
//
// Form goes through these stages:
// 1. AwaitAll. Each worker opens a stream (Join) and says Hello. Enter puts it into workers_ if its settings
//    agree.
// 2. Connect. The leader sends Prepare to all workers: the library for exchanges, and where shared memory is.
//    Each worker answers with its address. Then all ranks, the leader's own link included, connect with each
//    other at the same time.
// 3. MakeGroup. The backends of all ranks become one backend.
// While forming_ is true, workers may come, and may also go and come again. Once formed_ is true, a worker
// whose stream ends is lost, and with it the server (Leave).
#include "server/ranks/leader.h"

#include <grpcpp/grpcpp.h>
#include <sys/socket.h>

#include <algorithm>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"
#include "proto/wire/status_details.h"
#include "server/log/log.h"
#include "server/ranks/rows.h"

namespace lossd::ranks {

// A worker's stream to the leader, over gRPC. Threads as in WorkerTransport.
class GrpcTransport final : public WorkerTransport {
 public:
  using Stream = grpc::ServerReaderWriter<v1::ToWorker, v1::FromWorker>;
  GrpcTransport(grpc::ServerContext* context, Stream* stream) : context_(context), stream_(stream) {}
  bool Read(v1::FromWorker* message) override { return stream_->Read(message); }
  bool Write(const v1::ToWorker& message) override { return stream_->Write(message); }
  void Cancel() override { context_->TryCancel(); }

 private:
  grpc::ServerContext* const context_;
  Stream* const stream_;
};

// LeaderRows decides how the leader's rows reach each worker: in memory that both processes have mapped
// (rows.h), or in messages. It decides while the ranks connect, and logs the decision for each worker.
//
// Used by the thread that calls Leader::Form. The functions that it puts into the group's options are
// thread-safe.
class LeaderRows {
 public:
  using Workers = std::map<int, std::shared_ptr<WorkerStream>>;  // all workers, by rank

  // Asks all workers to prepare, and offers them shared memory if `share`. Call once.
  void Prepare(const Workers& workers, const std::string& collectives, bool share);
  // Call when a worker has prepared. `prepared` says whether its rows travel in shared memory or in messages.
  void OnPrepared(WorkerStream& worker, const v1::Prepared& prepared);
  // Adds two things to the options of the group: its staging memory comes from this object, which outlives
  // the group; and the group computes nothing once a worker is lost. (A lost worker may still write gradients
  // of its old chunks to shared memory, where the gradients of new chunks would lie.)
  kernels::GroupOptions Complete(kernels::GroupOptions group, const Workers& workers);
  // SharedRows::Silence, after Prepare.
  absl::Duration Silence() const { return shared_ == nullptr ? absl::ZeroDuration() : shared_->Silence(); }

 private:
  std::unique_ptr<SharedRows> shared_;  // null: nothing is shared
};

namespace {

// kLook: the pause between two checks whether to stop waiting for ranks. kHelloTimeout: the time that a
// worker may take to send its Hello.
constexpr absl::Duration kLook = absl::Milliseconds(200);
constexpr absl::Duration kHelloTimeout = absl::Seconds(20);
// Threads in addition to two for each rank: for streams that are refused, and gRPC's own threads.
constexpr int kSpareThreads = 16;
// Connections in addition to one for each rank, both of one peer and in all: for attempts that end, and for
// clients that are not ranks.
constexpr int kSpareConnections = 32;

}  // namespace

Leader::Leader(const LeaderOptions& options) : options_(options), rows_(std::make_unique<LeaderRows>()) {}

absl::Status Leader::Listen() {
  auto listeners = access::ListeningSocket::OpenTcp(options_.host, options_.port);
  if (!listeners.ok())
    return absl::UnavailableError(
        absl::StrCat("for ranks: ", listeners.status().message(), " (a taken port?)"));
  port_ = listeners->front().port();
  grpc::ServerBuilder builder;
  // A taker hands accepted connections to gRPC with its credentials. The ranks of this process connect over a
  // local socket, without TLS.
  const auto by_port = access::GrpcTaker(&builder, options_.credentials);
  access::ConnectionAcceptor::Take by_local;
  int local = -1;
  if (options_.devices > 1) {
    const std::string name = NewLocalName();
    LOSSD_TRY(auto listener, access::ListeningSocket::OpenAbstract(name, SOCK_STREAM));
    local = listener.descriptor();
    local_address_ = absl::StrCat("unix-abstract:", name);
    by_local = access::GrpcTaker(&builder, grpc::InsecureServerCredentials());
    listeners->push_back(std::move(listener));
  }
  Configure(options_.limits, &builder);
  builder.SetResourceQuota(grpc::ResourceQuota("ranks").SetMaxThreads(2 * options_.ranks + kSpareThreads));
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) return absl::UnavailableError("gRPC cannot start; its log says why");
  acceptor_ = std::make_unique<access::ConnectionAcceptor>(
      *std::move(listeners), access::EntranceOptions{.own_user_on_loopback = options_.secret.empty(),
                                                     .in_all = kMostRanks + kSpareConnections,
                                                     .per_peer = options_.ranks + kSpareConnections});
  acceptor_->Start("lossd-accept-r",
                   [=](int from, int connection) { (from == local ? by_local : by_port)(from, connection); });
  return absl::OkStatus();
}

// ---- Leader: streams ----

grpc::Status Leader::Join(grpc::ServerContext* context, RankStream* stream) {
  GrpcTransport transport(context, stream);
  absl::Status status = CheckSecret(options_.secret, *context);
  absl::StatusOr<v1::Hello> hello = status.ok() ? ReadHello(context, &transport) : status;
  if (!hello.ok()) {
    return {static_cast<grpc::StatusCode>(hello.status().code()), std::string(hello.status().message())};
  }
  // From here on this thread of gRPC belongs to the worker: Run reads the stream until it ends.
  const auto worker = std::make_shared<WorkerStream>(*std::move(hello), &transport);
  status = Enter(worker);
  if (!status.ok()) return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
  worker->Run([&](const absl::Status& lost) { Leave(worker, lost); },
              [&](const std::string& reason) {
                leaving_.Report({worker->rank(), reason});
              });
  return grpc::Status::OK;
}

absl::StatusOr<v1::Hello> Leader::ReadHello(grpc::ServerContext* context, GrpcTransport* transport) {
  {
    absl::MutexLock lock(&mutex_);
    if (!forming_) return absl::UnavailableError("the leader is not waiting for ranks");
    if (silent_.size() > static_cast<size_t>(options_.ranks)) {
      return absl::UnavailableError("too many at once say that they are ranks");
    }
    silent_[context] = clocks::SteadyNow();
  }
  v1::FromWorker message;
  const bool read = transport->Read(&message);
  absl::MutexLock lock(&mutex_);
  silent_.erase(context);
  if (!read || !message.has_hello()) return absl::InvalidArgumentError("a rank says Hello first");
  absl::Status status = CheckAgreement(settings_, traits_, message.hello());
  if (status.ok()) {
    status = CheckRank(message.hello(), options_.ranks);
    return status.ok() ? absl::StatusOr<v1::Hello>(std::move(*message.mutable_hello())) : status;
  }
  // The log and AwaitAll's error have the leader's value of the setting. The worker's answer does not have it
  // (start.h).
  log::Log(log::LogLevel::kError, "a rank is refused",
           {{"peer", context->peer()}, {"error", status.message()}});
  refusal_ = status;
  return CheckAgreement(settings_, traits_, message.hello(), Listener::kWorker);
}

absl::Status Leader::Enter(const std::shared_ptr<WorkerStream>& worker) {
  absl::MutexLock lock(&mutex_);
  if (!forming_) return absl::UnavailableError("the leader is not waiting for ranks");
  if (!workers_.emplace(worker->rank(), worker).second) {
    return absl::AlreadyExistsError(absl::StrCat("there is a rank ", worker->rank(), " already, on host ",
                                                 workers_[worker->rank()]->hello().host()));
  }
  log::Log(log::LogLevel::kInfo, "rank is there",
           {{"rank", worker->rank()},
            {"host", worker->hello().host()},
            {"device", worker->hello().backend().device()}});
  return absl::OkStatus();
}

// Other ranks may wait for the lost worker. So the leader gives up all workers, and every request to the
// ranks fails.
void Leader::Leave(const std::shared_ptr<WorkerStream>& worker, const absl::Status& status) {
  Workers others;
  {
    absl::MutexLock lock(&mutex_);
    if (forming_) {  // the worker may connect again
      workers_.erase(worker->rank());
      return;
    }
    if (!formed_ || !lost_.ok()) return;
    lost_ = status;
    others = workers_;
  }
  log::Log(log::LogLevel::kError, "rank is lost", {{"rank", worker->rank()}, {"error", status.message()}});
  loss_.Report(status);
  for (const auto& [rank, other] : others) {
    if (other != worker) other->GiveUp(status);
  }
  link_->Abort(status);
}

// The exchange of a chunk has failed. If a worker's stream reports a loss soon afterwards, that loss is the
// cause, and this function returns it. Otherwise some rank hangs. The function then gives up one worker,
// which makes all ranks end (Leave).
absl::Status Leader::OnChunkFailure(const absl::Status& failure) {
  absl::MutexLock lock(&mutex_);
  const auto is_lost = [this] {
    mutex_.AssertHeld();
    return !lost_.ok();
  };
  if (clocks::AwaitFor(mutex_, absl::Condition(&is_lost), kLastWords)) return lost_;
  const absl::Status status = absl::UnavailableError(absl::StrCat(
      "a rank is lost, or has not done its part of a chunk within ",
      absl::FormatDuration(options_.collective_timeout), " (--collective_timeout): ", failure.message()));
  workers_.begin()->second->GiveUp(status);
  return status;
}

// ---- Leader: forming ----

absl::Status Leader::Late() const {
  std::vector<int> missing;
  for (int rank = 1; rank < options_.ranks; ++rank) {
    if (workers_.count(rank) == 0) missing.push_back(rank);
  }
  return NotCome(missing, options_.ranks, options_.timeout, refusal_);
}

void Leader::CancelSilent() {
  for (const auto& [context, since] : silent_) {
    if (clocks::SteadyNow() - since > kHelloTimeout) context->TryCancel();
  }
}

absl::Status Leader::AwaitAll() {
  const absl::Time deadline = clocks::SteadyNow() + options_.timeout;
  absl::MutexLock lock(&mutex_);
  forming_ = true;
  size_t seen = 0;
  const auto news = [&] {
    mutex_.AssertHeld();
    return workers_.size() != seen;
  };
  while (true) {
    clocks::AwaitFor(mutex_, absl::Condition(&news), kLook);
    seen = workers_.size();
    if (seen == static_cast<size_t>(options_.ranks) - 1) {
      // This happens under the lock that counted the workers: all are connected now, and a worker that
      // disconnects from now on counts as lost.
      forming_ = false;
      formed_ = true;
      return absl::OkStatus();
    }
    if (options_.stop()) return absl::CancelledError("waiting for the other ranks");
    if (clocks::SteadyNow() > deadline) return Late();
    CancelSilent();
  }
}

// Admits no more workers. If `status` is OK, a worker that disconnects from now on counts as lost.
void Leader::EndForming(const absl::Status& status) {
  Workers workers;
  {
    absl::MutexLock lock(&mutex_);
    forming_ = false;
    formed_ = status.ok();
    for (const auto& [context, since] : silent_) context->TryCancel();
    if (!status.ok()) workers = workers_;
  }
  for (const auto& [rank, worker] : workers) {
    if (absl::IsCancelled(status)) {
      worker->End();
    } else {
      worker->Refuse(status);
    }
  }
}

Leader::Workers Leader::AllWorkers() const {
  absl::MutexLock lock(&mutex_);
  return workers_;
}

absl::Status Leader::Connect() {
  const Workers workers = AllWorkers();
  std::vector<v1::Hello> hellos;
  for (const auto& [rank, worker] : workers) hellos.push_back(worker->hello());
  LOSSD_TRY(const std::string collectives, UseCollectives(link_.get(), gpu_, options_.devices, hellos));
  collectives_ = collectives;
  rows_->Prepare(workers, collectives, options_.share_rows);
  LOSSD_TRY(std::string own, link_->Address());
  std::vector<std::string> addresses = {std::move(own)};
  const absl::Time deadline = clocks::SteadyNow() + options_.timeout;
  for (const auto& [rank, worker] : workers) {
    LOSSD_TRY(const v1::Prepared prepared, worker->AwaitPrepared(deadline));
    addresses.push_back(prepared.address());
    rows_->OnPrepared(*worker, prepared);
  }
  // Connecting blocks each rank until all others connect, so all workers are asked before the leader
  // connects.
  std::vector<uint64_t> requests;
  for (const auto& [rank, worker] : workers) requests.push_back(worker->StartConnect(addresses));
  const absl::Status connected = link_->Connect(addresses);
  absl::Status of_workers;
  size_t i = 0;
  for (const auto& [rank, worker] : workers) of_workers.Update(worker->Await(requests[i++]).status());
  // A worker's error names the cause; the leader's own error may only say that it has waited in vain.
  return of_workers.ok() ? connected : of_workers;
}

absl::StatusOr<std::unique_ptr<kernels::Backend>> Leader::MakeGroup(std::unique_ptr<kernels::Backend> own) {
  std::vector<std::unique_ptr<kernels::Backend>> members;
  members.push_back(std::move(own));
  for (const auto& [rank, worker] : AllWorkers()) {
    LOSSD_TRY(std::unique_ptr<RemoteBackend> member, RemoteBackend::Create(worker));
    members.push_back(std::move(member));
  }
  const auto make_replicas = [this](absl::Span<kernels::HeadKernels* const> heads) {
    return MakeRankReplicas(link_.get(), options_.collective_timeout, heads);
  };
  kernels::GroupOptions group = rows_->Complete(options_.group, AllWorkers());
  group.may_have_replicas = false;
  group.join_classes = [this](absl::Span<kernels::HeadKernels* const> heads) {
    // On GPUs the size of a chunk determines its steps, and so the exchanges that all ranks must do together.
    return JoinRankClasses(link_.get(), /*same_chunks=*/own_info_.name == "cuda", heads);
  };
  link_->WatchChunks([this](const absl::Status& failure) { return OnChunkFailure(failure); });
  auto made = kernels::CreateGroupBackend(std::move(members), make_replicas, group);
  if (made.ok()) group_ = made->get();
  return made;
}

absl::StatusOr<std::unique_ptr<kernels::Backend>> Leader::Form(kernels::CreatedBackend own) {
  own_info_ = own.backend->info();
  own_ = own.backend.get();
  link_ = std::move(own.link);
  traits_ = link_->Traits();
  settings_ = SettingsOf(options_.settings, own_info_);
  if (!own_info_.uuids.empty()) gpu_ = own_info_.uuids.front();
  absl::Status status = AwaitAll();
  acceptor_->Stop();
  EndForming(status);  // also ends calls that have not sent a Hello
  if (!status.ok()) return status;
  if (status = Connect(); !status.ok()) {
    EndForming(status);
    return status;
  }
  files_.SetWorkers(AllWorkers());
  return MakeGroup(std::move(own.backend));
}

// ---- Leader: afterwards ----

absl::Duration Leader::Silence() const { return std::max(acceptor_->Silence(), rows_->Silence()); }

std::vector<RankReport> Leader::Reports() const {
  const kernels::MemberWork work = own_work();
  std::vector<RankReport> reports = {{.state = {.host = HostName(),
                                                .device = own_info_.device,
                                                .memory = own_->memory(),
                                                .chunks = work.chunks,
                                                .rows = work.rows}}};
  absl::MutexLock lock(&mutex_);
  for (const auto& [rank, worker] : workers_) reports.push_back(worker->report());
  return reports;
}

Leader::~Leader() {
  Workers workers;
  {
    absl::MutexLock lock(&mutex_);
    workers = workers_;
    formed_ = false;
    forming_ = false;
  }
  loss_.Unwatch();
  leaving_.Unwatch();
  for (const auto& [rank, worker] : workers) worker->End();
  // Workers close their streams now. Streams that are still open after kGoodbye are cancelled.
  constexpr absl::Duration kGoodbye = absl::Seconds(5);
  if (server_ != nullptr) server_->Shutdown(wire::GrpcTime(clocks::SteadyNow() + kGoodbye));
}

absl::StatusOr<std::unique_ptr<Leader>> Leader::Start(const LeaderOptions& options) {
  auto leader = absl::WrapUnique(new Leader(options));
  LOSSD_RETURN_IF_ERROR(leader->Listen());
  return leader;
}

// ---- LeaderRows ----

void LeaderRows::Prepare(const Workers& workers, const std::string& collectives, bool share) {
  if (share) {
    absl::StatusOr<std::unique_ptr<SharedRows>> shared =
        SharedRows::Listen(static_cast<int>(workers.size()) + 1);
    if (shared.ok()) {
      shared_ = *std::move(shared);
    } else {
      log::Log(log::LogLevel::kWarning, "ranks share no memory", {{"error", shared.status().message()}});
    }
  }
  for (const auto& [rank, worker] : workers) {
    v1::Prepare prepare;
    prepare.set_collectives(collectives);
    if (shared_ != nullptr) {
      prepare.set_rows_socket(shared_->socket());
      prepare.set_rows_token(shared_->TokenOf(rank));
    }
    worker->Prepare(std::move(prepare));
  }
}

void LeaderRows::OnPrepared(WorkerStream& worker, const v1::Prepared& prepared) {
  if (shared_ != nullptr) worker.ShareRows(&shared_->regions());
  log::Log(log::LogLevel::kInfo, "rows of a rank",
           {{"rank", worker.rank()},
            {"in", prepared.rows_refused().empty() ? "shared memory" : prepared.rows_refused()}});
}

kernels::GroupOptions LeaderRows::Complete(kernels::GroupOptions group, const Workers& workers) {
  group.staging = shared_.get();
  group.check_members = [workers] {
    for (const auto& [rank, worker] : workers) {
      if (worker->lost()) return absl::UnavailableError(absl::StrCat("rank ", rank, " is lost"));
    }
    return absl::OkStatus();
  };
  return group;
}

}  // namespace lossd::ranks
