// SPDX-License-Identifier: Apache-2.0
// A server of several processes, which divide rows or the vocabulary: it trains as one process with as many
// devices does, bit for bit, and its checkpoints load into either.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/service/small_training.h"
#include "tests/support/rank_server.h"
#include "tests/support/server_process.h"

namespace lossd::app::testing {
namespace {

using test::RankServer;
using test::ServerProcess;
using ::testing::HasSubstr;

Trained TrainAt(const std::string& target, const std::vector<SmallRows>& data, uint64_t seed,
                v1::Split split = v1::SPLIT_UNSPECIFIED) {
  std::mt19937_64 rng(seed);
  const auto client = Connect(target, 1 + static_cast<int>(rng() % 3));
  v1::CreateHeadRequest head = SmallHead();
  head.mutable_spec()->set_split(split);
  EXPECT_TRUE(client->CreateHead(head).ok());
  Trained trained;
  Train(*client, data, 0, 3, rng, trained);
  return trained;
}

TEST(RanksSplitsTest, DeterministicRanksGiveTheBitsOfAsManyDevices) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  for (const auto& [count, split] : std::vector<std::pair<int, v1::Split>>{{2, v1::SPLIT_ROWS},
                                                                           {4, v1::SPLIT_ROWS},
                                                                           {2, v1::SPLIT_VOCABULARY},
                                                                           {3, v1::SPLIT_VOCABULARY},
                                                                           {4, v1::SPLIT_VOCABULARY}}) {
    SCOPED_TRACE(absl::StrCat(count, " ", v1::Split_Name(split)));
    ServerProcess devices(LOSSD_BINARY, {absl::StrCat("--cpu_devices=", count), "--deterministic"});
    const Trained of_devices = TrainAt(devices.target(), data, seed, split);
    RankServer ranks(LOSSD_BINARY, {.ranks = count, .flags = {"--deterministic"}});
    const Trained of_ranks = TrainAt(ranks.target(), data, seed + 1, split);
    EXPECT_EQ(of_ranks.tensors, of_devices.tensors);
    EXPECT_EQ(of_ranks.grads, of_devices.grads);
    EXPECT_EQ(of_ranks.norms, of_devices.norms);
  }
}

class RanksCheckpointTest : public ::testing::TestWithParam<v1::Split> {};

TEST_P(RanksCheckpointTest, LoadIntoRanksAndIntoOneProcess) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  RankServer ranks(LOSSD_BINARY, {.ranks = 2, .flags = {"--restore=latest"}});
  const Trained trained = TrainAt(ranks.target(), data, seed, GetParam());
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

INSTANTIATE_TEST_SUITE_P(Splits, RanksCheckpointTest, ::testing::Values(v1::SPLIT_ROWS, v1::SPLIT_VOCABULARY),
                         [](const auto& split) { return v1::Split_Name(split.param); });

// One process writes a checkpoint, and ranks that divide the vocabulary go on from it.
TEST(RanksSplitsTest, RanksByVocabularyGoOnFromACheckpointOfOneProcess) {
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
  RankServer ranks(LOSSD_BINARY, {.ranks = 2, .flags = {"--split=vocabulary"}});
  const auto client = Connect(ranks.target());
  const auto before = client->GetServer();
  ASSERT_TRUE(before.ok()) << before.status();
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
}  // namespace lossd::app::testing
