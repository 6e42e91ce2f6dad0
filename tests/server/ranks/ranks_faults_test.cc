// kill -9 of any rank at any moment of a training, again and again: every time all ranks end within a bound,
// the server starts again from its newest checkpoint, the trainer goes on from there, and the weights at the
// end are those of a run that nobody disturbed, bit for bit.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "tests/server/service/small_training.h"
#include "tests/support/rank_server.h"

namespace lossd::app::testing {
namespace {

using test::RankServer;

constexpr absl::Duration kLimit = absl::Minutes(3);  // for what a slow machine does
constexpr uint64_t kForEver = UINT64_MAX;

std::unique_ptr<client::Client> ConnectOnce(const std::string& target) {
  return client::Client::Connect({.target = target, .retry = {.max_attempts = 1}}).value();
}

// One step with all of the microbatches, and a checkpoint of what it made.
absl::Status DoStep(client::Client& client, const std::vector<SmallRows>& data, uint64_t step) {
  std::vector<std::vector<float>> grads(data.size());
  std::vector<client::PendingLoss> pending;
  for (size_t i = 0; i < data.size(); ++i) {
    grads[i].resize(data[i].hidden.size());
    client::ComputeOptions compute;
    compute.accumulate_gradients = true;
    compute.max_attempts = 1;
    pending.push_back(client.ComputeLossAsync(SmallMicrobatch(data[i], step, i),
                                              {.grad_hidden = grads[i].data()}, compute));
  }
  absl::Status status;
  for (client::PendingLoss& loss : pending) status.Update(loss.Wait().status());
  if (status.ok()) status = client.ApplyStep(AdamStep(step, data.size())).status();
  if (status.ok()) status = client.SaveCheckpoint("head").status();
  return status;
}

// Does steps until `last` are done, of which none need be left. The error of the first call that fails.
absl::Status TrainOn(const std::string& target, const std::vector<SmallRows>& data, uint64_t last) {
  const auto connected = client::Client::Connect({.target = target, .retry = {.max_attempts = 1}});
  if (!connected.ok()) return connected.status();
  client::Client& client = **connected;
  auto head = client.DescribeHead("head");
  if (absl::IsNotFound(head.status())) {  // killed before its first checkpoint
    if (absl::Status status = client.CreateHead(SmallHead()).status(); !status.ok()) return status;
    if (absl::Status status = client.SaveCheckpoint("head").status(); !status.ok()) return status;
    head = client.DescribeHead("head");
  }
  if (!head.ok()) return head.status();
  for (uint64_t step = head->state().step(); step < last; ++step) {
    if (absl::Status status = DoStep(client, data, step); !status.ok()) return status;
  }
  return absl::OkStatus();
}

std::vector<SmallRows> SomeData(std::mt19937_64& rng) {
  std::vector<SmallRows> data;
  for (const size_t rows : {1400, 900, 700, 90}) data.push_back(MakeSmallRows(rows, rng));
  return data;
}

std::vector<std::vector<float>> Undisturbed(int ranks, const std::vector<SmallRows>& data, uint64_t steps) {
  RankServer server(LOSSD_BINARY, {.ranks = ranks, .flags = {"--deterministic", "--keep_checkpoints=2"}});
  EXPECT_TRUE(TrainOn(server.target(), data, steps).ok());
  return Tensors(*ConnectOnce(server.target()));
}

// How the ranks have to end where `killed` was killed.
std::vector<int> Ends(int ranks, int killed) {
  std::vector<int> ends(static_cast<size_t>(ranks), 3);
  ends[static_cast<size_t>(killed)] = -SIGKILL;
  return ends;
}

void KillAndGoOn(int ranks, int kills) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = SomeData(rng);
  RankServer server(LOSSD_BINARY, {.ranks = ranks,
                                   .flags = {"--deterministic", "--restore=latest", "--keep_checkpoints=2"}});
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
  const uint64_t steps = ConnectOnce(server.target())->DescribeHead("head")->state().step() + 1;
  ASSERT_TRUE(TrainOn(server.target(), data, steps).ok());
  EXPECT_EQ(Tensors(*ConnectOnce(server.target())), Undisturbed(ranks, data, steps)) << steps << " steps";
}

// LOSSD_RANK_KILLS: more of them.
int Kills() {
  const char* const kills = std::getenv("LOSSD_RANK_KILLS");
  return kills == nullptr ? 12 : std::atoi(kills);
}

TEST(RanksFaultsTest, TwoRanks) { KillAndGoOn(2, Kills()); }
TEST(RanksFaultsTest, FourRanks) { KillAndGoOn(4, Kills() / 2); }

}  // namespace
}  // namespace lossd::app::testing
