// SPDX-License-Identifier: Apache-2.0
// The linked lossd program when it cannot work: its device thread or gRPC's threads hang, or its device is
// lost. What calls hear, what the metrics, the probes and the service manager are told, and how the process
// ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "tests/support/fake_host.h"
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

TEST_F(LivenessTest, AHangingAcceptorIsNotLive) {
  const std::string& address = server_.http();
  const pid_t thread = FindThread(server_.pid(), "lossd-accept");
  ASSERT_GT(thread, 0);
  {
    const FrozenThread frozen(thread);
    if (!frozen.frozen() && frozen.error() == EPERM) GTEST_SKIP() << "this machine does not allow ptrace";
    ASSERT_TRUE(frozen.frozen()) << std::strerror(frozen.error());
    EXPECT_TRUE(BecomesStatus(address, "/livez", 503));
    EXPECT_THAT(HttpGet(address, "/livez"), HasSubstr("no answer of the thread that accepts connections"));
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

// A probe over HTTP gets no answer then. The service manager hears why.
TEST_F(SupervisedServerTest, HearsNothingOfAliveWhileHttpTakesNoConnections) {
  manager_.NextWith("WATCHDOG=1\n");
  const pid_t thread = FindThread(server_.pid(), "lossd-accept-h");
  ASSERT_GT(thread, 0);
  {
    const FrozenThread frozen(thread);
    if (!frozen.frozen() && frozen.error() == EPERM) GTEST_SKIP() << "this machine does not allow ptrace";
    ASSERT_TRUE(frozen.frozen()) << std::strerror(frozen.error());
    manager_.NextWith("not alive: no answer of HTTP's threads for ");
    for (int i = 0; i < 10; ++i) EXPECT_THAT(manager_.NextWith("STATUS="), Not(HasSubstr("WATCHDOG=1")));
  }
  manager_.NextWith("WATCHDOG=1\n");
  EXPECT_EQ(HttpStatus(HttpGet(server_.http(), "/livez")), 200);
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

// ---- Loss of the device ----
// The linked lossd program, with a device that can be lost: what calls hear, what the metrics and probes say,
// and how the process ends.

constexpr absl::Duration kLimit = absl::Minutes(2);  // for what a slow machine does
constexpr uint64_t kHidden = 8;

class DeviceLossTest : public ::testing::Test {
 protected:
  DeviceLossTest() { setenv("LOSSD_LOSE_DEVICE", lost_.c_str(), 1); }
  ~DeviceLossTest() override { unsetenv("LOSSD_LOSE_DEVICE"); }

  void Start(std::vector<std::string> flags) {
    flags.insert(flags.end(), {"--backend=cuda", "--http=127.0.0.1:0", "--drain_timeout=60s"});
    server_ = std::make_unique<test::ServerProcess>(LOSSD_WITH_LOSABLE_DEVICE, flags);
    client_ = client::Client::Connect({.target = server_->target(), .retry = {.max_attempts = 1}}).value();
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("head");
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(100);
    ASSERT_TRUE(client_->CreateHead(request).ok());
    ASSERT_TRUE(client_->GradNorm("head").ok());
    EXPECT_EQ(test::HttpStatus(test::HttpGet(server_->http(), "/livez")), 200);
    EXPECT_THAT(test::HttpGet(server_->http(), "/metrics"), HasSubstr("\nlossd_device_lost 0\n"));
  }
  void LoseDevice() { test::WriteWholeFile(lost_, ""); }

  test::TempFolder folder_;
  const std::string lost_ = folder_.File("lost");
  std::unique_ptr<test::ServerProcess> server_;
  std::unique_ptr<client::Client> client_;
};

TEST_F(DeviceLossTest, EndsTheProcessWithAStatusOfItsOwn) {
  Start({});
  LoseDevice();
  const absl::Status status = client_->GradNorm("head").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("fell off the bus")) << "the call is answered";
  EXPECT_EQ(server_->WaitFor(kLimit), 3);
}

TEST_F(DeviceLossTest, EveryKindOfCallNoticesIt) {
  const std::vector<float> hidden(kHidden);
  std::vector<int32_t> targets = {1};
  const std::vector<std::function<absl::Status()>> calls = {
      [&] {
        return client_
            ->ComputeLoss({.head = "head",
                           .step = 0,
                           .id = 0,
                           .hidden_size = kHidden,
                           .hidden_dtype = v1::DTYPE_FP32,
                           .hidden = hidden.data(),
                           .targets = targets},
                          {}, {})
            .status();
      },
      [&] { return client_->ZeroGradients("head", 0).status(); },
      [&] {
        v1::CreateHeadRequest request;
        request.mutable_spec()->set_name("other");
        request.mutable_spec()->set_hidden_size(kHidden);
        request.mutable_spec()->set_vocab_size(10);
        return client_->CreateHead(request).status();
      },
      [&] { return client_->SaveCheckpoint("head", "x").status(); },
      [&] { return client_->ReadTensor("head", v1::PARAM_WEIGHT).status(); },
      [&] {
        const std::vector<float> weight(100 * kHidden);
        return client_->WriteTensor("head", v1::PARAM_WEIGHT, weight).status();
      },
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    std::filesystem::remove(lost_);
    Start({});
    LoseDevice();
    EXPECT_FALSE(calls[i]().ok());
    EXPECT_EQ(server_->WaitFor(kLimit), 3);
  }
}

TEST_F(DeviceLossTest, TheFlagKeepsItRunning) {
  Start({"--exit_on_device_loss=false"});
  LoseDevice();
  EXPECT_FALSE(client_->GradNorm("head").ok());
  EXPECT_EQ(test::HttpStatus(test::HttpGet(server_->http(), "/livez")), 503);
  EXPECT_EQ(test::HttpStatus(test::HttpGet(server_->http(), "/readyz")), 503);
  EXPECT_THAT(test::HttpGet(server_->http(), "/livez"), HasSubstr("device lost"));
  EXPECT_THAT(test::HttpGet(server_->http(), "/metrics"), HasSubstr("\nlossd_device_lost 1\n"));
  EXPECT_THAT(test::HttpGet(server_->http(), "/"),
              HasSubstr("<span class=\"state error\">device lost</span>"));
  EXPECT_TRUE(client_->DescribeHead("head").ok()) << "what needs no device works";
  EXPECT_TRUE(server_->Running());
}

TEST_F(DeviceLossTest, TheServiceManagerHearsThatTheServerIsNotAlive) {
  const test::FakeServiceManager manager(test::FakeServiceManager::Kind::kPath, absl::Milliseconds(200));
  Start({"--exit_on_device_loss=false"});
  manager.NextWith("WATCHDOG=1\n");
  LoseDevice();
  EXPECT_FALSE(client_->GradNorm("head").ok());
  EXPECT_EQ(manager.NextWith("not alive"), "STATUS=not alive: device lost\n");
  for (int i = 0; i < 5; ++i) EXPECT_EQ(manager.NextWith("="), "STATUS=not alive: device lost\n");
}

TEST_F(DeviceLossTest, TheServiceManagerHearsWhyTheServerEnds) {
  const test::FakeServiceManager manager;
  Start({});
  LoseDevice();
  EXPECT_FALSE(client_->GradNorm("head").ok());
  EXPECT_THAT(manager.NextWith("STOPPING=1\n"), HasSubstr("STATUS=draining: the device is lost\n"));
  EXPECT_EQ(server_->WaitFor(kLimit), 3);
}

}  // namespace
}  // namespace lossd::liveness_test
