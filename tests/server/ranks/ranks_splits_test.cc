// SPDX-License-Identifier: Apache-2.0
// A server of several processes, which divide rows or the vocabulary: it trains as one process with as many
// devices does, bit for bit, and its checkpoints load into either.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/server/service/small_training.h"
#include "tests/support/server_process.h"

namespace lossd::app::testing::ranks_splits_test {
namespace {

using test::RankServer;
using test::ServerProcess;
using ::testing::HasSubstr;

TEST(RanksSplitsTest, DeterministicRanksGiveTheBitsOfAsManyDevices) {
  if (test::RanksOnGpus()) GTEST_SKIP() << "the devices of one process are parts of the CPU";
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  const std::vector<std::tuple<int, v1::Split, std::vector<uint32_t>>> cases = {
      {2, v1::SPLIT_ROWS, {}},       {4, v1::SPLIT_ROWS, {}},       {2, v1::SPLIT_VOCABULARY, {}},
      {3, v1::SPLIT_VOCABULARY, {}}, {4, v1::SPLIT_VOCABULARY, {}}, {3, v1::SPLIT_VOCABULARY, {2, 0, 5}}};
  for (const auto& [count, split, shares] : cases) {
    SCOPED_TRACE(absl::StrCat(count, " ", v1::Split_Name(split), " ", absl::StrJoin(shares, ",")));
    ServerProcess devices(LOSSD_BINARY, {absl::StrCat("--cpu_devices=", count), "--deterministic"});
    const Trained of_devices = TrainAt(devices.target(), data, seed, split, shares);
    RankServer ranks(LOSSD_BINARY, {.ranks = count, .flags = {"--deterministic"}});
    const Trained of_ranks = TrainAt(ranks.target(), data, seed + 1, split, shares);
    ExpectSameBits(of_ranks, of_devices);
  }
}

TEST(RanksSplitsTest, SharesChangeBetweenStepsAndAreSavedByEachRank) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  const int count = test::RanksOnGpus() ? 2 : 3;
  const std::vector<uint32_t> shares =
      count == 2 ? std::vector<uint32_t>{0, 1} : std::vector<uint32_t>{2, 0, 5};
  RankServer ranks(LOSSD_BINARY, {.ranks = count, .flags = {"--split=vocabulary", "--restore=latest"}});
  {
    const auto client = Connect(ranks.target(), 2);
    ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
    Trained trained;
    Train(*client, data, 0, 2, rng, trained);
    v1::SetSharesRequest request;
    request.set_head("head");
    request.mutable_shares()->Add(shares.begin(), shares.end());
    const auto changed = client->SetShares(request);
    ASSERT_TRUE(changed.ok()) << changed.status();
    EXPECT_EQ(changed->head().devices_size(), count);
    EXPECT_EQ(Tensors(*client), trained.tensors);
    Train(*client, data, 2, 3, rng, trained);
    ASSERT_TRUE(client->SaveCheckpoint("head", "").ok());
  }
  const auto saved = Tensors(*Connect(ranks.target()));
  ranks.KillAll();
  ranks.Start();
  EXPECT_EQ(Tensors(*Connect(ranks.target())), saved);
  EXPECT_EQ(Connect(ranks.target())->DescribeHead("head")->spec().shares_size(), count);
}

Trained DeferAt(const std::string& target, const std::vector<SmallRows>& data, uint64_t seed,
                v1::Split split) {
  std::mt19937_64 rng(seed);
  const auto client = Connect(target, 1 + static_cast<int>(rng() % 3));
  v1::CreateHeadRequest head = SmallHead();
  head.mutable_spec()->set_split(split);
  EXPECT_TRUE(client->CreateHead(head).ok());
  return DeferredTraining(*client, data, /*ones=*/false)
      .Run(
          3, [](size_t i) { return i % 2 == 0; }, rng);
}

TEST(RanksSplitsTest, DeferredRowsOfDeterministicRanksHaveTheBitsOfAsManyDevices) {
  if (test::RanksOnGpus()) GTEST_SKIP() << "the devices of one process are parts of the CPU";
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  for (const auto& [count, split] : std::vector<std::pair<int, v1::Split>>{
           {2, v1::SPLIT_ROWS}, {3, v1::SPLIT_ROWS}, {2, v1::SPLIT_VOCABULARY}}) {
    SCOPED_TRACE(absl::StrCat(count, " ", v1::Split_Name(split)));
    ServerProcess devices(LOSSD_BINARY, {absl::StrCat("--cpu_devices=", count), "--deterministic"});
    const Trained of_devices = DeferAt(devices.target(), data, seed, split);
    RankServer ranks(LOSSD_BINARY, {.ranks = count, .flags = {"--deterministic"}});
    const Trained of_ranks = DeferAt(ranks.target(), data, seed + 1, split);
    ExpectSameBits(of_ranks, of_devices);
  }
}

struct Division {
  v1::Split split = v1::SPLIT_UNSPECIFIED;
  std::vector<uint32_t> shares;
};

class RanksCheckpointTest : public ::testing::TestWithParam<Division> {};

TEST_P(RanksCheckpointTest, LoadIntoRanksAndIntoOneProcess) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  RankServer ranks(LOSSD_BINARY, {.ranks = 2, .flags = {"--restore=latest"}});
  const Trained trained = TrainAt(ranks.target(), data, seed, GetParam().split, GetParam().shares);
  ASSERT_TRUE(Connect(ranks.target())->SaveCheckpoint("head", "").ok());
  ServerProcess one(LOSSD_BINARY);
  std::filesystem::copy(ranks.checkpoint_folder(), one.checkpoint_folder(),
                        std::filesystem::copy_options::recursive);
  one.Kill();
  ServerProcess restored(LOSSD_BINARY,
                         {"--restore=latest", absl::StrCat("--checkpoint_dir=", one.checkpoint_folder())});
  EXPECT_EQ(Tensors(*Connect(restored.target())), trained.tensors);
  ranks.KillAll();
  ranks.Start();
  EXPECT_EQ(Tensors(*Connect(ranks.target())), trained.tensors);
  ranks.KillAll();
  for (const char* split : {"rows", "vocabulary"}) {
    SCOPED_TRACE(split);
    RankServer others(LOSSD_BINARY, {.ranks = 3,
                                     .flags = {absl::StrCat("--split=", split), "--restore=latest",
                                               absl::StrCat("--checkpoint_dir=", one.checkpoint_folder())}});
    EXPECT_EQ(Tensors(*Connect(others.target())), trained.tensors);
  }
}

