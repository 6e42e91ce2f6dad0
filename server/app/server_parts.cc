// SPDX-License-Identifier: Apache-2.0
// The parts of a server, made from its options (server_parts.h).
#include "server/app/server_parts.h"

#include <sys/socket.h>

#include <algorithm>

#include "absl/random/random.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "kernels/clocks/clock.h"
#include "kernels/device_choice.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "kernels/group/group_backend.h"
#include "server/access/roles.h"
#include "server/log/log.h"
#include "server/ranks/channel.h"

namespace lossd::app {
namespace {

std::string Seconds(absl::Duration time) { return absl::FormatDuration(absl::Trunc(time, absl::Seconds(1))); }

metrics::HttpResponse Unavailable(std::string why) { return {.status = 503, .body = std::move(why)}; }

}  // namespace

absl::Status Live(const Health& health, absl::Duration timeout) {
  if (health.device_lost) return absl::UnavailableError("device lost");
  if (health.device_silence > timeout)
    return absl::UnavailableError(
        absl::StrCat("no progress on the device for ", Seconds(health.device_silence)));
  for (const Health::Thread& thread : health.threads) {
    if (thread.silence > std::min(timeout, kThreadTimeout))
      return absl::UnavailableError(
          absl::StrCat("no answer of ", thread.name, " for ", Seconds(thread.silence)));
  }
  return absl::OkStatus();
}

metrics::HttpResponse Liveness(const Health& health, absl::Duration timeout) {
  const absl::Status live = Live(health, timeout);
  return live.ok() ? metrics::HttpResponse{.body = "ok\n"} : Unavailable(absl::StrCat(live.message(), "\n"));
}

metrics::HttpResponse Readiness(const Health& health) {
  if (health.device_lost) return Unavailable("device lost\n");
  if (health.draining) return Unavailable("draining\n");
  return {.body = "ok\n"};
}

std::string Trouble(const Health& health, absl::Duration timeout) {
  if (const absl::Status live = Live(health, timeout); !live.ok()) return std::string(live.message());
  return health.draining ? "draining" : "";
}

std::vector<std::unique_ptr<metrics::GpuMonitor>> WatchGpus(
    const kernels::BackendInfo& backend, const std::vector<engine::EngineObserver*>& observers) {
  std::vector<std::unique_ptr<metrics::GpuMonitor>> monitors;
  if (!backend.uuids.empty()) {
    log::Log(log::LogLevel::kInfo, "how the GPUs are shared with other programs",
             {{"sharing", backend.gpu_sharing}});
  }
  for (const std::string& uuid : backend.uuids) {
    metrics::GpuMonitorOptions options;
    options.uuid = uuid;
    options.on_xid = [uuid](uint64_t xid) {
      log::Log(log::LogLevel::kError, "critical error of the GPU", {{"gpu", uuid}, {"xid", xid}});
    };
    options.on_lost = [observers](const absl::Status& status) {
      for (engine::EngineObserver* observer : observers) observer->OnDeviceError(status);
    };
    if (!backend.mps) {
      options.on_shared = [uuid](unsigned processes) {
        log::Log(log::LogLevel::kWarning, "other programs use the GPU, and it runs them in turns without MPS",
                 {{"gpu", uuid}, {"programs", processes}});
      };
    }
    auto monitor = metrics::GpuMonitor::Start(std::move(options));
    monitors.push_back(monitor.ok() ? *std::move(monitor) : nullptr);
    if (!monitor.ok()) {
      log::Log(log::LogLevel::kInfo, "no metrics of the GPU",
               {{"gpu", uuid}, {"reason", monitor.status().message()}});
    }
  }
  return monitors;
}

// ---- Checks of options ----

namespace {

constexpr int64_t kMebibyte = int64_t{1} << 20;
constexpr int kMostCheckpointThreads = 64;

absl::Status CheckAtLeast(absl::string_view option, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return errors::FieldError(option, absl::StrCat("be at least ", least), value);
}

absl::Status CheckClientLimits(const ServerOptions& options) {
  absl::Status status = CheckAtLeast("ledger_bytes", options.ledger_bytes, 0);
  if (!(options.peer_share > 0.0 && options.peer_share <= 1.0))
    status.Update(errors::FieldError("peer_share", "be in (0, 1]", options.peer_share));
  status.Update(CheckAtLeast("transport_bytes", TransportBytes(options), 4 * MaxMessageBytes(options)));
  status.Update(CheckAtLeast("max_calls_per_connection", options.transport.max_calls_per_connection, 1));
  status.Update(CheckAtLeast("max_connections", options.max_connections, 1));
  status.Update(CheckAtLeast("max_connections_per_address", options.max_connections_per_address, 1));
  status.Update(CheckAtLeast("max_tensor_calls", options.max_tensor_calls, 1));
  status.Update(CheckAtLeast("max_saves", options.max_saves, 1));
  status.Update(CheckAtLeast("max_waiting_calls", options.max_waiting_calls, 1));
  status.Update(CheckPositive("handshake_timeout", options.transport.handshake_timeout));
  status.Update(CheckPositive("idle_connection_timeout", options.transport.idle_connection_timeout));
  status.Update(CheckPositive("connection_age", options.transport.connection_age));
  status.Update(CheckPositive("open_timeout", options.timeouts.open));
  status.Update(CheckPositive("idle_timeout", options.timeouts.idle));
  status.Update(CheckPositive("turn_timeout", options.timeouts.turn));
  status.Update(CheckPositive("send_timeout", options.timeouts.send));
  return status;
}

}  // namespace

absl::Status CheckPositive(absl::string_view option, absl::Duration value) {
  if (value > absl::ZeroDuration()) return absl::OkStatus();
  return errors::FieldError(option, "be positive", absl::FormatDuration(value));
}

kernels::BackendChoice BackendOf(const ServerOptions& options) {
  return {.backend = options.backend,
          .device = options.device,
          .devices = options.devices,
          .stream_priority = options.stream_priority,
          .shares_process = options.embedded,
          .threads = options.threads,
          .cpu_devices = options.cpu_devices,
          .split = options.split,
          .replicas = options.replicas,
          .workspace_bytes = options.workspace_bytes,
          .memory_limit_bytes = options.memory_limit_bytes,
          .memory_reserve_bytes = options.memory_reserve_bytes,
          .teacher_pool_bytes = options.teacher_pool_bytes,
          .deterministic = options.deterministic,
          .replica = {options.ranks.launch.rank, options.ranks.launch.ranks},
          .local_rank = options.ranks.launch.local_rank,
          .collectives = options.ranks.collectives,
          .link_timeout = options.ranks.collective_timeout};
}

int64_t MaxMessageBytes(const ServerOptions& options) {
  return std::max(options.slice_bytes, 4 * kMebibyte) + kMebibyte;
}

int64_t TransportBytes(const ServerOptions& options) {
  if (options.transport.bytes != 0) return options.transport.bytes;
  return std::max(256 * kMebibyte, 16 * MaxMessageBytes(options));
}

int64_t LedgerBytes(const ServerOptions& options) {
  if (options.ledger_bytes > 0) return options.ledger_bytes;
  constexpr int64_t kDefault = 256 * kMebibyte;
  return options.memory_limit_bytes > 0 ? std::min(kDefault, options.memory_limit_bytes / 8) : kDefault;
}

int CheckpointThreads(const ServerOptions& options, const kernels::BackendInfo& backend) {
  if (options.checkpoint_threads > 0) return options.checkpoint_threads;
  constexpr int kDefault = 4;
  const int devices = std::max(options.cpu_devices, static_cast<int>(backend.uuids.size()));
  return std::clamp(devices, kDefault, kMostCheckpointThreads);
}

absl::Status CheckOptions(const ServerOptions& options) {
  absl::Status status = CheckAtLeast("threads", options.threads, 0);
  if (!options.restore.empty() && options.restore != "latest")
    status.Update(errors::FieldError("restore", "be latest, or empty", options.restore));
  const std::string& priority = options.stream_priority;
  if (priority != "dx" && priority != "all" && priority != "none")
    status.Update(errors::FieldError("stream_priority", "be dx, all or none", priority));
  status.Update(CheckAtLeast("cpu_devices", options.cpu_devices, 1));
  status.Update(CheckAtLeast("workspace_bytes", options.workspace_bytes, 0));
  status.Update(CheckAtLeast("memory_limit_bytes", options.memory_limit_bytes, 0));
  status.Update(CheckAtLeast("memory_reserve_bytes", options.memory_reserve_bytes, 0));
  status.Update(CheckAtLeast("teacher_pool_bytes", options.teacher_pool_bytes, 0));
  status.Update(CheckAtLeast("slice_bytes", options.slice_bytes, 64));
  status.Update(CheckAtLeast("staging_bytes", options.staging_bytes, 2 * options.slice_bytes));
  status.Update(CheckAtLeast("retained_bytes", options.retained_bytes, 0));
  status.Update(CheckAtLeast("shared_memory_bytes", options.shared_memory_bytes, 0));
  status.Update(CheckAtLeast("shared_device_memory_bytes", options.shared_device_memory_bytes, 0));
  status.Update(CheckAtLeast("checkpoint_buffer_bytes", options.checkpoint_buffer_bytes, 0));
  status.Update(CheckAtLeast("checkpoint_shard_bytes", options.checkpoint_shard_bytes, 1));
  status.Update(CheckAtLeast("checkpoint_threads", options.checkpoint_threads, 0));
  if (options.checkpoint_threads > kMostCheckpointThreads) {
    status.Update(errors::FieldError("checkpoint_threads",
                                     absl::StrCat("be at most ", kMostCheckpointThreads),
                                     options.checkpoint_threads));
  }
  status.Update(CheckAtLeast("keep_checkpoints", options.keep_checkpoints, 0));
  status.Update(CheckAtLeast("checkpoint_limit_bytes", options.checkpoint_limit_bytes, 0));
  status.Update(CheckAtLeast("max_streams", options.max_streams, 1));
  status.Update(CheckAtLeast("max_heads", options.max_heads, 1));
  if (options.slice_bytes > 1024 * kMebibyte) {
    status.Update(errors::FieldError("slice_bytes", "be at most 1 GiB", options.slice_bytes));
  }
  status.Update(CheckClientLimits(options));
  status.Update(CheckRanks(options));
  status.Update(CheckPositive("retained_timeout", options.retained_timeout));
  if (options.liveness_timeout < 2 * engine::kDeviceBeat) {
    status.Update(errors::FieldError("liveness_timeout", "be at least 2s",
                                     absl::FormatDuration(options.liveness_timeout)));
  }
  if (options.drain_timeout < absl::ZeroDuration()) {
    status.Update(
        errors::FieldError("drain_timeout", "not be negative", absl::FormatDuration(options.drain_timeout)));
  }
  return status;
}

// ---- Memory shared with clients ----

namespace {

// The name of the region socket. If gRPC has a Unix socket, the region socket lies beside the first one, so
// that the same permissions of the file system apply to it. If gRPC has no Unix socket, the region socket has
// an abstract name.
std::string ChooseName(const std::vector<Address>& addresses) {
  for (const Address& address : addresses) {
    if (address.port == Address::kUnixSocket) return absl::StrCat(address.socket_path(), ".regions");
  }
  absl::BitGen generator;
  return absl::StrFormat("@lossd-%016x", absl::Uniform<uint64_t>(generator));
}

// The GPUs whose memory clients may have. Empty: clients get host memory only.
std::vector<std::string> SharingDevices(const ServerOptions& options, kernels::Backend* backend) {
  if (options.shared_device_memory_bytes == 0) return {};
  return backend->SharingDevices();
}

bool IsAbstract(absl::string_view name) { return !name.empty() && name.front() == '@'; }

absl::StatusOr<access::ListeningSocket> Listen(const std::string& name, uint32_t mode) {
  if (IsAbstract(name)) return access::ListeningSocket::OpenAbstract(name.substr(1), SOCK_SEQPACKET);
  return access::ListeningSocket::OpenUnix(name, mode, SOCK_SEQPACKET);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Start(const ServerOptions& options,
                                                                  const std::vector<Address>& addresses,
                                                                  kernels::Backend* backend) {
  if (options.shared_memory_bytes <= 0 && SharingDevices(options, backend).empty()) return nullptr;
  const std::string name = options.region_socket.empty() ? ChooseName(addresses) : options.region_socket;
  absl::StatusOr<access::ListeningSocket> listener = Listen(name, options.unix_socket_mode);
  if (listener.ok())
    return std::unique_ptr<SharedMemory>(new SharedMemory(name, *std::move(listener), options, backend));
  if (!options.region_socket.empty())
    return absl::UnavailableError(absl::StrCat("region_socket: ", listener.status().message()));
  log::Log(log::LogLevel::kWarning, "no shared memory for clients of this host",
           {{"error", listener.status().message()}});
  return nullptr;
}

SharedMemory::SharedMemory(std::string name, access::ListeningSocket listener, const ServerOptions& options,
                           kernels::Backend* backend)
    : name_(std::move(name)),
      devices_(SharingDevices(options, backend)),
      device_bytes_(options.shared_device_memory_bytes),
      regions_(backend, {options.shared_memory_bytes, options.shared_device_memory_bytes},
               options.peer_share),
      sessions_(std::move(listener), &regions_, {.in_all = options.max_connections}) {}

std::vector<metrics::SharedMemoryUse> SharedMemory::UsesOf(const SharedMemory* shared) {
  std::vector<metrics::SharedMemoryUse> uses;
  if (shared == nullptr) return uses;
  for (const regions::RegionUse& use : shared->regions_.Uses()) {
    uses.push_back({use.device.empty() ? "host" : use.device, use.used_bytes, use.limit_bytes});
  }
  return uses;
}

// ---- The options of the parts, and functions for metrics ----

void LogMemoryPlan(const ServerOptions& options, const kernels::Backend& backend,
                   const SharedMemory* shared) {
  const kernels::MemoryBytes planned = backend.memory().current;
  log::Log(log::LogLevel::kInfo, "memory plan",
           {{"staging_bytes", planned[kernels::MemoryKind::kStaging]},
            {"slice_bytes", options.slice_bytes},
            {"retained_bytes", planned[kernels::MemoryKind::kRetained]},
            {"workspace_bytes_per_head",
             options.workspace_bytes > 0 ? absl::StrCat(options.workspace_bytes) : "default"},
            {"ledger_bytes", planned[kernels::MemoryKind::kLedger]},
            {"transport_bytes", TransportBytes(options)},
            {"shared_memory_bytes", shared == nullptr ? 0 : options.shared_memory_bytes},
            {"shared_device_memory_bytes_per_gpu", shared == nullptr ? 0 : shared->device_bytes()},
            {"sharing_gpus", shared == nullptr ? 0 : static_cast<int64_t>(shared->devices().size())},
            {"limit_bytes", options.memory_limit_bytes}});
}

engine::EngineOptions EngineOptionsOf(const ServerOptions& options) {
  engine::EngineOptions out;
  out.slice_bytes = options.slice_bytes;
  out.staging_bytes = options.staging_bytes;
  out.retained_bytes = options.retained_bytes;
  out.deterministic = options.deterministic;
  out.max_streams = options.max_streams;
  out.max_heads = options.max_heads;
  out.ledger_bytes = LedgerBytes(options);
  out.peer_share = options.peer_share;
  return out;
}

rpc::TransportOptions TransportOf(const ServerOptions& options) {
  rpc::TransportOptions transport = options.transport;
  transport.max_message_bytes = MaxMessageBytes(options);
  transport.bytes = TransportBytes(options);
  if (options.security.tls_client_ca.empty()) transport.connection_age = absl::InfiniteDuration();
  return transport;
}

rpc::HeadServiceOptions HeadServiceOptionsOf(const ServerOptions& options,
                                             const kernels::BackendInfo& backend, regions::Regions* regions,
                                             head::FileSites* sites) {
  rpc::HeadServiceOptions out;
  out.operations.checkpoints.sites = sites;
  out.operations.checkpoints.directory = options.checkpoint_directory;
  out.operations.checkpoints.buffer_bytes = options.checkpoint_buffer_bytes;
  out.operations.checkpoints.shards = {.most_bytes = options.checkpoint_shard_bytes,
                                       .threads = CheckpointThreads(options, backend)};
  out.operations.checkpoints.memory_reserve_bytes = options.memory_reserve_bytes;
  out.operations.checkpoints.keep = options.keep_checkpoints;
  out.operations.checkpoints.limit_bytes = options.checkpoint_limit_bytes;
  out.operations.default_compute_dtype = backend.default_compute_dtype;
  out.max_waiting_calls = options.max_waiting_calls;
  out.max_tensor_calls = options.max_tensor_calls;
  out.max_saves = options.max_saves;
  out.peer_share = options.peer_share;
  out.timeouts = options.timeouts;
  out.regions = regions;
  return out;
}

rpc::LossServiceOptions LossServiceOptionsOf(const ServerOptions& options, regions::Regions* regions) {
  return {.max_streams = options.max_streams,
          .max_staging_bytes = 8 * options.slice_bytes,
          .peer_share = options.peer_share,
          .timeouts = options.timeouts,
          .retained_timeout = options.retained_timeout,
          .regions = regions};
}

std::vector<metrics::RankReading> RanksOf(const ranks::Leader* leader) {
  std::vector<metrics::RankReading> readings;
  if (leader == nullptr) return readings;
  for (ranks::RankReport& report : leader->Reports()) {
    const bool is_leader = report.state.rank == 0;
    readings.push_back({.state = std::move(report.state),
                        .metrics = is_leader ? metrics::RankTimeFamilies(leader->times())
                                             : metrics::FromPlain(FromProto(report.metrics))});
  }
  return readings;
}

std::vector<metrics::RankReading> RanksOf(const ranks::Leader* leader, const kernels::Backend& backend) {
  if (leader != nullptr) return RanksOf(leader);
  std::vector<metrics::RankReading> readings;
  for (kernels::MemberState& member : backend.MemberStates()) {
    readings.push_back({.state = {.rank = static_cast<int>(readings.size()),
                                  .host = ranks::HostName(),
                                  .device = std::move(member.device),
                                  .memory = member.memory,
                                  .chunks = member.work.chunks,
                                  .rows = member.work.rows},
                        .metrics = metrics::RankTimeFamilies({member.work.busy, member.exchanges})});
  }
  return readings;
}

// ---- The ranks of this process ----

namespace {

// How long ranks may take to end at the end of the process.
constexpr absl::Duration kPatience = absl::Seconds(20);

}  // namespace

std::string RankNames(int first, int count) {
  std::string names = absl::StrCat(count == 1 ? "rank " : "ranks ", first);
  for (int i = 1; i < count; ++i) absl::StrAppend(&names, ", ", first + i);
  return names;
}

struct LocalRanks::Rank {
  explicit Rank(int number)
      : rank(number), watch([this](const absl::Status& status) { worker->ReportLoss(status); }) {}

  ranks::v1::Metrics Metrics() {
    const kernels::RankTimes times = worker->times();
    absl::MutexLock lock(&mutex);
    return ToProto(metrics::WorkerFamilies(times, gpus));
  }
  // Stops the monitors of GPUs before the worker is destroyed, because monitors and worker call each other.
  void StopMonitors() {
    std::vector<std::unique_ptr<metrics::GpuMonitor>> stopped;
    absl::MutexLock lock(&mutex);
    stopped.swap(gpus);
  }

  // Waits for kPatience at most; true if the rank has closed.
  bool AwaitClosed() {
    absl::MutexLock lock(&mutex);
    return clocks::AwaitFor(mutex, absl::Condition(&closed), kPatience);
  }

  const int rank;
  std::unique_ptr<ranks::Worker> worker;  // not changed once it is set
  DeviceWatch watch;
  absl::Mutex mutex;
  std::vector<std::unique_ptr<metrics::GpuMonitor>> gpus ABSL_GUARDED_BY(mutex);
  bool closed ABSL_GUARDED_BY(mutex) = false;  // set by the thread as its last action
  std::thread thread;
};

// Counts the ranks that have joined or ended, and calls the functions of LocalRanksOptions. It outlives
// LocalRanks if a rank is never destroyed.
class LocalRanks::News {
 public:
  News(size_t ranks, LocalRanksOptions local) : ranks_(ranks), local_(std::move(local)) {}

  void Joined() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (++joined_ == ranks_ && !stopped_) local_.on_joined();
  }
  void Ended(const RanksEnd& end) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    ++ended_;
    if (stopped_ || (end.status.ok() && ended_ != ranks_)) return;
    stopped_ = true;
    local_.on_end(end);
  }
  // After this returns, no function of LocalRanksOptions is called any more.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }

