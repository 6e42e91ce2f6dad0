// SPDX-License-Identifier: Apache-2.0
// Where a client gets its regions of shared memory from, and when they go back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "client/cpp/loss_plan.h"
#include "client/cpp/regions.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "tests/server/service/small_head.h"
#include "tests/server/service/test_server.h"

namespace lossd::app::testing::region_source_test {
namespace {

using client::internal::RegionPauses;
using client::internal::RegionSource;
using ::testing::HasSubstr;

std::string RegionSocketOf(const TestServer& server) {
  return client::Client::Connect({.target = server.target()}).value()->GetServer()->region_socket();
}

// A server that could not give memory, or was not reached, the first time may do so later.
TEST(RegionSourceTest, TriesAgainAfterAFailedAttempt) {
  const TestServer server;
  RegionSource source("auto", {4096, 4096}, "/nowhere", [&server] { return RegionSocketOf(server); },
                      {.first = absl::Milliseconds(1), .most = absl::Milliseconds(2)});
  EXPECT_EQ(source.Get(), nullptr);
  EXPECT_EQ(source.choice().transport, "grpc");
  EXPECT_THAT(source.choice().reason, HasSubstr("/nowhere"));
  EXPECT_THAT(source.choice().reason, HasSubstr("tried again"));
  const absl::Time end = clocks::SteadyNow() + absl::Seconds(60);
  while (source.Get() == nullptr && clocks::SteadyNow() < end) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(source.choice().transport, "shared_memory") << source.choice().reason;
}

TEST(RegionSourceTest, PausesGrowBetweenAttempts) {
  int attempts = 0;
  RegionSource source("auto", {4096, 4096}, "/nowhere",
                      [&attempts] {
                        ++attempts;
                        return std::string("/nowhere");
                      },
                      {.first = absl::Milliseconds(1), .most = absl::Hours(1)});
  const absl::Time start = clocks::SteadyNow();
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(source.Get(), nullptr);
    absl::SleepFor(absl::Microseconds(200));
  }
  // The pauses before attempt n are 2^n - 1 ms together.
  const double elapsed = absl::ToDoubleMilliseconds(clocks::SteadyNow() - start);
  EXPECT_GE(attempts, 2);
  EXPECT_LE(std::exp2(attempts) - 1, elapsed);
}

TEST(RegionSourceTest, ASocketOfAnotherServerIsTriedLessAndLess) {
  const TestServer server;
  RegionSource source("auto", {4096, 4096}, RegionSocketOf(server),
                      [&server] { return RegionSocketOf(server); },
                      {.first = absl::Hours(1), .most = absl::Hours(1)});
  auto region = source.Get();
  ASSERT_NE(region, nullptr);
  const auto refuse = [](client::internal::SharedRegion& one) {
    one.AfterFailure(errors::FieldError("open.region", "be open", "another", absl::StatusCode::kUnavailable),
                     /*holds=*/false);
  };
  refuse(*region);
  const auto next = source.Get();  // the server may have been restarted
  ASSERT_NE(next, nullptr);
  EXPECT_NE(next, region);
  refuse(*next);
  EXPECT_EQ(source.Get(), nullptr);
  EXPECT_THAT(source.choice().reason, HasSubstr("does not know the regions of its socket"));
}

constexpr uint64_t kMiB = uint64_t{1} << 20;

TEST(RegionSourceTest, GrowsWithTheCalls) {
  const TestServer server;
  RegionSource source("auto", {kMiB, 32 * kMiB}, RegionSocketOf(server), [] { return std::string(); });
  const auto first = source.Get();
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->size(), kMiB);
  EXPECT_EQ(source.Get(kMiB / 4), first);
  const auto second = source.Get(kMiB);
  EXPECT_EQ(second->size(), 4 * kMiB);
  EXPECT_EQ(source.Get(1), second) << "smaller calls use what is there";
  EXPECT_EQ(source.Get(100 * kMiB)->size(), 32 * kMiB);
  EXPECT_TRUE(first->usable()) << "for calls that have it";
}

TEST(RegionSourceTest, GrowsWhenCallsFindNoRoom) {
  const TestServer server;
  RegionSource source("auto", {kMiB, 32 * kMiB}, RegionSocketOf(server), [] { return std::string(); });
  const auto first = source.Get();
  ASSERT_NE(first, nullptr);
  ASSERT_TRUE(first->Take(kMiB).has_value());
  EXPECT_EQ(source.Get(), first) << "nobody needs more yet";
  EXPECT_FALSE(first->Take(1).has_value());
  const auto second = source.Get();
  EXPECT_EQ(second->size(), 4 * kMiB);
  EXPECT_EQ(source.Get(), second);
}