INSTANTIATE_TEST_SUITE_P(Splits, RanksCheckpointTest,
                         ::testing::Values(Division{v1::SPLIT_ROWS, {}}, Division{v1::SPLIT_VOCABULARY, {}},
                                           Division{v1::SPLIT_VOCABULARY, {1, 6}}),
                         [](const auto& division) {
                           return absl::StrCat(v1::Split_Name(division.param.split),
                                               division.param.shares.empty() ? "" : "_with_shares");
                         });

// Every tensor that a checkpoint has, and how far the head is.
struct Restorable {
  std::vector<std::vector<float>> tensors;
  uint64_t step = 0;
  friend bool operator==(const Restorable&, const Restorable&) = default;
};

Restorable WhatACheckpointHas(client::Client& client) {
  Restorable all;
  for (const v1::Param param :
       {v1::PARAM_WEIGHT, v1::PARAM_BIAS, v1::PARAM_NORM_GAIN, v1::PARAM_NORM_SHIFT}) {
    for (const v1::Role role : {v1::ROLE_VALUE, v1::ROLE_MOMENT1, v1::ROLE_MOMENT2}) {
      const auto tensor = client.ReadTensor("head", param, role);
      EXPECT_TRUE(tensor.ok()) << tensor.status();
      all.tensors.push_back(tensor.ok() ? tensor->values : std::vector<float>());
    }
  }
  const auto head = client.DescribeHead("head");
  EXPECT_TRUE(head.ok()) << head.status();
  if (head.ok()) all.step = head->state().step();
  return all;
}

