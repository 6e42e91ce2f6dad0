// SPDX-License-Identifier: Apache-2.0
// lossd: the server. Everything has a default; `lossd --help` lists the flags, `--flagfile=FILE` reads them
// from a file, one a line.
//
// Exit status: 0 after a drain, 1 if the server could not start or was told to stop twice, 2 for a bad flag,
// 3 if the device or another rank was lost.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "server/app/addresses.h"
#include "server/app/process.h"
#include "server/app/server.h"
#include "server/app/server_options.h"
#include "server/log/log.h"
#include "server/rpc/transport.h"
#include "server/rpc/workers.h"

using lossd::app::ByteSize;
using lossd::app::kGrace;
using lossd::app::Server;
using lossd::app::ServerOptions;
using lossd::app::ServiceManager;
using lossd::app::StopEvents;
using lossd::log::Log;
using lossd::log::LogFormat;
using lossd::log::LogLevel;

ABSL_FLAG(std::string, http, ServerOptions().http,
          "Address for /metrics, /livez, /readyz and the status page; port 0: any free one; empty: none");
ABSL_FLAG(std::string, tls_cert, "",
          "The server's certificate chain for gRPC over TLS, a PEM file; needs --tls_key");
ABSL_FLAG(
    std::string, tls_key, "",
    "The private key of --tls_cert, a PEM file that only its owner can read; read again when it changes, as "
    "all files of this group");
ABSL_FLAG(
    std::string, tls_client_ca, "",
    "Certificate authorities of clients, a PEM file. Clients need a certificate of one of them, or with "
    "--token_file a token");
ABSL_FLAG(std::string, role_file, "",
          "Roles of client certificates: lines \"role name\", role reader, trainer or admin, name dns:..., "
          "uri:..., "
          "email:... or ip:... as the certificate's alternative names have it, or * for any; needs "
          "--tls_client_ca");
ABSL_FLAG(
    std::string, token_file, "",
    "Bearer tokens: lines role:name:token or role:name:sha256:hash; a file that only its owner can read");
ABSL_FLAG(
    bool, insecure, false,
    "Allow addresses that other machines can reach without TLS, or without asking clients who they are. "
    "Whoever reaches the ports can then read weights and change gradients");
ABSL_FLAG(bool, http_tls, false, "Serve HTTP over TLS (HTTPS) with --tls_cert and --tls_key");
ABSL_FLAG(
    bool, http_token, false,
    "Answer HTTP requests for / and /metrics only with a token of --token_file (Authorization: Bearer)");
ABSL_FLAG(std::string, port_file, "",
          "Once serving, write the chosen addresses to this file as JSON: {\"grpc\": ..., \"http\": ...}");
ABSL_FLAG(std::string, checkpoint_dir, ServerOptions().checkpoint_directory,
          "Directory of checkpoints and tensor files; clients name files below it only");
ABSL_FLAG(
    std::string, restore, ServerOptions().restore,
    "latest: before it listens, the server loads the newest checkpoint of every head that has one below "
    "--checkpoint_dir; empty: it starts without heads");
ABSL_FLAG(
    int64_t, keep_checkpoints, ServerOptions().keep_checkpoints,
    "After a save that the server named (step-...), keep so many of those per head, the newest, and remove "
    "older ones; checkpoints named by clients stay. 0: keep all. A save may ask for another number");
ABSL_FLAG(
    ByteSize, checkpoint_limit_bytes, ByteSize{ServerOptions().checkpoint_limit_bytes},
    "What all files below --checkpoint_dir may take together. A save that would pass it is refused before "
    "anything is written. 0: no limit");
ABSL_FLAG(
    ByteSize, checkpoint_buffer_bytes, ByteSize{ServerOptions().checkpoint_buffer_bytes},
    "Memory a running save may take to read a head ahead of the disk, as far as it needs it. Steps wait "
    "only for the part of a checkpoint that does not fit");
ABSL_FLAG(ByteSize, checkpoint_shard_bytes, ByteSize{ServerOptions().checkpoint_shard_bytes},
          "The most that one file of a checkpoint holds of the tensors; a larger checkpoint has several, "
          "each with a "
          "range of the classes");
ABSL_FLAG(int, checkpoint_threads, ServerOptions().checkpoint_threads,
          "Threads that write the files of a checkpoint, or read them, at once; a checkpoint that is large "
          "enough has a file for each. 0: 4, or as many as there are devices if those are more");
ABSL_FLAG(std::string, backend, ServerOptions().backend,
          "What computes: cpu, cuda, or auto: a GPU if there is one");
