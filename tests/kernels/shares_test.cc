// SPDX-License-Identifier: Apache-2.0
// How shares divide the classes of a head among devices.
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"
#include "kernels/shard_rows.h"

namespace lossd::kernels::shares_test {
namespace {

using ::testing::ElementsAre;

HeadConfig ConfigOf(int64_t vocab_size, std::vector<int32_t> shares) {
  HeadConfig config;
  config.hidden_size = 8;
  config.vocab_size = vocab_size;
  config.split = Split::kVocabulary;
  config.shares = std::move(shares);
  return config;
}

std::vector<int64_t> ClassesOfAll(const HeadConfig& config) {
  std::vector<int64_t> classes;
  const auto devices = static_cast<int>(config.shares.size());
  for (int i = 0; i < devices; ++i) classes.push_back(ClassesOf(config, {i, devices}).rows);
  return classes;
}

TEST(SharesTest, DivideInProportion) {
  EXPECT_THAT(ClassesOfAll(ConfigOf(256 * 45, {13, 6, 13, 13})),
              ElementsAre(256 * 13, 256 * 6, 256 * 13, 256 * 13));
  EXPECT_THAT(ClassesOfAll(ConfigOf(128256, {1, 0, 1})), ElementsAre(64256, 0, 64000));
  EXPECT_THAT(ClassesOfAll(ConfigOf(1000, {0, 0, 3})), ElementsAre(0, 0, 1000));
  EXPECT_THAT(ClassesOfAll(ConfigOf(1000, {2, 0, 0})), ElementsAre(1000, 0, 0));
  EXPECT_THAT(ClassesOfAll(ConfigOf(7, {1, 1})), ElementsAre(4, 3));
}

TEST(SharesTest, EveryClassIsOfOneDevice) {
  std::mt19937_64 random(std::random_device{}());
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int i = 0; i < 2000; ++i) {
    std::vector<int32_t> shares(static_cast<size_t>(draw(1, 9)));
    for (int32_t& share : shares)
      share = static_cast<int32_t>(draw(0, 3) == 0 ? 0 : draw(0, i % 2 ? 9 : 200'000'000));
    shares[static_cast<size_t>(draw(0, static_cast<int64_t>(shares.size()) - 1))] += 1;
    const int64_t vocab = draw(1, i % 3 ? 5000 : (int64_t{1} << 31) - 1);
    const HeadConfig config = ConfigOf(vocab, shares);
    ASSERT_TRUE(Validate(config).ok());
    const double all = std::accumulate(shares.begin(), shares.end(), 0.0);
    int64_t next = 0;
    const auto devices = static_cast<int>(shares.size());
    for (int device = 0; device < devices; ++device) {
      const ShardRows own = ClassesOf(config, {device, devices});
      ASSERT_EQ(own.first, next);
      ASSERT_GE(own.rows, 0);
      const int32_t share = shares[static_cast<size_t>(device)];
      if (share == 0) {
        EXPECT_EQ(own.rows, 0);
      }
      EXPECT_NEAR(static_cast<double>(own.rows), static_cast<double>(vocab) * share / all, kShareGrain + 2);
      EXPECT_LE(own.rows, MostClassesOf(config, devices));
      next = own.end();
    }
    EXPECT_EQ(next, vocab);
  }
}

TEST(SharesTest, BeginWhereKernelsLikeIt) {
  const HeadConfig config = ConfigOf(128'256, {3, 1, 4, 1, 5});
  for (int device = 0; device < 5; ++device) EXPECT_EQ(ClassesOf(config, {device, 5}).first % kShareGrain, 0);
}

TEST(SharesTest, WithoutSharesAllHaveTheSame) {
  const HeadConfig config = ConfigOf(10, {});
  EXPECT_EQ(ClassesOf(config, {0, 4}).rows, 3);
  EXPECT_EQ(ClassesOf(config, {3, 4}).rows, 2);
  EXPECT_EQ(MostClassesOf(config, 4), 3);
}

// As a file of a checkpoint has all rows of a head, whatever replicas that has where it computes.
TEST(SharesTest, OneDeviceHasAllOfAHeadWithReplicas) {
  HeadConfig config = ConfigOf(97, {3, 1});
  config.replicas = 2;
  for (const Role role : {Role::kValue, Role::kMoment1}) {
    EXPECT_EQ(StoredRowsOf(config, {Param::kWeight, role}, {}), (ShardRows{0, 97}));
  }
  EXPECT_EQ(ClassesOf(config, {}), (ShardRows{0, 97}));
}

std::string FieldOf(const HeadConfig& config, int devices) {
  const auto violation = errors::GetFieldViolation(ValidateOn(config, devices));
  return violation ? violation->field : "";
}

TEST(SharesTest, RefusesWhatIsNoDivision) {
  EXPECT_EQ(FieldOf(ConfigOf(10, {1, 2}), 2), "");
  EXPECT_EQ(FieldOf(ConfigOf(10, {}), 3), "");
  EXPECT_EQ(FieldOf(ConfigOf(10, {1, 2}), 3), "shares");
  EXPECT_EQ(FieldOf(ConfigOf(10, {0, 0}), 2), "shares");
  EXPECT_EQ(FieldOf(ConfigOf(10, {1, -2}), 2), "shares[1]");
  EXPECT_EQ(FieldOf(ConfigOf(10, {2'000'000'000, 2'000'000'000}), 2), "shares");
  HeadConfig by_rows = ConfigOf(10, {1, 1});
  by_rows.split = Split::kRows;
  EXPECT_EQ(FieldOf(by_rows, 2), "split");
}

}  // namespace
}  // namespace lossd::kernels::shares_test
