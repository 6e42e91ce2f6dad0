// SPDX-License-Identifier: Apache-2.0
// Several processes with several devices each: every device is a rank, and all of them are what as many
// devices of one process, or as many processes, are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "tests/server/service/small_training.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"

namespace lossd::app::testing::ranks_devices_test {
namespace {

using test::RankServer;
using test::RankServerOptions;
using test::ServerProcess;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr absl::Duration kLimit = absl::Minutes(3);  // for what a slow machine does

// Of processes with two devices each, of a thread each.
RankServerOptions TwoDevicesEach(int processes, std::vector<std::string> flags = {}) {
  flags.insert(flags.begin(), {"--cpu_devices=2", "--threads=2"});
  return {.ranks = processes, .flags = std::move(flags)};
}

class RanksDevicesTest : public ::testing::TestWithParam<v1::Split> {};

TEST_P(RanksDevicesTest, TwoProcessesOfTwoGiveTheBitsOfFourDevicesAndOfFourProcesses) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  RankServer two(LOSSD_BINARY, TwoDevicesEach(2, {"--deterministic"}));
  EXPECT_EQ(Connect(two.target())->GetServer()->ranks_size(), 4);
  const Trained of_two = TrainAt(two.target(), data, seed, GetParam());
  ServerProcess devices(LOSSD_BINARY, {"--cpu_devices=4", "--deterministic"});
  ExpectSameBits(of_two, TrainAt(devices.target(), data, seed + 1, GetParam()));
  RankServer four(LOSSD_BINARY, {.ranks = 4, .flags = {"--deterministic"}});
  ExpectSameBits(of_two, TrainAt(four.target(), data, seed + 2, GetParam()));
}

TEST_P(RanksDevicesTest, CheckpointsGoFromEachToTheOthers) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  RankServer two(LOSSD_BINARY, TwoDevicesEach(2, {"--restore=latest"}));
  const Trained trained = TrainAt(two.target(), data, seed, GetParam());
  ASSERT_TRUE(Connect(two.target())->SaveCheckpoint("head", "").ok());
  two.KillAll();
  two.Start();
  EXPECT_EQ(Tensors(*Connect(two.target())), trained.tensors);
  two.KillAll();
  const std::vector<std::string> restore = {"--restore=latest",
                                            absl::StrCat("--checkpoint_dir=", two.checkpoint_folder())};
  ServerProcess one(LOSSD_BINARY, restore);
  EXPECT_EQ(Tensors(*Connect(one.target())), trained.tensors);
  RankServer four(LOSSD_BINARY, {.ranks = 4, .flags = restore});
  EXPECT_EQ(Tensors(*Connect(four.target())), trained.tensors);
}

INSTANTIATE_TEST_SUITE_P(Splits, RanksDevicesTest, ::testing::Values(v1::SPLIT_ROWS, v1::SPLIT_VOCABULARY),
                         [](const auto& split) { return v1::Split_Name(split.param); });

// ---- Ends ----

TEST(RanksDevicesEndTest, ASignalToEitherProcessDrainsBoth) {
  for (const int process : {0, 1}) {
    SCOPED_TRACE(process);
    RankServer ranks(LOSSD_BINARY, TwoDevicesEach(2));
    ASSERT_TRUE(Connect(ranks.target())->CreateHead(SmallHead()).ok());
    ranks.rank(process).Signal(SIGTERM);
    EXPECT_THAT(ranks.WaitForAll(kLimit), Each(0)) << ranks.log(0) << ranks.log(1);
  }
}

TEST(RanksDevicesEndTest, AProcessThatIsKilledEndsTheOther) {
  for (const int process : {0, 1}) {
    SCOPED_TRACE(process);
    RankServer ranks(LOSSD_BINARY, TwoDevicesEach(2));
    ASSERT_TRUE(Connect(ranks.target())->CreateHead(SmallHead()).ok());
    ranks.rank(process).Signal(SIGKILL);
    std::vector<int> want(2, 3);
    want[static_cast<size_t>(process)] = -SIGKILL;
    EXPECT_EQ(ranks.WaitForAll(kLimit), want);
  }
}