 private:
  const size_t ranks_;
  const LocalRanksOptions local_;
  absl::Mutex mutex_;  // held while the functions of local_ are called
  size_t joined_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

absl::StatusOr<std::unique_ptr<LocalRanks>> LocalRanks::Start(const ServerOptions& options,
                                                              std::vector<kernels::CreatedBackend> backends,
                                                              LocalRanksOptions local) {
  std::unique_ptr<LocalRanks> ranks(new LocalRanks(options, local, backends.size()));
  for (kernels::CreatedBackend& backend : backends) {
    LOSSD_RETURN_IF_ERROR(ranks->Add(std::move(backend)));
  }
  for (const auto& rank : ranks->ranks_) {
    rank->thread = std::thread([news = ranks->news_, one = rank.get()] { Run(one, *news); });
  }
  return ranks;
}

absl::StatusOr<std::unique_ptr<LocalRanks>> LocalRanks::StartOfProcess(
    const ServerOptions& options, std::function<void(const std::string& names)> on_joined,
    std::function<void(const RanksEnd&)> on_end) {
  LOSSD_TRY(Backends own, CreateOwnBackends(options));
  const auto devices = static_cast<int>(own.size());
  const int first = options.ranks.launch.rank * devices;
  return Start(options, std::move(own),
               {.first_rank = first,
                .devices = devices,
                .on_joined = [on_joined = std::move(on_joined),
                              names = RankNames(first, devices)] { on_joined(names); },
                .on_end = std::move(on_end)});
}

LocalRanks::LocalRanks(const ServerOptions& options, const LocalRanksOptions& local, size_t ranks)
    : options_(options), local_(local), news_(std::make_shared<News>(ranks, local)) {}

absl::Status LocalRanks::Add(kernels::CreatedBackend own) {
  const kernels::BackendInfo info = own.backend->info();
  auto rank = std::make_unique<Rank>(local_.first_rank + static_cast<int>(ranks_.size()));
  absl::StatusOr<std::unique_ptr<ranks::Worker>> worker =
      CreateWorker(options_,
                   {.rank = rank->rank,
                    .devices = local_.devices,
                    .local_address = local_.local_address,
                    .on_joined = [news = news_] { news->Joined(); },
                    .metrics = [one = rank.get()] { return one->Metrics(); }},
                   std::move(own));
  if (!worker.ok()) return worker.status();
  rank->worker = *std::move(worker);
  {
    absl::MutexLock lock(&rank->mutex);
    rank->gpus = WatchGpus(info, {&rank->watch});
  }
  log::Log(log::LogLevel::kInfo, "worker",
           {{"version", options_.version},
            {"rank", rank->rank},
            {"ranks", options_.ranks.launch.ranks * local_.devices},
            {"leader", options_.ranks.launch.leader},
            {"backend", info.name},
            {"device", info.device}});
  ranks_.push_back(std::move(rank));
  return absl::OkStatus();
}

LocalRanks::~LocalRanks() {
  news_->Stop();
  for (const auto& rank : ranks_) {
    if (rank->thread.joinable()) rank->worker->Leave("the process ends");
  }
  for (auto& rank : ranks_) {
    if (!rank->thread.joinable()) continue;
    if (rank->AwaitClosed()) {
      rank->thread.join();
    } else {
      rank->thread.detach();
      (void)rank.release();
    }
  }
}

// The thread of one rank. It closes the rank's gRPC stream to the leader here and not in the destructor,
// because the leader may wait until this stream is closed. If the rank is lost, the thread reports the end
// before it closes the stream, because closing may hang.
void LocalRanks::Run(Rank* rank, News& news) {
  const absl::Status status = rank->worker->Run();
  const RanksEnd end = {status, rank->worker->joined()};
  const bool lost = !status.ok() && end.joined;
  if (lost) news.Ended(end);
  rank->StopMonitors();
  rank->worker->Close();
  if (!lost) news.Ended(end);
  absl::MutexLock lock(&rank->mutex);
  rank->closed = true;
}

void LocalRanks::Leave(const std::string& reason) {
  for (const auto& rank : ranks_) rank->worker->Leave(absl::StrCat("rank ", rank->rank, " got ", reason));
}

bool LocalRanks::joined() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->worker->joined(); });
}

