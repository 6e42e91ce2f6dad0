// SPDX-License-Identifier: Apache-2.0
// The parts that Server and RunWorker put together, made from ServerOptions: checks of the options
// (CheckOptions, CheckRanks), the options of the parts (EngineOptionsOf and others), memory shared with
// clients (SharedMemory), and what computes (CreateCompute, LocalRanks).
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

// The health of a server: what /livez and /readyz answer and the service manager hears (Live, Readiness), and
// what watches the devices for their loss (DeviceWatch, WatchGpus). An orchestrator restarts a server that is
// not live, and sends no work to a server that is not ready.
//
// All functions and classes are thread-safe.

// The state of a server at one moment, from which the functions below judge its health.
struct Health {
  bool draining = false;
  bool device_lost = false;
  absl::Duration device_silence;  // engine::Engine::DeviceSilence
  // Threads that clients cannot do without, and since when they have shown no sign of life. They show one
  // every second. Of HTTP's threads a probe over HTTP hears nothing that it would not notice by itself; the
  // service manager does.
  struct Thread {
    absl::string_view name;
    absl::Duration silence;
  };
  std::array<Thread, 5> threads;
};

// A thread that is busy for longer than that does something that it should not do.
inline constexpr absl::Duration kThreadTimeout = absl::Seconds(30);

// UNAVAILABLE if the device is lost or has been silent for longer than `timeout`, or a thread for longer than
// that and kThreadTimeout. A server that drains is live.
absl::Status Live(const Health& health, absl::Duration timeout);

// 503 if it is not live.
metrics::HttpResponse Liveness(const Health& health, absl::Duration timeout);

// 503 if the device is lost or the server drains.
metrics::HttpResponse Readiness(const Health& health);

// In a few words for people what keeps the server from work: "device lost", "no progress on the device for
// 11m", "draining"; "" if it is live and ready.
std::string Trouble(const Health& health, absl::Duration timeout);

// Logs how chunks are computed, and notices when the device is lost: a backend whose device is gone answers
// UNAVAILABLE from then on.
class DeviceWatch final : public engine::EngineObserver {
 public:
  // `on_lost` is called once, on a thread of the engine's, and must not call into it.
  explicit DeviceWatch(absl::AnyInvocable<void(const absl::Status&)> on_lost)
      : on_lost_(std::move(on_lost)) {}

  bool lost() const { return lost_; }

  void OnChoices(const engine::ChoicesReport& report) override {
    admin::LogChoices("chunk computed otherwise than the last", report.head, report.choices);
  }
  // These are for the metrics.
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
// a monitor for each GPU, in order; null, and a line in the log, for a GPU that cannot be watched. The
// observers are told of the loss of a GPU as of a failed operation, and outlive the result.
std::vector<std::unique_ptr<metrics::GpuMonitor>> WatchGpus(
    const kernels::BackendInfo& backend, const std::vector<engine::EngineObserver*>& observers);

// INVALID_ARGUMENT naming the first option that is out of range.
absl::Status CheckOptions(const ServerOptions& options);

// INVALID_ARGUMENT naming the option unless its value is above 0.
absl::Status CheckPositive(absl::string_view option, absl::Duration value);

// Which backend the options choose.
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

// The memory that a server shares with programs of its host, and the socket where programs open it.
class SharedMemory {
 public:
  // Null if the options or the backend allow none; also, with a line in the log, if no socket was named and
  // none can be made. UNAVAILABLE naming the option region_socket.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Start(const ServerOptions& options,
                                                             const std::vector<Address>& addresses,
                                                             kernels::Backend* backend);