ABSL_FLAG(
    std::string, device, ServerOptions().device,
    "CUDA backend: index among the visible GPUs, or the UUID of one as nvidia-smi -L prints it (GPU-...)");
ABSL_FLAG(
    std::string, devices, ServerOptions().devices,
    "CUDA backend: several GPUs, as --device names them with commas between them, or all. Every head is "
    "on all of them, and they share the rows (docs/scaling.md). With --ranks, or a launcher, those of this "
    "process");
ABSL_FLAG(
    bool, exit_on_device_loss, true,
    "When the device is lost, answer the calls that are open, as after SIGTERM, and end with status 3, so "
    "that whatever supervises the server starts it again. False: go on without a device, and fail /livez");
ABSL_FLAG(int, threads, ServerOptions().threads, "Threads of the CPU backend; 0: all the process may use");
ABSL_FLAG(
    int, cpu_devices, ServerOptions().cpu_devices,
    "CPU backend: divide the threads among so many devices, which share the rows of every head as several "
    "GPUs do; to try that out. With --ranks, or a launcher, those of this process");
ABSL_FLAG(std::string, stream_priority, ServerOptions().stream_priority,
          "GPU: what goes before other programs' work (docs/mps.md): dx (not dW), all, or none");
ABSL_FLAG(std::string, split, ServerOptions().split,
          "Several devices: how heads that do not say lie on them (docs/scaling.md): rows, vocabulary, or "
          "any, which is by rows if every device has room for all classes, and else by vocabulary");
ABSL_FLAG(int, replicas, ServerOptions().replicas,
          "Several devices: how many replicas heads by vocabulary have that do not say (docs/scaling.md)");
ABSL_FLAG(
    ByteSize, workspace_bytes, ByteSize{ServerOptions().workspace_bytes},
    "Workspace of each head (on a GPU with its slots) that has no limit of its own; bounds the rows computed "
    "at once. 0: 256MiB (CPU), or 2220MiB and at most a quarter of the free memory (CUDA). Heads that "
    "recompute their logits take at most 64MiB on a GPU");
ABSL_FLAG(ByteSize, memory_limit_bytes, ByteSize{ServerOptions().memory_limit_bytes},
          "Refuse heads that would take the planned memory beyond this, of each GPU or rank; 0: no limit");
ABSL_FLAG(
    ByteSize, memory_reserve_bytes, ByteSize{ServerOptions().memory_reserve_bytes},
    "Leave so much of the host's memory (of what is available, and within the limits of the control groups "
    "and of the process) to others: a head on the CPU that would take it is refused, and the buffer of a "
    "save gets smaller");
ABSL_FLAG(
    bool, deterministic, ServerOptions().deterministic,
    "Accumulate in the order of microbatch ids, which then have to be 0, 1, 2, ... in each step, so that "
    "the same microbatches give the same weights, bit for bit, whatever arrives first. Takes up to "
    "staging_bytes more for each trainable head");
ABSL_FLAG(ByteSize, slice_bytes, ByteSize{ServerOptions().slice_bytes},
          "Largest slice of hidden states a message may hold");
ABSL_FLAG(ByteSize, staging_bytes, ByteSize{ServerOptions().staging_bytes},
          "Memory for slices that are being received, computed or sent");
ABSL_FLAG(int64_t, max_streams, ServerOptions().max_streams, "Most ComputeLoss calls open at once");
ABSL_FLAG(int64_t, max_heads, ServerOptions().max_heads, "Most heads");
ABSL_FLAG(absl::Duration, drain_timeout, ServerOptions().drain_timeout,
          "After SIGTERM or SIGINT, open calls may finish for so long");
ABSL_FLAG(ByteSize, retained_bytes, ByteSize{ServerOptions().retained_bytes},
          "Memory for hidden states of deferred microbatches (reduction none); 0: none are kept");
ABSL_FLAG(absl::Duration, liveness_timeout, ServerOptions().liveness_timeout,
          "/livez answers 503 when the device has had something to do and finished none of it for so long");
ABSL_FLAG(absl::Duration, retained_timeout, ServerOptions().retained_timeout,
          "Release a deferred microbatch that no call has used for so long");
ABSL_FLAG(
    ByteSize, ledger_bytes, ByteSize{ServerOptions().ledger_bytes},
    "Memory for what is remembered of rows: targets and weights of open calls, ledgers of open steps. 0: "
    "256MiB, and at most an eighth of --memory_limit_bytes");
