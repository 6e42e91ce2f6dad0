// SPDX-License-Identifier: Apache-2.0
// A lossd process with the CPU backend and little memory, killed when the object goes; or several that are
// one server, of which the others compute for it. Thread-compatible.
//
// Environment:
//   LOSSD_TEST_FLAGS    further flags of every server, with spaces between them
//   LOSSD_TEST_RANKS    of so many processes every server is; 1 by default
//   LOSSD_TEST_PROGRAM  what is run in place of the program that a test names
//   LOSSD_TEST_SOCKETS  "unix": servers listen on a Unix socket unless a test says where; else on the
//   loopback
#ifndef LOSSD_TESTS_SUPPORT_SERVER_PROCESS_H_
#define LOSSD_TESTS_SUPPORT_SERVER_PROCESS_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/support/child_process.h"
#include "tests/support/free_port.h"
#include "tests/support/temp_folder.h"

namespace lossd::test {

// Whether servers listen on Unix sockets.
inline bool OnUnixSockets() {
  const char* const sockets = std::getenv("LOSSD_TEST_SOCKETS");
  return sockets != nullptr && absl::string_view(sockets) == "unix";
}

class ServerProcess {
 public:
  // `program` is lossd; `flags` come after those set here, and after them those of LOSSD_TEST_FLAGS.
  explicit ServerProcess(std::string program, std::vector<std::string> flags = {})
      : program_(std::move(program)), flags_(std::move(flags)) {
    if (const char* const other = std::getenv("LOSSD_TEST_PROGRAM"); other != nullptr) program_ = other;
    Start();
  }

  // host:port, or unix:PATH
  const std::string& target() const { return target_; }
  // host:port; empty unless `flags` ask for HTTP.
  const std::string& http() const { return http_; }
  // What it has written to standard error.
  std::string log() const { return ReadWholeFile(folder_.File("log")); }
  std::string checkpoint_folder() const { return folder_.File("checkpoints"); }
  pid_t pid() const { return process_->pid(); }

  bool Running() const { return process_->Running(); }
  void Signal(int number) { process_->Signal(number); }
  // Its exit status, minus the signal that ended it, or -1000 if it still runs after `limit`.
  int WaitFor(absl::Duration limit) { return process_->WaitFor(limit); }
  // Ends it at once, as kill -9 does.
  void Kill() {
    process_ = nullptr;
    workers_.clear();
  }

  // Starts it again after Kill, with the same checkpoint folder; on a Unix socket also at the same address.
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

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_SERVER_PROCESS_H_
