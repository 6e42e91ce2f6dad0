// SPDX-License-Identifier: Apache-2.0
// kill -9 of any rank at any moment of a training, again and again: every time all ranks end within a bound,
// the server starts again from its newest checkpoint, the trainer goes on from there, and the weights at the
// end are those of a run that nobody disturbed, bit for bit.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "tests/server/ranks/small_steps.h"
#include "tests/server/service/small_training.h"
#include "tests/support/rank_server.h"

namespace lossd::app::testing::ranks_faults_test {
namespace {

using test::RankServer;

constexpr absl::Duration kLimit = absl::Minutes(3);  // for what a slow machine does
// How the ranks have to end where `killed` was killed.
std::vector<int> Ends(int ranks, int killed) {
  std::vector<int> ends(static_cast<size_t>(ranks), 3);
  ends[static_cast<size_t>(killed)] = -SIGKILL;
  return ends;
}

void KillAndGoOn(int ranks, int kills, const std::string& split = "rows", int devices = 1) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = SomeData(rng);
  RankServer server(LOSSD_BINARY,
                    {.ranks = ranks,
                     .flags = {"--deterministic", "--restore=latest", "--keep_checkpoints=2",
                               absl::StrCat("--split=", split), absl::StrCat("--cpu_devices=", devices)}});
  for (int i = 0; i < kills && !server.target().empty(); ++i) {
    const int victim = static_cast<int>(rng() % static_cast<uint64_t>(ranks));
    const absl::Duration after = absl::Microseconds(rng() % 120'000);  // some steps
    std::thread killer([&] {
      absl::SleepFor(after);
      server.rank(victim).Signal(SIGKILL);
    });
    const absl::Status status = TrainOn(server.target(), data, kForEver);
    killer.join();
    EXPECT_EQ(server.WaitForAll(kLimit), Ends(ranks, victim))
        << "rank " << victim << " after " << after << ", " << status;
    server.Start();
  }
  // There is no head yet if every end came before its first checkpoint.
  ASSERT_TRUE(TrainOn(server.target(), data, 0).ok());
  const uint64_t steps = ConnectOnce(server.target())->DescribeHead("head")->state().step() + 1;
  ASSERT_TRUE(TrainOn(server.target(), data, steps).ok());
  EXPECT_EQ(Tensors(*ConnectOnce(server.target())),
            Undisturbed(LOSSD_BINARY, ranks * devices, data, steps, split))
      << steps << " steps";
}

TEST(RanksFaultsTest, TwoRanks) { KillAndGoOn(2, Times(12)); }
TEST(RanksFaultsTest, FourRanks) { KillAndGoOn(4, Times(6)); }
// Within the exchanges of chunks most of the time.
TEST(RanksFaultsTest, TwoRanksByVocabulary) { KillAndGoOn(2, Times(8), "vocabulary"); }
TEST(RanksFaultsTest, FourRanksByVocabulary) { KillAndGoOn(4, Times(4), "vocabulary"); }

// What comes out is also what as many processes with one device make of it.
TEST(RanksFaultsTest, TwoProcessesOfTwoDevices) { KillAndGoOn(2, Times(8), "rows", 2); }
TEST(RanksFaultsTest, TwoProcessesOfTwoDevicesByVocabulary) { KillAndGoOn(2, Times(8), "vocabulary", 2); }

}  // namespace
}  // namespace lossd::app::testing::ranks_faults_test