ABSL_FLAG(
    double, peer_share, ServerOptions().peer_share,
    "What one client may hold of calls, places in queues, staging and ledger memory, in (0, 1]; 1: all. It "
    "may also never hold more than it leaves to all others");
ABSL_FLAG(ByteSize, transport_bytes, ByteSize{ServerOptions().transport.bytes},
          "Memory of gRPC for connections and messages that are being received. When it is used up, new "
          "connections are refused and calls are cancelled. 0: 256MiB, or 16 messages if that is more");
ABSL_FLAG(int64_t, max_connections, ServerOptions().max_connections, "Most gRPC connections open at once");
ABSL_FLAG(int64_t, max_connections_per_address, ServerOptions().max_connections_per_address,
          "Most of them from one address");
ABSL_FLAG(int64_t, max_calls_per_connection, ServerOptions().transport.max_calls_per_connection,
          "Most calls at once on one gRPC connection");
ABSL_FLAG(int64_t, max_tensor_calls, ServerOptions().max_tensor_calls,
          "Most ReadTensor, WriteTensor and AddGradient calls open at once");
ABSL_FLAG(int64_t, max_saves, ServerOptions().max_saves, "Most SaveCheckpoint calls that wait or run");
ABSL_FLAG(int64_t, max_waiting_calls, ServerOptions().max_waiting_calls,
          "Most other calls on heads that wait for a thread");
ABSL_FLAG(absl::Duration, handshake_timeout, ServerOptions().transport.handshake_timeout,
          "Close a gRPC connection that has not begun to speak the protocol for so long");
ABSL_FLAG(absl::Duration, idle_connection_timeout, ServerOptions().transport.idle_connection_timeout,
          "Close a gRPC connection that had no call for so long; clients connect again by themselves");
ABSL_FLAG(absl::Duration, open_timeout, ServerOptions().timeouts.open,
          "End a call whose first message does not come for so long");
ABSL_FLAG(absl::Duration, idle_timeout, ServerOptions().timeouts.idle,
          "End a call whose client sends nothing for so long while the server has nothing to do for it");
ABSL_FLAG(absl::Duration, turn_timeout, ServerOptions().timeouts.turn,
          "End a call that waits for memory, its turn or the device for so long without progress");
ABSL_FLAG(absl::Duration, send_timeout, ServerOptions().timeouts.send,
          "Cancel a call whose answers the client does not take for so long");
ABSL_FLAG(LogLevel, log_level, LogLevel::kInfo, "Least level logged: debug, info, warning, error or off");
ABSL_FLAG(LogFormat, log_format, LogFormat::kText, "Form of log lines: text or json");

namespace {

constexpr int kExitFailure = 1;
constexpr int kExitDeviceLost = 3;

// Abseil ends the process with status 1 for a bad flag as for --help; here these are 2 and 0.
bool g_parsing_flags = false;
bool g_asked_for_help = false;

void MapExitStatus(int status, void*) {
  if (!g_parsing_flags || status != 1) return;
  std::fflush(nullptr);
  _exit(g_asked_for_help ? 0 : 2);
}

std::vector<char*> ParseFlags(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) g_asked_for_help = g_asked_for_help || absl::StrContains(argv[i], "-help");
  g_parsing_flags = true;
  on_exit(&MapExitStatus, nullptr);
  absl::FlagsUsageConfig config;
  config.version_string = [] { return std::string("lossd " LOSSD_VERSION "\n"); };
  config.contains_help_flags = [](absl::string_view file) {
    return absl::EndsWith(file, "server/app/main.cc") || absl::EndsWith(file, "server/app/server_options.cc");
  };
  config.contains_helpshort_flags = config.contains_help_flags;
  absl::SetFlagsUsageConfig(config);
  absl::SetProgramUsageMessage("a server that owns language models' loss heads; no flag is needed");
  std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  g_parsing_flags = false;
  return rest;
}

void SetClientLimits(ServerOptions& options) {
  options.ledger_bytes = absl::GetFlag(FLAGS_ledger_bytes).bytes;
  options.peer_share = absl::GetFlag(FLAGS_peer_share);
  options.transport.bytes = absl::GetFlag(FLAGS_transport_bytes).bytes;
  options.transport.max_calls_per_connection = absl::GetFlag(FLAGS_max_calls_per_connection);
  options.transport.handshake_timeout = absl::GetFlag(FLAGS_handshake_timeout);
  options.transport.idle_connection_timeout = absl::GetFlag(FLAGS_idle_connection_timeout);
  options.max_connections = absl::GetFlag(FLAGS_max_connections);
  options.max_connections_per_address = absl::GetFlag(FLAGS_max_connections_per_address);
  options.max_tensor_calls = absl::GetFlag(FLAGS_max_tensor_calls);
  options.max_saves = absl::GetFlag(FLAGS_max_saves);
  options.max_waiting_calls = absl::GetFlag(FLAGS_max_waiting_calls);
  options.timeouts = {.open = absl::GetFlag(FLAGS_open_timeout),
                      .idle = absl::GetFlag(FLAGS_idle_timeout),
                      .turn = absl::GetFlag(FLAGS_turn_timeout),
                      .send = absl::GetFlag(FLAGS_send_timeout)};
}