bool LocalRanks::device_lost() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->watch.lost(); });
}

absl::Duration LocalRanks::Silence() const {
  absl::Duration longest = absl::ZeroDuration();
  for (const auto& rank : ranks_) longest = std::max(longest, rank->worker->Silence());
  return longest;
}

// ---- The backends ----

namespace {

bool MayUseNccl(const ServerOptions& options, const kernels::BackendInfo& backend) {
  if (backend.uuids.size() > 1) return true;
  return options.ranks.several() && !backend.uuids.empty() && options.ranks.collectives != kernels::kGloo;
}

// The library by which the devices of a process exchange data, if there is only one process. GPUs use NCCL;
// CPU devices are threads in one address space.
std::string CollectivesOf(const ServerOptions& options, const kernels::BackendInfo& backend) {
  if (backend.uuids.size() > 1) return kernels::kNccl;
  return backend.name == "cpu" && options.cpu_devices > 1 ? "threads" : "";
}

absl::StatusOr<Backends> CreateOne(const ServerOptions& options) {
  LOSSD_TRY(kernels::CreatedBackend one, kernels::CreateBackend(BackendOf(options)));
  Backends backends;
  backends.push_back(std::move(one));
  return backends;
}

absl::StatusOr<Backends> CreateOneForEachRank(const ServerOptions& options) {
  kernels::BackendChoice choice = BackendOf(options);
  LOSSD_TRY(choice.link_host, RankHost(options));
  return kernels::CreateRankBackends(choice);
}

}  // namespace

