// SPDX-License-Identifier: Apache-2.0
// Server and RunWorker (server.h): how the parts of a server start, work together and end.
#include "server/app/server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <string.h>

#include <algorithm>
#include <optional>

#include "absl/memory/memory.h"
#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "proto/wire/direct_call.h"
#include "proto/wire/status_details.h"
#include "server/access/connection_acceptor.h"
#include "server/access/listening_socket.h"
#include "server/log/log.h"
#include "server/metrics/metrics.h"
#include "server/rpc/services.h"
#include "server/rpc/workers.h"

namespace lossd::app {
namespace {

constexpr const char* kServices[] = {"lossd.v1.LossService", "lossd.v1.HeadService"};

uint64_t DrawIncarnation() {
  absl::BitGen generator;
  return absl::Uniform<uint64_t>(absl::IntervalClosed, generator, 1, UINT64_MAX);
}

}  // namespace

Server::Server(const ServerOptions& options) : options_(options) {}

std::string Server::grpc_address() const { return TextOf(grpc_addresses_); }

std::string Server::http_address() const { return http_ == nullptr ? "" : http_->address(); }

absl::Status Server::Live() const { return app::Live(health(), options_.liveness_timeout); }

absl::Status Server::Init() {
  LOSSD_RETURN_IF_ERROR(CheckOptions(options_));
  LOSSD_RETURN_IF_ERROR(CreateSecurity());
  LOSSD_RETURN_IF_ERROR(CreateEngine());
  CreateServices();
  if (options_.restore == "latest") LOSSD_RETURN_IF_ERROR(head_service_->RestoreLatest());
  LOSSD_RETURN_IF_ERROR(Listen());
  if (!options_.http.empty()) LOSSD_RETURN_IF_ERROR(StartHttp());
  LogStart();
  return absl::OkStatus();
}

// Parses the addresses, checks that the server may listen there, and makes security_.
absl::Status Server::CreateSecurity() {
  LOSSD_TRY(grpc_addresses_, ParseAddresses("listen", options_.listen));
  absl::Status allowed;
  for (const Address& address : grpc_addresses_) allowed.Update(CheckGrpcAddress(options_.security, address));
  if (allowed.ok() && !options_.http.empty()) {
    LOSSD_TRY(http_bind_, ParseAddress("http", options_.http));
    allowed = CheckHttpAddress(options_.security, http_bind_);
  }
  if (!allowed.ok()) return allowed;
  // The function is called during calls, when the acceptor exists.
  LOSSD_TRY(security_, Security::Create(options_.security, [this](absl::string_view address) {
              return acceptor_ == nullptr ? "" : acceptor_->NameAt(address);
            }));
  return absl::OkStatus();
}

void Server::LogStart() const {
  const kernels::BackendInfo info = backend_->info();
  log::Log(log::LogLevel::kInfo, "serving",
           {{"version", options_.version},
            {"grpc", grpc_address()},
            {"http", http_address()},
            {"security", security_->Text()},
            {"backend", info.name},
            {"device", info.device},
            {"deterministic", options_.deterministic},
            {"incarnation", absl::StrCat(absl::Hex(engine_->incarnation(), absl::kZeroPad16))}});
  metrics_->events().Add(
      metrics::EventLevel::kInfo, "server_started", "",
      absl::StrCat("lossd ", options_.version, " serves, ", info.name, " backend, ", info.device));
  LogMemoryPlan(options_, *backend_, shared_memory_.get());
}

absl::Status Server::CreateEngine() {
  LOSSD_TRY(Compute compute, CreateCompute(options_, security_->rank_credentials()));
  other_devices_ = std::move(compute.other_devices);
  leader_ = std::move(compute.leader);
  backend_ = std::move(compute.backend);
  collectives_ = std::move(compute.collectives);
  const kernels::BackendInfo info = backend_->info();
  metrics_ = std::make_unique<metrics::Metrics>(metrics::BuildInfo{
      .version = options_.version, .backend = info.name, .device = info.device, .compiler = __VERSION__});
  device_watch_ = std::make_unique<DeviceWatch>([this](const absl::Status& status) { OnDeviceLost(status); });
  LOSSD_TRY(engine_, engine::Engine::Create(EngineOptionsOf(options_), backend_.get(), DrawIncarnation(),
                                            {metrics_.get(), device_watch_.get()}));
  LOSSD_TRY(shared_memory_, SharedMemory::Start(options_, grpc_addresses_, backend_.get()));
  metrics_->Attach(
      engine_.get(), backend_.get(), [this] { return RanksOf(leader_.get(), *backend_); },
      [this] { return SharedMemory::UsesOf(shared_memory_.get()); });
  gpus_ = WatchGpus(info, {metrics_.get(), device_watch_.get()});
  std::vector<const metrics::GpuMonitor*> monitors;
  for (const auto& gpu : gpus_) monitors.push_back(gpu.get());
  metrics_->AttachGpus(std::move(monitors));
  metrics_->AttachTls(security_->tls());
  if (leader_ != nullptr) WatchRanks();
  return absl::OkStatus();
}

// Watches the ranks. The loss of a rank is handled like the loss of the device, because its part of every
// head is lost.
void Server::WatchRanks() {
  leader_->WatchLoss([this](const absl::Status& status) {
    metrics_->OnDeviceError(status);
    device_watch_->OnDeviceError(status);
  });
  leader_->WatchLeaving([this](const ranks::Leaving& leaving) {
    log::Log(log::LogLevel::kInfo, "a rank was asked to stop",
             {{"rank", leaving.rank}, {"reason", leaving.reason}});
    options_.ranks.on_leaving();
  });
}

void Server::CreateServices() {
  regions::Regions* const regions = shared_memory_ == nullptr ? nullptr : shared_memory_->regions();
  head_service_ =
      rpc::HeadService::Create(HeadServiceOptionsOf(options_, backend_->info(), regions,
                                                    leader_ == nullptr ? nullptr : leader_->file_sites()),
                               engine_.get(), &security_->access_control(), metrics_.get());
  loss_service_ = std::make_unique<rpc::LossService>(LossServiceOptionsOf(options_, regions), engine_.get(),
                                                     &security_->access_control(), metrics_.get(),
                                                     head_service_->requests());
  server_service_ = std::make_unique<rpc::ServerService>(
      rpc::ServerServiceOptions{.version = options_.version,
                                .started = started_,
                                .max_message_bytes = MaxMessageBytes(options_),
                                .max_streams = options_.max_streams,
                                .ranks = [this] { return RanksOf(leader_.get()); },
                                .collectives = collectives_,
                                .region_socket = shared_memory_ == nullptr ? "" : shared_memory_->socket(),
                                .region_devices = SharedMemory::DevicesOf(shared_memory_.get()),
                                .http = [this] { return http_url_.Get(); }},
      engine_.get(), backend_.get(), loss_service_.get(), &security_->access_control(),
      head_service_->requests());
}

absl::Status Server::Listen() {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  SetReflection(!security_->asks(), &builder);
  LOSSD_TRY(std::vector<access::ListeningSocket> sockets,
            OpenSockets(&grpc_addresses_, options_.unix_socket_mode));
  CreateAcceptor(std::move(sockets));
  auto take = access::GrpcTaker(&builder, security_->credentials());
  pulse_ = std::make_unique<rpc::Pulse>(&builder);
  rpc::Configure(TransportOf(options_), &builder);
  builder.RegisterService(loss_service_.get());
  builder.RegisterService(head_service_.get());
  builder.RegisterService(server_service_.get());
  grpc_ = builder.BuildAndStart();
  if (grpc_ == nullptr) return absl::UnavailableError("gRPC cannot start; its log says why");
  for (const char* service : kServices) grpc_->GetHealthCheckService()->SetServingStatus(service, true);
  acceptor_->Start("lossd-accept", std::move(take));
  pulse_->Start();
  if (options_.embedded && !security_->asks()) ServeThisProcess();
  return absl::OkStatus();
}

// Clients in this process open their loss computations without a connection. Their other calls, which are
// few, use a connection.
void Server::ServeThisProcess() {
  direct_ =
      wire::DirectServer::Create(static_cast<size_t>(MaxMessageBytes(options_)),
                                 [losses = loss_service_.get()](wire::CallContext* context, uint64_t client) {
                                   return losses->ComputeLossDirect(context, client);
                                 });
  for (const Address& address : grpc_addresses_) direct_->Publish(address.text());
}

void Server::CreateAcceptor(std::vector<access::ListeningSocket> sockets) {
  access::EntranceOptions limits{.in_all = options_.max_connections,
                                 .per_peer = options_.max_connections_per_address};
  limits.on_refused = [this](int, absl::string_view flag, const access::Peer& peer) {
    OnRefused(flag, peer.name);
  };
  acceptor_ = std::make_unique<access::ConnectionAcceptor>(std::move(sockets), std::move(limits));
}

void Server::OnRefused(absl::string_view limit, absl::string_view address) {
  metrics_->CountLimit(limit);
  {
    const std::lock_guard<std::mutex> lock(refusals_mutex_);
    if (!refusals_logged_.Ready()) return;
  }
  log::Log(log::LogLevel::kWarning, "connections refused", {{"limit", limit}, {"address", address}});
}

absl::Status Server::StartHttp() {
  pages_ = std::make_unique<metrics::HttpPages>(
      metrics::StatusPageOptions{.version = options_.version,
                                 .grpc_address = grpc_address(),
                                 .started = started_,
                                 .collectives = collectives_},
      options_.checkpoint_directory, engine_.get(), backend_.get(), metrics_.get(),
      [this] { return Trouble(health(), options_.liveness_timeout); });
  Address address = http_bind_;
  if (address.host == "localhost") address.host = "127.0.0.1";  // HttpServer takes addresses, not names
  absl::StatusOr<std::unique_ptr<metrics::HttpServer>> http = metrics::HttpServer::Start(
      address.text(), Handlers(), security_->http(),
      [this](absl::string_view limit, absl::string_view peer) { OnRefused(limit, peer); });
  if (!http.ok()) return http.status();
  http_ = *std::move(http);
  http_watched_ = http_.get();
  http_url_.Set(absl::StrCat(options_.security.http_tls ? "https://" : "http://", http_->address()));
  return absl::OkStatus();
}

metrics::HttpHandlers Server::Handlers() {
  using metrics::HttpResponse;
  metrics::HttpHandlers handlers;
  pages_->AddTo(&handlers);
  handlers["/metrics"] = [this](const auto&) {
    return HttpResponse{.content_type = "text/plain; version=0.0.4; charset=utf-8",
                        .body = metrics_->RenderText()};
  };
  handlers["/livez"] = [this](const auto&) { return Liveness(health(), options_.liveness_timeout); };
  handlers["/readyz"] = [this](const auto&) { return Readiness(health()); };
  handlers["/healthz"] = handlers["/readyz"];
  return handlers;
}

// Takes no lock, so that /livez can report an engine that hangs with its lock held. If a scrape on the HTTP
// thread waits for that lock, a probe gets no answer; this also counts as a failure.
Health Server::health() const {
  return {.draining = draining_,
          .device_lost = device_watch_->lost(),
          .device_silence = std::max(engine_->DeviceSilence(), SilenceOf(other_devices_)),
          .threads = {{{"gRPC's threads", pulse_->Silence()},
                       {"the thread that accepts connections", acceptor_->Silence()},
                       {"the thread of the region socket", SilenceOf(shared_memory_)},
                       {"a thread of the ranks' sockets", SilenceOf(leader_)},
                       {"HTTP's threads", SilenceOf(http_watched_.load())}}}};
}

// The data on the device is lost. Reports this, so that the server is replaced.
void Server::OnDeviceLost(const absl::Status& status) {
  log::Log(log::LogLevel::kError, "the device is lost", {{"error", status.message()}});
  if (grpc_ != nullptr) grpc_->GetHealthCheckService()->SetServingStatus(false);
  options_.on_device_lost(status);
}

bool Server::Drain(absl::Time deadline) {
  bool clean = true;
  std::call_once(drained_, [&] {
    draining_ = true;
    metrics_->SetDraining(true);
    grpc_->GetHealthCheckService()->SetServingStatus(false);
    loss_service_->Drain();
    head_service_->Drain();
    server_service_->Drain();
    if (device_watch_->lost()) loss_service_->EndAll(absl::UnavailableError("the device is lost"));
    clean = loss_service_->WaitUntilIdle(deadline);
    clean = head_service_->WaitUntilIdle(deadline) && clean;
    head_service_->CancelSaves();
    // After Shutdown new calls end with CANCELLED. Until then, for kLastWords, they get UNAVAILABLE, so that
    // clients have time to stop.
    constexpr absl::Duration kLastWords = absl::Milliseconds(200);
    absl::SleepFor(std::min(kLastWords, deadline - clocks::SteadyNow()));
    // The calls that remain must be cancelled. Some of them may be watchers of health or reflection, which
    // never end by themselves.
    constexpr absl::Duration kGoodbye = absl::Milliseconds(500);
    acceptor_->Stop();
    pulse_->Stop();
    if (direct_ != nullptr) direct_->Shutdown();
    grpc_->Shutdown(wire::GrpcTime(clocks::SteadyNow() + kGoodbye));
    loss_service_->WaitUntilIdle(absl::InfiniteFuture());
    head_service_->WaitUntilIdle(absl::InfiniteFuture());
  });
  return clean;
}

// gRPC may hold slices of staging buffers a little longer than the server. Waits until it has released them,
// because the pool must outlive them.
void Server::WaitForStaging() {
  const absl::Time limit = clocks::SteadyNow() + absl::Seconds(10);
  const auto in_use = [this] {
    const engine::EngineStats stats = engine_->stats();
    return stats.staging_used_bytes > 0 || stats.area_buffers_lent > 0;
  };
  while (in_use()) {
    if (clocks::SteadyNow() > limit) {
      log::Log(log::LogLevel::kError, "staging buffers are still in use; leaving their memory to the system");
      (void)engine_.release();
      (void)metrics_.release();
      (void)backend_.release();
      return;
    }
    absl::SleepFor(absl::Milliseconds(1));
  }
}

Server::~Server() {
  if (grpc_ != nullptr) Drain(clocks::SteadyNow());
  http_watched_ = nullptr;
  http_.reset();
  pages_.reset();
  grpc_.reset();
  server_service_.reset();
  head_service_.reset();
  loss_service_.reset();
  if (metrics_ != nullptr) {
    metrics_->AttachGpus({});
    metrics_->AttachTls(nullptr);
    metrics_->Detach();
  }
  if (engine_ != nullptr) WaitForStaging();
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options) {
  auto server = absl::WrapUnique(new Server(options));
  LOSSD_RETURN_IF_ERROR(server->Init());
  return server;
}

namespace {

class WorkerApp {
 public:
  WorkerApp(const ServerOptions& options, ServiceManager* manager, StopEvents* events)
      : options_(options), manager_(manager), events_(events) {}
  ~WorkerApp() {
    keep_alive_.reset();
    http_.reset();
    ranks_.reset();
  }

