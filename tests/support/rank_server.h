// SPDX-License-Identifier: Apache-2.0
// A server of several lossd processes on this host, with the CPU backend and little memory; killed when the
// object goes. Thread-compatible.
//
// Environment:
//   LOSSD_RANK_PROGRAM  lossd, where tests do not lie where they were built
//   LOSSD_RANK_FLAGS    flags of all ranks, which come before those of the test: "--backend=cuda" and so on
//   LOSSD_RANK_GPUS     how many GPUs the ranks share: rank r has the GPU r modulo so many
#ifndef LOSSD_TESTS_SUPPORT_RANK_SERVER_H_
#define LOSSD_TESTS_SUPPORT_RANK_SERVER_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/support/child_process.h"
#include "tests/support/free_port.h"
#include "tests/support/temp_folder.h"

namespace lossd::test {

// Whether LOSSD_RANK_FLAGS puts ranks on GPUs.
inline bool RanksOnGpus() {
  const char* const flags = std::getenv("LOSSD_RANK_FLAGS");
  return flags != nullptr && absl::StrContains(flags, "--backend=cuda");
}

struct RankServerOptions {
  int ranks = 2;
  std::vector<std::string> flags;                                        // of all ranks
  std::function<std::vector<std::string>(int rank)> flags_of = nullptr;  // of one, after those
  // What a launcher sets: "NAME=value", of a rank whose leader waits on `port`. Null: flags say it.
  std::function<std::vector<std::string>(int rank, int port)> environment = nullptr;
  bool await = true;           // until rank 0 serves
  int late = 0;                // so many ranks, the last ones, are started by StartLate() only
  int open_files = 0;          // `ulimit -n` of all ranks; 0: that of the test
  std::string temporary = {};  // TMPDIR of all ranks; empty: that of the test
};

class RankServer {
 public:
  RankServer(std::string program, RankServerOptions options)
      : program_(Variable("LOSSD_RANK_PROGRAM", std::move(program))), options_(std::move(options)) {
    Start();
  }

  const std::string& target() const { return target_; }  // host:port
  const std::string& http() const { return http_; }      // likewise; empty unless flags ask for it
  std::string checkpoint_folder() const { return folder_.File("checkpoints"); }
  std::string log(int rank) const { return ReadWholeFile(LogFile(rank)); }
  int rank_port() const { return port_; }  // where rank 0 waits for the others
  ChildProcess& rank(int rank) { return *processes_[static_cast<size_t>(rank)]; }
  // How every rank ended, by rank: see ChildProcess::WaitFor.
  std::vector<int> WaitForAll(absl::Duration limit) {
    std::vector<int> ends;
    for (const auto& process : processes_) ends.push_back(process->WaitFor(limit));
    return ends;
  }
  void KillAll() { processes_.clear(); }
  // Waits until rank 0 serves or has ended, and says whether it serves; also without `await`.
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

  // Starts all ranks but the late ones, with the same checkpoint folder.
  void Start() {
    // Another program may have taken the port meanwhile.
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

  // False if rank 0 has not said yet where it serves.
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

#endif  // LOSSD_TESTS_SUPPORT_RANK_SERVER_H_