absl::StatusOr<Backends> CreateOwnBackends(const ServerOptions& options) {
  LOSSD_TRY(Backends own, options.ranks.several() ? CreateOneForEachRank(options) : CreateOne(options));
  LOSSD_RETURN_IF_ERROR(CheckRankCount(options, static_cast<int>(own.size())));
  const kernels::CreatedBackend& first = own.front();
  if (!first.note.empty()) log::Log(log::LogLevel::kInfo, "no GPU backend", {{"reason", first.note}});
  if (MayUseNccl(options, first.backend->info())) {
    log::Log(log::LogLevel::kInfo, "settings of NCCL", {{kernels::kNcclMulticast, kernels::NcclMulticast()}});
  }
  return own;
}

absl::StatusOr<Compute> CreateCompute(const ServerOptions& options,
                                      const std::shared_ptr<grpc::ServerCredentials>& credentials) {
  LOSSD_TRY(Backends own, CreateOwnBackends(options));
  kernels::CreatedBackend first = std::move(own.front());
  Compute compute;
  if (!options.ranks.several()) {
    compute.collectives = CollectivesOf(options, first.backend->info());
    compute.backend = std::move(first.backend);
    return compute;
  }
  const auto devices = static_cast<int>(own.size());
  LOSSD_TRY(compute.leader, StartLeader(options, devices, credentials));
  if (devices > 1) {
    own.erase(own.begin());
    LOSSD_TRY(compute.other_devices,
              LocalRanks::Start(
                  options, std::move(own),
                  {.first_rank = 1, .devices = devices, .local_address = compute.leader->local_address()}));
  }
  LOSSD_TRY(std::unique_ptr<kernels::Backend> backend, compute.leader->Form(std::move(first)));
  compute.collectives = compute.leader->collectives();
  compute.backend = std::move(backend);
  return compute;
}