ServerOptions OptionsFromFlags() {
  ServerOptions options;
  options.version = LOSSD_VERSION;
  lossd::app::SetListenOptions(&options);
  options.http = absl::GetFlag(FLAGS_http);
  options.security = {.tls_cert = absl::GetFlag(FLAGS_tls_cert),
                      .tls_key = absl::GetFlag(FLAGS_tls_key),
                      .tls_client_ca = absl::GetFlag(FLAGS_tls_client_ca),
                      .role_file = absl::GetFlag(FLAGS_role_file),
                      .token_file = absl::GetFlag(FLAGS_token_file),
                      .insecure = absl::GetFlag(FLAGS_insecure),
                      .http_tls = absl::GetFlag(FLAGS_http_tls),
                      .http_token = absl::GetFlag(FLAGS_http_token)};
  options.backend = absl::GetFlag(FLAGS_backend);
  options.device = absl::GetFlag(FLAGS_device);
  options.devices = absl::GetFlag(FLAGS_devices);
  options.threads = absl::GetFlag(FLAGS_threads);
  options.cpu_devices = absl::GetFlag(FLAGS_cpu_devices);
  options.stream_priority = absl::GetFlag(FLAGS_stream_priority);
  options.split = absl::GetFlag(FLAGS_split);
  options.replicas = absl::GetFlag(FLAGS_replicas);
  options.workspace_bytes = absl::GetFlag(FLAGS_workspace_bytes).bytes;
  options.memory_limit_bytes = absl::GetFlag(FLAGS_memory_limit_bytes).bytes;
  options.memory_reserve_bytes = absl::GetFlag(FLAGS_memory_reserve_bytes).bytes;
  options.deterministic = absl::GetFlag(FLAGS_deterministic);
  options.slice_bytes = absl::GetFlag(FLAGS_slice_bytes).bytes;
  options.staging_bytes = absl::GetFlag(FLAGS_staging_bytes).bytes;
  options.retained_bytes = absl::GetFlag(FLAGS_retained_bytes).bytes;
  options.max_streams = absl::GetFlag(FLAGS_max_streams);
  options.max_heads = absl::GetFlag(FLAGS_max_heads);
  options.checkpoint_directory = absl::GetFlag(FLAGS_checkpoint_dir);
  options.restore = absl::GetFlag(FLAGS_restore);
  options.keep_checkpoints = absl::GetFlag(FLAGS_keep_checkpoints);
  options.checkpoint_limit_bytes = absl::GetFlag(FLAGS_checkpoint_limit_bytes).bytes;
  options.checkpoint_buffer_bytes = absl::GetFlag(FLAGS_checkpoint_buffer_bytes).bytes;
  options.checkpoint_shard_bytes = absl::GetFlag(FLAGS_checkpoint_shard_bytes).bytes;
  options.checkpoint_threads = absl::GetFlag(FLAGS_checkpoint_threads);
  options.drain_timeout = absl::GetFlag(FLAGS_drain_timeout);
  options.liveness_timeout = absl::GetFlag(FLAGS_liveness_timeout);
  options.retained_timeout = absl::GetFlag(FLAGS_retained_timeout);
  SetClientLimits(options);
  return options;
}

int Fail(const absl::Status& status) {
  std::cerr << "lossd: " << status.message() << std::endl;
  return absl::IsInvalidArgument(status) ? 2 : 1;
}

// Ends the process at a second signal, and if the drain takes longer than it may.
void WatchTheDrain(StopEvents& events, const StopEvents::Event& first) {
  const int status = first.signal == 0 ? kExitDeviceLost : kExitFailure;
  std::thread([&events, status, of_rank = first.of_rank] {
    if (of_rank) events.WaitForSignal();  // the first one
    events.WaitForSignal();
    Log(LogLevel::kWarning, "second signal: leaving at once");
    _exit(status);
  }).detach();
  const absl::Duration limit = absl::GetFlag(FLAGS_drain_timeout) + kGrace;
  lossd::app::EndWithin(first.signal == 0 ? limit : limit + lossd::app::kFarewell, status, "the drain");
}

