// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/batches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/examples/random_seed.h"

namespace lossd::ngram_lm::batches_test {
namespace {

using ::testing::ElementsAre;

TEST(GatherRowsTest, PadsBeforeTheFirstToken) {
  std::vector<int32_t> contexts, targets;
  GatherRows({10, 11, 12, 13}, {0, 3, 1}, 2, 99, &contexts, &targets);
  EXPECT_THAT(contexts, ElementsAre(99, 99, 11, 12, 99, 10));
  EXPECT_THAT(targets, ElementsAre(10, 13, 11));
}

TEST(ShufflerTest, EveryEpochHasEachPositionOnce) {
  Shuffler shuffler(13, FreshSeed());
  std::vector<std::vector<int64_t>> epochs;
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::vector<int64_t> seen = shuffler.Next(5);
    for (int64_t position : shuffler.Next(8)) seen.push_back(position);
    epochs.push_back(seen);
    std::sort(seen.begin(), seen.end());
    for (int64_t i = 0; i < 13; ++i) EXPECT_EQ(seen[i], i);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_EQ(shuffler.epochs(), 2);
}

TEST(ShufflerTest, SkippedPositionsAreTaken) {
  const uint64_t seed = FreshSeed();
  for (int64_t skipped : {0, 3, 13, 14, 40}) {
    Shuffler one(13, seed), other(13, seed);
    one.Next(skipped);
    other.Skip(skipped);
    EXPECT_EQ(one.Next(20), other.Next(20)) << skipped;
  }
}

TEST(EvenlySpacedTest, CoversTheWholeRange) {
  EXPECT_THAT(EvenlySpaced(10, 3), ElementsAre(0, 3, 6));
  EXPECT_THAT(EvenlySpaced(3, 10), ElementsAre(0, 1, 2));
  EXPECT_THAT(EvenlySpaced(0, 10), ElementsAre());
}

TEST(UnigramEntropyTest, AddsOneToEveryCount) {
  // Counts 3, 1, 0 plus one each: probabilities 4/7, 2/7, 1/7.
  EXPECT_NEAR(UnigramEntropy({0, 0, 0, 1}, {0, 2}, 3), -(std::log(4.0 / 7) + std::log(1.0 / 7)) / 2, 1e-12);
  EXPECT_NEAR(UnigramEntropy({}, {1}, 8), std::log(8.0), 1e-12);
}

}  // namespace
}  // namespace lossd::ngram_lm::batches_test