// ---- Leader and workers ----

namespace {

constexpr size_t kLeastSecretBytes = 16;
constexpr size_t kMostSecretBytes = 1024;
// The largest slice_bytes with several ranks. A slice with all inputs of its rows must fit into one message.
constexpr int64_t kMostSliceBytes = int64_t{128} << 20;

// The address at which rank 0 listens for the other ranks.
absl::StatusOr<Address> RankAddress(const RankOptions& options) {
  if (!options.listen.empty()) return ParseAddress("rank_listen", options.listen);
  absl::StatusOr<Address> leader = ParseAddress("leader", options.launch.leader);
  // Listen on all addresses, because the leader's name may resolve to another address here than on other
  // hosts.
  if (leader.ok() && !IsLoopback(*leader)) leader->host = "[::]";
  return leader;
}

absl::Status CheckReach(const ServerOptions& options) {
  LOSSD_TRY(const Address leader, ParseAddress("leader", options.ranks.launch.leader));
  if (leader.port == Address::kUnixSocket) {
    return errors::FieldError("leader", "be host:port", options.ranks.launch.leader);
  }
  LOSSD_TRY(const Address listen, RankAddress(options.ranks));
  if (Asks(options.security) && options.ranks.secret_file.empty()) {
    return errors::FieldError(
        "rank_secret_file",
        "be given where clients are asked who they are (--token_file, --tls_client_ca), for a "
        "program that joins as a rank gets the weights of every head",
        "nothing");
  }
  const bool guarded = !options.ranks.ca.empty() && !options.ranks.secret_file.empty();
  if (guarded || options.security.insecure || (IsLoopback(leader) && IsLoopback(listen)))
    return absl::OkStatus();
  return errors::FieldError(
      "leader",
      "be a loopback address unless the ranks' connections are encrypted and ranks are admitted by a secret: "
      "give "
      "--tls_cert, --tls_key, --rank_ca and --rank_secret_file, or allow it with --insecure",
      options.ranks.launch.leader);
}

absl::StatusOr<std::string> ReadSecret(const RankOptions& options) {
  if (options.secret_file.empty()) return "";
  const access::AccessFile file = {"rank_secret_file", options.secret_file};
  LOSSD_TRY(std::string text, access::ReadAccessFile(file, access::Secrecy::kSecret));
  const std::string secret(absl::StripAsciiWhitespace(text));
  for (const char c : secret) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c))) {
      return access::AccessFileError(file, "hold one line of printable characters without spaces");
    }
  }
  if (secret.size() < kLeastSecretBytes || secret.size() > kMostSecretBytes) {
    return access::AccessFileError(
        file, absl::StrCat("hold ", kLeastSecretBytes, " to ", kMostSecretBytes, " characters"));
  }
  return secret;
}

