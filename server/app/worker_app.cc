// SPDX-License-Identifier: Apache-2.0
#include "server/app/worker_app.h"

#include <string.h>

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/clocks/clock.h"
#include "server/app/health.h"
#include "server/app/security.h"
#include "server/app/server_parts.h"
#include "server/log/log.h"
#include "server/metrics/http_server.h"

namespace lossd::app {
namespace {

// For rank 0 to end the others after its drain.
constexpr absl::Duration kWorkerGrace = absl::Seconds(10);

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
    return {.device_lost = ranks_->device_lost(), .device_silence = ranks_->Silence()};
  }
  // Waits for the end. DEADLINE_EXCEEDED after `limit`, CANCELLED at a signal.
  absl::Status AwaitEnd(absl::Duration limit);

  const ServerOptions& options_;
  ServiceManager* const manager_;
  StopEvents* const events_;
  std::unique_ptr<Security> security_;
  std::unique_ptr<LocalRanks> ranks_;
  std::unique_ptr<metrics::HttpServer> http_;
  std::optional<KeepAlive> keep_alive_;
  absl::Mutex mutex_;
  std::optional<RanksEnd> end_ ABSL_GUARDED_BY(mutex_);
};

absl::Status WorkerApp::Start() {
  if (absl::Status status = CheckOptions(options_); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<Security>> security = Security::Create(options_.security);
  if (!security.ok()) return security.status();
  security_ = *std::move(security);
  if (absl::Status status = StartRanks(); !status.ok()) return status;
  keep_alive_.emplace(manager_, [this] { return Live(health(), options_.liveness_timeout); });
  return options_.ranks.worker_http.empty() ? absl::OkStatus() : StartHttp();
}

absl::Status WorkerApp::StartRanks() {
  absl::StatusOr<Backends> own = CreateOwnBackends(options_);
  if (!own.ok()) return own.status();
  const auto devices = static_cast<int>(own->size());
  const int first = options_.ranks.launch.rank * devices;
  const std::string names = RankNames(first, devices);
  absl::StatusOr<std::unique_ptr<LocalRanks>> ranks =
      LocalRanks::Start(options_, *std::move(own),
                        {.first_rank = first,
                         .devices = devices,
                         .on_joined = [this, names] { manager_->Ready(absl::StrCat("computes as ", names)); },
                         .on_end =
                             [this](const RanksEnd& end) {
                               {
                                 absl::MutexLock lock(&mutex_);
                                 end_ = end;
                               }
                               events_->NotifyDeviceLost();
                             }});
  if (!ranks.ok()) return ranks.status();
  ranks_ = *std::move(ranks);
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
  // Not taken down unless it had joined and ended well: what it would wait for may hang.
  auto app = std::make_unique<WorkerApp>(options, manager, &events);
  RanksEnd end{app->Start(), false};
  if (end.status.ok()) end = app->Run();
  if (!end.status.ok() || !end.joined) (void)app.release();
  return end;
}

}  // namespace lossd::app
