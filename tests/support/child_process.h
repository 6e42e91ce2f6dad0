// SPDX-License-Identifier: Apache-2.0
// A program run as a child; killed if it is still there when the object goes. Thread-compatible.
#ifndef LOSSD_TESTS_SUPPORT_CHILD_PROCESS_H_
#define LOSSD_TESTS_SUPPORT_CHILD_PROCESS_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace lossd::test {

class ChildProcess {
 public:
  // `errors`: the file that its standard error goes to; empty: this program's.
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

  // Sends SIGSTOP, and returns when all of its threads have stopped, or it has ended.
  void Stop() const {
    Signal(SIGSTOP);
    siginfo_t info = {};
    EXPECT_EQ(waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WEXITED | WNOWAIT), 0);
  }

  // False once it has ended; Wait still tells how.
  bool Running() const {
    siginfo_t info = {};
    return waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == 0;
  }

  // Exit status, or minus the signal that ended it. To be called once.
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  // The same, but -1000 (and the child lives on) if it does not end within `limit`.
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

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_CHILD_PROCESS_H_
