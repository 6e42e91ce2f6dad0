// SPDX-License-Identifier: Apache-2.0
#include "kernels/data/softmax_profile.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::data::softmax_profile_test {
namespace {

using ::testing::DoubleNear;
using ::testing::Each;
using ::testing::Ge;
using ::testing::Le;
using ::testing::SizeIs;

double SumOfExp(const std::vector<double>& log_p) {
  double sum = 0.0;
  for (double value : log_p) sum += std::exp(value);
  return sum;
}

double Entropy(const std::vector<double>& log_p) {
  double sum = 0.0;
  for (double value : log_p) sum -= std::exp(value) * value;
  return sum;
}

TEST(SoftmaxProfileTest, IsWhatWasMeasured) {
  const SoftmaxProfile& profile = RealProfile();
  EXPECT_THAT(profile.group_log_p, SizeIs(10));
  EXPECT_THAT(profile.group_log_p, Each(SizeIs(profile.ranks.size())));
  EXPECT_EQ(profile.ranks.front(), 1.0);
  EXPECT_EQ(profile.thresholds.front(), 0x1p-8);
  EXPECT_EQ(profile.thresholds.back(), 0x1p-20);
  EXPECT_EQ(profile.candidates.size(), profile.thresholds.size());
  EXPECT_EQ(profile.tail_mass.size(), profile.thresholds.size());
  EXPECT_EQ(profile.loss, 2.735);
}

TEST(SoftmaxProfileTest, RowsAreProbabilitiesThatFallWithTheRank) {
  for (double u : {0.0, 0.05, 0.123, 0.5, 0.95, 1.0}) {
    const std::vector<double> log_p = LogProbabilities(RealProfile(), u);
    EXPECT_NEAR(SumOfExp(log_p), 1.0, 1e-9) << u;
    EXPECT_THAT(log_p, Each(Le(0.0)));
    for (size_t i = 1; i < log_p.size(); ++i) ASSERT_LE(log_p[i], log_p[i - 1]) << u << " rank " << i + 1;
  }
}

// The measured mean entropies of the first, the fifth and the last group.
TEST(SoftmaxProfileTest, QuantilesAreOfTheEntropy) {
  EXPECT_NEAR(Entropy(LogProbabilities(RealProfile(), 0.05)), 0.109, 0.06);
  EXPECT_NEAR(Entropy(LogProbabilities(RealProfile(), 0.45)), 2.263, 0.15);
  EXPECT_NEAR(Entropy(LogProbabilities(RealProfile(), 0.95)), 5.35, 0.2);
}

TEST(SoftmaxProfileTest, PopularityOfAnyVocabularySumsToOneAndFalls) {
  for (int64_t vocab : {1024, 49152, 256000}) {
    const std::vector<double> popularity = Popularity(RealProfile(), vocab);
    ASSERT_EQ(popularity.size(), static_cast<size_t>(vocab));
    EXPECT_THAT(std::accumulate(popularity.begin(), popularity.end(), 0.0), DoubleNear(1.0, 1e-9));
    EXPECT_TRUE(std::is_sorted(popularity.rbegin(), popularity.rend()));
    EXPECT_THAT(popularity, Each(Ge(0.0)));
  }
  EXPECT_NEAR(Popularity(RealProfile(), 49152)[0], 0.044, 0.005);
}

}  // namespace
}  // namespace lossd::data::softmax_profile_test
