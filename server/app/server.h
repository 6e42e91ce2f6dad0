// SPDX-License-Identifier: Apache-2.0
// Server is a lossd server that serves clients: it creates backend, engine, services, metrics and HTTP from
// one plain struct, ServerOptions. RunWorker is the other form of the program lossd, a process that serves no
// clients: its devices compute for rank 0.
//
// Server is thread-safe. Destroying a server stops it.
#ifndef LOSSD_SERVER_APP_SERVER_H_
#define LOSSD_SERVER_APP_SERVER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/clocks/clock.h"
#include "server/app/addresses.h"
#include "server/app/process.h"
#include "server/app/server_options.h"
#include "server/app/server_parts.h"
#include "server/engine/engine.h"
#include "server/metrics/http_server.h"

namespace grpc {
class Server;
}  // namespace grpc

namespace lossd::access {
class ConnectionAcceptor;
class ListeningSocket;
}  // namespace lossd::access

namespace lossd::metrics {
class GpuMonitor;
class HttpPages;
class HttpServer;
class Metrics;
}  // namespace lossd::metrics

namespace lossd::ranks {
class Leader;
}  // namespace lossd::ranks

namespace lossd::rpc {
class HeadService;
class LossService;
class Pulse;
class ServerService;
}  // namespace lossd::rpc

namespace lossd::wire {
class DirectServer;
}  // namespace lossd::wire

namespace lossd::app {

class DeviceWatch;
class LocalRanks;
class Security;
class SharedMemory;
struct Health;

// Limits an action to once per `pause`: do the action if Ready returns true. Thread-compatible.
class Throttle {
 public:
  explicit Throttle(absl::Duration pause) : pause_(pause) {}
  bool Ready() {
    const absl::Time now = clocks::SteadyNow();
    if (now < next_) return false;
    next_ = now + pause_;
    return true;
  }

 private:
  const absl::Duration pause_;
  absl::Time next_ = absl::InfinitePast();
};

// A text that one thread sets once, while other threads may already read it. Thread-safe.
class SetOnceText {
 public:
  void Set(std::string text) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    text_ = std::move(text);
  }
  // The text; empty until it is set.
  std::string Get() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::ReaderMutexLock lock(&mutex_);
    return text_;
  }

 private:
  mutable absl::Mutex mutex_;
  std::string text_ ABSL_GUARDED_BY(mutex_);
};

class Server {
 public:
  // Checks the options, allocates staging memory, listens and serves. Errors: INVALID_ARGUMENT naming the
  // option and its value, RESOURCE_EXHAUSTED, or UNAVAILABLE.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options);
  // Shuts down at once: calls still open are cancelled.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // "host:port" with the actual port. grpc_address has all addresses of `listen`, with commas between them.
  // http_address is empty without HTTP.
  std::string grpc_address() const;
  std::string http_address() const;
  uint64_t incarnation() const { return engine_->incarnation(); }
  engine::EngineStats stats() const { return engine_->stats(); }
  // The answer of /livez: OK, or UNAVAILABLE with the reason. Takes no lock.
  absl::Status Live() const;

  // Reports NOT_SERVING, refuses new calls, lets open calls finish until `deadline`, then cancels the calls
  // that are still open, and stops. Returns true if no call had to be cancelled. Later calls of Drain do
  // nothing.
  bool Drain(absl::Time deadline);

 private:
  explicit Server(const ServerOptions& options);

  absl::Status Init();
  absl::Status CreateSecurity();
  absl::Status CreateEngine();
  void WatchRanks();
  void CreateServices();
  absl::Status Listen();
  void ServeThisProcess();
  void CreateAcceptor(std::vector<access::ListeningSocket> sockets);
  absl::Status StartHttp();
  void OnDeviceLost(const absl::Status& status);
  // Called on the threads of the acceptors.
  void OnRefused(absl::string_view limit, absl::string_view address);
  void LogStart() const;
  metrics::HttpHandlers Handlers();
  Health health() const;
  void WaitForStaging();

  const ServerOptions options_;
  const absl::Time started_ = clocks::SteadyNow();
  std::vector<Address> grpc_addresses_;
  Address http_bind_;
  SetOnceText http_url_;  // for ServerDescription.http
  std::atomic<bool> draining_{false};
  std::once_flag drained_;

  // In order of dependence: each member uses the members above it.
  std::unique_ptr<Security> security_;
  std::unique_ptr<LocalRanks> other_devices_;  // the other ranks of this process; null: none
  std::unique_ptr<ranks::Leader> leader_;      // null: there is one rank
  std::string collectives_;                    // as ServerDescription.collectives
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<SharedMemory> shared_memory_;  // null: no memory is shared
  std::unique_ptr<metrics::Metrics> metrics_;
  std::unique_ptr<DeviceWatch> device_watch_;
  std::unique_ptr<engine::Engine> engine_;
  std::vector<std::unique_ptr<metrics::GpuMonitor>> gpus_;
  std::unique_ptr<rpc::LossService> loss_service_;
  std::unique_ptr<rpc::HeadService> head_service_;
  std::unique_ptr<rpc::ServerService> server_service_;
  std::unique_ptr<access::ConnectionAcceptor> acceptor_;
  std::unique_ptr<rpc::Pulse> pulse_;
  std::mutex refusals_mutex_;
  Throttle refusals_logged_{absl::Seconds(10)};
  std::unique_ptr<grpc::Server> grpc_;
  std::shared_ptr<wire::DirectServer>
      direct_;  // for clients in this process; null: they connect like other clients
  std::unique_ptr<metrics::HttpPages> pages_;
  std::unique_ptr<metrics::HttpServer> http_;
  // For health(): http_, after it has started.
  std::atomic<const metrics::HttpServer*> http_watched_{nullptr};
};

// Runs a process that serves no clients: its devices compute for rank 0 until rank 0 ends. Returns how the
// ranks of this process ended. After an error, end the process at once, without destroying anything.
//
// At a signal, the process asks rank 0 to drain and to end all ranks. If rank 0 does not do this within the
// time of a drain, or if a second signal comes, the process ends by itself. RunWorker reports to `manager`
// that the process is ready, when the ranks are connected, and each of these events. `manager` outlives the
// call.
RanksEnd RunWorker(const ServerOptions& options, ServiceManager* manager, StopEvents& events);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_SERVER_H_
