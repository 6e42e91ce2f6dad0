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

namespace {

// The functions that take an option from its flag, one for each SERVER_FLAG.
using SetOption = void (*)(ServerOptions& options);
std::vector<SetOption>& Setters() {
  static auto* const setters = new std::vector<SetOption>();
  return *setters;
}
bool AddSetter(SetOption set) {
  Setters().push_back(set);
  return true;
}

int64_t ValueOf(ByteSize size) { return size.bytes; }
template <typename T>
T ValueOf(T value) {
  return value;
}

}  // namespace

// Defines a flag for a field of ServerOptions. The field's default is the flag's default.
#define SERVER_FLAG(type, name, field, help)                \
  ABSL_FLAG(type, name, type{ServerOptions().field}, help); \
  [[maybe_unused]] static const bool g_has_##name =         \
      AddSetter([](ServerOptions& options) { options.field = ValueOf(absl::GetFlag(FLAGS_##name)); })

SERVER_FLAG(std::string, http, http,
            "Address for /metrics, /livez, /readyz and the status page; port 0: any free one; empty: none");
SERVER_FLAG(std::string, tls_cert, security.tls_cert,
            "The server's certificate chain for gRPC over TLS, a PEM file; needs --tls_key");
SERVER_FLAG(
    std::string, tls_key, security.tls_key,
    "The private key of --tls_cert, a PEM file that only its owner can read; read again when it changes, as "
    "all files of this group");
SERVER_FLAG(
    std::string, tls_client_ca, security.tls_client_ca,
    "Certificate authorities of clients, a PEM file. Clients need a certificate of one of them, or with "
    "--token_file a token");
SERVER_FLAG(std::string, role_file, security.role_file,
            "Roles of client certificates: lines \"role name\", role reader, trainer or admin, name dns:..., "
            "uri:..., "
            "email:... or ip:... as the certificate's alternative names have it, or * for any; needs "
            "--tls_client_ca");
SERVER_FLAG(
    std::string, token_file, security.token_file,
    "Bearer tokens: lines role:name:token or role:name:sha256:hash; a file that only its owner can read");
SERVER_FLAG(
    bool, insecure, security.insecure,
    "Allow addresses that other machines can reach without TLS, or without asking clients who they are. "
    "Whoever reaches the ports can then read weights and change gradients");
SERVER_FLAG(bool, http_tls, security.http_tls, "Serve HTTP over TLS (HTTPS) with --tls_cert and --tls_key");
SERVER_FLAG(
    bool, http_token, security.http_token,
    "Answer HTTP requests for / and /metrics only with a token of --token_file (Authorization: Bearer)");
ABSL_FLAG(std::string, port_file, "",
          "Once serving, write the chosen addresses to this file as JSON: {\"grpc\": ..., \"http\": ...}");
SERVER_FLAG(std::string, checkpoint_dir, checkpoint_directory,
            "Directory of checkpoints and tensor files; clients name files below it only");
SERVER_FLAG(
    std::string, restore, restore,
    "latest: before it listens, the server loads the newest checkpoint of every head that has one below "
    "--checkpoint_dir; empty: it starts without heads");
SERVER_FLAG(
    int64_t, keep_checkpoints, keep_checkpoints,
    "After a save that the server named (step-...), keep so many of those per head, the newest, and remove "
    "older ones; checkpoints named by clients stay. 0: keep all. A save may ask for another number. Where "
    "the server asks who calls, only an admin asks for fewer, or deletes one that the server named");
SERVER_FLAG(
    ByteSize, checkpoint_limit_bytes, checkpoint_limit_bytes,
    "What all files below --checkpoint_dir may take together. A save that would pass it is refused before "
    "anything is written. 0: no limit");
SERVER_FLAG(
    ByteSize, checkpoint_buffer_bytes, checkpoint_buffer_bytes,
    "Memory a running save may take to read a head ahead of the disk, as far as it needs it. Steps wait "
    "only for the part of a checkpoint that does not fit");
SERVER_FLAG(ByteSize, checkpoint_shard_bytes, checkpoint_shard_bytes,
            "The most that one file of a checkpoint holds of the tensors; a larger checkpoint has several, "
            "each with a "
            "range of the classes");
SERVER_FLAG(int, checkpoint_threads, checkpoint_threads,
            "Threads that write the files of a checkpoint, or read them, at once; a checkpoint that is large "
            "enough has a file for each. 0: 4, or as many as there are devices if those are more");
SERVER_FLAG(std::string, backend, backend, "What computes: cpu, cuda, or auto: a GPU if there is one");
SERVER_FLAG(
    std::string, device, device,
    "CUDA backend: index among the visible GPUs, or the UUID of one as nvidia-smi -L prints it (GPU-...)");
SERVER_FLAG(
    std::string, devices, devices,
    "CUDA backend: several GPUs, as --device names them with commas between them, or all. Every head is "
    "on all of them, and they share the rows (docs/scaling.md). With --ranks, or a launcher, those of this "
    "process");
ABSL_FLAG(
    bool, exit_on_device_loss, true,
    "When the device is lost, answer the calls that are open, as after SIGTERM, and end with status 3, so "
    "that whatever supervises the server starts it again. False: go on without a device, and fail /livez");
SERVER_FLAG(int, threads, threads, "Threads of the CPU backend; 0: all the process may use");
SERVER_FLAG(
    int, cpu_devices, cpu_devices,
    "CPU backend: divide the threads among so many devices, which share the rows of every head as several "
    "GPUs do; to try that out. With --ranks, or a launcher, those of this process");
SERVER_FLAG(std::string, stream_priority, stream_priority,
            "GPU: what goes before other programs' work (docs/mps.md): dx (not dW), all, or none");
SERVER_FLAG(std::string, split, split,
            "Several devices: how heads that do not say lie on them (docs/scaling.md): rows, vocabulary, or "
            "any, which is by rows if every device has room for all classes, and else by vocabulary");
SERVER_FLAG(int, replicas, replicas,
            "Several devices: how many replicas heads by vocabulary have that do not say (docs/scaling.md)");
SERVER_FLAG(
    ByteSize, workspace_bytes, workspace_bytes,
    "Workspace of each head (on a GPU with its slots) that has no limit of its own; bounds the rows computed "
    "at once. 0: 256MiB (CPU), or 2220MiB and at most a quarter of the free memory (CUDA). Heads that "
    "recompute their logits take at most 64MiB on a GPU");
SERVER_FLAG(ByteSize, memory_limit_bytes, memory_limit_bytes,
            "Refuse heads that would take the planned memory beyond this, of each GPU or rank; 0: no limit");
SERVER_FLAG(
    ByteSize, memory_reserve_bytes, memory_reserve_bytes,
    "Leave so much of the host's memory (of what is available, and within the limits of the control groups "
    "and of the process) to others: a head on the CPU that would take it is refused, and the buffer of a "
    "save gets smaller");
SERVER_FLAG(
    bool, deterministic, deterministic,
    "Accumulate in the order of microbatch ids, which then have to be 0, 1, 2, ... in each step, so that "
    "the same microbatches give the same weights, bit for bit, whatever arrives first. Takes up to "
    "staging_bytes more for each trainable head");
SERVER_FLAG(ByteSize, slice_bytes, slice_bytes, "Largest slice of hidden states a message may hold");
SERVER_FLAG(ByteSize, staging_bytes, staging_bytes,
            "Memory for slices that are being received, computed or sent");
SERVER_FLAG(int64_t, max_streams, max_streams, "Most ComputeLoss calls open at once");
SERVER_FLAG(int64_t, max_heads, max_heads, "Most heads");
SERVER_FLAG(absl::Duration, drain_timeout, drain_timeout,
            "After SIGTERM or SIGINT, open calls may finish for so long");
SERVER_FLAG(ByteSize, retained_bytes, retained_bytes,
            "Memory for hidden states of deferred microbatches (reduction none); 0: none are kept");
SERVER_FLAG(absl::Duration, liveness_timeout, liveness_timeout,
            "/livez answers 503 when the device has had something to do and finished none of it for so long");
SERVER_FLAG(absl::Duration, retained_timeout, retained_timeout,
            "Release a deferred microbatch that no call has used for so long");
SERVER_FLAG(
    ByteSize, ledger_bytes, ledger_bytes,
    "Memory for what is remembered of rows: targets and weights of open calls, ledgers of open steps. 0: "
    "256MiB, and at most an eighth of --memory_limit_bytes");
SERVER_FLAG(
    double, peer_share, peer_share,
    "What one client may hold of calls, places in queues, staging and ledger memory, in (0, 1]; 1: all. It "
    "may also never hold more than it leaves to all others");
SERVER_FLAG(ByteSize, transport_bytes, transport.bytes,
            "Memory of gRPC for connections and messages that are being received. When it is used up, new "
            "connections are refused and calls are cancelled. 0: 256MiB, or 16 messages if that is more");
SERVER_FLAG(int64_t, max_connections, max_connections, "Most gRPC connections open at once");
SERVER_FLAG(int64_t, max_connections_per_address, max_connections_per_address,
            "Most of them from one address");
SERVER_FLAG(int64_t, max_calls_per_connection, transport.max_calls_per_connection,
            "Most calls at once on one gRPC connection");
SERVER_FLAG(int64_t, max_tensor_calls, max_tensor_calls,
            "Most ReadTensor, WriteTensor and AddGradient calls open at once");
SERVER_FLAG(int64_t, max_saves, max_saves, "Most SaveCheckpoint calls that wait or run");
SERVER_FLAG(int64_t, max_waiting_calls, max_waiting_calls,
            "Most other calls on heads that wait for a thread");
SERVER_FLAG(absl::Duration, handshake_timeout, transport.handshake_timeout,
            "Close a gRPC connection that has not begun to speak the protocol for so long");
SERVER_FLAG(absl::Duration, idle_connection_timeout, transport.idle_connection_timeout,
            "Close a gRPC connection that had no call for so long; clients connect again by themselves");
SERVER_FLAG(absl::Duration, open_timeout, timeouts.open,
            "End a call whose first message does not come for so long");
SERVER_FLAG(absl::Duration, idle_timeout, timeouts.idle,
            "End a call whose client sends nothing for so long while the server has nothing to do for it");
SERVER_FLAG(absl::Duration, turn_timeout, timeouts.turn,
            "End a call that waits for memory, its turn or the device for so long without progress");
SERVER_FLAG(absl::Duration, send_timeout, timeouts.send,
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

// The options of the server, as its flags say them.
ServerOptions OptionsFromFlags() {
  ServerOptions options;
  options.version = LOSSD_VERSION;
  lossd::app::SetListenOptions(&options);
  for (const SetOption set : Setters()) set(options);
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
