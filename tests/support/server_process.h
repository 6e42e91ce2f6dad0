// SPDX-License-Identifier: Apache-2.0
// Programs that tests start: a child process (ChildProcess), a lossd process (ServerProcess), and several
// lossd processes as one server (RankServer). The servers have the CPU backend and little memory. Processes
// are killed when their object is destroyed. Thread-compatible.
//
// Environment:
//   LOSSD_TEST_FLAGS    further flags of every ServerProcess, separated by spaces
//   LOSSD_TEST_RANKS    the number of processes of every ServerProcess; 1 by default
//   LOSSD_TEST_PROGRAM  the program that a ServerProcess runs in place of the one that a test names
//   LOSSD_TEST_SOCKETS  "unix": a ServerProcess listens on a Unix socket, else on the loopback, unless a test
//                       names an address
//   LOSSD_RANK_PROGRAM  the program lossd for a RankServer, if tests were moved after the build
//   LOSSD_RANK_FLAGS    flags of all ranks of a RankServer, before the test's own, such as "--backend=cuda"
//   LOSSD_RANK_GPUS     how many GPUs the ranks share: rank r has the GPU r modulo this number
#ifndef LOSSD_TESTS_SUPPORT_SERVER_PROCESS_H_
#define LOSSD_TESTS_SUPPORT_SERVER_PROCESS_H_

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/support/temp_folder.h"

namespace lossd::test {

// A program that runs as a child process.
class ChildProcess {
 public:
  // `errors`: the file for its standard error; empty: this program's standard error.
  explicit ChildProcess(std::vector<std::string> arguments, const std::string& errors = "") {
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    if (!errors.empty()) {
      posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, errors.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                       0600);
    }
    EXPECT_EQ(posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ), 0) << argv[0];
    posix_spawn_file_actions_destroy(&actions);
  }
  ~ChildProcess() {
    if (pid_ <= 0) return;
    Signal(SIGKILL);
    Wait();
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  void Signal(int signal_number) const { kill(pid_, signal_number); }

  // Sends SIGSTOP. Returns when all threads of the process have stopped, or the process has ended.
  void Stop() const {
    Signal(SIGSTOP);
    siginfo_t info = {};
    EXPECT_EQ(waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WEXITED | WNOWAIT), 0);
  }

  // False after the process has ended. Wait can still be called.
  bool Running() const {
    siginfo_t info = {};
    return waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == 0;
  }

  // Waits for the end. Returns the exit status, or minus the signal that ended the process. Call it once.
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  // The same, but returns -1000 if the process does not end within `limit`; it continues to run.
  int WaitFor(absl::Duration limit) {
    const absl::Time deadline = absl::Now() + limit;
    int status = 0;
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      if (absl::Now() > deadline) return -1000;
      absl::SleepFor(absl::Milliseconds(5));
    }
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
};

// The first of the ports that the system chooses for sockets without a port.
inline int FirstPortOfTheSystem() {
  std::ifstream range("/proc/sys/net/ipv4/ip_local_port_range");
  int first = 0;
  return range >> first ? first : 32768;
}

// A free port of the loopback, below the ports that the system chooses itself. Until it is used, only another
// test that draws the same port could take it. If none of 1,000 ports is free, fails the test and returns 0.
// Thread-safe.
inline int FreePort() {
  constexpr int kPorts = 20000;
  const int end = std::max(FirstPortOfTheSystem(), 1024 + kPorts);
  std::random_device random;
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const int port = end - 1 - static_cast<int>(random() % kPorts);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool is_free = bind(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    close(descriptor);
    if (is_free) return port;
  }
  ADD_FAILURE() << "no free port";
  return 0;
}

// Whether servers listen on Unix sockets.
inline bool OnUnixSockets() {
  const char* const sockets = std::getenv("LOSSD_TEST_SOCKETS");
  return sockets != nullptr && absl::string_view(sockets) == "unix";
}

// A lossd process; with LOSSD_TEST_RANKS several processes that are one server.
class ServerProcess {
 public:
  // `program` is lossd. `flags` follow the flags that are set here, and the flags in LOSSD_TEST_FLAGS follow
  // them.
  explicit ServerProcess(std::string program, std::vector<std::string> flags = {})
      : program_(std::move(program)), flags_(std::move(flags)) {
    if (const char* const other = std::getenv("LOSSD_TEST_PROGRAM"); other != nullptr) program_ = other;
    Start();
  }

  // host:port, or unix:PATH
  const std::string& target() const { return target_; }
  // host:port; empty unless `flags` ask for HTTP.
  const std::string& http() const { return http_; }
  // What the process has written to standard error.
  std::string log() const { return ReadWholeFile(folder_.File("log")); }
  std::string checkpoint_folder() const { return folder_.File("checkpoints"); }
  pid_t pid() const { return process_->pid(); }

