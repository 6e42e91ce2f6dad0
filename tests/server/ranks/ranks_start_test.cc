// SPDX-License-Identifier: Apache-2.0
// Ranks that are stopped or killed before they serve: whoever was asked to stop ends at once, and says so,
// and the others end or wait for it to come again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "kernels/clocks/clock.h"
#include "tests/support/fake_service_manager.h"
#include "tests/support/rank_server.h"

namespace lossd::app::testing::ranks_start_test {
namespace {

using test::RankServer;
using test::RankServerOptions;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr absl::Duration kLimit = absl::Minutes(3);  // for what a slow machine does

// The last rank looks for rank 0 where there is nothing.
RankServerOptions WithoutTheLastRank(int ranks) {
  return {.ranks = ranks,
          .flags = {"--rank_timeout=1h"},
          .flags_of =
              [ranks](int rank) {
                return rank == ranks - 1 ? std::vector<std::string>{"--leader=127.0.0.1:1"}
                                         : std::vector<std::string>();
              },
          .await = false};
}

void AwaitLog(const RankServer& ranks, int rank, const std::string& text) {
  const absl::Time deadline = clocks::SteadyNow() + kLimit;
  while (!absl::StrContains(ranks.log(rank), text)) {
    ASSERT_LT(clocks::SteadyNow(), deadline) << ranks.log(rank);
    absl::SleepFor(absl::Milliseconds(5));
  }
}

TEST(RanksStartTest, RankZeroThatWaitsEndsWithTheRanksThatAreThere) {
  for (const int signal : {SIGTERM, SIGINT}) {
    RankServer ranks(LOSSD_BINARY, WithoutTheLastRank(3));
    AwaitLog(ranks, 0, "rank is there");
    ranks.rank(0).Signal(signal);
    EXPECT_EQ(ranks.rank(0).WaitFor(kLimit), 0);
    EXPECT_EQ(ranks.rank(1).WaitFor(kLimit), 0);
    EXPECT_THAT(ranks.log(0), HasSubstr(std::string("stopped reason=") + strsignal(signal) +
                                        " while=\"waiting for the other ranks\""));
    EXPECT_THAT(ranks.log(1), HasSubstr("stopped"));
    EXPECT_TRUE(ranks.rank(2).Running());
  }
}

TEST(RanksStartTest, AWorkerThatWaitsForRankZeroEnds) {
  for (const int signal : {SIGTERM, SIGINT}) {
    RankServer ranks(LOSSD_BINARY, WithoutTheLastRank(2));
    AwaitLog(ranks, 1, "worker version=");
    ranks.rank(1).Signal(signal);
    EXPECT_EQ(ranks.rank(1).WaitFor(kLimit), 0) << ranks.log(1);
    EXPECT_THAT(ranks.log(1), HasSubstr(std::string("reason=") + strsignal(signal)));
    EXPECT_THAT(ranks.log(1), HasSubstr("stopped"));
    EXPECT_TRUE(ranks.rank(0).Running()) << "it may come again";
  }
}

TEST(RanksStartTest, AWorkerThatWaitsForOtherRanksEndsAndMayComeAgain) {
  RankServer ranks(LOSSD_BINARY, WithoutTheLastRank(3));
  AwaitLog(ranks, 0, "rank is there");
  ranks.rank(1).Signal(SIGTERM);
  EXPECT_EQ(ranks.rank(1).WaitFor(kLimit), 0) << ranks.log(1);
  EXPECT_TRUE(ranks.rank(0).Running());
  ranks.rank(0).Signal(SIGTERM);
  EXPECT_EQ(ranks.rank(0).WaitFor(kLimit), 0) << ranks.log(0);
}

TEST(RanksStartTest, ServiceManagersAreToldNothingBeforeAllRanksAreThere) {
  const test::FakeServiceManager manager;
  RankServer ranks(LOSSD_BINARY, WithoutTheLastRank(3));
  AwaitLog(ranks, 0, "rank is there");
  AwaitLog(ranks, 1, "worker version=");
  EXPECT_EQ(manager.Next(absl::Milliseconds(500)), std::nullopt);
}

TEST(RanksStartTest, ServiceManagersOfAllRanksHearThatTheyAreReadyAndEnd) {
  const test::FakeServiceManager manager(test::FakeServiceManager::Kind::kPath, absl::Milliseconds(200));
  RankServer ranks(LOSSD_BINARY, {.ranks = 2});
  const std::vector<std::string> ready = {manager.NextWith("READY=1\n"), manager.NextWith("READY=1\n")};
  EXPECT_THAT(ready, ::testing::UnorderedElementsAre(HasSubstr("STATUS=serving on " + ranks.target()),
                                                     HasSubstr("STATUS=computes as rank 1\n")));
  manager.NextWith("WATCHDOG=1\nSTATUS=computes as rank 1\n");
  ranks.rank(1).Signal(SIGTERM);
  EXPECT_THAT(manager.NextWith("STOPPING=1\n"), HasSubstr("STATUS=asking rank 0 to drain: Terminated\n"));
  manager.NextWith("STOPPING=1\nSTATUS=draining: ");
  EXPECT_EQ(ranks.WaitForAll(kLimit), (std::vector<int>{0, 0}));
}

// Whenever it comes, all end within a bound and with a reason.
TEST(RanksStartTest, ARankThatIsKilledWhileTheyComeTogetherEndsAll) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  for (int i = 0; i < 6; ++i) {
    RankServer ranks(LOSSD_BINARY,
                     {.ranks = 3, .flags = {"--rank_timeout=4s", "--restore=latest"}, .await = false});
    const int victim = static_cast<int>(rng() % 3);
    const absl::Duration after = absl::Microseconds(rng() % 250'000);
    SCOPED_TRACE(absl::StrCat("rank ", victim, " after ", absl::FormatDuration(after)));
    absl::SleepFor(after);
    ranks.rank(victim).Signal(SIGKILL);
    for (int rank = 0; rank < 3; ++rank) {
      const int end = ranks.rank(rank).WaitFor(kLimit);
      if (rank == victim) {
        EXPECT_EQ(end, -SIGKILL);
      } else {
        EXPECT_THAT(end, AnyOf(1, 3)) << "rank " << rank << ": " << ranks.log(rank);
        EXPECT_THAT(ranks.log(rank), AnyOf(HasSubstr("lost"), HasSubstr("has not come within"),
                                           HasSubstr("was not taken within"), HasSubstr("rank 0")));
      }
    }
  }
}

}  // namespace
}  // namespace lossd::app::testing::ranks_start_test
