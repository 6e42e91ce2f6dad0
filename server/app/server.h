// SPDX-License-Identifier: Apache-2.0
// Server is a lossd server: backend, engine, services, metrics and HTTP, put together from one plain struct,
// ServerOptions.
//
// Server is thread-safe. Destroying a server stops it.
#ifndef LOSSD_SERVER_APP_SERVER_H_
#define LOSSD_SERVER_APP_SERVER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "server/app/server_options.h"
#include "server/engine/engine.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/transport.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace lossd::app {

struct ServerOptions {
  // Addresses "host:port"; port 0: any free one. gRPC's may also be "unix:PATH", and several with commas
  // between them.
  std::string listen = "127.0.0.1:7070";
  uint32_t unix_socket_mode = 0600;     // of the files of Unix sockets: who may connect
  std::string http = "127.0.0.1:7071";  // empty: no HTTP
  SecurityOptions security;             // encryption, and who may do what
  std::string version = "0.0.0";

  // Compute.
  std::string backend = "auto";  // "auto" (a GPU if there is one), "cpu" or "cuda"
  std::string device = "0";      // CUDA backend: index among the visible GPUs, or a UUID
  // CUDA backend: several GPUs that share the rows of every head: as `device`, with commas between them, or
  // "all"; empty: the one of `device`.
  std::string devices;
  int threads = 0;                     // CPU backend; 0: all the process may use
  int cpu_devices = 1;                 // CPU backend: parts of the threads that work as devices of their own
  std::string stream_priority = "dx";  // kernels::BackendChoice
  std::string split = "any";       // several devices: of heads that do not say; "any", "rows" or "vocabulary"
  int replicas = 1;                // of heads by vocabulary that do not say; it divides the devices
  int64_t workspace_bytes = 0;     // per head; 0: 256 MiB (CPU), 2220 MiB or less (CUDA)
  int64_t memory_limit_bytes = 0;  // heads and staging; 0: none
  // Of the host's memory so much is left to others, by heads on the CPU backend and by the buffers of saves.
  int64_t memory_reserve_bytes = int64_t{256} << 20;
  // The same microbatches give the same weights, bit for bit, whatever arrives first (docs/exactly-once.md).
  bool deterministic = false;

  // This process as one of several that are one server. A server is made of rank 0.
  RankOptions ranks;

  // Admission.
  int64_t slice_bytes = int64_t{4} << 20;       // largest slice payload
  int64_t staging_bytes = int64_t{256} << 20;   // all buffers for slices in transit
  int64_t retained_bytes = int64_t{256} << 20;  // hidden states of deferred microbatches; 0: none
  // Memory that clients of this host may open and put their slices into (docs/transport.md), of the host and
  // of the GPU, taken as they do; 0: none. Where they open it: a path, or "@" and a name in the abstract
  // namespace; empty: the server chooses.
  int64_t shared_memory_bytes = int64_t{1} << 30;
  int64_t shared_device_memory_bytes = int64_t{1} << 30;
  std::string region_socket;
  int64_t max_streams = 256;  // open ComputeLoss calls
  int64_t max_heads = 64;
  // Host memory for targets and weights of open calls and for ledgers of open steps; 0: 256 MiB, but at most
  // an eighth of memory_limit_bytes.
  int64_t ledger_bytes = 0;

  // Limits of clients (docs/fairness.md). What one peer may hold of anything that is shared: calls, places in
  // queues, staging; in (0, 1], 1: all.
  double peer_share = 0.5;
  rpc::TransportOptions transport;  // but max_message_bytes, which follows from slice_bytes
  int64_t max_connections = 512;
  int64_t max_connections_per_address = 128;
  int64_t max_tensor_calls = 64;    // ReadTensor, WriteTensor, AddGradient, open
  int64_t max_saves = 16;           // waiting or running
  int64_t max_waiting_calls = 256;  // of the other calls on heads
  rpc::CallTimeouts timeouts;

  std::string checkpoint_directory = "./lossd-checkpoints";
  std::string restore;  // "latest": start with every head's newest checkpoint; empty: without heads
  int64_t checkpoint_buffer_bytes = int64_t{1} << 30;   // what a save may read ahead of the disk
  int64_t checkpoint_shard_bytes = int64_t{1} << 30;    // the most of one file of a checkpoint
  int checkpoint_threads = 0;                           // that write or read one; 0: 4, or the devices
  int64_t keep_checkpoints = 0;                         // automatic ones, per head; 0: all
  int64_t checkpoint_limit_bytes = 0;                   // all files below the directory; 0: no limit
  absl::Duration drain_timeout = absl::Seconds(30);     // open calls may finish for so long
  absl::Duration retained_timeout = absl::Minutes(10);  // deferred microbatches not used for so long go
  // /livez reports a device without progress for so long. Longer than any one piece of work: the creation of
  // a head, an optimizer step, a chunk; on a slow CPU those take minutes. At least two of
  // engine::kDeviceBeat.
  absl::Duration liveness_timeout = absl::Minutes(10);
  // Called once when the device is lost, on a thread of the engine's; must not call into the server.
  std::function<void()> on_device_lost = [] {};
};

class Server {
 public:
  // Checks the options, allocates staging memory, listens and serves. INVALID_ARGUMENT naming the option
  // and its value, RESOURCE_EXHAUSTED or UNAVAILABLE.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options);
  // Shuts down at once: calls still open are cancelled.
  virtual ~Server() = default;

  // "host:port" with the ports that were chosen, and as `listen` several with commas between them;
  // http_address is empty without HTTP.
  virtual std::string grpc_address() const = 0;
  virtual std::string http_address() const = 0;
  virtual uint64_t incarnation() const = 0;
  // A channel without a network.
  virtual std::shared_ptr<grpc::Channel> InProcessChannel() = 0;
  virtual engine::EngineStats stats() const = 0;
  // What /livez says: OK, or UNAVAILABLE and why. Takes no lock.
  virtual absl::Status Live() const = 0;

  // Reports NOT_SERVING, refuses new calls, lets open ones finish until `deadline`, then cancels the rest
  // and stops. True if none had to be cancelled. Later calls do nothing.
  virtual bool Drain(absl::Time deadline) = 0;
};

// Says when something is to be done again that is to be done at most once per `pause`. Thread-compatible.
class Every {
 public:
  explicit Every(absl::Duration pause) : pause_(pause) {}
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

// A text that becomes known while other threads ask for it. Thread-safe.
class LateText {
 public:
  void Set(std::string text) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    text_ = std::move(text);
  }
  // Empty until it is known.
  std::string Get() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::ReaderMutexLock lock(&mutex_);
    return text_;
  }

 private:
  mutable absl::Mutex mutex_;
  std::string text_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_SERVER_H_