// Relative to the largest value: sums in another order.
double Difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 1e-30, difference = a.size() == b.size() ? 0.0 : 1e30;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    largest = std::max(largest, std::fabs(double{a[i]}));
    difference = std::max(difference, std::fabs(double{a[i]} - double{b[i]}));
  }
  return difference / largest;
}

// Saved by any number of ranks in either way, loaded into any other, and gone on from there.
TEST(RanksSplitsTest, CheckpointsKeepEveryBitBetweenAllNumbersOfRanksAndBothWays) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  v1::CreateHeadRequest create = SmallHead();
  create.mutable_spec()->set_bias(true);
  create.mutable_spec()->set_norm(v1::NORM_LAYERNORM);
  struct Layout {
    std::string name;
    std::unique_ptr<RankServer> server;
    Restorable saved, next;  // what was saved, and what one more step makes of it
  };
  std::vector<Layout> layouts;
  for (const auto& [ranks, split] : std::vector<std::pair<int, std::string>>{
           {1, "any"}, {2, "rows"}, {3, "rows"}, {2, "vocabulary"}, {3, "vocabulary"}}) {
    Layout& layout = layouts.emplace_back();
    layout.name = absl::StrCat(ranks, "-by-", split);
    layout.server = std::make_unique<RankServer>(
        LOSSD_BINARY,
        test::RankServerOptions{.ranks = ranks, .flags = {"--deterministic", "--split=" + split}});
    const auto client = Connect(layout.server->target());
    ASSERT_TRUE(client->CreateHead(create).ok());
    Trained trained;
    Train(*client, data, 0, 2, rng, trained);
    layout.saved = WhatACheckpointHas(*client);
    EXPECT_EQ(layout.saved.step, 2u);
    ASSERT_TRUE(client->SaveCheckpoint("head", layout.name).ok());
    Train(*client, data, 2, 3, rng, trained);
    layout.next = WhatACheckpointHas(*client);
  }
  for (const Layout& from : layouts) {
    const std::filesystem::path checkpoint = std::filesystem::path("head") / from.name;
    for (const Layout& into : layouts) {
      SCOPED_TRACE(absl::StrCat("from ", from.name, " into ", into.name));
      if (&from != &into) {
        std::filesystem::copy(std::filesystem::path(from.server->checkpoint_folder()) / checkpoint,
                              std::filesystem::path(into.server->checkpoint_folder()) / checkpoint,
                              std::filesystem::copy_options::recursive);
      }
      const auto client = Connect(into.server->target());
      const auto head = client->LoadCheckpoint(absl::StrCat("head/", from.name), "head");
      ASSERT_TRUE(head.ok()) << head.status();
      EXPECT_EQ(WhatACheckpointHas(*client), from.saved) << "bit for bit";
      Trained trained;
      Train(*client, data, 2, 3, rng, trained);
      const Restorable next = WhatACheckpointHas(*client);
      if (&from == &into) {
        EXPECT_EQ(next, from.next) << "bit for bit, as if it had never been away";
      }
      for (size_t i = 0; i < next.tensors.size(); ++i) {
        // On GPUs with products in bf16.
        EXPECT_LT(Difference(from.next.tensors[i], next.tensors[i]), test::RanksOnGpus() ? 3e-2 : 1e-3) << i;
      }
    }
  }
}