std::string Text(bool value) { return value ? "true" : "false"; }

ranks::Settings SettingsOf(const ServerOptions& options, int devices) {
  return {{"version", options.version},
          {"messages between ranks", ranks::ProtocolHash()},
          {ranks::kDevices, absl::StrCat(devices)},
          {"ranks", absl::StrCat(options.ranks.launch.ranks)},
          {"deterministic", Text(options.deterministic)},
          {"split", options.split},
          {"collectives", options.ranks.collectives},
          {"collective_timeout", absl::FormatDuration(options.ranks.collective_timeout)},
          {"rank_silence_timeout", absl::FormatDuration(options.ranks.silence_timeout)},
          {"workspace_bytes", absl::StrCat(options.workspace_bytes)},
          {"memory_limit_bytes", absl::StrCat(options.memory_limit_bytes)},
          {"slice_bytes", absl::StrCat(options.slice_bytes)}};
}

ranks::ChannelLimits LimitsOf(const ServerOptions& options) {
  return {.slice_bytes = options.slice_bytes, .silence = options.ranks.silence_timeout};
}

}  // namespace

absl::Status CheckRanks(const ServerOptions& options) {
  const RankOptions& ranks = options.ranks;
  if (!ranks.several()) return absl::OkStatus();
  absl::Status status = CheckReach(options);
  if (options.replicas > 1) {
    status.Update(errors::FieldError("replicas", "be 1 with several ranks", options.replicas));
  }
  status.Update(CheckPositive("rank_timeout", ranks.timeout));
  status.Update(CheckPositive("rank_silence_timeout", ranks.silence_timeout));
  status.Update(CheckPositive("collective_timeout", ranks.collective_timeout));
  if (options.security.tls_cert.empty() != ranks.ca.empty()) {
    status.Update(errors::FieldError("rank_ca",
                                     "be given together with tls_cert where there are several ranks",
                                     ranks.ca.empty() ? "nothing" : ranks.ca));
  }
  if (options.slice_bytes > kMostSliceBytes) {
    status.Update(
        errors::FieldError("slice_bytes", "be at most 128 MiB with several ranks", options.slice_bytes));
  }
  return status;
}