TEST(RanksDevicesEndTest, AProcessThatHangsIsLost) {
  for (const int process : {0, 1}) {
    SCOPED_TRACE(process);
    RankServer ranks(LOSSD_BINARY, TwoDevicesEach(2, {"--rank_silence_timeout=4s"}));
    ASSERT_TRUE(Connect(ranks.target())->CreateHead(SmallHead()).ok());
    ranks.rank(process).Stop();
    EXPECT_EQ(ranks.rank(1 - process).WaitFor(kLimit), 3);
    ranks.rank(process).Signal(SIGCONT);
    EXPECT_EQ(ranks.rank(process).WaitFor(kLimit), 3);
  }
}

// Its other device waits with it.
TEST(RanksDevicesEndTest, ProcessesThatWaitEndWhenAskedTo) {
  for (const int asked : {0, 1}) {
    SCOPED_TRACE(asked);
    RankServerOptions options = TwoDevicesEach(3, {"--rank_timeout=1h"});
    options.flags_of = [](int process) {
      return process == 2 ? std::vector<std::string>{"--leader=127.0.0.1:1"} : std::vector<std::string>();
    };
    options.await = false;
    RankServer ranks(LOSSD_BINARY, options);
    const absl::Time deadline = clocks::SteadyNow() + kLimit;
    for (const int rank : {1, 2, 3}) {
      while (!absl::StrContains(ranks.log(0), absl::StrCat("rank is there rank=", rank))) {
        ASSERT_LT(clocks::SteadyNow(), deadline) << ranks.log(0);
        absl::SleepFor(absl::Milliseconds(5));
      }
    }
    ranks.rank(asked).Signal(SIGTERM);
    EXPECT_EQ(ranks.rank(asked).WaitFor(kLimit), 0) << ranks.log(asked);
    if (asked == 0) {
      EXPECT_EQ(ranks.rank(1).WaitFor(kLimit), 0) << ranks.log(1);
    } else {
      EXPECT_TRUE(ranks.rank(0).Running()) << "it may come again";
    }
    EXPECT_TRUE(ranks.rank(2).Running());
  }
}

// ---- Refusals ----

void ExpectBothRefuse(RankServerOptions options, const std::string& message) {
  SCOPED_TRACE(message);
  options.await = false;
  RankServer ranks(LOSSD_BINARY, options);
  EXPECT_EQ(ranks.WaitForAll(kLimit), (std::vector<int>{2, 2}));
  EXPECT_THAT(ranks.log(0), HasSubstr(message));
  EXPECT_THAT(ranks.log(1), HasSubstr(message));
}

// Process 1 hears its own value, and process 0 waits for another one; its log has both values.
void ExpectOneIsRefused(RankServerOptions options, const std::string& rule, const std::string& value,
                        const std::string& got) {
  SCOPED_TRACE(rule);
  options.await = false;
  RankServer ranks(LOSSD_BINARY, options);
  EXPECT_EQ(ranks.rank(1).WaitFor(kLimit), 2);
  EXPECT_TRUE(ranks.rank(0).Running());
  ranks.rank(0).Signal(SIGTERM);
  EXPECT_EQ(ranks.rank(0).WaitFor(kLimit), 0);
  EXPECT_THAT(ranks.log(0), HasSubstr(absl::StrCat(rule, ", ", value, ", got ", got)));
  EXPECT_THAT(ranks.log(1), HasSubstr(absl::StrCat(rule, " (its log says what that is), got ", got)));
}

TEST(RanksDevicesRefusalTest, ProcessesThatDisagreeAreRefusedByName) {
  const auto with = [](std::vector<std::string> of_all, std::string of_process_1) {
    of_all.emplace_back("--rank_timeout=60s");
    return RankServerOptions{.ranks = 2, .flags = std::move(of_all), .flags_of = [of_process_1](int process) {
                               return process == 1 ? std::vector<std::string>{of_process_1}
                                                   : std::vector<std::string>();
                             }};
  };
  const std::string devices = "process 1: number of devices must be what process 0 has";
  ExpectOneIsRefused(with({"--cpu_devices=2"}, "--cpu_devices=1"), devices, "2", "1");
  ExpectOneIsRefused(with({}, "--cpu_devices=2"), devices, "1", "2");
  ExpectOneIsRefused(with({"--cpu_devices=2"}, "--cpu_devices=3"), devices, "2", "3");
  ExpectOneIsRefused(with({"--cpu_devices=2"}, "--split=vocabulary"),
                     "process 1: split must be what process 0 has", "any", "vocabulary");
}