// One that no call uses goes back first, so that there may be room.
TEST(RegionSourceTest, ARegionThatNoCallUsesMakesRoomForALargerOne) {
  ServerOptions options = SmallServer();
  options.shared_memory_bytes = 8 * kMiB;
  options.peer_share = 1;
  const TestServer server(options);
  RegionSource source("auto", {kMiB, 32 * kMiB}, RegionSocketOf(server), [] { return std::string(); });
  ASSERT_NE(source.Get(), nullptr);
  EXPECT_EQ(source.Get(2 * kMiB)->size(), 8 * kMiB);
}

// What there is beside the region of calls under way; later, when nothing is under way, the whole.
TEST(RegionSourceTest, AsksAgainForWhatItDidNotGet) {
  ServerOptions options = SmallServer();
  options.shared_memory_bytes = 8 * kMiB;
  options.peer_share = 1;
  const TestServer server(options);
  RegionSource source("auto", {kMiB, 8 * kMiB}, RegionSocketOf(server), [] { return std::string(); },
                      {.first = absl::Milliseconds(1), .most = absl::Milliseconds(1)});
  {
    const auto used = source.Get();
    ASSERT_NE(used, nullptr);
    const auto second = source.Get(2 * kMiB);
    EXPECT_GT(second->size(), kMiB);
    EXPECT_LT(second->size(), 8 * kMiB);
  }
  std::shared_ptr<client::internal::SharedRegion> region;
  for (int i = 0; i < 500 && (region == nullptr || region->size() < 8 * kMiB); ++i) {
    region = nullptr;
    absl::SleepFor(absl::Milliseconds(2));
    region = source.Get(2 * kMiB);
  }
  EXPECT_EQ(region->size(), 8 * kMiB);
}

// And does not ask with each call, even where there would be room again.
TEST(RegionSourceTest, KeepsItsRegionWhereTheServerGivesNoLargerOne) {
  ServerOptions options = SmallServer();
  options.shared_memory_bytes = 8 * kMiB;
  options.peer_share = 1;
  const TestServer server(options);
  RegionSource other("auto", {4 * kMiB, 4 * kMiB}, RegionSocketOf(server), [] { return std::string(); });
  RegionSource source("auto", {2 * kMiB, 32 * kMiB}, RegionSocketOf(server), [] { return std::string(); },
                      {.first = absl::Milliseconds(1), .most = absl::Hours(1)});
  ASSERT_NE(other.Get(), nullptr);
  const auto region = source.Get();
  ASSERT_NE(region, nullptr);
  EXPECT_EQ(source.Get(20 * kMiB), region);
  other.Get()->Retire();
  other.DropUnusable();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(source.Get(20 * kMiB), region);
  EXPECT_EQ(source.choice().transport, "shared_memory");
}

TEST(RegionSourceTest, ARestartedServerIsAskedForWhatCallsNeed) {
  const std::string socket = absl::StrCat(::testing::TempDir(), "/lossd-region-source-", getpid());
  ServerOptions options = SmallServer();
  options.region_socket = socket;
  auto server = std::make_unique<TestServer>(options);
  RegionSource source("auto", {kMiB, 32 * kMiB}, socket, [&] { return socket; });
  auto region = source.Get(2 * kMiB);
  ASSERT_NE(region, nullptr);
  EXPECT_EQ(region->size(), 8 * kMiB);
  server = nullptr;
  server = std::make_unique<TestServer>(options);
  ASSERT_FALSE(region->usable());
  region = source.Get(4 * kMiB);
  ASSERT_NE(region, nullptr);
  EXPECT_EQ(region->size(), 16 * kMiB);
}

