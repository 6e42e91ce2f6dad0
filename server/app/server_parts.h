// SPDX-License-Identifier: Apache-2.0
// The parts that Server and RunWorker put together, made from ServerOptions: health (Live, Readiness,
// DeviceWatch), checks of the options (CheckOptions, CheckRanks), the options of the parts (EngineOptionsOf
// and others), memory shared with clients (SharedMemory), and the backends (CreateCompute, LocalRanks).
//
// Each function is stateless and thread-safe; each class is thread-safe.
#ifndef LOSSD_SERVER_APP_SERVER_PARTS_H_
#define LOSSD_SERVER_APP_SERVER_PARTS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/create_backend.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "server/access/listening_socket.h"
#include "server/admin/head_operations.h"
#include "server/app/addresses.h"
#include "server/app/server_options.h"
#include "server/engine/engine_options.h"
#include "server/metrics/http_server.h"
#include "server/metrics/metrics.h"
#include "server/ranks/leader.h"
#include "server/ranks/worker.h"
#include "server/regions/regions.h"
#include "server/rpc/services.h"
#include "server/rpc/transport.h"

namespace lossd::app {

// The health of a server. Liveness and Readiness are the answers of /livez and /readyz; Live is also reported
// to the service manager. An orchestrator restarts a server that is not live, and sends no work to a server
// that is not ready. DeviceWatch and WatchGpus notice the loss of a device.
//
// All functions and classes are thread-safe.

// The state of a server at one moment. The functions below decide from it whether the server is healthy.
struct Health {
  bool draining = false;
  bool device_lost = false;
  absl::Duration device_silence;  // engine::Engine::DeviceSilence
  // The threads that clients depend on, and how long each thread has given no sign of life. A thread that
  // works gives one every second. HTTP's threads are in the list for the service manager, because a probe
  // over HTTP would itself notice that they hang.
  struct Thread {
    absl::string_view name;
    absl::Duration silence;
  };
  std::array<Thread, 5> threads;
};

// If a thread gives no sign of life for longer than this, something is wrong.
inline constexpr absl::Duration kThreadTimeout = absl::Seconds(30);

// UNAVAILABLE if the device is lost, if the device has been silent for longer than `timeout`, or if a thread
// has been silent for longer than `timeout` or kThreadTimeout, whichever is shorter. A server that drains is
// live.
absl::Status Live(const Health& health, absl::Duration timeout);

// 503 if the server is not live.
metrics::HttpResponse Liveness(const Health& health, absl::Duration timeout);

// 503 if the device is lost or the server drains.
metrics::HttpResponse Readiness(const Health& health);

// A few words for people that say why the server does not work: "device lost", "no progress on the device for
// 11m", "draining". Empty if it is live and ready.
std::string Trouble(const Health& health, absl::Duration timeout);

// Logs how chunks are computed, and notices when the device is lost: from then on the backend returns
// UNAVAILABLE.
class DeviceWatch final : public engine::EngineObserver {
 public:
  // `on_lost` is called once, on a thread of the engine. It must not call into the engine.
  explicit DeviceWatch(absl::AnyInvocable<void(const absl::Status&)> on_lost)
      : on_lost_(std::move(on_lost)) {}

  bool lost() const { return lost_; }

  void OnChoices(const engine::ChoicesReport& report) override {
    admin::LogChoices("chunk computed otherwise than the last", report.head, report.choices);
  }
  // These reports are for the metrics.
  void OnChunk(const engine::ChunkReport&) override {}
  void OnChunkLeft(const engine::ChunkReport&) override {}
  void OnContribution(const engine::ContributionReport&) override {}
  void OnStep(const engine::StepReport&) override {}
  void OnDeviceError(const absl::Status& status) override {
    if (absl::IsUnavailable(status) && !lost_.exchange(true)) on_lost_(status);
  }

