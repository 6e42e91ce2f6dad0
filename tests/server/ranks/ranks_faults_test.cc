// SPDX-License-Identifier: Apache-2.0
// kill -9 of any rank at any moment of a training, again and again: every time all ranks end within a bound,
// the server starts again from its newest checkpoint, the trainer goes on from there, and the weights at the
// end are those of a run that nobody disturbed, bit for bit. And rows in memory that the ranks of one host
// share.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "kernels/clocks/clock.h"
#include "tests/server/ranks/small_steps.h"
#include "tests/server/service/small_training.h"
#include "tests/support/server_process.h"

namespace lossd::app::testing::ranks_faults_test {
namespace {

using test::RankServer;
using ::testing::HasSubstr;

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

// ---- Rows in shared memory ----
// Rows in memory that the ranks of one host share: that they are there, and that what a lost worker may still
// write reaches nobody.

int Mappings(const test::ChildProcess& process) {
  std::ifstream maps(absl::StrCat("/proc/", process.pid(), "/maps"));
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += absl::StrContains(line, "memfd:lossd-region");
  return count;
}

struct Computed {
  absl::Status status;
  double loss = 0.0;
  std::vector<float> grads;
};

// Accumulates nothing, so that the same rows come to the same each time.
Computed Compute(client::Client& client, const SmallRows& rows, uint64_t number) {
  Computed computed;
  computed.grads.resize(rows.hidden.size());
  client::ComputeOptions compute;
  compute.max_attempts = 1;
  const auto result =
      client.ComputeLoss(SmallMicrobatch(rows, 0, number), {.grad_hidden = computed.grads.data()}, compute);
  computed.status = result.status();
  if (result.ok()) computed.loss = result->loss;
  return computed;
}

TEST(RanksRowsTest, StagingAndRegionsOfClientsAreMapped) {
  RankServer ranks(LOSSD_BINARY, {.ranks = 2, .flags = {"--rank_shared_memory=true"}});
  EXPECT_THAT(ranks.log(0), HasSubstr("rows of a rank rank=1 in=\"shared memory\""));
  EXPECT_THAT(ranks.log(1), HasSubstr("rows=\"shared memory\""));
  EXPECT_EQ(Mappings(ranks.rank(1)), 1) << "staging memory";
  client::ClientOptions options;
  options.target = ranks.target();
  options.transport = "shared_memory";
  auto client = client::Client::Connect(options).value();
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  std::mt19937_64 rng(1);
  const SmallRows rows = MakeSmallRows(1400, rng);
  const Computed first = Compute(*client, rows, 0);
  ASSERT_TRUE(first.status.ok()) << first.status;
  for (const absl::Time limit = clocks::SteadyNow() + kLimit;
       Mappings(ranks.rank(1)) < 2 && clocks::SteadyNow() < limit;) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(Mappings(ranks.rank(1)), 2) << "and the client's region";
  const Computed second = Compute(*client, rows, 1);
  ASSERT_TRUE(second.status.ok()) << second.status;
  EXPECT_NEAR(second.loss, first.loss, 1e-5 * std::abs(first.loss));
  for (size_t i = 0; i < first.grads.size(); ++i) ASSERT_NEAR(second.grads[i], first.grads[i], 1e-5) << i;
  client.reset();
  for (const absl::Time limit = clocks::SteadyNow() + kLimit;
       Mappings(ranks.rank(1)) > 1 && clocks::SteadyNow() < limit;) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(Mappings(ranks.rank(1)), 1);
}

TEST(RanksRowsTest, AreInMessagesWhereRank0IsToldSo) {
  RankServer ranks(LOSSD_BINARY, {.ranks = 2, .flags = {"--rank_shared_memory=false"}});
  EXPECT_THAT(ranks.log(0), HasSubstr("rows of a rank rank=1 in=\"messages: the leader shares no memory"));
  EXPECT_THAT(ranks.log(1), HasSubstr("rows=\"messages: "));
  EXPECT_EQ(Mappings(ranks.rank(1)), 0);
}

// Calls one after the other while a worker is killed, or stops and goes on when it has been given up: each
// has the right results or none.
void LoseWhileComputing(bool kill, const std::string& split, uint64_t seed) {
  SCOPED_TRACE(absl::StrCat(kill ? "killed " : "stopped ", split, " ", seed));
  std::mt19937_64 rng(seed);
  RankServer ranks(LOSSD_BINARY, {.ranks = 2,
                                  .flags = {"--split=" + split, "--rank_silence_timeout=2s",
                                            "--collective_timeout=2s", "--drain_timeout=1h"}});
  const auto client = ConnectOnce(ranks.target());
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  std::vector<SmallRows> data;
  std::vector<Computed> want;
  for (const size_t rows : {1400, 90}) {  // divided, and by one rank alone
    data.push_back(MakeSmallRows(rows, rng));
    want.push_back(Compute(*client, data.back(), want.size()));
    ASSERT_TRUE(want.back().status.ok()) << want.back().status;
  }
  std::atomic<int> good = 0;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  for (size_t i = 0; i < 4; ++i) {
    callers.emplace_back([&, which = i % 2, caller = i] {
      for (uint64_t number = 0; number < 1'000'000; ++number) {
        const Computed got = Compute(*client, data[which], 10 + 4 * number + caller);
        if (!got.status.ok()) return;
        ++good;
        bool same = std::abs(got.loss - want[which].loss) <= 1e-4 * std::abs(want[which].loss);
        for (size_t k = 0; same && k < got.grads.size(); ++k) {
          same = std::abs(got.grads[k] - want[which].grads[k]) <= 1e-4f;
        }
        wrong += same ? 0 : 1;
      }
    });
  }
  while (good < 8) absl::SleepFor(absl::Milliseconds(1));
  absl::SleepFor(absl::Microseconds(static_cast<int64_t>(rng() % 20'000)));
  if (kill) {
    ranks.rank(1).Signal(SIGKILL);
  } else {
    ranks.rank(1).Stop();
    for (const absl::Time limit = clocks::SteadyNow() + kLimit;
         !absl::StrContains(ranks.log(0), "rank is lost") && clocks::SteadyNow() < limit;) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    ranks.rank(1).Signal(SIGCONT);
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(ranks.rank(0).WaitFor(kLimit), 3) << ranks.log(0);
  EXPECT_EQ(ranks.rank(1).WaitFor(kLimit), kill ? -SIGKILL : 3) << ranks.log(1);
}

TEST(RanksRowsTest, ALostWorkerSpoilsNothing) {
  const uint64_t seed = std::random_device{}();
  for (const std::string split : {"rows", "vocabulary"}) {
    for (int i = 0; i < Times(2); ++i) {
      LoseWhileComputing(/*kill=*/true, split, seed + static_cast<uint64_t>(i));
      LoseWhileComputing(/*kill=*/false, split, seed + static_cast<uint64_t>(i));
    }
  }
}

}  // namespace
}  // namespace lossd::app::testing::ranks_faults_test