TEST(RegionSourceTest, GrowsWhileOtherThreadsBeginAndEndCalls) {
  const TestServer server;
  RegionSource source("auto", {kMiB, 64 * kMiB}, RegionSocketOf(server), [] { return std::string(); });
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&source, thread] {
      for (uint64_t i = 0; i < 60; ++i) {
        const auto region = source.Get(((i * 37 + thread * 11) % 64) * kMiB / 8);
        if (region == nullptr) continue;  // another thread is opening one
        const auto offset = region->Take(1 + i * 4096);
        if (!offset.has_value()) continue;
        region->At(*offset)[0] = 1;
        region->Give(*offset);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(source.Get()->size(), 16 * kMiB);
}

// They had a quarter of what the server gives each, whatever they sent.
TEST(RegionSourceTest, ManyClientsOfSmallMicrobatchesShareWhatThereIs) {
  ServerOptions options = SmallServer();
  options.shared_memory_bytes = 256 * kMiB;
  const TestServer server(options);
  std::mt19937_64 rng(12);
  const SmallRows rows = MakeSmallRows(50, rng);
  std::vector<std::unique_ptr<client::Client>> clients;
  for (int i = 0; i < 12; ++i) {
    clients.push_back(
        client::Client::Connect({.target = server.target(), .transport = "shared_memory"}).value());
    if (i == 0) {
      ASSERT_TRUE(clients[0]->CreateHead(SmallHead()).ok());
    }
    ASSERT_TRUE(clients[i]->ComputeLoss(SmallMicrobatch(rows, 0, i), {}).ok());
    EXPECT_EQ(clients[i]->transport().transport, "shared_memory") << clients[i]->transport().reason;
  }
}

TEST(RegionSourceTest, ARegionGoesBackAlthoughAChildHasInheritedIt) {
  ServerOptions options = SmallServer();
  options.shared_memory_bytes = 8 * kMiB;
  const TestServer server(options);
  RegionSource source("auto", {8 * kMiB, 8 * kMiB}, RegionSocketOf(server), [] { return std::string(); });
  ASSERT_NE(source.Get(), nullptr);
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  source.Get()->Retire();
  source.DropUnusable();
  RegionSource other("auto", {8 * kMiB, 8 * kMiB}, RegionSocketOf(server), [] { return std::string(); });
  EXPECT_NE(other.Get(), nullptr) << other.choice().reason;
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

// The server does not wait for the client's next call.
TEST(RegionSourceTest, ARegionThatWasGivenUpGoesBackAtOnce) {
  const TestServer server;
  const auto client =
      client::Client::Connect(
          {.target = server.target(), .transport = "shared_memory", .shared_memory_bytes = 1 << 20})
          .value();
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  const auto direct = client::Client::Connect({.target = server.target(), .transport = "grpc"}).value();
  const auto staging = [&direct] { return direct->GetServer()->memory().staging(); };
  std::mt19937_64 rng(10);
  SmallRows rows = MakeSmallRows(600, rng);
  ASSERT_TRUE(client->ComputeLoss(SmallMicrobatch(rows, 0, 1), {}).ok());
  const uint64_t with_region = staging();
  rows.hidden[300 * kSmallHidden] = std::numeric_limits<float>::infinity();
  rows.targets[300] = 1;
  EXPECT_FALSE(
      client->ComputeLoss(SmallMicrobatch(rows, 0, 2), {}, {.slice_bytes = 10 * kSmallHidden * sizeof(float)})
          .ok());
  const absl::Time end = clocks::SteadyNow() + absl::Seconds(60);
  while (staging() + (1 << 20) > with_region && clocks::SteadyNow() < end)
    absl::SleepFor(absl::Milliseconds(5));
  EXPECT_LE(staging() + (1 << 20), with_region);
}

// On a machine with fewer than four cores one stream is best in any case.
TEST(RegionStreamsTest, ALargeMicrobatchIsCopiedByAsManyStreamsAsHelp) {
  constexpr uint64_t kRowBytes = kSmallHidden * sizeof(float);
  std::mt19937_64 rng(11);
  const SmallRows rows = MakeSmallRows((uint64_t{18} << 20) / kRowBytes, rng);
  const int several =
      client::internal::StreamsInRegion(rows.targets.size() * kRowBytes, std::thread::hardware_concurrency());
  for (const bool deterministic : {false, true}) {
    ServerOptions options = SmallServer();
    options.deterministic = deterministic;
    const TestServer server(options);
    const auto compute = [&](const std::string& transport, int streams) {
      const auto client =
          client::Client::Connect({.target = server.target(), .channels = 1, .transport = transport});
      EXPECT_TRUE(client.ok()) << client.status();
      client->get()->CreateHead(SmallHead()).status().IgnoreError();  // the second client finds it
      std::vector<float> grads(rows.hidden.size());
      const auto result =
          (*client)->ComputeLoss(SmallMicrobatch(rows, 0, 0), {.grad_hidden = grads.data()}, {});
      EXPECT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result.ok() ? result->streams : 0, streams)
          << transport << ", deterministic " << deterministic;
      return grads;
    };
    const std::vector<float> in_messages = compute("grpc", 1);
    const std::vector<float> shared = compute("shared_memory", deterministic ? 1 : several);
    for (size_t i = 0; i < shared.size(); ++i) ASSERT_NEAR(shared[i], in_messages[i], 1e-4) << i;
  }
}

}  // namespace
}  // namespace lossd::app::testing::region_source_test