void Drain(Server& server, ServiceManager& manager, StopEvents& events, const StopEvents::Event& event) {
  const absl::Duration timeout = absl::GetFlag(FLAGS_drain_timeout);
  const char* const reason = event.signal == 0 ? "the device is lost" : strsignal(event.signal);
  manager.Stopping(absl::StrCat("draining: ", reason), timeout + kGrace);
  Log(LogLevel::kInfo, "draining",
      {{"reason", reason},
       {"timeout", absl::FormatDuration(timeout)},
       {"open_streams", server.stats().open_streams}});
  WatchTheDrain(events, event);
  const bool clean = server.Drain(lossd::clocks::SteadyNow() + timeout);
  Log(clean ? LogLevel::kInfo : LogLevel::kWarning,
      clean ? "drained" : "drained; calls still open were cancelled");
}

int RunAsWorker(const ServerOptions& options, ServiceManager& manager, StopEvents& events) {
  const lossd::app::RanksEnd end = lossd::app::RunWorker(options, &manager, events);
  if (end.status.ok()) {
    Log(LogLevel::kInfo, "stopped");
    lossd::app::EndWithin(lossd::app::kFarewell, 0, "the process");
    if (end.joined) return 0;
    _exit(0);  // a thread may still be connecting
  }
  Log(LogLevel::kError, "the rank ends", {{"error", end.status.message()}});
  const int failure = Fail(end.status);
  std::cerr.flush();
  _exit(end.joined ? kExitDeviceLost : failure);
}

int Run() {
  lossd::app::PrepareProcess();
  StopEvents& events = *new StopEvents();  // for threads that outlive this function
  lossd::log::Configure(absl::GetFlag(FLAGS_log_level), absl::GetFlag(FLAGS_log_format));
  lossd::rpc::LogGrpcMessages();
  const absl::StatusOr<std::unique_ptr<ServiceManager>> manager = ServiceManager::FromEnvironment();
  if (!manager.ok()) return Fail(manager.status());
  const lossd::rpc::Periodic give_back(absl::Seconds(10), lossd::app::GiveBackFreedMemory);
  ServerOptions options = OptionsFromFlags();
  absl::StatusOr<lossd::app::RankOptions> ranks = lossd::app::RankOptionsFromFlags();
  if (!ranks.ok()) return Fail(ranks.status());
  options.ranks = *std::move(ranks);
  options.ranks.stop_requested = [&events] { return events.Pending() != 0; };
  options.ranks.on_leaving = [&events] { events.NotifyStop(); };
  if (options.ranks.launch.rank != 0) return RunAsWorker(options, **manager, events);
  if (absl::GetFlag(FLAGS_exit_on_device_loss))
    options.on_device_lost = [&events] { events.NotifyDeviceLost(); };
  std::optional<lossd::app::StartWatch> watch(&events);
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options);
  watch.reset();
  if (absl::IsCancelled(server.status())) {  // asked to stop before there was anything to drain
    Log(LogLevel::kInfo, "stopped",
        {{"reason", strsignal(events.Pending())}, {"while", server.status().message()}});
    return 0;
  }
  if (!server.ok()) return Fail(server.status());
  const std::string port_file = absl::GetFlag(FLAGS_port_file);
  if (!port_file.empty()) {
    const absl::Status status =
        lossd::app::WritePortFile(port_file, (*server)->grpc_address(), (*server)->http_address());
    if (!status.ok()) return Fail(status);
  }
  (*manager)->Ready(absl::StrCat("serving on ", (*server)->grpc_address()));
  std::optional<lossd::app::KeepAlive> keep_alive;
  keep_alive.emplace(manager->get(), [&server] { return (*server)->Live(); });
  const StopEvents::Event event = events.Wait();
  Drain(**server, **manager, events, event);
  keep_alive.reset();
  const bool device_lost = event.signal == 0;
  if (!device_lost) server->reset();
  if (!port_file.empty()) std::remove(port_file.c_str());
  Log(LogLevel::kInfo, "stopped");
  // Giving back what lies on a lost device could hang or fail.
  if (device_lost) _exit(kExitDeviceLost);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<char*> rest = ParseFlags(argc, argv);
  if (rest.size() > 1) {
    std::cerr << "lossd: unexpected argument " << rest[1] << " (flags start with --)" << std::endl;
    return 2;
  }
  return Run();
}
