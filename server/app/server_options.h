// SPDX-License-Identifier: Apache-2.0
// ServerOptions has the options of a server. Flags, the library or a test set them. It contains RankOptions
// for several processes that are one server (docs/scaling.md), and SecurityOptions for encryption and access
// (docs/security.md). Plain data. option_table.inc lists the options that have a flag, and SetOption sets an
// option by its name.
#ifndef LOSSD_SERVER_APP_SERVER_OPTIONS_H_
#define LOSSD_SERVER_APP_SERVER_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/ranks/start.h"
#include "server/rpc/request_call.h"
#include "server/rpc/transport.h"

namespace lossd::app {

// The options of a process that is one of several processes of a server.
struct RankOptions {
  ranks::Launch launch;  // launch.ranks == 1: there is only this process
  // "host:port" at which rank 0 listens for the other ranks; empty: derived from the leader's address.
  std::string listen;
  // An address at which the other ranks reach this host; empty: the source address of packets to the leader.
  std::string host;
  // The library that carries sums and exchanges between the ranks (kernels::BackendChoice).
  std::string collectives = "auto";
  // Whether rank 0 shares the memory of rows with the ranks of its host. If false, rows travel in messages.
  bool shared_memory = true;
  std::string secret_file;  // A file with the secret that admits a rank; empty: no secret is needed
  // A PEM file with the authorities that sign the leader's certificate; empty: no TLS.
  std::string ca;
  std::string worker_http;                    // ServerOptions::http of the other ranks; empty: no HTTP
  absl::Duration timeout = absl::Minutes(5);  // how long all ranks may take to connect
  // A rank that answers no ping for this long is lost.
  absl::Duration silence_timeout = absl::Seconds(30);
  // How long a rank may take for its part of a sum.
  absl::Duration collective_timeout = absl::Minutes(1);

  // For rank 0. While rank 0 waits for the other ranks, it gives up if `stop_requested` returns true.
  // `on_leaving` is called once, on a thread of the server, when another rank was asked to stop.
  std::function<bool()> stop_requested = [] { return false; };
  std::function<void()> on_leaving = [] {};

  bool several() const { return launch.ranks > 1; }
};

// Encryption and access. The strings are paths of files, which docs/security.md describes; empty: no such
// file.
struct SecurityOptions {
  std::string tls_cert;
  std::string tls_key;
  std::string tls_client_ca;
  std::string role_file;
  std::string token_file;
  // Allow addresses beyond the loopback without TLS, or without authentication.
  bool insecure = false;
  bool http_tls = false;    // HTTP over TLS, with the same certificate
  bool http_token = false;  // HTTP requires a reader's token, except for the health paths
};

// The options of a server.
struct ServerOptions {
  // Addresses "host:port"; port 0: any free port. `listen`, for gRPC, may also have "unix:PATH", and several
  // addresses with commas between them.
  std::string listen = "127.0.0.1:7070";
  uint32_t unix_socket_mode = 0600;     // permissions of the files of Unix sockets
  std::string http = "127.0.0.1:7071";  // empty: no HTTP
  SecurityOptions security;             // encryption and access
  std::string version = "0.0.0";
  // The server runs in the process of another program (lossd.h). It does not change settings of the process.
  bool embedded = false;

  // Compute.
  std::string backend = "auto";  // "auto" (a GPU if there is one), "cpu" or "cuda"
  std::string device = "0";      // CUDA backend: index of a visible GPU, or a UUID
  // CUDA backend with several GPUs, which share the rows of every head: values as in `device`, with commas
  // between them, or "all". Empty: only the GPU `device`.
  std::string devices;
  int threads = 0;  // CPU backend; 0: all that the process may use
  // CPU backend: the threads are divided into this many parts, each of which works as a device.
  int cpu_devices = 1;
  std::string stream_priority = "dx";  // kernels::BackendChoice
  // With several devices: the split of heads whose creation leaves it open: "any", "rows" or "vocabulary".
  std::string split = "any";
  // The number of replicas of heads that are split by vocabulary and whose creation leaves this number open.
  // The number of devices must be a multiple of it.
  int replicas = 1;
  int64_t workspace_bytes = 0;     // per head; 0: 256 MiB (CPU), 2220 MiB or less (CUDA)
  int64_t memory_limit_bytes = 0;  // of heads and staging; 0: no limit
  // Host memory that heads of the CPU backend and buffers of saves leave free for other programs.
  int64_t memory_reserve_bytes = int64_t{256} << 20;
  // The size of each device's teacher pool, for heads in host memory; 0: as large as the largest such head.
  int64_t teacher_pool_bytes = 0;
  // The same microbatches give the same weights, bit for bit, for any order in which they arrive
  // (docs/exactly-once.md).
  bool deterministic = false;

