// SPDX-License-Identifier: Apache-2.0
// Tests of the small parts that a server process is started and watched with: addresses, options, health, and
// the events that stop it.
#include "server/app/process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/app/addresses.h"
#include "server/app/server_options.h"
#include "server/app/server_parts.h"

// ---- Addresses ----

namespace lossd::app::addresses_test {
namespace {

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

}  // namespace
}  // namespace lossd::app::addresses_test

// ---- Sizes in bytes ----

namespace lossd::app::byte_size_test {
namespace {

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

}  // namespace
}  // namespace lossd::app::byte_size_test

// ---- Checks of options ----
// Options that are out of range, and what follows from them.

namespace lossd::app::check_options_test {
namespace {

using ::testing::HasSubstr;

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

}  // namespace
}  // namespace lossd::app::check_options_test

// ---- Process ----

namespace lossd::app::process_test {
namespace {

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

}  // namespace
}  // namespace lossd::app::process_test

// ---- Health ----

namespace lossd::app::health_test {
namespace {

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

}  // namespace
}  // namespace lossd::app::health_test

// ---- Device watch ----

namespace lossd::app::device_watch_test {
namespace {

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

}  // namespace
}  // namespace lossd::app::device_watch_test

// ---- Stop events ----

namespace lossd::app::stop_events_test {
namespace {

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

}  // namespace
}  // namespace lossd::app::stop_events_test