  regions::Regions* regions() { return &regions_; }
  // Of the thread that answers at the socket.
  absl::Duration Silence() const { return sessions_.Silence(); }
  // As ServerDescription.region_socket has it.
  const std::string& socket() const { return name_; }
  // As ServerDescription.region_devices has them.
  const std::vector<std::string>& devices() const { return devices_; }
  static std::vector<std::string> DevicesOf(const SharedMemory* shared) {
    return shared == nullptr ? std::vector<std::string>() : shared->devices();
  }
  // Of each of these devices, which clients may have; 0: none.
  int64_t device_bytes() const { return devices_.empty() ? 0 : device_bytes_; }
  // What clients have; nothing of null.
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

// Logs what memory a server has planned at its start. `shared`: null if the server shares no memory.
void LogMemoryPlan(const ServerOptions& options, const kernels::Backend& backend, const SharedMemory* shared);

// ---- The options of a server's parts, as they follow from the server's own, and what its metrics read ----

engine::EngineOptions EngineOptionsOf(const ServerOptions& options);

// Only connections with client certificates get old: a token is looked at with every call.
rpc::TransportOptions TransportOf(const ServerOptions& options);

// In both, `regions` is null if the server shares no memory. `sites`: CheckpointOptions::sites.
rpc::HeadServiceOptions HeadServiceOptionsOf(const ServerOptions& options,
                                             const kernels::BackendInfo& backend, regions::Regions* regions,
                                             head::FileSites* sites);
rpc::LossServiceOptions LossServiceOptionsOf(const ServerOptions& options, regions::Regions* regions);

// How long a part has shown no sign of life; zero without a part. `part` points to it.
template <typename Pointer>
absl::Duration SilenceOf(const Pointer& part) {
  return part == nullptr ? absl::ZeroDuration() : part->Silence();
}

// None without a leader.
std::vector<metrics::RankReading> RanksOf(const ranks::Leader* leader);
// Without a leader the devices of the process, numbered as ranks; none if it has one device.
std::vector<metrics::RankReading> RanksOf(const ranks::Leader* leader, const kernels::Backend& backend);

// ---- The ranks of this process that compute for the leader ----

// How ranks have ended: as ranks::Worker::Run says.
struct RanksEnd {
  absl::Status status;
  bool joined = false;  // before; then an error means that rank 0 or the device is lost
};

struct LocalRanksOptions {
  int first_rank = 1;         // of the first backend; the others follow
  int devices = 1;            // of each process
  std::string local_address;  // Leader::local_address, in the leader's process
  // Called once, when all are joined; and when the first has ended with an error, or else all have ended. On
  // threads of the ranks; must not call in here.
  std::function<void()> on_joined = [] {};
  std::function<void(const RanksEnd&)> on_end = [](const RanksEnd&) {};
};

// "rank 1", "ranks 2, 3".
std::string RankNames(int first, int count);

// The ranks of this process that compute for the leader: one rank for each device. Each rank has threads of
// its own and a monitor of its GPU.
class LocalRanks {
 public:
  // For a process that serves no clients: its devices join the leader as ranks. `on_joined` is given their
  // names (RankNames); both functions as in LocalRanksOptions.
  static absl::StatusOr<std::unique_ptr<LocalRanks>> StartOfProcess(
      const ServerOptions& options, std::function<void(const std::string& names)> on_joined,
      std::function<void(const RanksEnd&)> on_end);
  // Has the ranks join the leader.
  static absl::StatusOr<std::unique_ptr<LocalRanks>> Start(const ServerOptions& options,
                                                           std::vector<kernels::CreatedBackend> backends,
                                                           LocalRanksOptions local);
  // After the leader, if that is in this process. Waits for the ranks, which leave if they wait for the
  // leader. What belongs to a rank that does not end within 20 seconds stays for ever: its device hangs.
  ~LocalRanks();
  LocalRanks(const LocalRanks&) = delete;
  LocalRanks& operator=(const LocalRanks&) = delete;

  // Has the leader hear that the ranks are asked to stop. Does not wait.
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

  // `ranks`: how many are to be added.
  LocalRanks(const ServerOptions& options, const LocalRanksOptions& local, size_t ranks);
  absl::Status Add(kernels::CreatedBackend own);
  static void Run(Rank* rank, News& news);

  const ServerOptions& options_;
  const LocalRanksOptions local_;
  const std::shared_ptr<News> news_;          // a rank that stays for ever has it, too
  std::vector<std::unique_ptr<Rank>> ranks_;  // const once the first thread runs
};

// ---- What computes: the backend of this process, alone or with the backends of the other ranks ----

using Backends = std::vector<kernels::CreatedBackend>;

// The backends of this process: one, or with several processes one for each of its devices, which are ranks
// in this order.
absl::StatusOr<Backends> CreateOwnBackends(const ServerOptions& options);

// What computes. The members stand in order of dependence: each uses the members above it.
struct Compute {
  std::unique_ptr<LocalRanks> other_devices;  // the ranks of this process but the first; null: none
  std::unique_ptr<ranks::Leader> leader;      // null: one rank
  std::unique_ptr<kernels::Backend> backend;
  std::string collectives;  // as ServerDescription.collectives
};

// For process 0: waits for the other ranks. `credentials` are the credentials of the ranks' service. Errors
// as Leader::Form.
absl::StatusOr<Compute> CreateCompute(const ServerOptions& options,
                                      const std::shared_ptr<grpc::ServerCredentials>& credentials);

// ---- The leader and the workers of a server of several ranks ----

// INVALID_ARGUMENT naming the option if the options of ranks are not in order, or would let programs reach
// the ranks that may not.
absl::Status CheckRanks(const ServerOptions& options);

// INVALID_ARGUMENT if all processes, each with so many devices, would have too many ranks.
absl::Status CheckRankCount(const ServerOptions& options, int devices);

// The address of this host that the other ranks reach.
absl::StatusOr<std::string> RankHost(const ServerOptions& options);

// For process 0: listens for the other ranks. `devices`: the devices of each process. `credentials`: the
// credentials of the ranks' service.
absl::StatusOr<std::unique_ptr<ranks::Leader>> StartLeader(
    const ServerOptions& options, int devices, const std::shared_ptr<grpc::ServerCredentials>& credentials);

// A rank other than 0; as ranks::WorkerOptions.
struct WorkerSpec {
  int rank = 1;
  int devices = 1;            // of each process
  std::string local_address;  // Leader::local_address, in the leader's process
  std::function<void()> on_joined;
  std::function<ranks::v1::Metrics()> metrics;
};

absl::StatusOr<std::unique_ptr<ranks::Worker>> CreateWorker(const ServerOptions& options, WorkerSpec spec,
                                                            kernels::CreatedBackend own);

// The metrics of a worker as the message that ranks send each other, and back.
ranks::v1::Metrics ToProto(const std::vector<metrics::PlainFamily>& families);
std::vector<metrics::PlainFamily> FromProto(const ranks::v1::Metrics& message);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_SERVER_PARTS_H_