  // If the server has several processes: which of them this process is. Only rank 0 creates a Server.
  RankOptions ranks;

  // Admission.
  int64_t slice_bytes = int64_t{4} << 20;      // largest slice payload
  int64_t staging_bytes = int64_t{256} << 20;  // all buffers for slices in transit
  // Hidden states of deferred microbatches; 0: there can be no deferred microbatches.
  int64_t retained_bytes = int64_t{256} << 20;
  // The most memory, of the host and of each GPU, that clients of this host may open to put their slices into
  // (docs/transport.md). The server allocates it when clients open it; 0: clients get no such memory. Clients
  // open it at the socket `region_socket`: a path, or "@" and a name in the abstract namespace; empty: the
  // server chooses.
  int64_t shared_memory_bytes = int64_t{1} << 30;
  int64_t shared_device_memory_bytes = int64_t{1} << 30;
  std::string region_socket;
  int64_t max_streams = 256;  // open ComputeLoss calls
  int64_t max_heads = 64;
  // Host memory for targets and weights of open calls and for ledgers of open steps; 0: 256 MiB, but at most
  // an eighth of memory_limit_bytes.
  int64_t ledger_bytes = 0;

  // Limits of clients (docs/fairness.md). The largest share of each shared resource (calls, places in queues,
  // staging) that one peer may hold. In (0, 1]; 1: everything.
  double peer_share = 0.5;
  rpc::TransportOptions transport;  // its max_message_bytes is not used; it is computed from slice_bytes
  int64_t max_connections = 512;
  int64_t max_connections_per_address = 128;
  int64_t max_tensor_calls = 64;    // open calls of ReadTensor, WriteTensor and AddGradient
  int64_t max_saves = 16;           // waiting or running
  int64_t max_waiting_calls = 256;  // waiting calls on heads, of all other kinds
  rpc::CallTimeouts timeouts;

  std::string checkpoint_directory = "./lossd-checkpoints";
  // "latest": start with the newest checkpoint of each head; empty: start without heads.
  std::string restore;
  int64_t checkpoint_buffer_bytes = int64_t{1} << 30;  // how much a save may read ahead of the disk
  int64_t checkpoint_shard_bytes = int64_t{1} << 30;   // the largest file of a checkpoint
  // Threads that write or read a checkpoint; 0: 4, or the number of devices if that is larger.
  int checkpoint_threads = 0;
  int64_t keep_checkpoints = 0;                      // automatic checkpoints to keep per head; 0: all
  int64_t checkpoint_limit_bytes = 0;                // all files below the directory; 0: no limit
  absl::Duration drain_timeout = absl::Seconds(30);  // how long open calls may take to finish
  // Deferred microbatches that are not used for this long are released.
  absl::Duration retained_timeout = absl::Minutes(10);
  // /livez reports a device that makes no progress for this long. It must be longer than each single piece of
  // work: the creation of a head, an optimizer step, a chunk. On a slow CPU these take minutes. At least
  // twice engine::kDeviceBeat.
  absl::Duration liveness_timeout = absl::Minutes(10);
  // Called once with the reason when the device is lost, on a thread of the engine. It must not call into the
  // server.
  std::function<void(const absl::Status&)> on_device_lost = [](const absl::Status&) {};
};

// Permissions of a file in the form of a flag: octal, "0660".
struct FileMode {
  uint32_t bits = 0;
};
bool AbslParseFlag(absl::string_view text, FileMode* mode, std::string* error);
std::string AbslUnparseFlag(FileMode mode);

// A number of bytes as people write it on a command line: "4096", "64KiB", "256MiB", "1.5GiB".
struct ByteSize {
  int64_t bytes = 0;
  friend bool operator==(const ByteSize&, const ByteSize&) = default;
};

// Converts the type as which a flag is parsed to the type of the field of ServerOptions.
inline int64_t FieldOf(ByteSize size) { return size.bytes; }
inline uint32_t FieldOf(FileMode mode) { return mode.bits; }
template <typename T>
T FieldOf(T value) {
  return value;
}

// Parses a flag: a number, possibly with a fraction, and one of the units B, KiB, MiB, GiB, TiB (1024
// each) or KB, MB, GB, TB (1000 each), in any case; without a unit: bytes. Refuses negative numbers and
// numbers from 2^62 on.
bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error);
// The size in the largest unit that divides it: "256MiB".
std::string AbslUnparseFlag(const ByteSize& size);

// Sets one option. `name` is the flag of lossd without dashes ("staging_bytes"), and `text` the text of the
// flag ("64MiB"). INVALID_ARGUMENT naming the option and the text; the options are then unchanged.
// Thread-safe.
absl::Status SetOption(absl::string_view name, absl::string_view text, ServerOptions* options);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_SERVER_OPTIONS_H_
