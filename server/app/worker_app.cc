// SPDX-License-Identifier: Apache-2.0
#include "server/app/worker_app.h"

#include <string.h>

#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/app/check_options.h"
#include "server/app/compute.h"
#include "server/app/device_watch.h"
#include "server/app/gpu_watch.h"
#include "server/app/health.h"
#include "server/app/rank_families.h"
#include "server/app/security.h"
#include "server/log/log.h"
#include "server/metrics/http_server.h"

namespace lossd::app {
namespace {

// For rank 0 to end the others after its drain.
constexpr absl::Duration kGrace = absl::Seconds(10);
// How often a worker that was asked to stop looks for a second signal.
constexpr absl::Duration kLook = absl::Milliseconds(200);

class WorkerApp {
 public:
  WorkerApp(const ServerOptions& options, ServiceManager* manager) : options_(options), manager_(manager) {}
  ~WorkerApp() {
    keep_alive_.reset();
    http_.reset();
    if (runs_.joinable()) runs_.join();
    {  // Monitors call into the worker, and it asks them.
      std::vector<std::unique_ptr<metrics::GpuMonitor>> gpus;
      absl::MutexLock lock(&mutex_);
      gpus.swap(gpus_);
    }
    worker_.reset();
  }

  absl::Status Start();
  WorkerEnd Run(StopEvents& events);

 private:
  absl::Status StartHttp();
  ranks::v1::Metrics Metrics();
  metrics::HttpHandlers Handlers() const;
  Health health() const {
    return {.device_lost = device_watch_->lost(), .device_silence = worker_->Silence()};
  }
  // Waits for the end. DEADLINE_EXCEEDED after `limit`, CANCELLED at a signal.
  absl::Status AwaitEnd(const StopEvents& events, absl::Duration limit);

  const ServerOptions& options_;
  ServiceManager* const manager_;
  std::unique_ptr<Security> security_;
  std::unique_ptr<ranks::Worker> worker_;
  std::optional<DeviceWatch> device_watch_;
  std::unique_ptr<metrics::HttpServer> http_;
  std::optional<KeepAlive> keep_alive_;
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<metrics::GpuMonitor>> gpus_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  std::thread runs_;
};

absl::Status WorkerApp::Start() {
  if (absl::Status status = CheckOptions(options_); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<Security>> security = Security::Create(options_.security);
  if (!security.ok()) return security.status();
  security_ = *std::move(security);
  absl::StatusOr<kernels::CreatedBackend> own = CreateOwnBackend(options_);
  if (!own.ok()) return own.status();
  const kernels::BackendInfo info = own->backend->info();
  absl::StatusOr<std::unique_ptr<ranks::Worker>> worker =
      CreateWorker(options_, *std::move(own),
                   {.on_joined =
                        [manager = manager_, rank = options_.ranks.launch.rank] {
                          manager->Ready(absl::StrCat("computes as rank ", rank));
                        },
                    .metrics = [this] { return Metrics(); }});
  if (!worker.ok()) return worker.status();
  worker_ = *std::move(worker);
  device_watch_.emplace([this](const absl::Status& status) { worker_->ReportLoss(status); });
  {
    absl::MutexLock lock(&mutex_);
    gpus_ = WatchGpus(info, {&*device_watch_});
  }
  keep_alive_.emplace(manager_, [this] { return Live(health(), options_.liveness_timeout); });
  log::Log(log::LogLevel::kInfo, "worker",
           {{"version", options_.version},
            {"rank", options_.ranks.launch.rank},
            {"ranks", options_.ranks.launch.ranks},
            {"leader", options_.ranks.launch.leader},
            {"backend", info.name},
            {"device", info.device}});
  return options_.ranks.worker_http.empty() ? absl::OkStatus() : StartHttp();
}

metrics::HttpHandlers WorkerApp::Handlers() const {
  using metrics::HttpResponse;
  metrics::HttpHandlers handlers;
  handlers["/livez"] = [this](const auto&) { return Liveness(health(), options_.liveness_timeout); };
  handlers["/readyz"] = [this](const auto&) {
    return worker_->joined() ? Readiness(health())
                             : HttpResponse{.status = 503, .body = "waiting for the other ranks\n"};
  };
  handlers["/healthz"] = handlers["/readyz"];
  return handlers;
}

ranks::v1::Metrics WorkerApp::Metrics() {
  const kernels::RankTimes times = worker_->times();
  absl::MutexLock lock(&mutex_);
  return ToProto(metrics::WorkerFamilies(times, gpus_));
}

absl::Status WorkerApp::StartHttp() {
  absl::StatusOr<Address> address = ParseAddress("worker_http", options_.ranks.worker_http);
  if (!address.ok()) return address.status();
  if (absl::Status status = CheckHttpAddress(options_.security, *address); !status.ok()) return status;
  if (address->host == "localhost") address->host = "127.0.0.1";
  absl::StatusOr<std::unique_ptr<metrics::HttpServer>> http =
      metrics::HttpServer::Start(address->text(), Handlers(), security_->http());
  if (!http.ok()) return http.status();
  http_ = *std::move(http);
  log::Log(log::LogLevel::kInfo, "probes", {{"http", http_->address()}});
  return absl::OkStatus();
}

absl::Status WorkerApp::AwaitEnd(const StopEvents& events, absl::Duration limit) {
  const absl::Time deadline = absl::Now() + limit;
  absl::MutexLock lock(&mutex_);
  const auto ended = [this] {
    mutex_.AssertHeld();
    return end_.has_value();
  };
  while (!mutex_.AwaitWithTimeout(absl::Condition(&ended), kLook)) {
    if (events.Pending() != 0) return absl::CancelledError("second signal: leaving at once");
    if (absl::Now() > deadline) return absl::DeadlineExceededError("rank 0 has not ended this rank");
  }
  return absl::OkStatus();
}

WorkerEnd WorkerApp::Run(StopEvents& events) {
  runs_ = std::thread([this, &events] {
    absl::Status status = worker_->Run();
    {
      absl::MutexLock lock(&mutex_);
      end_ = std::move(status);
    }
    events.NotifyDeviceLost();
  });
  const StopEvents::Event event = events.Wait();
  if (event.signal != 0) {
    log::Log(log::LogLevel::kInfo, "asking rank 0 to drain", {{"reason", strsignal(event.signal)}});
    manager_->Stopping(absl::StrCat("asking rank 0 to drain: ", strsignal(event.signal)),
                       options_.drain_timeout + kGrace);
    worker_->Leave(absl::StrCat("rank ", options_.ranks.launch.rank, " got ", strsignal(event.signal)));
    const absl::Status ended = AwaitEnd(events, options_.drain_timeout + kGrace);
    if (!ended.ok()) return {ended, false};
  }
  absl::MutexLock lock(&mutex_);
  return {*end_, worker_->joined()};
}

}  // namespace

WorkerEnd RunWorker(const ServerOptions& options, ServiceManager* manager, StopEvents& events) {
  // Not taken down unless it had joined and ended well: what it would wait for may hang.
  auto app = std::make_unique<WorkerApp>(options, manager);
  WorkerEnd end{app->Start(), false};
  if (!end.status.ok()) return end;
  end = app->Run(events);
  if (!end.status.ok() || !end.joined) (void)app.release();
  return end;
}

}  // namespace lossd::app
