// SPDX-License-Identifier: Apache-2.0
// Every class is in exactly one file, files are about as large as each other, and there are as many as the
// rules want.
#include "server/head/shards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "absl/strings/str_cat.h"

namespace lossd::head::shards_test {
namespace {

using kernels::HeadConfig;
using kernels::Param;
using kernels::Role;

constexpr int64_t kMebibyte = int64_t{1} << 20;

// 12 MiB for 1024 classes.
HeadConfig HeadOf(int64_t vocab_size) { return {.hidden_size = 1024, .vocab_size = vocab_size}; }

size_t Shards(const HeadConfig& config, int64_t most_bytes, int threads) {
  return DivideClasses(config, {.most_bytes = most_bytes, .threads = threads}).size();
}

TEST(ShardsTest, AsManyAsTheRulesWant) {
  EXPECT_EQ(Shards(HeadOf(1024), 1024 * kMebibyte, 4), 1u) << "too small for several";
  EXPECT_EQ(Shards(HeadOf(2048), 1024 * kMebibyte, 4), 1u) << "24 MiB";
  EXPECT_EQ(Shards(HeadOf(4096), 1024 * kMebibyte, 4), 3u) << "of 16 MiB";
  EXPECT_EQ(Shards(HeadOf(40960), 1024 * kMebibyte, 4), 4u) << "one for each thread";
  EXPECT_EQ(Shards(HeadOf(40960), 100 * kMebibyte, 4), 8u) << "480 MiB: 5, and as many for each thread";
  EXPECT_EQ(Shards(HeadOf(40960), 100 * kMebibyte, 1), 5u);
  EXPECT_EQ(Shards(HeadOf(40960), 1, 4), kMostShards);
  EXPECT_EQ(Shards(HeadOf(3), 1, 4), 3u) << "no file without a class";
  EXPECT_EQ(Shards(HeadOf(int64_t{1} << 31), 1024 * kMebibyte, 3), kMostShards);
}

TEST(ShardsTest, EveryRowIsInOneFile) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    const auto below = [&](int64_t limit) { return static_cast<int64_t>(random()) % limit; };
    const HeadConfig config{.hidden_size = 1 + below(50),
                            .vocab_size = 1 + below(700),
                            .has_bias = random() % 2 == 0,
                            .has_class_weights = random() % 2 == 0,
                            .norm = random() % 2 == 0 ? kernels::Norm::kNone : kernels::Norm::kLayerNorm};
    const auto ranges =
        DivideClasses(config, {.most_bytes = 1 + below(20'000), .threads = static_cast<int>(below(9))});
    std::map<std::pair<Param, Role>, int64_t> rows;  // so far
    int64_t least = config.vocab_size, most = 0, next = 0;
    for (const ClassRange& range : ranges) {
      EXPECT_EQ(range.begin, next);
      next = range.end;
      least = std::min(least, range.size());
      most = std::max(most, range.size());
      for (const TensorPart& part : PartsOf(config, range)) {
        EXPECT_EQ((rows[{part.id.param, part.id.role}]), part.row_begin);
        rows[{part.id.param, part.id.role}] += part.rows;
      }
    }
    EXPECT_EQ(next, config.vocab_size);
    EXPECT_GE(least, 1);
    EXPECT_LE(most - least, 1);
    EXPECT_EQ(rows.size(), CheckpointTensors(config).size());
    for (const auto& [tensor, count] : rows) EXPECT_EQ(count, kernels::ShapeOf(config, tensor.first).rows);
  }
}

TEST(ShardsTest, Names) {
  EXPECT_EQ(ShardFile(0, 1), "tensors.safetensors");
  EXPECT_EQ(ShardFile(0, 12), "tensors-00001-of-00012.safetensors");
  EXPECT_EQ(ShardFile(11, 12), "tensors-00012-of-00012.safetensors");
  EXPECT_TRUE(ShardMetadata(HeadOf(4), {0, 4}).empty());
  EXPECT_THAT(ShardMetadata(HeadOf(4), {1, 3}),
              testing::ElementsAre(testing::Pair("classes", "[1, 3) of 4")));
}

}  // namespace
}  // namespace lossd::head::shards_test