absl::StatusOr<std::string> RankHost(const ServerOptions& options) {
  if (!options.ranks.host.empty()) return options.ranks.host;
  LOSSD_TRY(const Address leader, ParseAddress("leader", options.ranks.launch.leader));
  return ranks::LocalAddressFor(leader.host);
}

absl::Status CheckRankCount(const ServerOptions& options, int devices) {
  const int processes = options.ranks.launch.ranks;
  if (devices <= ranks::kMostRanks / processes) return absl::OkStatus();
  return errors::FieldError(
      "ranks", absl::StrCat("be at most ", ranks::kMostRanks / devices, " with ", devices, " devices each"),
      processes);
}

absl::StatusOr<std::unique_ptr<ranks::Leader>> StartLeader(
    const ServerOptions& options, int devices, const std::shared_ptr<grpc::ServerCredentials>& credentials) {
  LOSSD_TRY(const Address listen, RankAddress(options.ranks));
  LOSSD_TRY(const kernels::Split split, kernels::SplitOf(BackendOf(options)));
  LOSSD_TRY(std::string secret, ReadSecret(options.ranks));
  const int ranks = options.ranks.launch.ranks * devices;
  LOSSD_TRY(std::unique_ptr<ranks::Leader> leader,
            ranks::Leader::Start({.ranks = ranks,
                                  .devices = devices,
                                  .host = listen.host,
                                  .port = listen.port,
                                  .credentials = credentials,
                                  .secret = std::move(secret),
                                  .limits = LimitsOf(options),
                                  .settings = SettingsOf(options, devices),
                                  .group = {.split = split},
                                  .share_rows = options.ranks.shared_memory,
                                  .timeout = options.ranks.timeout,
                                  .collective_timeout = options.ranks.collective_timeout,
                                  .stop = options.ranks.stop_requested}));
  log::Log(log::LogLevel::kInfo, "waiting for the other ranks", {{"ranks", ranks}, {"port", leader->port()}});
  return leader;
}