  absl::Status Start();
  RanksEnd Run();

 private:
  absl::Status StartRanks();
  absl::Status StartHttp();
  metrics::HttpHandlers Handlers() const;
  Health health() const {
    return {.device_lost = ranks_->device_lost(),
            .device_silence = ranks_->Silence(),
            .threads = {{{"HTTP's threads", SilenceOf(http_watched_.load())}}}};
  }
  // Waits for the end of the ranks. DEADLINE_EXCEEDED after `limit`, CANCELLED at a signal.
  absl::Status AwaitEnd(absl::Duration limit);

  const ServerOptions& options_;
  ServiceManager* const manager_;
  StopEvents* const events_;
  std::unique_ptr<Security> security_;
  std::unique_ptr<LocalRanks> ranks_;
  std::unique_ptr<metrics::HttpServer> http_;
  // For health(): http_, after it has started.
  std::atomic<const metrics::HttpServer*> http_watched_{nullptr};
  std::optional<KeepAlive> keep_alive_;
  absl::Mutex mutex_;
  std::optional<RanksEnd> end_ ABSL_GUARDED_BY(mutex_);
};

absl::Status WorkerApp::Start() {
  LOSSD_RETURN_IF_ERROR(CheckOptions(options_));
  LOSSD_TRY(security_, Security::Create(options_.security));
  LOSSD_RETURN_IF_ERROR(StartRanks());
  keep_alive_.emplace(manager_, [this] { return Live(health(), options_.liveness_timeout); });
  return options_.ranks.worker_http.empty() ? absl::OkStatus() : StartHttp();
}

absl::Status WorkerApp::StartRanks() {
  LOSSD_TRY(ranks_,
            LocalRanks::StartOfProcess(
                options_,
                [this](const std::string& names) { manager_->Ready(absl::StrCat("computes as ", names)); },
                [this](const RanksEnd& end) {
                  {
                    absl::MutexLock lock(&mutex_);
                    end_ = end;
                  }
                  events_->NotifyDeviceLost();
                }));
  return absl::OkStatus();
}

metrics::HttpHandlers WorkerApp::Handlers() const {
  using metrics::HttpResponse;
  metrics::HttpHandlers handlers;
  handlers["/livez"] = [this](const auto&) { return Liveness(health(), options_.liveness_timeout); };
  handlers["/readyz"] = [this](const auto&) {
    return ranks_->joined() ? Readiness(health())
                            : HttpResponse{.status = 503, .body = "waiting for the other ranks\n"};
  };
  handlers["/healthz"] = handlers["/readyz"];
  return handlers;
}

absl::Status WorkerApp::StartHttp() {
  LOSSD_TRY(Address address, ParseAddress("worker_http", options_.ranks.worker_http));
  LOSSD_RETURN_IF_ERROR(CheckHttpAddress(options_.security, address));
  if (address.host == "localhost") address.host = "127.0.0.1";
  LOSSD_TRY(http_, metrics::HttpServer::Start(address.text(), Handlers(), security_->http()));
  http_watched_ = http_.get();
  log::Log(log::LogLevel::kInfo, "probes", {{"http", http_->address()}});
  return absl::OkStatus();
}

absl::Status WorkerApp::AwaitEnd(absl::Duration limit) {
  const absl::Time deadline = clocks::SteadyNow() + limit;
  absl::MutexLock lock(&mutex_);
  const auto ended = [this] {
    mutex_.AssertHeld();
    return end_.has_value();
  };
  while (!clocks::AwaitFor(mutex_, absl::Condition(&ended), kSignalPoll)) {
    if (events_->Pending() != 0) return absl::CancelledError("second signal: leaving at once");
    if (clocks::SteadyNow() > deadline) return absl::DeadlineExceededError("rank 0 has not ended this rank");
  }
  return absl::OkStatus();
}

RanksEnd WorkerApp::Run() {
  const StopEvents::Event event = events_->Wait();
  if (event.signal != 0) {
    log::Log(log::LogLevel::kInfo, "asking rank 0 to drain", {{"reason", strsignal(event.signal)}});
    manager_->Stopping(absl::StrCat("asking rank 0 to drain: ", strsignal(event.signal)),
                       options_.drain_timeout + kWorkerGrace);
    ranks_->Leave(strsignal(event.signal));
    const absl::Status ended = AwaitEnd(options_.drain_timeout + kWorkerGrace);
    if (!ended.ok()) return {ended, false};
  }
  absl::MutexLock lock(&mutex_);
  return *end_;
}

}  // namespace

RanksEnd RunWorker(const ServerOptions& options, ServiceManager* manager, StopEvents& events) {
  // The app is destroyed only if it had joined and ended without error. Otherwise its destructor may wait for
  // a device or a rank that hangs.
  auto app = std::make_unique<WorkerApp>(options, manager, &events);
  RanksEnd end{app->Start(), false};
  if (end.status.ok()) end = app->Run();
  if (!end.status.ok() || !end.joined) (void)app.release();
  return end;
}

}  // namespace lossd::app