 private:
  absl::AnyInvocable<void(const absl::Status&)> on_lost_;
  std::atomic<bool> lost_{false};
};

// Starts watching the GPUs of a backend: their metrics, their critical errors in the log, their loss. Returns
// a monitor for each GPU, in order; null, and a line in the log, for a GPU that cannot be watched. The loss
// of a GPU is reported to the observers like a failed operation (OnDeviceError). The observers outlive the
// result.
std::vector<std::unique_ptr<metrics::GpuMonitor>> WatchGpus(
    const kernels::BackendInfo& backend, const std::vector<engine::EngineObserver*>& observers);

// INVALID_ARGUMENT naming the first option that is out of range.
absl::Status CheckOptions(const ServerOptions& options);

// INVALID_ARGUMENT naming the option unless its value is above 0.
absl::Status CheckPositive(absl::string_view option, absl::Duration value);

// The choice of backend that follows from the options.
kernels::BackendChoice BackendOf(const ServerOptions& options);

// The largest message of a call: a slice with its header, or an opening message, which clients keep below 4
// MiB.
int64_t MaxMessageBytes(const ServerOptions& options);

// ServerOptions::transport.bytes, or its default.
int64_t TransportBytes(const ServerOptions& options);

// ServerOptions::ledger_bytes, or its default.
int64_t LedgerBytes(const ServerOptions& options);

// ServerOptions::checkpoint_threads, or its default: at least one for each device.
int CheckpointThreads(const ServerOptions& options, const kernels::BackendInfo& backend);

// The memory that a server shares with clients of its host, and the socket where clients open it.
class SharedMemory {
 public:
  // Null if the options or the backend allow no shared memory. If the options name no socket and none can be
  // made, logs a warning and returns null. UNAVAILABLE, naming the option region_socket, if the named socket
  // cannot be made.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Start(const ServerOptions& options,
                                                             const std::vector<Address>& addresses,
                                                             kernels::Backend* backend);

  regions::Regions* regions() { return &regions_; }
  // How long the thread that answers at the socket has given no sign of life.
  absl::Duration Silence() const { return sessions_.Silence(); }
  // The value of ServerDescription.region_socket.
  const std::string& socket() const { return name_; }
  // The values of ServerDescription.region_devices.
  const std::vector<std::string>& devices() const { return devices_; }
  static std::vector<std::string> DevicesOf(const SharedMemory* shared) {
    return shared == nullptr ? std::vector<std::string>() : shared->devices();
  }
  // The bytes that clients may have of each of these devices; 0: none.
  int64_t device_bytes() const { return devices_.empty() ? 0 : device_bytes_; }
  // The memory that clients have now; empty if `shared` is null.
  static std::vector<metrics::SharedMemoryUse> UsesOf(const SharedMemory* shared);

 private:
  SharedMemory(std::string name, access::ListeningSocket listener, const ServerOptions& options,
               kernels::Backend* backend);

  const std::string name_;
  const std::vector<std::string> devices_;
  const int64_t device_bytes_;
  regions::Regions regions_;
  regions::SessionServer sessions_;
};

// Logs the memory that a server has planned at its start. `shared`: null if the server shares no memory.
void LogMemoryPlan(const ServerOptions& options, const kernels::Backend& backend, const SharedMemory* shared);

// ---- The options of a server's parts, made from the server's options, and functions for its metrics ----

engine::EngineOptions EngineOptionsOf(const ServerOptions& options);

// Sets a maximum age of connections only if there are client certificates. Tokens are checked at every call.
rpc::TransportOptions TransportOf(const ServerOptions& options);

// In both functions, `regions` is null if the server shares no memory. `sites`: CheckpointOptions::sites.
rpc::HeadServiceOptions HeadServiceOptionsOf(const ServerOptions& options,
                                             const kernels::BackendInfo& backend, regions::Regions* regions,
                                             head::FileSites* sites);
rpc::LossServiceOptions LossServiceOptionsOf(const ServerOptions& options, regions::Regions* regions);

// How long a part has given no sign of life. `part` points to the part; zero if it is null.
template <typename Pointer>
absl::Duration SilenceOf(const Pointer& part) {
  return part == nullptr ? absl::ZeroDuration() : part->Silence();
}

// The readings of all ranks; empty without a leader.
std::vector<metrics::RankReading> RanksOf(const ranks::Leader* leader);
// The same, but without a leader it gives the devices of the process, numbered like ranks. Empty if the
// process has one device.
std::vector<metrics::RankReading> RanksOf(const ranks::Leader* leader, const kernels::Backend& backend);

// ---- The ranks of this process that compute for the leader ----

// How ranks have ended. `status` is the result of ranks::Worker::Run.
struct RanksEnd {
  absl::Status status;
  // Whether the ranks had joined the leader before. If so, an error means that rank 0 or the device is lost.
  bool joined = false;
};

struct LocalRanksOptions {
  int first_rank = 1;         // the rank of the first backend; the others follow
  int devices = 1;            // devices of each process
  std::string local_address;  // Leader::local_address, in the leader's process
  // Each is called once, on a thread of a rank: `on_joined` when all ranks have joined; `on_end` when the
  // first rank has ended with an error, or otherwise when all ranks have ended. They must not call into
  // LocalRanks.
  std::function<void()> on_joined = [] {};
  std::function<void(const RanksEnd&)> on_end = [](const RanksEnd&) {};
};

// "rank 1", "ranks 2, 3".
std::string RankNames(int first, int count);