absl::StatusOr<std::unique_ptr<ranks::Worker>> CreateWorker(const ServerOptions& options, WorkerSpec spec,
                                                            kernels::CreatedBackend own) {
  LOSSD_TRY(std::string secret, ReadSecret(options.ranks));
  const bool local = !spec.local_address.empty();
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (!local && !options.ranks.ca.empty()) {
    LOSSD_TRY(const std::string ca,
              access::ReadAccessFile({"rank_ca", options.ranks.ca}, access::Secrecy::kPublic));
    credentials = grpc::SslCredentials({.pem_root_certs = ca, .pem_private_key = "", .pem_cert_chain = ""});
  }
  const int threads = CheckpointThreads(options, own.backend->info());
  return ranks::Worker::Create({.rank = spec.rank,
                                .leader = local ? spec.local_address : options.ranks.launch.leader,
                                .credentials = std::move(credentials),
                                .secret = std::move(secret),
                                .limits = LimitsOf(options),
                                .settings = SettingsOf(options, spec.devices),
                                .files = {.directory = options.checkpoint_directory,
                                          .buffer_bytes = options.checkpoint_buffer_bytes,
                                          .reserve_bytes = options.memory_reserve_bytes,
                                          .threads = threads},
                                .timeout = options.ranks.timeout,
                                .on_joined = std::move(spec.on_joined),
                                .metrics = std::move(spec.metrics)},
                               std::move(own));
}

using metrics::PlainFamily;

// ---- Metrics of workers ----

ranks::v1::Metrics ToProto(const std::vector<PlainFamily>& families) {
  ranks::v1::Metrics out;
  for (const PlainFamily& family : families) {
    ranks::v1::MetricFamily* const to = out.add_families();
    to->set_name(family.name);
    to->set_help(family.help);
    to->set_counter(family.counter);
    for (const PlainFamily::Sample& each : family.samples) {
      ranks::v1::MetricSample* const sample = to->add_samples();
      sample->set_value(each.value);
      for (const auto& [name, value] : each.labels) {
        ranks::v1::MetricLabel* const label = sample->add_labels();
        label->set_name(name);
        label->set_value(value);
      }
    }
  }
  return out;
}

std::vector<PlainFamily> FromProto(const ranks::v1::Metrics& message) {
  std::vector<PlainFamily> out;
  for (const ranks::v1::MetricFamily& family : message.families()) {
    out.push_back({.name = family.name(), .help = family.help(), .counter = family.counter()});
    for (const ranks::v1::MetricSample& each : family.samples()) {
      PlainFamily::Sample sample;
      sample.value = each.value();
      for (const ranks::v1::MetricLabel& label : each.labels()) {
        sample.labels.emplace_back(label.name(), label.value());
      }
      out.back().samples.push_back(std::move(sample));
    }
  }
  return out;
}

}  // namespace lossd::app