  bool Running() const { return process_->Running(); }
  void Signal(int number) { process_->Signal(number); }
  // The exit status, minus the signal that ended the process, or -1000 if it still runs after `limit`.
  int WaitFor(absl::Duration limit) { return process_->WaitFor(limit); }
  // Ends the process at once, like kill -9.
  void Kill() {
    process_ = nullptr;
    workers_.clear();
  }

  // Starts the process again after Kill, with the same checkpoint folder; on a Unix socket also at the same
  // address.
  void Start() { Start(OnUnixSockets() ? "unix:" + folder_.File("grpc") : "127.0.0.1:0"); }
  void Start(const std::string& listen) {
    const std::string port_file = folder_.File("ports.json");
    std::filesystem::remove(port_file);
    std::vector<std::string> command = {program_,
                                        absl::StrCat("--listen=", listen),
                                        "--http=",
                                        absl::StrCat("--port_file=", port_file),
                                        absl::StrCat("--checkpoint_dir=", checkpoint_folder()),
                                        "--log_level=off",
                                        "--threads=1",
                                        "--backend=cpu",
                                        "--slice_bytes=64KiB",
                                        "--staging_bytes=4MiB",
                                        "--workspace_bytes=4MiB"};
    command.insert(command.end(), flags_.begin(), flags_.end());
    const char* const more = std::getenv("LOSSD_TEST_FLAGS");
    for (absl::string_view flag : absl::StrSplit(more == nullptr ? "" : more, ' ', absl::SkipEmpty())) {
      command.emplace_back(flag);
    }
    StartProcesses(command);
    target_.clear();
    for (int i = 0; i < 4000 && target_.empty(); ++i) {
      absl::SleepFor(absl::Milliseconds(5));
      std::ifstream file(port_file);
      const auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
      if (!json.is_object()) continue;
      target_ = json["grpc"];
      http_ = json["http"];
    }
    EXPECT_NE(target_, "") << "lossd did not start: " << log();
  }

 private:
  void StartProcesses(std::vector<std::string> command) {
    workers_.clear();
    const char* const ranks = std::getenv("LOSSD_TEST_RANKS");
    const int count = ranks == nullptr ? 1 : std::atoi(ranks);
    if (count > 1) {
      command.push_back(absl::StrCat("--ranks=", count));
      command.push_back(absl::StrCat("--leader=127.0.0.1:", FreePort()));
      command.emplace_back("--rank=0");
    }
    process_ = std::make_unique<ChildProcess>(command, folder_.File("log"));
    for (int rank = 1; rank < count; ++rank) {
      command.back() = absl::StrCat("--rank=", rank);
      workers_.push_back(std::make_unique<ChildProcess>(command, folder_.File(absl::StrCat("log-", rank))));
    }
  }

  std::string program_;
  const std::vector<std::string> flags_;
  TempFolder folder_;
  std::unique_ptr<ChildProcess> process_;               // rank 0
  std::vector<std::unique_ptr<ChildProcess>> workers_;  // the other ranks
  std::string target_;
  std::string http_;
};

// Whether LOSSD_RANK_FLAGS puts ranks on GPUs.
inline bool RanksOnGpus() {
  const char* const flags = std::getenv("LOSSD_RANK_FLAGS");
  return flags != nullptr && absl::StrContains(flags, "--backend=cuda");
}

struct RankServerOptions {
  int ranks = 2;
  std::vector<std::string> flags;                                        // for all ranks
  std::function<std::vector<std::string>(int rank)> flags_of = nullptr;  // for one rank, after `flags`
  // The environment that a launcher sets, "NAME=value", for a rank whose leader waits on `port`. Null: flags
  // are used instead.
  std::function<std::vector<std::string>(int rank, int port)> environment = nullptr;
  bool await = true;           // wait until rank 0 serves
  int late = 0;                // how many ranks, the last ones, only StartLate() starts
  int open_files = 0;          // `ulimit -n` of all ranks; 0: the test's own
  std::string temporary = {};  // TMPDIR of all ranks; empty: the test's own
};

// A server of several lossd processes on this host.
class RankServer {
 public:
  RankServer(std::string program, RankServerOptions options)
      : program_(Variable("LOSSD_RANK_PROGRAM", std::move(program))), options_(std::move(options)) {
    Start();
  }