TEST(RanksDevicesRefusalTest, DevicesThatCannotBeAreRefusedAtTheStart) {
  ExpectBothRefuse({.flags = {"--devices=all"}},
                   "devices must be empty with backend cpu, which has cpu_devices, got all");
  ExpectBothRefuse({.flags = {"--cpu_devices=0"}}, "cpu_devices must be at least 1, got 0");
  ExpectBothRefuse({.flags = {"--cpu_devices=1025"}}, "cpu_devices must be in [1, 1024], got 1025");
  ExpectBothRefuse({.flags = {"--cpu_devices=600"}}, "ranks must be at most 1 with 600 devices each, got 2");
}

TEST(RanksDevicesRefusalTest, RanksOfAProcessThatNeverComesAreNamed) {
  RankServerOptions options = TwoDevicesEach(2, {"--rank_timeout=2s"});
  options.flags_of = [](int process) {
    return process == 1 ? std::vector<std::string>{"--leader=127.0.0.1:1"} : std::vector<std::string>();
  };
  options.await = false;
  RankServer late(LOSSD_BINARY, options);
  EXPECT_EQ(late.WaitForAll(kLimit), (std::vector<int>{1, 1}));
  EXPECT_THAT(late.log(0), HasSubstr("ranks 2, 3 of 4 have not come within 2s (--rank_timeout)"));
}

// ---- What is said of them ----

TEST(RanksDevicesStateTest, MetricsProbesAndGetServerShowEveryDevice) {
  const int port = test::FreePort();
  RankServerOptions options = TwoDevicesEach(2, {"--http=127.0.0.1:0"});
  options.flags_of = [port](int process) {
    return process == 1 ? std::vector<std::string>{absl::StrCat("--worker_http=127.0.0.1:", port)}
                        : std::vector<std::string>();
  };
  RankServer ranks(LOSSD_BINARY, options);
  const auto client = Connect(ranks.target());
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  std::mt19937_64 rng(1);
  Trained trained;
  Train(*client, {MakeSmallRows(2600, rng)}, 0, 1, rng, trained);
  for (const int rank : {1, 2, 3}) {  // the first is in the leader's process
    const std::string series = absl::StrCat("\nlossd_rank_collective_seconds_total{rank=\"", rank,
                                            "\",operation=\"sum_gradients\"} ");
    const absl::Time deadline = clocks::SteadyNow() + kLimit;
    std::string metrics = test::HttpGet(ranks.http(), "/metrics");
    while (!absl::StrContains(metrics, series) || absl::StrContains(metrics, series + "0\n")) {
      ASSERT_LT(clocks::SteadyNow(), deadline) << metrics;
      absl::SleepFor(absl::Milliseconds(20));
      metrics = test::HttpGet(ranks.http(), "/metrics");
    }
    EXPECT_TRUE(absl::StrContains(metrics, absl::StrCat("lossd_rank_up{rank=\"", rank, "\"")));
  }
  const auto server = client->GetServer();
  ASSERT_TRUE(server.ok()) << server.status();
  ASSERT_EQ(server->ranks_size(), 4);
  for (const auto& rank : server->ranks()) {
    EXPECT_FALSE(rank.lost());
    EXPECT_GE(rank.memory().weights(), kSmallHidden * kSmallVocab * 4);
    EXPECT_THAT(rank.device(), HasSubstr("1 thread,")) << "they divide the threads of a process";
  }
  const std::string probes = absl::StrCat("127.0.0.1:", port);
  EXPECT_EQ(test::HttpStatus(test::HttpGet(probes, "/livez")), 200);
  EXPECT_EQ(test::HttpStatus(test::HttpGet(probes, "/readyz")), 200);
}

}  // namespace
}  // namespace lossd::app::testing::ranks_devices_test
