// SPDX-License-Identifier: Apache-2.0
// Tests of the small parts that a server process is started and watched with: addresses, options, health, the
// events that stop it, what its service manager hears, the memory that it is allowed, and the metrics of its
// workers.
#include "server/app/process.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "client/cpp/client.h"
#include "kernels/errors/field_error.h"
#include "kernels/host_memory.h"
#include "server/app/addresses.h"
#include "server/app/server_options.h"
#include "server/app/server_parts.h"
#include "server/metrics/metrics.h"
#include "tests/support/fake_host.h"
#include "tests/support/server_process.h"

namespace lossd::app::process_test {
namespace {

using test::FakeServiceManager;
using ::testing::HasSubstr;
using ::testing::Not;

// ---- Addresses ----

TEST(AddressesTest, Parses) {
  const auto address = ParseAddress("listen", "127.0.0.1:7070");
  ASSERT_TRUE(address.ok());
  EXPECT_EQ(address->host, "127.0.0.1");
  EXPECT_EQ(address->port, 7070);
  EXPECT_EQ(address->text(), "127.0.0.1:7070");
  EXPECT_EQ(ParseAddress("listen", "[::1]:0")->host, "[::1]");
  const auto unix_socket = ParseAddress("listen", "unix:/run/lossd:1");
  ASSERT_TRUE(unix_socket.ok());
  EXPECT_EQ(unix_socket->text(), "unix:/run/lossd:1");
  EXPECT_EQ(unix_socket->socket_path(), "/run/lossd:1");
  EXPECT_TRUE(IsLoopback(*unix_socket));
  EXPECT_EQ(ParseAddress("listen", "unix:///run/lossd")->socket_path(), "/run/lossd");
  EXPECT_EQ(ParseAddress("listen", "unix:lossd")->socket_path(), "lossd");
  EXPECT_TRUE(ParseAddress("listen", "unix:/" + std::string(106, 'a')).ok());
}

TEST(AddressesTest, ParsesSeveral) {
  const auto addresses = ParseAddresses("listen", "127.0.0.1:0,unix:/run/lossd,127.0.0.1:0");
  ASSERT_TRUE(addresses.ok()) << addresses.status();
  ASSERT_EQ(addresses->size(), 3u);
  EXPECT_EQ((*addresses)[1].socket_path(), "/run/lossd");
  for (const char* text : {"", "127.0.0.1:1,", "127.0.0.1:1,127.0.0.1:1", "unix:/a,unix:/a"}) {
    EXPECT_EQ(ParseAddresses("listen", text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(AddressesTest, Refuses) {
  const std::string long_path = "unix:/" + std::string(107, 'a');
  for (const std::string& text : {std::string(), std::string("unix:"), std::string("host"), std::string(":1"),
                                  std::string("host:"), std::string("host:x"), std::string("host:70000"),
                                  std::string("host:-1"), std::string("::1:80"), long_path}) {
    const auto address = ParseAddress("listen", text);
    EXPECT_EQ(address.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(address.status().message().find("listen"), absl::string_view::npos);
  }
}

TEST(AddressesTest, KnowsLoopback) {
  for (const char* host : {"localhost", "127.0.0.1", "127.9.9.9", "[::1]"})
    EXPECT_TRUE(IsLoopback({host, 1})) << host;
  for (const char* host :
       {"0.0.0.0", "[::]", "10.0.0.1", "example.com", "128.0.0.1", "127.0.0.1.example.com"}) {
    EXPECT_FALSE(IsLoopback({host, 1})) << host;
  }
}

// ---- Sizes in bytes ----

int64_t Parse(absl::string_view text) {
  ByteSize size;
  std::string error;
  return AbslParseFlag(text, &size, &error) ? size.bytes : -1;
}

TEST(ByteSizeTest, Units) {
  EXPECT_EQ(Parse("4096"), 4096);
  EXPECT_EQ(Parse("0"), 0);
  EXPECT_EQ(Parse("12B"), 12);
  EXPECT_EQ(Parse("64KiB"), 64 << 10);
  EXPECT_EQ(Parse("256 mib"), 256 << 20);
  EXPECT_EQ(Parse("2GiB"), int64_t{2} << 30);
  EXPECT_EQ(Parse("1.5GiB"), int64_t{3} << 29);
  EXPECT_EQ(Parse("1TiB"), int64_t{1} << 40);
  EXPECT_EQ(Parse("3GB"), 3'000'000'000);
}

TEST(ByteSizeTest, Refusals) {
  for (const char* text :
       {"", "lots", "-1", "1e3", "0x10", "5PiB", "1 2", "GiB", "99999999TiB", "nan", "inf", "1..2"}) {
    EXPECT_EQ(Parse(text), -1) << text;
  }
  ByteSize size;
  std::string error;
  EXPECT_FALSE(AbslParseFlag("lots", &size, &error));
  EXPECT_NE(error.find("2GiB"), std::string::npos);
}

TEST(ByteSizeTest, RoundTrip) {
  for (const int64_t bytes :
       {int64_t{0}, int64_t{1}, int64_t{1000}, int64_t{1} << 10, int64_t{3} << 20, int64_t{5} << 40}) {
    EXPECT_EQ(Parse(AbslUnparseFlag(ByteSize{bytes})), bytes);
  }
  EXPECT_EQ(AbslUnparseFlag(ByteSize{int64_t{256} << 20}), "256MiB");
}

// ---- Checks of options ----
// Options that are out of range, and what follows from them.

void ExpectRefused(const ServerOptions& options, const std::string& message) {
  const absl::Status status = CheckOptions(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
}

TEST(CheckOptionsTest, Checkpoints) {
  ServerOptions options;
  EXPECT_TRUE(CheckOptions(options).ok());
  options.checkpoint_threads = 64;
  options.checkpoint_shard_bytes = 1;
  EXPECT_TRUE(CheckOptions(options).ok());
  options.checkpoint_threads = 65;
  ExpectRefused(options, "checkpoint_threads must be at most 64, got 65");
  options.checkpoint_threads = -1;
  ExpectRefused(options, "checkpoint_threads must be at least 0, got -1");
  options = {};
  options.checkpoint_shard_bytes = 0;
  ExpectRefused(options, "checkpoint_shard_bytes must be at least 1, got 0");
}

TEST(CheckOptionsTest, AThreadForEachDevice) {
  ServerOptions options;
  kernels::BackendInfo backend;
  EXPECT_EQ(CheckpointThreads(options, backend), 4);
  backend.uuids.resize(8);
  EXPECT_EQ(CheckpointThreads(options, backend), 8);
  options.cpu_devices = 12;
  EXPECT_EQ(CheckpointThreads(options, backend), 12);
  options.cpu_devices = 1000;
  EXPECT_EQ(CheckpointThreads(options, backend), 64);
  options.checkpoint_threads = 2;
  EXPECT_EQ(CheckpointThreads(options, backend), 2);
}

TEST(CheckOptionsTest, StreamPriority) {
  ServerOptions options;
  EXPECT_EQ(BackendOf(options).stream_priority, "dx");
  for (const char* known : {"dx", "all", "none"}) {
    options.stream_priority = known;
    EXPECT_TRUE(CheckOptions(options).ok()) << known;
    EXPECT_EQ(BackendOf(options).stream_priority, known);
  }
  for (const char* unknown : {"", "DX", "high"}) {
    options.stream_priority = unknown;
    ExpectRefused(options, absl::StrCat("stream_priority must be dx, all or none, got ", unknown));
  }
}

// ---- Process ----

std::string Multicast() {
  const char* const value = std::getenv("NCCL_NVLS_ENABLE");
  return value == nullptr ? "unset" : value;
}

TEST(ProcessTest, NvlinkMulticastIsOffUnlessTheEnvironmentSaysOtherwise) {
  unsetenv("NCCL_NVLS_ENABLE");
  PrepareProcess();
  EXPECT_EQ(Multicast(), "0");
  for (const char* const said : {"1", "2", ""}) {
    setenv("NCCL_NVLS_ENABLE", said, 1);
    PrepareProcess();
    EXPECT_EQ(Multicast(), said);
  }
}

TEST(ProcessTest, AWriteThatFailsDoesNotEndTheProcess) {
  signal(SIGPIPE, SIG_DFL);
  signal(SIGXFSZ, SIG_DFL);
  PrepareProcess();
  EXPECT_EQ(signal(SIGPIPE, SIG_DFL), SIG_IGN);
  EXPECT_EQ(signal(SIGXFSZ, SIG_DFL), SIG_IGN);
}

// ---- Health ----

constexpr absl::Duration kTimeout = absl::Seconds(10);

TEST(HealthTest, AServerThatWorks) {
  EXPECT_EQ(Liveness({.device_silence = kTimeout}, kTimeout).status, 200);
  EXPECT_EQ(Liveness({}, kTimeout).body, "ok\n");
  EXPECT_EQ(Readiness({}).status, 200);
  EXPECT_EQ(Readiness({}).body, "ok\n");
}

TEST(HealthTest, AServerThatDrainsIsLiveAndNotReady) {
  EXPECT_EQ(Liveness({.draining = true}, kTimeout).status, 200);
  EXPECT_EQ(Readiness({.draining = true}).status, 503);
  EXPECT_EQ(Readiness({.draining = true}).body, "draining\n");
}

TEST(HealthTest, ALostDevice) {
  const Health health = {.draining = true, .device_lost = true};
  EXPECT_EQ(Liveness(health, kTimeout).status, 503);
  EXPECT_EQ(Liveness(health, kTimeout).body, "device lost\n");
  EXPECT_EQ(Readiness(health).status, 503);
  EXPECT_EQ(Readiness(health).body, "device lost\n");
}

TEST(HealthTest, ASilentDevice) {
  const Health health = {.device_silence = absl::Milliseconds(12'345)};
  EXPECT_EQ(Liveness(health, kTimeout).status, 503);
  EXPECT_EQ(Liveness(health, kTimeout).body, "no progress on the device for 12s\n");
  EXPECT_EQ(Readiness(health).status, 200);
}

TEST(HealthTest, AThreadThatDoesNotAnswer) {
  const Health health = {.threads = {{{"one", absl::Seconds(2)}, {"the other", absl::Milliseconds(31'500)}}}};
  EXPECT_EQ(Liveness(health, absl::Minutes(10)).status, 503);
  EXPECT_EQ(Liveness(health, absl::Minutes(10)).body, "no answer of the other for 31s\n");
  EXPECT_EQ(Liveness(health, absl::Seconds(1)).body, "no answer of one for 2s\n")
      << "a shorter timeout holds, too";
  EXPECT_EQ(Readiness(health).status, 200);
  EXPECT_EQ(Liveness({.threads = {{{"one", kThreadTimeout}}}}, absl::Minutes(10)).status, 200);
}

TEST(HealthTest, TroubleIsWhatAPersonHasToKnowFirst) {
  EXPECT_EQ(Trouble({}, kTimeout), "");
  EXPECT_EQ(Trouble({.draining = true}, kTimeout), "draining");
  EXPECT_EQ(Trouble({.draining = true, .device_lost = true}, kTimeout), "device lost");
  EXPECT_EQ(Trouble({.draining = true, .device_silence = absl::Seconds(12)}, kTimeout),
            "no progress on the device for 12s");
}

// ---- Device watch ----

TEST(DeviceWatchTest, AFailedOperationIsNotALostDevice) {
  int lost = 0;
  DeviceWatch watch([&](const absl::Status&) { ++lost; });
  watch.OnDeviceError(absl::InternalError("one chunk failed"));
  EXPECT_FALSE(watch.lost());
  EXPECT_EQ(lost, 0);
}

TEST(DeviceWatchTest, ReportsALostDeviceOnce) {
  int lost = 0;
  DeviceWatch watch([&](const absl::Status& status) {
    EXPECT_EQ(status.message(), "the device fell off the bus");
    ++lost;
  });
  for (int i = 0; i < 3; ++i) watch.OnDeviceError(absl::UnavailableError("the device fell off the bus"));
  EXPECT_TRUE(watch.lost());
  EXPECT_EQ(lost, 1);
}

// ---- Stop events ----

constexpr absl::Duration kLimit = absl::Minutes(2);  // for what a slow machine does

TEST(StopEventsTest, EachEventOnce) {
  StopEvents events;
  std::thread([&] { events.NotifyDeviceLost(); }).join();
  EXPECT_EQ(events.Wait().signal, 0) << "what comes before the waiting is not lost";
  std::thread later([&] { events.NotifyDeviceLost(); });
  EXPECT_EQ(events.Wait().signal, 0);
  later.join();
  events.NotifyStop();
  EXPECT_EQ(events.Pending(), 0) << "no signal";
  EXPECT_TRUE(events.Wait().of_rank);
  kill(getpid(), SIGTERM);
  EXPECT_EQ(events.AwaitPending(kLimit), SIGTERM);
  EXPECT_EQ(events.Pending(), SIGTERM);
  const StopEvents::Event event = events.Wait();
  EXPECT_EQ(event.signal, SIGTERM);
  EXPECT_FALSE(event.of_rank);
  EXPECT_EQ(events.AwaitPending(absl::ZeroDuration()), 0);
  events.NotifyStop();
  kill(getpid(), SIGINT);
  EXPECT_EQ(events.WaitForSignal(), SIGINT);
}

// A thread that a library has made does not block signals, and the system may give them to it.
TEST(StopEventsTest, ASignalThatComesToAThreadOfALibrary) {
  absl::Notification made, end;
  std::thread library([&] {
    sigset_t none;
    sigemptyset(&none);
    pthread_sigmask(SIG_SETMASK, &none, nullptr);
    made.Notify();
    end.WaitForNotification();
  });
  made.WaitForNotification();
  {
    StopEvents events;
    pthread_kill(library.native_handle(), SIGTERM);
    EXPECT_EQ(events.AwaitPending(kLimit), SIGTERM);
    pthread_kill(library.native_handle(), SIGINT);
    EXPECT_EQ(events.Wait().signal, SIGTERM);
    EXPECT_EQ(events.Wait().signal, SIGINT);
  }
  pthread_kill(library.native_handle(), SIGTERM);  // afterwards: nothing
  end.Notify();
  library.join();
}

// ---- Service manager ----

TEST(ServiceManagerTest, SaysWhatHappensToPathsAndAbstractNames) {
  for (const auto kind : {FakeServiceManager::Kind::kPath, FakeServiceManager::Kind::kAbstract}) {
    const FakeServiceManager fake(kind);
    const auto manager = ServiceManager::FromEnvironment();
    ASSERT_TRUE(manager.ok()) << manager.status();
    (*manager)->Ready("serving on 127.0.0.1:7070");
    EXPECT_EQ(fake.Next(absl::Minutes(1)), "READY=1\nSTATUS=serving on 127.0.0.1:7070\n");
    (*manager)->Alive();
    EXPECT_EQ(fake.Next(absl::Minutes(1)), "WATCHDOG=1\nSTATUS=serving on 127.0.0.1:7070\n");
    (*manager)->NotAlive("device\nlost");
    EXPECT_EQ(fake.Next(absl::Minutes(1)), "STATUS=not alive: device lost\n");
    (*manager)->Stopping("draining", absl::Seconds(40));
    EXPECT_EQ(fake.Next(absl::Minutes(1)), "STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=40000000\n");
    (*manager)->Alive();
    EXPECT_EQ(fake.Next(absl::Minutes(1)), "WATCHDOG=1\nSTATUS=draining\n");
  }
}

TEST(ServiceManagerTest, WithoutASocketNothingIsSaid) {
  unsetenv("NOTIFY_SOCKET");
  setenv("WATCHDOG_USEC", "10", 1);
  const auto manager = ServiceManager::FromEnvironment();
  unsetenv("WATCHDOG_USEC");
  ASSERT_TRUE(manager.ok()) << manager.status();
  EXPECT_EQ((*manager)->watchdog(), absl::InfiniteDuration());
  (*manager)->Ready("serving");
}

TEST(ServiceManagerTest, AManagerThatHasGoneIsNoHindrance) {
  std::unique_ptr<ServiceManager> manager;
  {
    const FakeServiceManager fake;
    manager = ServiceManager::FromEnvironment().value();
  }
  manager->Ready("serving");
  manager->Stopping("draining", absl::ZeroDuration());
}

TEST(ServiceManagerTest, TheWatchdogIsThatOfThisProcess) {
  const FakeServiceManager fake(FakeServiceManager::Kind::kPath, absl::Seconds(30));
  EXPECT_EQ((*ServiceManager::FromEnvironment())->watchdog(), absl::Seconds(30));
  setenv("WATCHDOG_PID", absl::StrCat(getpid()).c_str(), 1);
  EXPECT_EQ((*ServiceManager::FromEnvironment())->watchdog(), absl::Seconds(30));
  setenv("WATCHDOG_PID", absl::StrCat(getppid()).c_str(), 1);
  EXPECT_EQ((*ServiceManager::FromEnvironment())->watchdog(), absl::InfiniteDuration());
}

TEST(ServiceManagerTest, RefusesWhatItDoesNotUnderstand) {
  const struct {
    const char* name;
    std::string value;
  } cases[] = {{"NOTIFY_SOCKET", "vsock:2:1234"},
               {"NOTIFY_SOCKET", "relative"},
               {"NOTIFY_SOCKET", "@"},
               {"NOTIFY_SOCKET", "/" + std::string(107, 'x')},
               {"WATCHDOG_USEC", "0"},
               {"WATCHDOG_USEC", "-1"},
               {"WATCHDOG_USEC", "3s"},
               {"WATCHDOG_USEC", "99999999999999999999"},
               {"WATCHDOG_PID", "me"}};
  for (const auto& [name, value] : cases) {
    const FakeServiceManager fake(FakeServiceManager::Kind::kPath, absl::Seconds(30));
    setenv(name, value.c_str(), 1);
    const absl::Status status = ServiceManager::FromEnvironment().status();
    ASSERT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name << "=" << value;
    EXPECT_EQ(errors::GetFieldViolation(status)->field, name);
    EXPECT_EQ(errors::GetFieldViolation(status)->value, value);
  }
}

TEST(KeepAliveTest, SaysThatTheProcessIsAliveOnlyWhileItIs) {
  const FakeServiceManager fake(FakeServiceManager::Kind::kAbstract, absl::Milliseconds(40));
  const auto manager = ServiceManager::FromEnvironment();
  ASSERT_TRUE(manager.ok()) << manager.status();
  std::atomic<bool> live{true};
  const KeepAlive keep_alive(
      manager->get(), [&live] { return live ? absl::OkStatus() : absl::UnavailableError("no progress"); });
  for (int i = 0; i < 3; ++i)
    EXPECT_THAT(fake.Next(absl::Minutes(1)).value_or(""), HasSubstr("WATCHDOG=1\n"));
  live = false;
  fake.NextWith("not alive");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(fake.Next(absl::Minutes(1)), "STATUS=not alive: no progress\n");
  live = true;
  fake.NextWith("WATCHDOG=1\n");
}

// ---- Limits of memory ----
// The linked lossd program refuses heads that are larger than what the system lets it have: it is neither
// killed nor does it end.

constexpr int64_t kGib = int64_t{1} << 30;

class MemoryLimitsTest : public ::testing::Test {
 protected:
  absl::Status CreateHead(const std::string& name, uint64_t hidden_size, uint64_t vocab_size) {
    auto client = client::Client::Connect({.target = server_.target()});
    if (!client.ok()) return client.status();
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name(name);
    request.mutable_spec()->set_hidden_size(hidden_size);
    request.mutable_spec()->set_vocab_size(vocab_size);
    return (*client)->CreateHead(request).status();
  }
  void ExpectRefused(uint64_t hidden_size, uint64_t vocab_size, const std::string& why) {
    const absl::Status status = CreateHead("large", hidden_size, vocab_size);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
    EXPECT_THAT(std::string(status.message()), HasSubstr("memory_reserve_bytes keeps 64.0 MiB free"));
    EXPECT_TRUE(server_.Running());
    EXPECT_EQ(CreateHead("small", 8, 100), absl::OkStatus());
  }

  test::ServerProcess server_{LOSSD_BINARY, {"--memory_reserve_bytes=64MiB", "--retained_bytes=4MiB"}};
};

TEST_F(MemoryLimitsTest, LargerThanTheMachine) {
  const auto host = kernels::HostMemory().Available();
  ASSERT_TRUE(host.has_value());
  // Weight, gradient and both moments take 16 bytes an element.
  ExpectRefused(8192, static_cast<uint64_t>(host->bytes / (16 * 8192)) + 1000, " GiB available");
}

// As after ulimit -v.
TEST_F(MemoryLimitsTest, LargerThanTheProcessMayBe) {
  std::ifstream file(absl::StrCat("/proc/", server_.pid(), "/statm"));
  int64_t pages = 0;
  ASSERT_TRUE(file >> pages);
  // Threads that are still to start reserve some hundred MiB of addresses.
  const rlim_t limit = static_cast<rlim_t>(pages * 4096 + 3 * kGib);
  const rlimit limits{limit, limit};
  if (pages * 4096 > 1000 * kGib) GTEST_SKIP() << "a sanitizer reserves most addresses";
  ASSERT_EQ(prlimit(server_.pid(), RLIMIT_AS, &limits, nullptr), 0);
  ExpectRefused(1024, 262'144, "\"Max address space\" of the process is ");
}

// A control group of its own below this one, if the machine allows that.
class Group {
 public:
  Group(int64_t limit, pid_t member) {
    for (const auto& line : absl::StrSplit(test::ReadWholeFile("/proc/self/cgroup"), '\n')) {
      const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
      if (parts.size() != 3) continue;
      if (parts[1] == "memory")
        Make("/sys/fs/cgroup/memory" + parts[2], "memory.limit_in_bytes", limit, member);
      if (parts[0] == "0" && !made_) Make("/sys/fs/cgroup" + parts[2], "memory.max", limit, member);
    }
  }
  ~Group() {
    std::error_code ignored;
    if (!folder_.empty()) std::filesystem::remove(folder_, ignored);
  }
  bool made() const { return made_; }

 private:
  void Make(const std::string& parent, const std::string& file, int64_t limit, pid_t member) {
    std::error_code error;
    const std::string folder = absl::StrCat(parent, "/lossd_test_", member);
    if (!std::filesystem::create_directory(folder, error)) return;
    folder_ = folder;
    made_ = std::filesystem::exists(absl::StrCat(folder, "/", file)) &&
            (std::ofstream(absl::StrCat(folder, "/", file)) << limit).flush() &&
            (std::ofstream(folder + "/cgroup.procs") << member).flush();
  }

  std::string folder_;
  bool made_ = false;
};

TEST_F(MemoryLimitsTest, LargerThanTheControlGroupMayBe) {
  const Group group(kGib, server_.pid());
  if (!group.made()) GTEST_SKIP() << "this machine does not allow a control group";
  ExpectRefused(1024, 65'536, absl::StrCat("lossd_test_", server_.pid(), " may have 1.00 GiB"));
  server_.Kill();
}

// ---- Metrics of workers ----
// Metrics of workers on the leader's page: what a worker would answer a scrape, with the label rank.

std::string Text(const std::vector<prometheus::MetricFamily>& families) {
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families);
  return out.str();
}

// On the way from a worker to the leader.
std::vector<prometheus::MetricFamily> Sent(const std::vector<prometheus::MetricFamily>& families) {
  return metrics::FromPlain(FromProto(ToProto(metrics::ToPlain(families))));
}

std::vector<prometheus::MetricFamily> GpuFamilies(const metrics::GpuMonitor& gpu) {
  return Sent(gpu.Collect());
}

class RankFamiliesTest : public ::testing::Test {
 protected:
  RankFamiliesTest() : library_(dlopen(LOSSD_FAKE_NVML, RTLD_NOW)) {
    EXPECT_NE(library_, nullptr) << dlerror();
    const auto set =
        reinterpret_cast<void (*)(const char*, unsigned long long)>(dlsym(library_, "fake_nvml_set"));
    set("power", 350'500);
    set("temperature", 61);
  }
  ~RankFamiliesTest() override { dlclose(library_); }

  static std::unique_ptr<metrics::GpuMonitor> PlayedGpu() {
    auto gpu = metrics::GpuMonitor::Start(
        {.library = LOSSD_FAKE_NVML, .uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"});
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    return *std::move(gpu);
  }

 private:
  void* const library_;
};

TEST_F(RankFamiliesTest, WhatAWorkerSendsIsWhatItWouldAnswerAScrape) {
  const std::vector<prometheus::MetricFamily> collected = PlayedGpu()->Collect();
  EXPECT_EQ(Text(Sent(collected)), Text(collected));
  EXPECT_THAT(Text(Sent(collected)), HasSubstr("lossd_gpu_xid_errors_total{gpu=\"GPU-0123"));
  std::vector<std::unique_ptr<metrics::GpuMonitor>> gpus;
  gpus.push_back(PlayedGpu());
  const std::string times = Text(metrics::FromPlain(FromProto(
      ToProto(metrics::WorkerFamilies({.busy = absl::Milliseconds(2500),
                                       .exchanges = {absl::Milliseconds(500), absl::ZeroDuration(),
                                                     absl::Milliseconds(250), absl::Milliseconds(125)}},
                                      gpus)))));
  EXPECT_THAT(times, HasSubstr("# TYPE lossd_rank_busy_seconds_total counter\n"
                               "lossd_rank_busy_seconds_total 2.5\n"));
  const std::string collectives = "lossd_rank_collective_seconds_total{operation=";
  EXPECT_THAT(times, HasSubstr(collectives + "\"sum_gradients\"} 0.5\n" + collectives +
                               "\"spread_values\"} 0\n" + collectives + "\"row_statistics\"} 0.25\n" +
                               collectives + "\"hidden_gradients\"} 0.125\n"));
  EXPECT_THAT(times, HasSubstr("lossd_gpu_power_watts{gpu=\"GPU-0123"));
}

TEST_F(RankFamiliesTest, AllRanksAreOnOnePage) {
  const auto gpu = PlayedGpu();
  std::vector<prometheus::MetricFamily> families;
  std::vector<metrics::RankReading> ranks(3);
  for (int rank = 1; rank < 3; ++rank) {
    metrics::RankReading& one = ranks[static_cast<size_t>(rank)];
    one.state.rank = rank;
    one.state.chunks = 1;
    one.state.rows = 20;
    one.state.traffic = kernels::RankTraffic{.sent_bytes = 300, .received_bytes = 4000};
    one.metrics = GpuFamilies(*gpu);
  }
  ranks[2].state.lost = true;
  ranks[0].state.rows = 7;
  ranks[0].metrics = metrics::RankTimeFamilies({.busy = absl::Seconds(3)});
  metrics::AddRankFamilies(ranks, &families);
  const std::string text = Text(families);
  EXPECT_THAT(text, HasSubstr("lossd_rank_up{rank=\"1\",host=\"\",device=\"\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("lossd_rank_up{rank=\"2\",host=\"\",device=\"\"} 0\n"));
  for (const char* const rank : {"1", "2"}) {
    const std::string label = std::string("{rank=\"") + rank + "\"";
    EXPECT_THAT(text, HasSubstr("lossd_rank_chunks_total" + label + "} 1\n"));
    EXPECT_THAT(text, HasSubstr("lossd_rank_rows_total" + label + "} 20\n"));
    EXPECT_THAT(text, HasSubstr("lossd_rank_sent_bytes_total" + label + "} 300\n"));
    EXPECT_THAT(text, HasSubstr("lossd_rank_received_bytes_total" + label + "} 4000\n"));
    EXPECT_THAT(text, HasSubstr("lossd_gpu_temperature_celsius" + label + ",gpu=\"GPU-0123"));
  }
  EXPECT_THAT(text, HasSubstr("lossd_rank_rows_total{rank=\"0\"} 7\n"));
  EXPECT_THAT(text, HasSubstr("lossd_rank_busy_seconds_total{rank=\"0\"} 3\n"));
  EXPECT_THAT(text, HasSubstr("lossd_rank_collective_seconds_total{rank=\"0\",operation=\"sum_gradients\"}"));
  EXPECT_THAT(text, Not(HasSubstr("lossd_rank_sent_bytes_total{rank=\"0\"")));
  const std::string type = "# TYPE lossd_gpu_temperature_celsius";
  EXPECT_EQ(text.find(type), text.rfind(type)) << "one family";
}

TEST_F(RankFamiliesTest, TheLeadersGpusHaveTheLabelWhereThereAreSeveralRanks) {
  const auto gpu = PlayedGpu();
  metrics::Metrics metrics({});
  metrics.AttachGpus({gpu.get()});
  EXPECT_THAT(metrics.RenderText(), HasSubstr("lossd_gpu_power_watts{gpu="));
  metrics.Attach(nullptr, nullptr, [&gpu] {
    std::vector<metrics::RankReading> ranks(2);
    ranks[1].state.rank = 1;
    ranks[1].metrics = GpuFamilies(*gpu);
    return ranks;
  });
  EXPECT_THAT(metrics.RenderText(), HasSubstr("lossd_gpu_power_watts{rank=\"0\",gpu="));
  EXPECT_THAT(metrics.RenderText(), HasSubstr("lossd_gpu_power_watts{rank=\"1\",gpu="));
  metrics.Detach();
}

}  // namespace
}  // namespace lossd::app::process_test