  const std::string& target() const { return target_; }  // host:port
  const std::string& http() const { return http_; }      // host:port; empty unless flags ask for it
  std::string checkpoint_folder() const { return folder_.File("checkpoints"); }
  std::string log(int rank) const { return ReadWholeFile(LogFile(rank)); }
  int rank_port() const { return port_; }  // the port on which rank 0 waits for the other ranks
  ChildProcess& rank(int rank) { return *processes_[static_cast<size_t>(rank)]; }
  // Waits for the end of every rank; see ChildProcess::WaitFor.
  std::vector<int> WaitForAll(absl::Duration limit) {
    std::vector<int> ends;
    for (const auto& process : processes_) ends.push_back(process->WaitFor(limit));
    return ends;
  }
  void KillAll() { processes_.clear(); }
  // Waits until rank 0 serves or has ended. Returns whether it serves. May also be called without `await`.
  bool AwaitServing() {
    const absl::Time deadline = absl::Now() + absl::Minutes(3);
    while (!ReadPorts() && absl::Now() < deadline && processes_.front()->Running()) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    return ReadPorts();
  }

  void StartLate() {
    for (int rank = options_.ranks - options_.late; rank < options_.ranks; ++rank) StartRank(rank);
  }

  // Starts all ranks except the late ones, with the same checkpoint folder.
  void Start() {
    // Tries again, because another program may have taken the port meanwhile.
    for (int attempt = 0; attempt < 5; ++attempt) {
      StartAll(FreePort());
      if (!options_.await) return;
      AwaitServing();
      if (!target_.empty() || !absl::StrContains(log(0), "cannot listen")) break;
    }
    if (target_.empty()) {
      for (int i = 0; i < options_.ranks; ++i) ADD_FAILURE() << "rank " << i << ": " << log(i);
    }
  }

 private:
  static std::string Variable(const char* name, std::string otherwise = "") {
    const char* const value = std::getenv(name);
    return value == nullptr ? std::move(otherwise) : value;
  }
  std::string LogFile(int rank) const { return folder_.File(absl::StrCat("log-", rank)); }
  std::string PortFile() const { return folder_.File("ports.json"); }

  void StartAll(int port) {
    processes_.clear();
    target_.clear();
    std::filesystem::remove(PortFile());
    port_ = port;
    for (int rank = 0; rank < options_.ranks - options_.late; ++rank) StartRank(rank);
  }
  void StartRank(int rank) {
    std::filesystem::remove(LogFile(rank));
    processes_.push_back(std::make_unique<ChildProcess>(CommandOf(rank, port_), LogFile(rank)));
  }

  std::vector<std::string> CommandOf(int rank, int port) const {
    std::vector<std::string> command;
    if (options_.open_files > 0) {
      command = {"/bin/sh", "-c", absl::StrCat("ulimit -n ", options_.open_files, R"( && exec "$@")"), "sh"};
    }
    if (!options_.temporary.empty() || options_.environment) command.push_back("/usr/bin/env");
    if (!options_.temporary.empty()) command.push_back(absl::StrCat("TMPDIR=", options_.temporary));
    if (options_.environment) {
      for (std::string& variable : options_.environment(rank, port)) command.push_back(std::move(variable));
    }
    for (const std::string& part :
         {program_, absl::StrCat("--rank_port=", port), std::string("--listen=127.0.0.1:0"),
          std::string("--http="), absl::StrCat("--port_file=", PortFile()),
          absl::StrCat("--checkpoint_dir=", checkpoint_folder()), std::string("--threads=1"),
          std::string("--backend=cpu"), std::string("--slice_bytes=64KiB"),
          std::string("--staging_bytes=4MiB"), std::string("--workspace_bytes=4MiB")}) {
      command.push_back(part);
    }
    for (const absl::string_view flag :
         absl::StrSplit(Variable("LOSSD_RANK_FLAGS"), ' ', absl::SkipEmpty())) {
      command.emplace_back(flag);
    }
    if (const int gpus = std::atoi(Variable("LOSSD_RANK_GPUS").c_str()); gpus > 0) {
      command.push_back(absl::StrCat("--device=", rank % gpus));
    }
    if (!options_.environment) {
      command.push_back(absl::StrCat("--rank=", rank));
      command.push_back(absl::StrCat("--ranks=", options_.ranks));
      command.push_back("--leader=127.0.0.1");
    }
    command.insert(command.end(), options_.flags.begin(), options_.flags.end());
    if (options_.flags_of) {
      for (std::string& flag : options_.flags_of(rank)) command.push_back(std::move(flag));
    }
    return command;
  }

  // Reads the ports that rank 0 has written. False if it has not written them yet.
  bool ReadPorts() {
    if (!target_.empty()) return true;
    std::ifstream file(PortFile());
    const auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) return false;
    target_ = json["grpc"];
    http_ = json["http"];
    return true;
  }

  const std::string program_;
  const RankServerOptions options_;
  TempFolder folder_;
  std::vector<std::unique_ptr<ChildProcess>> processes_;
  int port_ = 0;
  std::string target_;
  std::string http_;
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_SERVER_PROCESS_H_
