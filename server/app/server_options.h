// SPDX-License-Identifier: Apache-2.0
// The options of a server, as flags or a test set them: ServerOptions, with RankOptions for several processes
// that are one server (docs/scaling.md) and SecurityOptions for encryption and for who may do what
// (docs/security.md). Plain data. option_table.inc lists the options that have a flag; SetOption sets one by
// its name.
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

// This process as one of several that are one server.
struct RankOptions {
  ranks::Launch launch;  // one rank: this process alone
  std::string
      listen;  // rank 0 waits for the others there, "host:port"; empty: follows from the leader's address
  std::string
      host;  // an address of this host that the other ranks reach; empty: that of the way to the leader
  // What carries sums and exchanges between the ranks (kernels::BackendChoice).
  std::string collectives = "auto";
  // Rows lie in memory that rank 0 shares with the ranks of its host; else they travel in messages.
  bool shared_memory = true;
  std::string secret_file;  // what admits a rank; empty: nothing
  std::string ca;           // authorities of the leader's certificate, a PEM file; empty: no TLS
  std::string worker_http;  // of the other ranks, as ServerOptions::http; empty: none
  absl::Duration timeout = absl::Minutes(5);             // for all ranks to come together
  absl::Duration silence_timeout = absl::Seconds(30);    // a rank that answers no ping for so long is lost
  absl::Duration collective_timeout = absl::Minutes(1);  // for the other ranks to do their part of a sum

  // For rank 0. `stop_requested` says whether rank 0 stops waiting for the other ranks. `on_leaving` is
  // called when another rank was asked to stop, on a thread of the server, once.
  std::function<bool()> stop_requested = [] { return false; };
  std::function<void()> on_leaving = [] {};

  bool several() const { return launch.ranks > 1; }
};

// Encryption, and who may do what. The texts are paths of files, which docs/security.md describes; empty:
// none.
struct SecurityOptions {
  std::string tls_cert;
  std::string tls_key;
  std::string tls_client_ca;
  std::string role_file;
  std::string token_file;
  bool insecure = false;    // allow addresses beyond the loopback without TLS, or without asking who calls
  bool http_tls = false;    // HTTP over TLS, with the same certificate
  bool http_token = false;  // HTTP wants a reader's token, except for the health paths
};

// What a server is made of.
struct ServerOptions {
  // Addresses "host:port"; port 0: any free one. gRPC's may also be "unix:PATH", and several with commas
  // between them.
  std::string listen = "127.0.0.1:7070";
  uint32_t unix_socket_mode = 0600;     // of the files of Unix sockets: who may connect
  std::string http = "127.0.0.1:7071";  // empty: no HTTP
  SecurityOptions security;             // encryption, and who may do what
  std::string version = "0.0.0";
  bool embedded = false;  // in the process of other code, of which nothing is set (lossd.h)

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
  int64_t teacher_pool_bytes = 0;  // of each device, for heads in host memory; 0: as the largest of them
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
  // Called once with the reason when the device is lost, on a thread of the engine's; must not call into the
  // server.
  std::function<void(const absl::Status&)> on_device_lost = [](const absl::Status&) {};
};

// Permissions of a file, as a flag takes them: octal, "0660".
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

// The value of a field whose option is read as one of these types.
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
// The largest unit that divides the size: "256MiB".
std::string AbslUnparseFlag(const ByteSize& size);

// Sets one option. `name` is the flag of lossd without dashes ("staging_bytes"), `text` what the flag would
// be given ("64MiB"). INVALID_ARGUMENT naming the option and the text; the options are as before then.
// Thread-safe.
absl::Status SetOption(absl::string_view name, absl::string_view text, ServerOptions* options);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_SERVER_OPTIONS_H_