// The ranks of this process that compute for the leader: one rank for each device. Each rank has threads of
// its own and a monitor of its GPU.
class LocalRanks {
 public:
  // For a process that serves no clients: its devices join the leader as ranks. `on_joined` gets their names
  // (RankNames). Both functions are called as in LocalRanksOptions.
  static absl::StatusOr<std::unique_ptr<LocalRanks>> StartOfProcess(
      const ServerOptions& options, std::function<void(const std::string& names)> on_joined,
      std::function<void(const RanksEnd&)> on_end);
  // Makes each of `backends` a rank that joins the leader.
  static absl::StatusOr<std::unique_ptr<LocalRanks>> Start(const ServerOptions& options,
                                                           std::vector<kernels::CreatedBackend> backends,
                                                           LocalRanksOptions local);
  // Ends ranks that still wait for the leader, and waits for the end of all ranks. If a rank does not end
  // within 20 seconds, its device hangs; its memory is then never freed. If the leader is in this process,
  // destroy the leader first.
  ~LocalRanks();
  LocalRanks(const LocalRanks&) = delete;
  LocalRanks& operator=(const LocalRanks&) = delete;

  // Tells the leader that the ranks were asked to stop. Does not wait.
  void Leave(const std::string& reason);
  // Whether all ranks have joined the leader.
  bool joined() const;
  // Whether a device of the ranks is lost.
  bool device_lost() const;
  // The longest Worker::Silence of the ranks.
  absl::Duration Silence() const;

 private:
  struct Rank;
  class News;

  // `ranks`: how many ranks Add will add.
  LocalRanks(const ServerOptions& options, const LocalRanksOptions& local, size_t ranks);
  absl::Status Add(kernels::CreatedBackend own);
  static void Run(Rank* rank, News& news);

  const ServerOptions& options_;
  const LocalRanksOptions local_;
  const std::shared_ptr<News> news_;          // shared with ranks that are never destroyed
  std::vector<std::unique_ptr<Rank>> ranks_;  // not changed once the first thread runs
};

// ---- The backend of a server: of this process alone, or joined with the backends of the other ranks ----

using Backends = std::vector<kernels::CreatedBackend>;

// Creates the backends of this process. A process that is alone has one backend. One of several processes has
// a backend for each of its devices; each is a rank, in this order.
absl::StatusOr<Backends> CreateOwnBackends(const ServerOptions& options);

// The backend of a server, with the ranks behind it. The members are in order of dependence: each uses the
// members above it.
struct Compute {
  std::unique_ptr<LocalRanks> other_devices;  // the ranks of this process except the first; null: none
  std::unique_ptr<ranks::Leader> leader;      // null: there is one rank
  std::unique_ptr<kernels::Backend> backend;
  std::string collectives;  // the value of ServerDescription.collectives
};

// Creates the backend of process 0, and waits for the other ranks. `credentials`: the credentials of the
// service for the other ranks. Errors as Leader::Form.
absl::StatusOr<Compute> CreateCompute(const ServerOptions& options,
                                      const std::shared_ptr<grpc::ServerCredentials>& credentials);

// ---- The leader and the workers of a server of several ranks ----

// INVALID_ARGUMENT naming the option if the options of ranks are not valid, or would let programs reach the
// ranks without authentication.
absl::Status CheckRanks(const ServerOptions& options);

// INVALID_ARGUMENT if all processes together, each with `devices` devices, would have too many ranks.
absl::Status CheckRankCount(const ServerOptions& options, int devices);

// The address of this host at which the other ranks reach it.
absl::StatusOr<std::string> RankHost(const ServerOptions& options);

// Makes the leader, for process 0, which listens for the other ranks. `devices`: the devices of each process.
// `credentials`: the credentials of the ranks' service.
absl::StatusOr<std::unique_ptr<ranks::Leader>> StartLeader(
    const ServerOptions& options, int devices, const std::shared_ptr<grpc::ServerCredentials>& credentials);

// A rank other than 0. The members are as in ranks::WorkerOptions.
struct WorkerSpec {
  int rank = 1;
  int devices = 1;            // devices of each process
  std::string local_address;  // Leader::local_address, in the leader's process
  std::function<void()> on_joined;
  std::function<ranks::v1::Metrics()> metrics;
};

absl::StatusOr<std::unique_ptr<ranks::Worker>> CreateWorker(const ServerOptions& options, WorkerSpec spec,
                                                            kernels::CreatedBackend own);

// Convert the metrics of a worker to the message of the ranks' protocol, and back.
ranks::v1::Metrics ToProto(const std::vector<metrics::PlainFamily>& families);
std::vector<metrics::PlainFamily> FromProto(const ranks::v1::Metrics& message);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_SERVER_PARTS_H_
