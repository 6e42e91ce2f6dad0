// SPDX-License-Identifier: Apache-2.0
// The linked lossd program tells that its device thread or gRPC's threads hang: /livez does, and the service
// manager hears no more that it is alive. The server still answers HTTP meanwhile.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/support/fake_service_manager.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"
#include "tests/support/temp_folder.h"

namespace lossd::liveness_test {
namespace {

using test::FakeServiceManager;
using test::HttpGet;
using test::HttpStatus;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// The thread of `process` with this name; -1 if there is none.
pid_t ThreadOf(pid_t process, const std::string& name) {
  for (const auto& entry : std::filesystem::directory_iterator(absl::StrCat("/proc/", process, "/task"))) {
    if (test::ReadWholeFile(entry.path() / "comm") == name + "\n") return std::stoi(entry.path().filename());
  }
  return -1;
}

// The same for a process that has just begun: a thread takes its name a moment after its start.
pid_t FindThread(pid_t process, const std::string& name) {
  for (const absl::Time limit = absl::Now() + absl::Seconds(60); absl::Now() < limit;) {
    if (const pid_t thread = ThreadOf(process, name); thread > 0) return thread;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return -1;
}

// The threads of `process` that gRPC reads, writes and answers calls on, by the names that gRPC 1.51 gives
// them.
std::vector<pid_t> GrpcThreadsOf(pid_t process) {
  std::vector<pid_t> threads;
  for (const auto& entry : std::filesystem::directory_iterator(absl::StrCat("/proc/", process, "/task"))) {
    const std::string name = test::ReadWholeFile(entry.path() / "comm");
    for (const char* of_grpc :
         {"nexting_thread\n", "event_engine\n", "grpcpp_sync_ser\n", "default-executo\n"})
      if (name == of_grpc) threads.push_back(std::stoi(entry.path().filename()));
  }
  return threads;
}

// Holds one thread of a child process still, as a debugger does.
class FrozenThread {
 public:
  explicit FrozenThread(pid_t thread) : thread_(thread) {
    frozen_ = ptrace(PTRACE_SEIZE, thread, nullptr, nullptr) == 0 &&
              ptrace(PTRACE_INTERRUPT, thread, nullptr, nullptr) == 0 &&
              waitpid(thread, nullptr, __WALL) == thread;
    error_ = errno;
  }
  ~FrozenThread() {
    if (frozen_) ptrace(PTRACE_DETACH, thread_, nullptr, nullptr);
  }
  FrozenThread(const FrozenThread&) = delete;
  FrozenThread& operator=(const FrozenThread&) = delete;

  bool frozen() const { return frozen_; }
  int error() const { return error_; }

 private:
  const pid_t thread_;
  bool frozen_ = false;
  int error_ = 0;
};

bool BecomesStatus(const std::string& address, const char* path, int status) {
  for (const absl::Time limit = absl::Now() + absl::Seconds(60); absl::Now() < limit;) {
    if (HttpStatus(HttpGet(address, path)) == status) return true;
    absl::SleepFor(absl::Milliseconds(50));
  }
  return false;
}

class LivenessTest : public ::testing::Test {
 protected:
  // Several of the device thread's beats, so that a slow machine does not look like a hanging thread.
  test::ServerProcess server_{LOSSD_BINARY, {"--http=127.0.0.1:0", "--liveness_timeout=8s"}};
};

TEST_F(LivenessTest, AnIdleServerIsLive) {
  const std::string& address = server_.http();
  EXPECT_EQ(HttpStatus(HttpGet(address, "/livez")), 200);
  absl::SleepFor(absl::Seconds(9));  // longer than the timeout: the thread beats with nothing to do
  EXPECT_EQ(HttpStatus(HttpGet(address, "/livez")), 200);
  EXPECT_TRUE(absl::EndsWith(HttpGet(address, "/livez"), "\r\n\r\nok\n"));
}

TEST_F(LivenessTest, AHangingDeviceThreadIsNotLive) {
  const std::string& address = server_.http();
  const pid_t thread = FindThread(server_.pid(), "lossd-device");
  ASSERT_GT(thread, 0);
  {
    const FrozenThread frozen(thread);
    if (!frozen.frozen() && frozen.error() == EPERM) GTEST_SKIP() << "this machine does not allow ptrace";
    ASSERT_TRUE(frozen.frozen()) << std::strerror(frozen.error());
    EXPECT_TRUE(BecomesStatus(address, "/livez", 503));
    EXPECT_NE(HttpGet(address, "/livez").find("no progress on the device for "), std::string::npos);
    EXPECT_EQ(HttpStatus(HttpGet(address, "/readyz")), 200);
  }
  EXPECT_TRUE(BecomesStatus(address, "/livez", 200));
}

TEST_F(LivenessTest, HangingThreadsOfGrpcAreNotLive) {
  const std::string& address = server_.http();
  ASSERT_TRUE(BecomesStatus(address, "/livez", 200));
  {
    std::vector<std::unique_ptr<FrozenThread>> frozen;
    for (const pid_t thread : GrpcThreadsOf(server_.pid())) {
      frozen.push_back(std::make_unique<FrozenThread>(thread));
      if (!frozen.back()->frozen() && frozen.back()->error() == EPERM)
        GTEST_SKIP() << "this machine does not allow ptrace";
      ASSERT_TRUE(frozen.back()->frozen()) << std::strerror(frozen.back()->error());
    }
    ASSERT_FALSE(frozen.empty()) << "gRPC's threads have other names";
    EXPECT_TRUE(BecomesStatus(address, "/livez", 503));
    EXPECT_THAT(HttpGet(address, "/livez"), HasSubstr("no answer of gRPC"));
  }
  EXPECT_TRUE(BecomesStatus(address, "/livez", 200));
}

class SupervisedServerTest : public ::testing::Test {
 protected:
  const FakeServiceManager manager_{FakeServiceManager::Kind::kAbstract, absl::Milliseconds(200)};
  // Several of the device thread's beats, as above.
  test::ServerProcess server_{LOSSD_BINARY,
                              {"--http=127.0.0.1:0", "--liveness_timeout=8s", "--drain_timeout=50s"}};
};

TEST_F(SupervisedServerTest, HearsThatTheServerServesLivesAndEnds) {
  EXPECT_EQ(manager_.NextWith("STATUS="), "READY=1\nSTATUS=serving on " + server_.target() + "\n");
  EXPECT_EQ(HttpStatus(HttpGet(server_.http(), "/readyz")), 200);
  for (int i = 0; i < 3; ++i) EXPECT_THAT(manager_.NextWith("STATUS="), StartsWith("WATCHDOG=1\n"));
  server_.Signal(SIGTERM);
  EXPECT_EQ(manager_.NextWith("STOPPING=1\n"),
            "STOPPING=1\nSTATUS=draining: Terminated\nEXTEND_TIMEOUT_USEC=60000000\n");
  EXPECT_EQ(server_.WaitFor(absl::Minutes(2)), 0);
  while (const auto message = manager_.Next(absl::ZeroDuration())) {
    EXPECT_EQ(message, "WATCHDOG=1\nSTATUS=draining: Terminated\n");
  }
}

TEST_F(SupervisedServerTest, HearsNothingOfAliveWhileTheDeviceThreadHangs) {
  manager_.NextWith("WATCHDOG=1\n");
  const pid_t thread = FindThread(server_.pid(), "lossd-device");
  ASSERT_GT(thread, 0);
  {
    const FrozenThread frozen(thread);
    if (!frozen.frozen() && frozen.error() == EPERM) GTEST_SKIP() << "this machine does not allow ptrace";
    ASSERT_TRUE(frozen.frozen()) << std::strerror(frozen.error());
    manager_.NextWith("not alive: no progress on the device for ");
    EXPECT_EQ(HttpStatus(HttpGet(server_.http(), "/livez")), 503);
    for (int i = 0; i < 10; ++i) EXPECT_THAT(manager_.NextWith("STATUS="), Not(HasSubstr("WATCHDOG=1")));
  }
  manager_.NextWith("WATCHDOG=1\n");
}

TEST(ServiceManagerFlagsTest, AServerWhoseManagerHasGoneServes) {
  setenv("NOTIFY_SOCKET", "/nowhere/notify", 1);
  test::ServerProcess server(LOSSD_BINARY, {"--log_level=info"});
  unsetenv("NOTIFY_SOCKET");
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitFor(absl::Minutes(2)), 0);
  EXPECT_THAT(server.log(), HasSubstr("the service manager cannot be told NOTIFY_SOCKET=/nowhere/notify"));
}

TEST(ServiceManagerFlagsTest, AnEnvironmentThatIsMalformedIsRefused) {
  const test::TempFolder folder;
  setenv("NOTIFY_SOCKET", "elsewhere", 1);
  test::ChildProcess server({LOSSD_BINARY, "--listen=127.0.0.1:0", "--http="}, folder.File("log"));
  unsetenv("NOTIFY_SOCKET");
  EXPECT_EQ(server.WaitFor(absl::Minutes(2)), 2);
  EXPECT_THAT(test::ReadWholeFile(folder.File("log")), HasSubstr("NOTIFY_SOCKET must be a path"));
}

}  // namespace
}  // namespace lossd::liveness_test