// One process writes a checkpoint, and ranks that divide the vocabulary go on from it.
TEST(RanksSplitsTest, RanksByVocabularyGoOnFromACheckpointOfOneProcess) {
  if (test::RanksOnGpus()) GTEST_SKIP() << "the one process is on the CPU, which gives other bits";
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  ServerProcess one(LOSSD_BINARY, {"--cpu_devices=4", "--split=vocabulary", "--deterministic"});
  const Trained before = TrainAt(one.target(), data, seed);
  const auto client = Connect(one.target());
  ASSERT_TRUE(client->SaveCheckpoint("head", "").ok());
  RankServer ranks(LOSSD_BINARY, {.ranks = 4,
                                  .flags = {"--split=vocabulary", "--deterministic", "--restore=latest",
                                            absl::StrCat("--checkpoint_dir=", one.checkpoint_folder())}});
  const auto of_ranks = Connect(ranks.target());
  EXPECT_EQ(Tensors(*of_ranks), before.tensors);
  Trained here, there;
  Train(*client, data, 3, 5, rng, here);
  Train(*of_ranks, data, 3, 5, rng, there);
  EXPECT_EQ(there.tensors, here.tensors);
  EXPECT_EQ(there.grads, here.grads);
  EXPECT_EQ(there.norms, here.norms);
}

// What the link needs is counted from the start, and a worker's buffer with the head; each class is at one
// rank.
TEST(RanksSplitsTest, RanksByVocabularyHaveTheirClassesEach) {
  if (test::RanksOnGpus())
    GTEST_SKIP() << "a GPU's memory comes in pieces of 2 MiB, more than the head takes";
  RankServer ranks(LOSSD_BINARY, {.ranks = 2, .flags = {"--split=vocabulary"}});
  const auto client = Connect(ranks.target());
  const auto before = client->GetServer();
  ASSERT_TRUE(before.ok()) << before.status();
  // A room of 1 MiB for each rank.
  for (const auto& rank : before->ranks()) EXPECT_EQ(rank.memory().workspace(), 2u << 20) << rank.rank();
  const auto head = client->CreateHead(SmallHead());
  ASSERT_TRUE(head.ok()) << head.status();
  const auto after = client->GetServer();
  ASSERT_TRUE(after.ok()) << after.status();
  const uint64_t classes[] = {(kSmallVocab + 1) / 2, kSmallVocab / 2};
  for (int rank = 0; rank < 2; ++rank) {
    const uint64_t weights = (classes[rank] * kSmallHidden * 4 + 63) / 64 * 64;
    EXPECT_EQ(after->ranks(rank).memory().weights(), weights);
    EXPECT_EQ(after->ranks(rank).memory().gradients(), weights);
  }
  EXPECT_GE(after->ranks(1).memory().staging(), uint64_t{head->chunk_rows()} * kSmallHidden * 4);
}

// What fits no rank as a whole is split by vocabulary, without being asked for.
TEST(RanksSplitsTest, AHeadThatFitsNoRankIsSplitByVocabulary) {
  if (test::RanksOnGpus()) GTEST_SKIP() << "the limit is what a head takes on CPUs";
  RankServer ranks(LOSSD_BINARY, {.ranks = 4, .flags = {"--memory_limit_bytes=80MiB", "--retained_bytes=0"}});
  const auto client = Connect(ranks.target());
  v1::CreateHeadRequest large = SmallHead();
  large.mutable_spec()->set_hidden_size(64);
  large.mutable_spec()->set_vocab_size(
      150'000);  // 38 MB of weights, as much of gradients, twice that of moments
  const auto head = client->CreateHead(large);
  ASSERT_TRUE(head.ok()) << head.status();
  const auto devices = std::find_if(head->choices().begin(), head->choices().end(),
                                    [](const auto& choice) { return choice.what() == "devices"; });
  ASSERT_NE(devices, head->choices().end());
  EXPECT_EQ(devices->choice(), "4, by vocabulary");
  EXPECT_THAT(devices->reason(), HasSubstr("a copy on every device does not fit"));
}

}  // namespace
}  // namespace lossd::app::testing::ranks_splits_test
