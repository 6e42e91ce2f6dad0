// SPDX-License-Identifier: Apache-2.0
// The program lossd, the server. Every flag has a default; `lossd --help` lists the flags, and
// `--flagfile=FILE` reads them from a file, one on each line.
//
// Exit status: 0 after a drain, 1 if the server could not start or got two signals to stop, 2 for a bad flag,
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
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "server/app/addresses.h"
#include "server/app/process.h"
#include "server/app/server.h"
#include "server/app/server_options.h"
#include "server/log/log.h"
#include "server/ranks/start.h"
#include "server/rpc/transport.h"
#include "server/rpc/workers.h"

using lossd::app::ByteSize;
using lossd::app::FileMode;
using lossd::app::kGrace;
using lossd::app::RankOptions;
using lossd::app::Server;
using lossd::app::ServerOptions;
using lossd::app::ServiceManager;
using lossd::app::StopEvents;
using lossd::log::Log;
using lossd::log::LogFormat;
using lossd::log::LogLevel;
using lossd::ranks::LaunchFlags;

#define LOSSD_OPTION(type, name, field, help) ABSL_FLAG(type, name, type{ServerOptions().field}, help);
#define LOSSD_RANK_OPTION(type, name, field, help) ABSL_FLAG(type, name, type{RankOptions().field}, help);
#include "server/app/option_table.inc"

ABSL_FLAG(std::string, port_file, "",
          "Once serving, write the chosen addresses to this file as JSON: {\"grpc\": ..., \"http\": ...}");
ABSL_FLAG(bool, exit_on_device_loss, true,
          "When the device is lost, answer open calls and end with status 3, to be started again. False: go "
          "on without a device, and fail /livez");
ABSL_FLAG(LogLevel, log_level, LogLevel::kInfo, "Least level logged: debug, info, warning, error or off");
ABSL_FLAG(LogFormat, log_format, LogFormat::kText, "Form of log lines: text or json");

// Flags for a server that has several processes.
ABSL_FLAG(std::string, launcher, LaunchFlags().launcher,
          "Several processes are one server (docs/scaling.md), started by torchrun, slurm, lws "
          "(LeaderWorkerSet) or jobset, whose environment says which one this is; auto: whichever of these; "
          "none: --rank and --ranks say it");
ABSL_FLAG(int, ranks, 0,
          "How many processes are one server, each with the same number of devices; 0: as the launcher says, "
          "or one");
ABSL_FLAG(int, rank, -1, "Which of them this one is; 0 serves clients. -1: as the launcher says");
ABSL_FLAG(std::string, leader, "",
          "Where the other ranks reach rank 0, host:port or host; empty: as the launcher says");
ABSL_FLAG(int, rank_port, LaunchFlags().port,
          "The port of rank 0 where --leader and the launcher give a host only");

namespace {

constexpr int kExitFailure = 1;
constexpr int kExitDeviceLost = 3;

// Abseil ends the process with status 1 both for a bad flag and for --help. MapExitStatus changes this to 2
// for a bad flag and 0 for --help.
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
    return absl::EndsWith(file, "server/app/main.cc") || absl::EndsWith(file, "server/app/option_table.inc");
  };
  config.contains_helpshort_flags = config.contains_help_flags;
  absl::SetFlagsUsageConfig(config);
  absl::SetProgramUsageMessage("a server that owns language models' loss heads; no flag is needed");
  std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  g_parsing_flags = false;
  return rest;
}

// Makes the options of the server from the flags.
ServerOptions OptionsFromFlags() {
  ServerOptions options;
  options.version = LOSSD_VERSION;
#define LOSSD_OPTION(type, name, field, help) \
  options.field = lossd::app::FieldOf(absl::GetFlag(FLAGS_##name));
#define LOSSD_RANK_OPTION(type, name, field, help) options.ranks.field = absl::GetFlag(FLAGS_##name);
#include "server/app/option_table.inc"
  return options;
}

lossd::ranks::Environment ReadEnvironment() {
  lossd::ranks::Environment environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    environment.insert(std::pair<std::string, std::string>(absl::StrSplit(*entry, absl::MaxSplits('=', 1))));
  }
  return environment;
}

// Finds the rank of this process from flags and environment. INVALID_ARGUMENT as ranks::ReadLaunch.
absl::StatusOr<lossd::ranks::Launch> LaunchFromFlags() {
  LaunchFlags flags;
  flags.launcher = absl::GetFlag(FLAGS_launcher);
  if (const int ranks = absl::GetFlag(FLAGS_ranks); ranks != 0) flags.ranks = ranks;
  if (const int rank = absl::GetFlag(FLAGS_rank); rank != -1) flags.rank = rank;
  flags.leader = absl::GetFlag(FLAGS_leader);
  flags.port = absl::GetFlag(FLAGS_rank_port);
  return lossd::ranks::ReadLaunch(flags, ReadEnvironment());
}

int Fail(const absl::Status& status) {
  std::cerr << "lossd: " << status.message() << std::endl;
  return absl::IsInvalidArgument(status) ? 2 : 1;
}

// Ends the process at once at a second signal, or if the drain takes longer than allowed.
void WatchTheDrain(StopEvents& events, const StopEvents::Event& first) {
  const int status = first.signal == 0 ? kExitDeviceLost : kExitFailure;
  std::thread([&events, status, of_rank = first.of_rank] {
    if (of_rank) events.WaitForSignal();  // drop the first signal: the stop came from another rank
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
  StopEvents& events = *new StopEvents();  // never destroyed, because some threads outlive this function
  lossd::log::Configure(absl::GetFlag(FLAGS_log_level), absl::GetFlag(FLAGS_log_format));
  lossd::rpc::LogGrpcMessages();
  const absl::StatusOr<std::unique_ptr<ServiceManager>> manager = ServiceManager::FromEnvironment();
  if (!manager.ok()) return Fail(manager.status());
  const lossd::rpc::Periodic give_back(absl::Seconds(10), lossd::app::GiveBackFreedMemory);
  ServerOptions options = OptionsFromFlags();
  absl::StatusOr<lossd::ranks::Launch> launch = LaunchFromFlags();
  if (!launch.ok()) return Fail(launch.status());
  options.ranks.launch = *std::move(launch);
  options.ranks.stop_requested = [&events] { return events.Pending() != 0; };
  options.ranks.on_leaving = [&events] { events.NotifyStop(); };
  if (options.ranks.launch.rank != 0) return RunAsWorker(options, **manager, events);
  if (absl::GetFlag(FLAGS_exit_on_device_loss))
    options.on_device_lost = [&events](const absl::Status&) { events.NotifyDeviceLost(); };
  std::optional<lossd::app::StartWatch> watch(&events);
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options);
  watch.reset();
  if (absl::IsCancelled(server.status())) {  // a signal came before the server had started
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
  // Freeing memory of a lost device could hang or fail.
  if (device_lost) _exit(kExitDeviceLost);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  lossd::clocks::TakeLocksWithoutSearch();
  const std::vector<char*> rest = ParseFlags(argc, argv);
  if (rest.size() > 1) {
    std::cerr << "lossd: unexpected argument " << rest[1] << " (flags start with --)" << std::endl;
    return 2;
  }
  return Run();
}
