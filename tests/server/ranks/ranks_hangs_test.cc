// SPDX-License-Identifier: Apache-2.0
// A rank that stops without ending (SIGSTOP, as a host that hangs does): within a collective, between any two
// operations, and with either of the two time limits alone. Every call gets one answer, all ranks end with
// the status of a lost device, and the server goes on from its newest checkpoint, bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "tests/server/ranks/small_steps.h"
#include "tests/server/service/small_training.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"

namespace lossd::app::testing::ranks_hangs_test {
namespace {

using test::RankServer;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr absl::Duration kLimit = absl::Minutes(3);  // for what a slow machine does

// Who waits for whom, and which limit ends it.
struct Hang {
  std::string name;
  std::vector<std::string> flags;
  int ranks = 2;
  int stopped = 1;
};

class RanksHangTest : public ::testing::TestWithParam<Hang> {};

// A chunk that the leader alone computes, and a step: the first that the leader asks of the others is their
// part of the sum.
TEST_P(RanksHangTest, InACollective) {
  const Hang& hang = GetParam();
  std::vector<std::string> flags = hang.flags;
  flags.push_back("--drain_timeout=1h");
  RankServer ranks(LOSSD_BINARY, {.ranks = hang.ranks, .flags = flags});
  const auto client = ConnectOnce(ranks.target());
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  std::mt19937_64 rng(1);
  const std::vector<SmallRows> data = {MakeSmallRows(90, rng)};
  ASSERT_TRUE(Accumulate(*client, data, 0).ok());
  ranks.rank(hang.stopped).Stop();
  const absl::Status status = client->ApplyStep(AdamStep(0, data.size())).status();
  ASSERT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank ")) << "which one, and why";
  for (int rank = 0; rank < hang.ranks; ++rank) {
    if (rank == hang.stopped) continue;
    EXPECT_EQ(ranks.rank(rank).WaitFor(kLimit), 3) << ranks.log(rank);
  }
  ranks.rank(hang.stopped).Signal(SIGCONT);
  EXPECT_EQ(ranks.rank(hang.stopped).WaitFor(kLimit), 3) << ranks.log(hang.stopped);
}

// A chunk of a head that is split by vocabulary, which all ranks exchange statistics for.
TEST_P(RanksHangTest, InAChunk) {
  const Hang& hang = GetParam();
  std::vector<std::string> flags = hang.flags;
  flags.push_back("--drain_timeout=1h");
  flags.push_back("--split=vocabulary");
  RankServer ranks(LOSSD_BINARY, {.ranks = hang.ranks, .flags = flags});
  const auto client = ConnectOnce(ranks.target());
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  std::mt19937_64 rng(1);
  const std::vector<SmallRows> data = {MakeSmallRows(90, rng)};
  ranks.rank(hang.stopped).Stop();
  const absl::Status status = Accumulate(*client, data, 0);
  // INTERNAL is what a slice hears of a device that failed.
  ASSERT_THAT(status.code(), AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kInternal)) << status;
  EXPECT_THAT(std::string(status.message()), AnyOf(HasSubstr("the device is lost"), HasSubstr("rank ")));
  for (int rank = 0; rank < hang.ranks; ++rank) {
    if (rank == hang.stopped) continue;
    EXPECT_EQ(ranks.rank(rank).WaitFor(kLimit), 3) << ranks.log(rank);
  }
  EXPECT_THAT(ranks.log(0), HasSubstr(absl::StrCat("rank ", hang.stopped))) << "which one, and why";
  ranks.rank(hang.stopped).Signal(SIGCONT);
  EXPECT_EQ(ranks.rank(hang.stopped).WaitFor(kLimit), 3) << ranks.log(hang.stopped);
}

bool BecomesLive(const std::string& probes, bool live) {
  for (const absl::Time limit = clocks::SteadyNow() + kLimit; clocks::SteadyNow() < limit;) {
    if (test::HttpStatus(test::HttpGet(probes, "/livez")) == (live ? 200 : 503)) return true;
    absl::SleepFor(absl::Milliseconds(20));
  }
  return false;
}

TEST(RanksHangsTest, AWorkerThatWaitsForAnotherOneIsNotLive) {
  const std::string probes = absl::StrCat("127.0.0.1:", test::FreePort());
  RankServer ranks(LOSSD_BINARY, {.ranks = 3,
                                  .flags = {"--rank_silence_timeout=1h", "--collective_timeout=1h",
                                            "--liveness_timeout=2s"},
                                  .flags_of = [&probes](int rank) -> std::vector<std::string> {
                                    if (rank != 1) return {};
                                    return {"--worker_http=" + probes};
                                  }});
  const auto client = ConnectOnce(ranks.target());
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  std::mt19937_64 rng(1);
  const std::vector<SmallRows> data = {MakeSmallRows(90, rng)};
  ASSERT_TRUE(Accumulate(*client, data, 0).ok());
  EXPECT_TRUE(BecomesLive(probes, true));
  ranks.rank(2).Stop();
  absl::Status applied;
  std::thread step([&] { applied = client->ApplyStep(AdamStep(0, data.size())).status(); });
  EXPECT_TRUE(BecomesLive(probes, false));
  EXPECT_THAT(test::HttpGet(probes, "/livez"), HasSubstr("no progress on the device for "));
  ranks.rank(2).Signal(SIGCONT);
  step.join();
  EXPECT_TRUE(applied.ok()) << applied;
  EXPECT_TRUE(BecomesLive(probes, true));
}

INSTANTIATE_TEST_SUITE_P(
    Limits, RanksHangTest,
    ::testing::Values(
        Hang{"OnlyPings", {"--rank_silence_timeout=4s", "--collective_timeout=1h"}},
        Hang{"OnlyPingsOfFour", {"--rank_silence_timeout=4s", "--collective_timeout=1h"}, 4, 2},
        Hang{"OnlyTheCollective", {"--rank_silence_timeout=1h", "--collective_timeout=4s"}},
        Hang{"OnlyTheCollectiveOfFour", {"--rank_silence_timeout=1h", "--collective_timeout=4s"}, 4, 3}),
    [](const auto& hang) { return hang.param.name; });

void StopAndGoOn(int ranks, int stops, const std::string& split = "rows") {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = SomeData(rng);
  RankServer server(LOSSD_BINARY, {.ranks = ranks,
                                   .flags = {"--deterministic", "--restore=latest", "--keep_checkpoints=2",
                                             "--rank_silence_timeout=4s", "--collective_timeout=4s",
                                             absl::StrCat("--split=", split)}});
  for (int i = 0; i < stops && !server.target().empty(); ++i) {
    const int victim = 1 + static_cast<int>(rng() % static_cast<uint64_t>(ranks - 1));
    const absl::Duration after = absl::Microseconds(rng() % 120'000);  // some steps
    std::thread stopper([&] {
      absl::SleepFor(after);
      server.rank(victim).Stop();
    });
    const absl::Status status = TrainOn(server.target(), data, kForEver);
    stopper.join();
    // INTERNAL is what a slice hears of a device that failed.
    EXPECT_THAT(status.code(), AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kInternal)) << status;
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == victim) continue;
      EXPECT_EQ(server.rank(rank).WaitFor(kLimit), 3) << server.log(rank);
    }
    server.rank(victim).Signal(SIGCONT);
    EXPECT_EQ(server.rank(victim).WaitFor(kLimit), 3) << server.log(victim);
    server.Start();
  }
  // There is no head yet if every end came before its first checkpoint.
  ASSERT_TRUE(TrainOn(server.target(), data, 0).ok());
  const uint64_t steps = ConnectOnce(server.target())->DescribeHead("head")->state().step() + 1;
  ASSERT_TRUE(TrainOn(server.target(), data, steps).ok());
  EXPECT_EQ(Tensors(*ConnectOnce(server.target())), Undisturbed(LOSSD_BINARY, ranks, data, steps, split));
}

TEST(RanksHangsTest, BetweenAnyTwoOperationsOfTwoRanks) { StopAndGoOn(2, Times(4)); }
TEST(RanksHangsTest, BetweenAnyTwoOperationsOfFourRanks) { StopAndGoOn(4, Times(3)); }
TEST(RanksHangsTest, WithinChunksOfTwoRanks) { StopAndGoOn(2, Times(3), "vocabulary"); }
TEST(RanksHangsTest, WithinChunksOfFourRanks) { StopAndGoOn(4, Times(2), "vocabulary"); }

}  // namespace
}  // namespace lossd::app::testing::ranks_hangs_test
